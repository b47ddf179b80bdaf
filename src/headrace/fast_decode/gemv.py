"""Matrix products of one row on the CUDA cores, with everything around the product in the same kernel.

At this size a step is the time to stream the weights. A program owns BLOCK_N output columns over the whole of K, so no sum is
split between programs: replays are bit-identical, and the residual is updated in place by its only owner. The weight tiles are
loaded into registers before the wait for the previous kernel (programmatic dependent launch): they stream while it drains.
With rows of 512 bytes in a tile every warp has columns of its own (a sum is shuffles only); with 512 * num_warps the warps
share columns. products.py says what is computed, kernels/one_row.py how a step's weights are loaded and multiplied.
"""

# mypy: disable-error-code="assignment, var-annotated"
# (kernels grow tuples of tiles in loops that the compiler unrolls)

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from headrace.fast_decode.epilogues import Plan, sumsq_block
from headrace.kernels.activation import activate, soft_cap
from headrace.kernels.all_reduce import PushSpace, as_sent, empty_mark
from headrace.kernels.launch import gdc_launch_dependents, gdc_wait, jit, tl
from headrace.kernels.lora_product import NOTHING, LowRank, add_to_row, begin_row, wait_for_x
from headrace.kernels.narrow import arguments, step_columns
from headrace.kernels.one_row import add_step, load_step
from headrace.model.weight import Weight

MAX_ROWS = 1  # with a few more, tensor cores are faster, and tiles would spill registers


@dataclass(frozen=True, slots=True)
class GemvTile:
    """One program's work: block_n columns in steps of block_k; `prefetch` steps' weights are loaded before the wait."""

    block_n: int
    block_k: int
    num_warps: int
    prefetch: int


