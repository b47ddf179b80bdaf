"""Matrix products of one row on the CUDA cores, with everything around the product in the same kernel.

At this size a step is the time to stream the weights. A program owns BLOCK_N output columns over the whole of K, so no sum is
split between programs: replays are bit-identical, and the residual is updated in place by its only owner. The weight tiles are
loaded into registers, or on their way into shared memory, before the wait for the previous kernel (programmatic dependent
launch): they stream while it drains.
With rows of 512 bytes in a tile every warp has columns of its own (a sum is shuffles only); with 512 * num_warps the warps
share columns. products.py says what is computed, kernels/one_row.py how a step's weights are loaded and multiplied.
"""

# mypy: disable-error-code="assignment, misc, var-annotated"
# (kernels grow tuples of tiles in loops that the compiler unrolls)

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from headrace.fast_decode.epilogues import Plan, sumsq_block
from headrace.kernels.activation import activate, soft_cap
from headrace.kernels.all_reduce import RowPlace, as_sent, empty_mark
from headrace.kernels.launch import gdc_launch_dependents, gdc_wait, jit, tl
from headrace.kernels.lora_product import NOTHING, LowRank, add_to_row, begin_row, wait_for_x
from headrace.kernels.narrow import arguments, step_columns
from headrace.kernels.one_row import add_step, load_step
from headrace.model.weight import Weight

MAX_ROWS = 1  # with a few more, tensor cores are faster, and tiles would spill registers


@dataclass(frozen=True, slots=True)
class GemvTile:
    """One program's work: block_n columns in steps of block_k; `prefetch` steps' weights are loaded before the wait.

    With `shared` weights of so many steps are in flight into shared memory instead, also before the wait. That leaves registers
    for other kernels' programs, so more of these are there early. It is for weights of 16 bits, tiles without a rest, and few
    steps: all of x lies in registers.
    """

    block_n: int
    block_k: int
    num_warps: int
    prefetch: int
    shared: int = 0


