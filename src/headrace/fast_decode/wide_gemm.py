"""Matrix products of up to 256 rows on the tensor cores of Hopper and newer: tiles come by the tensor copy engine (TMA).

What `skinny_gemm.py` does, for more rows: a program multiplies `block_m` rows by `block_n` weight rows, so that the output lies
as it is stored, and the engine copies the tiles, several steps ahead. Programs that run side by side share weight tiles through
the L2 cache. Where the tiles do not fill the card the sum over K is split, as there. A row of either operand must be a multiple
of 16 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from headrace.fast_decode.epilogues import Plan, column_parameters, finish, split_width
from headrace.kernels.launch import TensorDescriptor, gdc_launch_dependents, gdc_wait, jit, next_power_of_2, tl, touch
from headrace.kernels.lora_product import NOTHING, LowRank, add_low_rank, begin_low_rank, wait_for_x
from headrace.model.weight import Weight

MAX_ROWS = 256
SUMSQ_BLOCK = 64  # partial sums of squares that are added at a time
EARLY_ELEMENTS = 4096  # of a tile of the residual that is loaded before the sums


@dataclass(frozen=True, slots=True)
class WideTile:
    """One program's work: block_m rows times block_n columns over 1 / splits of K, `num_stages` steps of block_k in flight.

    Weights of the first `touch` steps are asked into the L2 cache before the wait for the previous kernel.
    """

    block_m: int
    block_n: int
    block_k: int
    splits: int
    num_warps: int
    num_stages: int
    touch: int = 0

    def row_tiles(self, rows: int) -> int:
        return -(-rows // self.block_m)

    def partial_elements(self, rows: int, columns: int) -> int:
        """Floats of partial sums that a residual product of this tile keeps."""
        if self.splits == 1:
            return 0
        return self.row_tiles(rows) * self.block_m * -(-columns // self.block_n) * self.block_n * self.splits


@jit
def _see_what_others_wrote():
    """The copy engine sees what this thread does."""
    tl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.u32 $0, $1;", "=r,r", [tl.arange(0, 128)], dtype=tl.int32, is_pure=False, pack=1
    )  # fmt: skip


@jit(do_not_specialize=["M", "sumsq_tiles", "sumsq_out_tiles"])  # or multiples of 16 would be variants
def _wide_kernel(
    x_tiles, w_tiles, w_ptr, bias_ptr, sumsq_ptr, out_ptr, residual_ptr, norm_ptr, sumsq_out_ptr, partials_ptr, tickets_ptr,
    M, N, K, k_split, sumsq_tiles, sumsq_out_tiles, eps, scale, softcap, norm_offset,
    shrunk_ptr, b_ptr, slices_ptr, used_ptr, flag_ptr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr, MODE: tl.constexpr,
    SUMSQ_BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    EARLY: tl.constexpr, LINES: tl.constexpr, SHRUNK: tl.constexpr, RANK: tl.constexpr, AT_ONCE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL and LINES > 0:
        gdc_launch_dependents()
    split = tl.program_id(1)
    n0 = tl.program_id(0) * BLOCK_N
    m0 = tl.program_id(2) * BLOCK_M
    k_start = split * k_split
    rn = n0 + tl.arange(0, BLOCK_N)
    rm = m0 + tl.arange(0, BLOCK_M)
    if PDL and LINES > 0:  # of 64 weights each; past the end the last one again
        line = tl.minimum(k_start + tl.arange(0, LINES) * 64, K - 1)
        lines = tl.minimum(rn, N - 1)[:, None].to(tl.int64) * K + line[None, :]
        touch(w_ptr + lines)
        if MODE == "glu":
            touch(w_ptr + N.to(tl.int64) * K + lines)
    norm, bias = column_parameters(norm_ptr, bias_ptr, rn, N, norm_offset, split, BLOCK_N, MODE, HAS_BIAS, SPLITS)
    if SHRUNK > 0:
        begun = begin_low_rank(b_ptr, slices_ptr, used_ptr, n0, N, split == 0, MODE, BLOCK_N, SHRUNK, RANK, AT_ONCE)
    if PDL:
        if SHRUNK > 0:
            wait_for_x(flag_ptr)
            _see_what_others_wrote()
        else:
            gdc_wait()
        if LINES == 0:
            gdc_launch_dependents()
    # what the epilogue reads is asked for now, where it is small: behind the sums its latency would show
    if SUMSQ_BLOCK > 0:
        rs = tl.arange(0, SUMSQ_BLOCK)
        squares = sumsq_ptr + tl.minimum(rm, M - 1)[:, None] * sumsq_tiles + rs[None, :]
        sumsq = tl.load(squares, mask=(rs < sumsq_tiles)[None, :], other=0.0)
    before = 0.0
    if MODE == "residual" and EARLY:
        place = rm[:, None] * N + rn[None, :]
        before = tl.load(residual_ptr + place, mask=(rm < M)[:, None] & (rn < N)[None, :], other=0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(k_start, k_start + k_split, BLOCK_K):  # past the edges the engine fills in zeros
        x = x_tiles.load([m0, k])
        acc = tl.dot(x, w_tiles.load([n0, k]).T, acc, input_precision="ieee")
        if MODE == "glu":
            up_acc = tl.dot(x, w_tiles.load([N + n0, k]).T, up_acc, input_precision="ieee")
    if SHRUNK > 0:
        acc, up_acc = add_low_rank(
            acc, up_acc, begun, shrunk_ptr, b_ptr, used_ptr, rm, n0, M, N, MODE, SHRUNK, RANK, AT_ONCE, 1, PDL
        )  # fmt: skip
    if SUMSQ_BLOCK > 0:
        total = tl.sum(sumsq, 1)
        for s0 in range(SUMSQ_BLOCK, sumsq_tiles, SUMSQ_BLOCK):
            total += tl.sum(tl.load(squares + s0, mask=(s0 + rs < sumsq_tiles)[None, :], other=0.0), 1)
        factor = tl.rsqrt(total / K + eps)
        acc = acc * factor[:, None]
        if MODE == "glu":
            up_acc = up_acc * factor[:, None]
    finish(
        acc, up_acc, before, out_ptr, residual_ptr, sumsq_out_ptr, partials_ptr, tickets_ptr, norm, bias, rm, rn, M, N,
        tl.program_id(2) * tl.num_programs(0) + tl.program_id(0), split, sumsq_out_tiles, scale, softcap,
        MODE, ACTIVATION, HAS_SOFTCAP, SPLITS, EARLY, COLUMNS=1,
    )  # fmt: skip


def plan(
    tile: WideTile, x: Tensor, weight: Weight, columns: int, sumsq: Tensor | None, low_rank: LowRank | None = None
) -> Plan:
    own = {
        "x_tiles": TensorDescriptor.from_tensor(x, [tile.block_m, tile.block_k]),
        "w_tiles": TensorDescriptor.from_tensor(weight.data, [tile.block_n, tile.block_k]), "w_ptr": weight.data,
        "BLOCK_M": tile.block_m, "BLOCK_K": tile.block_k, "k_split": split_width(x.shape[1], tile.splits, tile.block_k),
        "SUMSQ_BLOCK": 0 if sumsq is None else SUMSQ_BLOCK,
        "EARLY": tile.block_m * tile.block_n <= EARLY_ELEMENTS,
        "LINES": next_power_of_2(min(tile.touch * tile.block_k, x.shape[1]) // 64) if tile.touch else 0,
        **(NOTHING if low_rank is None else low_rank.arguments),
    }  # fmt: skip
    return Plan(_wide_kernel, (-(-columns // tile.block_n), tile.splits, tile.row_tiles(x.shape[0])), own)