@jit(do_not_specialize=["sumsq_tiles", "rank"])
def _gemv_kernel(
    x_ptr, w_ptr, scales_ptr, zeros_ptr, bias_ptr, sumsq_ptr, out_ptr, residual_ptr, norm_ptr, sumsq_out_ptr, peers_ptr,
    turns_ptr, N, sumsq_tiles, eps, scale, softcap, norm_offset, rank, rank_stride,
    shrunk_ptr, b_ptr, slices_ptr, used_ptr, flag_ptr,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PREFETCH: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, SCALE_ROWS: tl.constexpr, ZEROS: tl.constexpr,
    ASM: tl.constexpr,
    MODE: tl.constexpr, SUMSQ_BLOCK: tl.constexpr, ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, EVEN_N: tl.constexpr, RANKS: tl.constexpr, EMPTY: tl.constexpr,
    SHRUNK: tl.constexpr, RANK: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:  # at once: the next kernel's weights stream while this one still waits for its input
        gdc_launch_dependents()
    PACK: tl.constexpr = 2 if KIND == "int4" or KIND == "fp4" else 1
    WIDTH: tl.constexpr = K // PACK  # of a row as it is held
    BLOCK: tl.constexpr = BLOCK_K // PACK
    STEPS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    SUMS: tl.constexpr = BLOCK // 8 if KIND == "float" else BLOCK // 16
    first = tl.program_id(0) * BLOCK_N
    rn = first + tl.arange(0, BLOCK_N)
    ok = rn < N
    rk = tl.arange(0, BLOCK)
    pointers = w_ptr + rn[:, None].to(tl.int64) * WIDTH + rk[None, :]
    up_pointers = pointers + N.to(tl.int64) * WIDTH  # the up rows of a gate-up weight
    early = ()
    early_up = ()
    for i in tl.static_range(PREFETCH):
        early = early + (
            load_step(
                pointers, scales_ptr, zeros_ptr, rk, i * BLOCK, rn, first, N, WIDTH, BLOCK_N, BLOCK, EVEN_N, KIND, GROUP,
                GROUPS, SCALE_ROWS, ZEROS, "",
            ),
        )
        if MODE == "glu":
            early_up = early_up + (
                load_step(
                    up_pointers, scales_ptr, zeros_ptr, rk, i * BLOCK, N + rn, N + first, 2 * N, WIDTH, BLOCK_N, BLOCK, EVEN_N,
                    KIND, GROUP, GROUPS, SCALE_ROWS, ZEROS, "",
                ),
            )
    row_scale = 1.0
    up_row_scale = 1.0
    if KIND != "float" and GROUP == 0:
        row_scale = tl.load(scales_ptr + rn // SCALE_ROWS, mask=ok, other=0.0).to(tl.float32)
        if MODE == "glu":
            up_row_scale = tl.load(scales_ptr + (N + rn) // SCALE_ROWS, mask=ok, other=0.0).to(tl.float32)
    if MODE == "residual":
        norm = tl.load(norm_ptr + rn, mask=ok, other=0.0).to(tl.float32) + norm_offset
    if HAS_BIAS:
        bias = tl.load(bias_ptr + rn, mask=ok, other=0.0).to(tl.float32)
    if SHRUNK > 0:
        begun = begin_row(b_ptr, slices_ptr, used_ptr, first, N, MODE, BLOCK_N, RANK)
    if PDL:
        if SHRUNK > 0:
            wait_for_x(flag_ptr)
        else:
            gdc_wait()
    # what the epilogue reads is asked for now: behind the sums' barriers its latency would show
    if SUMSQ_BLOCK > 0:
        rs = tl.arange(0, SUMSQ_BLOCK)
        sumsq = tl.load(sumsq_ptr + rs, mask=rs < sumsq_tiles, other=0.0)
    if MODE == "residual":
        before = tl.load(residual_ptr + rn, mask=ok, other=0.0)
    acc = tl.zeros([BLOCK_N, SUMS], tl.float32)
    up_acc = tl.zeros([BLOCK_N, SUMS], tl.float32)
    for i in tl.static_range(STEPS):
        if i < PREFETCH:
            step = early[i]
        else:
            step = load_step(
                pointers, scales_ptr, zeros_ptr, rk, i * BLOCK, rn, first, N, WIDTH, BLOCK_N, BLOCK, EVEN_N, KIND, GROUP,
                GROUPS, SCALE_ROWS, ZEROS, "",
            )
        acc = add_step(acc, step, x_ptr, rk, i * BLOCK, K, BLOCK_N, BLOCK, KIND, GROUP, ZEROS, ASM)
        if MODE == "glu":
            if i < PREFETCH:
                step = early_up[i]
            else:
                step = load_step(
                    up_pointers, scales_ptr, zeros_ptr, rk, i * BLOCK, N + rn, N + first, 2 * N, WIDTH, BLOCK_N, BLOCK, EVEN_N,
                    KIND, GROUP, GROUPS, SCALE_ROWS, ZEROS, "",
                )
            up_acc = add_step(up_acc, step, x_ptr, rk, i * BLOCK, K, BLOCK_N, BLOCK, KIND, GROUP, ZEROS, ASM)
    factor = 1.0
    if SUMSQ_BLOCK > 0:
        factor = tl.rsqrt(tl.sum(sumsq, 0) / K + eps)
    y = tl.sum(acc, 1) * (factor * row_scale)
    up = tl.sum(up_acc, 1) * (factor * up_row_scale)  # of no use but with gate and up
    if SHRUNK > 0:
        y, up = add_to_row(y, up, begun, shrunk_ptr, factor, MODE, SHRUNK, RANK, PDL)
    if HAS_BIAS:
        y += bias
    if MODE == "residual":
        r = before + scale * y
        tl.store(residual_ptr + rn, r, mask=ok)
        tl.store(out_ptr + rn, (r * norm).to(out_ptr.dtype.element_ty), mask=ok)
        tl.store(sumsq_out_ptr + tl.program_id(0), tl.sum(r * r, 0))
    elif MODE == "push":  # this rank's part into everybody's slots, its own too: see kernels/all_reduce.py
        part = as_sent(y, x_ptr.dtype.element_ty, out_ptr.dtype.element_ty, EMPTY)
        place = (tl.load(turns_ptr) * RANKS + rank) * rank_stride + rn
        for step in tl.static_range(1, RANKS + 1):
            peer = tl.load(peers_ptr + (rank + step) % RANKS).to(out_ptr.dtype)
            tl.store(tl.multiple_of(peer, 16) + place, part, mask=ok)
    else:
        if MODE == "glu":
            y = activate(y, ACTIVATION) * up
        else:
            y = y * scale
            if HAS_SOFTCAP:
                y = soft_cap(y, softcap)
        tl.store(out_ptr + rn, y.to(out_ptr.dtype.element_ty), mask=ok)


def plan(
    tile: GemvTile, x: Tensor, weight: Weight, columns: int, sumsq: Tensor | None, push: PushSpace | None = None,
    low_rank: LowRank | None = None,
) -> Plan:  # fmt: skip
    width = x.shape[1]
    block_k = step_columns(weight.kind, tile.block_k)
    own = {
        "x_ptr": x, "K": width, "BLOCK_K": block_k, "PREFETCH": min(tile.prefetch, -(-width // block_k)),
        "SUMSQ_BLOCK": sumsq_block(sumsq, 256), "EVEN_N": columns % tile.block_n == 0,
        "peers_ptr": None, "turns_ptr": None, "rank": 0, "rank_stride": 0, "RANKS": 1, "EMPTY": 0,
        **arguments(weight, x), **(NOTHING if low_rank is None else low_rank.arguments),
    }  # fmt: skip
    if push is not None:
        own |= {
            "peers_ptr": push.peers, "turns_ptr": push.turns, "rank": push.rank, "rank_stride": push.slots.stride(1),
            "RANKS": push.size, "EMPTY": empty_mark(push.slots.dtype),
        }  # fmt: skip
    return Plan(_gemv_kernel, (-(-columns // tile.block_n),), own)