@jit(do_not_specialize=["sumsq_tiles", "rank"])
def _gemv_kernel(
    x_ptr, w_ptr, scales_ptr, zeros_ptr, bias_ptr, sumsq_ptr, out_ptr, residual_ptr, norm_ptr, sumsq_out_ptr, peers_ptr,
    N, sumsq_tiles, eps, scale, softcap, norm_offset, rank, rank_stride, row_place,
    shrunk_ptr, b_ptr, slices_ptr, used_ptr, flag_ptr,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PREFETCH: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, SCALE_ROWS: tl.constexpr, ZEROS: tl.constexpr,
    ASM: tl.constexpr,
    MODE: tl.constexpr, SUMSQ_BLOCK: tl.constexpr, ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, EVEN_N: tl.constexpr, RANKS: tl.constexpr, EMPTY: tl.constexpr,
    PHASE: tl.constexpr, SHRUNK: tl.constexpr, RANK: tl.constexpr, AT_ONCE: tl.constexpr, SHARED: tl.constexpr,
    PDL: tl.constexpr,
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
    peers = ()
    if MODE == "push":
        for step in tl.static_range(1, RANKS + 1):
            peers = peers + (tl.load(peers_ptr + (rank + step) % RANKS),)
    if SHRUNK > 0:
        begun = begin_row(b_ptr, slices_ptr, used_ptr, first, N, MODE, BLOCK_N, RANK)
    acc = tl.zeros([BLOCK_N, SUMS], tl.float32)
    up_acc = tl.zeros([BLOCK_N, SUMS], tl.float32)
    rs = tl.arange(0, SUMSQ_BLOCK if SUMSQ_BLOCK > 0 else 1)
    sumsq = tl.zeros([SUMSQ_BLOCK if SUMSQ_BLOCK > 0 else 1], tl.float32)
    if SHARED > 0:
        xs = ()
        for _ in tl.static_range(STEPS):
            xs = xs + (tl.zeros([BLOCK], x_ptr.dtype.element_ty),)
        for i in tl.range(0, STEPS, num_stages=SHARED + 1):  # the compiler lets copies run ahead, out of the loop too
            w = tl.load(pointers + i * BLOCK)
            if MODE == "glu":
                w_up = tl.load(up_pointers + i * BLOCK)
            if i == 0:  # here, or those copies would wait; what is loaded in a branch is not copied ahead
                if PDL:
                    gdc_wait()
                xs = ()
                for j in tl.static_range(STEPS):
                    xs = xs + (tl.load(x_ptr + j * BLOCK + rk),)
                if SUMSQ_BLOCK > 0:
                    sumsq = tl.load(sumsq_ptr + rs, mask=rs < sumsq_tiles, other=0.0)
            x = xs[0]
            for j in tl.static_range(1, STEPS):
                x = tl.where(i == j, xs[j], x)
            x = x.to(tl.float32)[None, :]
            acc += tl.sum(tl.reshape(w.to(tl.float32) * x, (BLOCK_N, SUMS, 8)), 2)
            if MODE == "glu":
                up_acc += tl.sum(tl.reshape(w_up.to(tl.float32) * x, (BLOCK_N, SUMS, 8)), 2)
    elif PDL:
        if SHRUNK > 0:
            wait_for_x(flag_ptr)
        else:
            gdc_wait()
    # what the epilogue reads is asked for now: behind the sums' barriers its latency would show
    if SUMSQ_BLOCK > 0 and SHARED == 0:
        sumsq = tl.load(sumsq_ptr + rs, mask=rs < sumsq_tiles, other=0.0)
    if MODE == "residual":
        before = tl.load(residual_ptr + rn, mask=ok, other=0.0)
    for i in tl.static_range(0 if SHARED > 0 else STEPS):
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
        place = (PHASE * RANKS + rank) * rank_stride + row_place + rn
        for step in tl.static_range(RANKS):
            tl.store(tl.multiple_of(peers[step].to(out_ptr.dtype), 16) + place, part, mask=ok)
    else:
        if MODE == "glu":
            y = activate(y, ACTIVATION) * up
        else:
            y = y * scale
            if HAS_SOFTCAP:
                y = soft_cap(y, softcap)
        tl.store(out_ptr + rn, y.to(out_ptr.dtype.element_ty), mask=ok)


def takes_shared(tile: GemvTile, weight: Weight, columns: int) -> bool:
    """Whether these weights can lie in shared memory."""
    return weight.kind == "float" and columns % tile.block_n == 0 and weight.shape[1] % tile.block_k == 0


def plan(
    tile: GemvTile, x: Tensor, weight: Weight, columns: int, sumsq: Tensor | None, push: RowPlace | None = None,
    low_rank: LowRank | None = None,
) -> Plan:  # fmt: skip
    width = x.shape[1]
    block_k = step_columns(weight.kind, tile.block_k)
    shared = tile.shared if takes_shared(tile, weight, columns) and low_rank is None else 0
    squares = 0 if sumsq is None else 256 if sumsq.shape[1] > 32 else 16
    own = {
        "x_ptr": x, "K": width, "BLOCK_K": block_k, "PREFETCH": 0 if shared else min(tile.prefetch, -(-width // block_k)),
        "SUMSQ_BLOCK": sumsq_block(sumsq, squares), "EVEN_N": columns % tile.block_n == 0, "SHARED": shared,
        "peers_ptr": None, "rank": 0, "rank_stride": 0, "row_place": 0, "RANKS": 1, "EMPTY": 0, "PHASE": 0,
        **arguments(weight, x), **(NOTHING if low_rank is None else low_rank.arguments),
    }  # fmt: skip
    if push is not None:
        space = push.space
        own |= {
            "peers_ptr": space.peers, "rank": space.rank, "rank_stride": space.slots.stride(1), "row_place": space.row_place,
            "RANKS": space.size, "EMPTY": empty_mark(space.slots.dtype), "PHASE": push.phase,
        }  # fmt: skip
    return Plan(_gemv_kernel, (-(-columns // tile.block_n),), own)
