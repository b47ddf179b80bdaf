"""Matrix products of 2 to 64 rows on the tensor cores: the weights stream, the rows stay.

The operands are swapped: a tile of the weight [BLOCK_N, BLOCK_K] is the left one, the few rows of x the right one, so all rows
of a weight tile are used at once and the weight is read exactly once. Where N is too small to fill the card the sum over K is
split between programs: each stores its partial sums and the last one to finish (an integer ticket says which) adds all
of them in the order of the splits. So the result does not depend on who was last: replays are bit-identical.
products.py says what is computed.
"""

# mypy: disable-error-code="assignment, var-annotated"
# (kernels grow tuples of tiles in loops that the compiler unrolls)

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from headrace.fast_decode.epilogues import Plan, column_parameters, finish, split_width, sumsq_block
from headrace.kernels.launch import gdc_launch_dependents, gdc_wait, jit, next_power_of_2, tl, touch
from headrace.kernels.lora_product import NOTHING, LowRank, add_low_rank, begin_low_rank, wait_for_x
from headrace.model.weight import Weight

MAX_ROWS = 64
EARLY_ELEMENTS = 2048  # of a tile of the residual that is loaded before the sums


class AllRows:
    """Of tiles whose programs have all rows of their columns, over 1 / splits of K."""

    __slots__ = ()
    block_n: int
    splits: int

    def row_tiles(self, rows: int) -> int:
        return 1

    def partial_elements(self, rows: int, columns: int) -> int:
        """Floats of partial sums that a residual product of this tile keeps, or of the one that stands in for it."""
        return row_block(rows) * -(-columns // self.block_n) * self.block_n * self.splits if self.splits > 1 else 0


@dataclass(frozen=True, slots=True)
class GemmTile(AllRows):
    """One program's work: block_n columns of all rows over 1 / splits of K in steps of block_k, `num_stages` steps in flight.

    The first `prefetch` steps' weights are loaded into shared memory before the wait for the previous kernel, and those of
    `touch` steps after them into the L2 cache; with either, the next kernel may start to do the same with its own at once.
    """

    block_n: int
    block_k: int
    splits: int
    num_warps: int
    num_stages: int
    prefetch: int = 0
    touch: int = 0


def row_block(rows: int) -> int:
    """Rows of a program's tile when there are `rows`, those past the last included."""
    return max(16, next_power_of_2(rows))


@jit
def _load_weights(pointers, ok, k, k_end, rk, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(pointers + k)
    return tl.load(pointers + k, mask=ok[:, None] & (k + rk < k_end)[None, :], other=0.0)


@jit
def load_rows(pointers, k, k_end, rk, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(pointers + k)
    return tl.load(pointers + k, mask=(k + rk < k_end)[:, None], other=0.0)


@jit(do_not_specialize=["M", "sumsq_tiles", "sumsq_out_tiles"])  # or multiples of 16 would be variants
def _skinny_kernel(
    x_ptr, w_ptr, bias_ptr, sumsq_ptr, out_ptr, residual_ptr, norm_ptr, sumsq_out_ptr, partials_ptr, tickets_ptr,
    M, N, K, k_split, sumsq_tiles, sumsq_out_tiles, eps, scale, softcap, norm_offset,
    shrunk_ptr, b_ptr, slices_ptr, used_ptr, flag_ptr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr, PREFETCH: tl.constexpr,
    LOOP: tl.constexpr, MODE: tl.constexpr, SUMSQ_BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, EVEN: tl.constexpr, LINES: tl.constexpr,
    EARLY: tl.constexpr, SHRUNK: tl.constexpr, RANK: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL and PREFETCH + LINES > 0:
        gdc_launch_dependents()
    tile = tl.program_id(0)
    split = tl.program_id(1)
    rn = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    rk = tl.arange(0, BLOCK_K)
    rm = tl.arange(0, BLOCK_M)
    column_ok = rn < N
    k_start = split * k_split
    k_end = tl.minimum(k_start + k_split, K)
    weights = w_ptr + rn[:, None].to(tl.int64) * K + rk[None, :]
    up_weights = weights + N.to(tl.int64) * K
    rows = x_ptr + (rm % M)[None, :] * K + rk[:, None]  # rows past M repeat others, unstored: the last alone is waited for
    if SHRUNK > 0:
        n0 = tile * BLOCK_N
        begun = begin_low_rank(b_ptr, slices_ptr, used_ptr, n0, N, split == 0, MODE, BLOCK_N, SHRUNK, RANK, AT_ONCE)
    early = ()
    early_up = ()
    for i in tl.static_range(PREFETCH):
        early = early + (_load_weights(weights, column_ok, k_start + i * BLOCK_K, k_end, rk, EVEN),)
        if MODE == "glu":
            early_up = early_up + (_load_weights(up_weights, column_ok, k_start + i * BLOCK_K, k_end, rk, EVEN),)
    if PDL and LINES > 0:  # of 64 weights each; past the end the last one again
        line = k_start + PREFETCH * BLOCK_K + tl.arange(0, LINES) * 64
        lines = tl.minimum(rn, N - 1)[:, None].to(tl.int64) * K + tl.minimum(line, K - 1)[None, :]
        touch(w_ptr + lines)
        if MODE == "glu":
            touch(w_ptr + N.to(tl.int64) * K + lines)
    norm, bias = column_parameters(norm_ptr, bias_ptr, rn, N, norm_offset, split, BLOCK_N, MODE, HAS_BIAS, SPLITS)
    if PDL:
        if SHRUNK > 0:
            wait_for_x(flag_ptr)
        else:
            gdc_wait()
    if PDL and PREFETCH + LINES == 0:
        gdc_launch_dependents()
    xs = ()  # all of them are asked for before the first is used: a product's barrier would stop later loads
    for i in tl.static_range(PREFETCH):
        xs = xs + (load_rows(rows, k_start + i * BLOCK_K, k_end, rk, EVEN),)
    # what the epilogue reads is asked for now, where it is small: behind the sums' barriers its latency would show
    if SUMSQ_BLOCK > 0:
        rs = tl.arange(0, SUMSQ_BLOCK)
        squares = sumsq_ptr + tl.minimum(rm, M - 1)[:, None] * sumsq_tiles + rs[None, :]
        sumsq = tl.load(squares, mask=(rs < sumsq_tiles)[None, :], other=0.0)
    before = 0.0
    if MODE == "residual" and EARLY:
        place = rm[None, :] * N + rn[:, None]
        before = tl.load(residual_ptr + place, mask=(rm < M)[None, :] & column_ok[:, None], other=0.0)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up_acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for i in tl.static_range(PREFETCH):
        acc = tl.dot(early[i], xs[i], acc, input_precision="ieee")
        if MODE == "glu":
            up_acc = tl.dot(early_up[i], xs[i], up_acc, input_precision="ieee")
    if LOOP:
        for k in range(k_start + PREFETCH * BLOCK_K, k_end, BLOCK_K):
            w = _load_weights(weights, column_ok, k, k_end, rk, EVEN)
            x = load_rows(rows, k, k_end, rk, EVEN)
            acc = tl.dot(w, x, acc, input_precision="ieee")
            if MODE == "glu":
                u = _load_weights(up_weights, column_ok, k, k_end, rk, EVEN)
                up_acc = tl.dot(u, x, up_acc, input_precision="ieee")
    if SHRUNK > 0:
        acc, up_acc = add_low_rank(
            acc, up_acc, begun, shrunk_ptr, b_ptr, used_ptr, rm, n0, M, N, MODE, SHRUNK, RANK, AT_ONCE, 0, PDL
        )  # fmt: skip
    if SUMSQ_BLOCK > 0:
        factor = tl.rsqrt(tl.sum(sumsq, 1) / K + eps)
        acc = acc * factor[None, :]
        if MODE == "glu":
            up_acc = up_acc * factor[None, :]
    finish(
        acc, up_acc, before, out_ptr, residual_ptr, sumsq_out_ptr, partials_ptr, tickets_ptr, norm, bias, rm, rn, M, N,
        tile, split, sumsq_out_tiles, scale, softcap, MODE, ACTIVATION, HAS_SOFTCAP, SPLITS, EARLY, COLUMNS=0,
    )  # fmt: skip


def plan(
    tile: GemmTile, x: Tensor, weight: Weight, columns: int, sumsq: Tensor | None, low_rank: LowRank | None = None
) -> Plan:
    rows, width = x.shape
    k_split = split_width(width, tile.splits, tile.block_k)
    steps = k_split // tile.block_k
    prefetch = min(tile.prefetch, steps)
    touched = min(tile.touch, steps - prefetch) * tile.block_k // 64
    own = {
        "x_ptr": x, "w_ptr": weight.data, "BLOCK_M": row_block(rows), "BLOCK_K": tile.block_k,
        "k_split": k_split, "PREFETCH": prefetch, "LOOP": prefetch < steps,
        "SUMSQ_BLOCK": sumsq_block(sumsq, 64), "LINES": next_power_of_2(touched) if touched else 0,
        "EARLY": row_block(rows) * tile.block_n <= EARLY_ELEMENTS,
        "EVEN": columns % tile.block_n == 0 and width % (tile.splits * tile.block_k) == 0,
        **(NOTHING if low_rank is None else low_rank.arguments),
    }  # fmt: skip
    return Plan(_skinny_kernel, (-(-columns // tile.block_n), tile.splits), own)
