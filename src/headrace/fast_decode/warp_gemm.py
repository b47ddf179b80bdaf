"""Matrix products of up to 64 rows with narrow weights that each warp does for itself, from memory to the tensor cores.

Fast where the weights are all there is to read, so for few rows: up to eight cost as much as one. A program's warps are beside
each other along K, and over each other; a chunk of their weights is asked for before the wait for the previous kernel, and so
is more of it, into the L2 cache, with `touch`. The order of every sum is fixed, and what a row gets does not depend on others.
products.py says what is computed, kernels/warp_products.py how a warp does it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from headrace.fast_decode.epilogues import Plan, column_parameters, finish, sumsq_block
from headrace.fast_decode.gemv import GemvTile
from headrace.fast_decode.skinny_gemm import AllRows, GemmTile
from headrace.kernels.launch import gdc_launch_dependents, gdc_wait, jit, next_power_of_2, tl, touch
from headrace.kernels.narrow import arguments, assembly, packed
from headrace.kernels.warp_products import RUN_BYTES, gather, start, sums
from headrace.model.weight import Weight

MAX_ROWS = 64
LINE = 128  # bytes that `touch` asks for


@dataclass(frozen=True, slots=True)
class WarpTile(AllRows):
    """block_n columns of the output: num_warps warps, of which warps_k share columns, over 1 / splits of K. Each has a chunk of
    runs (64 bytes of a row) in registers while it asks for the next; of `touch` lines of a row the L2 cache is told early."""

    block_n: int
    num_warps: int
    warps_k: int
    chunk: int
    splits: int = 1
    touch: int = 0

    @property
    def num_stages(self) -> int:
        return 1

    def otherwise(self, rows: int, per_byte: int, gated: bool) -> GemvTile | GemmTile:
        """A tile of as many columns and splits for weights that `takes` refuses."""
        if rows == 1 and self.splits == 1:
            return GemvTile(self.block_n, 512 * per_byte, 1, 1)
        return GemmTile(self.block_n * (2 if gated else 1), 128, self.splits, 4, 3)


def suits(weight: Weight) -> bool:
    """Whether weights have a form that these kernels multiply by: one scale for each run, or for several."""
    return weight.kind in ("int4", "int8", "fp8") and weight.group % (RUN_BYTES * packed(weight.kind)) == 0


def takes(weight: Weight, x: Tensor, tile: WarpTile) -> bool:
    """Whether this tile does: each warp has whole runs and groups; on a card, for bfloat16."""
    step = max(RUN_BYTES * packed(weight.kind), weight.group) * tile.warps_k * tile.splits
    return suits(weight) and weight.shape[1] % step == 0 and assembly(x) > 0


@jit(do_not_specialize=["M", "sumsq_tiles", "sumsq_out_tiles"])
def _warp_kernel(
    x_ptr, w_ptr, scales_ptr, zeros_ptr, bias_ptr, sumsq_ptr, out_ptr, residual_ptr, norm_ptr, sumsq_out_ptr, partials_ptr,
    tickets_ptr,
    M, N, sumsq_tiles, sumsq_out_tiles, eps, scale, softcap, norm_offset,
    K: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, SCALE_ROWS: tl.constexpr,
    ZEROS: tl.constexpr, ASM: tl.constexpr, SCALES_IN_WORD: tl.constexpr, ZEROS_IN_WORD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WARPS: tl.constexpr, WARPS_K: tl.constexpr, CHUNK: tl.constexpr,
    TOUCH: tl.constexpr, SPLITS: tl.constexpr, MODE: tl.constexpr, SUMSQ_BLOCK: tl.constexpr, ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, EVEN_N: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    GATED: tl.constexpr = MODE == "glu"
    ROWS: tl.constexpr = BLOCK_N * 2 if GATED else BLOCK_N
    first, split = tl.program_id(0) * BLOCK_N, tl.program_id(1)
    rn = first + tl.arange(0, BLOCK_N)
    rm = tl.arange(0, BLOCK_M)
    weights, places, words, scales, zeros = start(
        w_ptr, scales_ptr, zeros_ptr, first, split, N, K, KIND, GROUP, GROUPS, SCALE_ROWS, ZEROS, ROWS, GATED, WARPS, WARPS_K,
        SPLITS, CHUNK, SCALES_IN_WORD, ZEROS_IN_WORD,
    )  # fmt: skip
    if PDL and TOUCH > 0:
        WIDTH: tl.constexpr = K // 2 if KIND == "int4" else K
        rw = tl.arange(0, ROWS)
        of_row = tl.minimum(first + rw % BLOCK_N, N - 1).to(tl.int64) + rw // BLOCK_N * N
        line = tl.arange(0, TOUCH) * 128 + split * (WIDTH // SPLITS)
        touch(w_ptr + of_row[:, None] * WIDTH + tl.minimum(line, WIDTH - 1)[None, :])
    norm, bias = column_parameters(norm_ptr, bias_ptr, rn, N, norm_offset, split, BLOCK_N, MODE, HAS_BIAS, SPLITS)
    if PDL:
        gdc_wait()
    if SUMSQ_BLOCK > 0:
        rs = tl.arange(0, SUMSQ_BLOCK)
        squares = sumsq_ptr + tl.minimum(rm, M - 1)[:, None] * sumsq_tiles + rs[None, :]
        sumsq = tl.load(squares, mask=(rm < M)[:, None] & (rs < sumsq_tiles)[None, :], other=0.0)
    acc = sums(
        x_ptr, scales_ptr, zeros_ptr, weights, places, words, scales, zeros, 0, split, M, K, KIND, GROUP, ZEROS, BLOCK_M, ROWS,
        WARPS, WARPS_K, SPLITS, CHUNK, SCALES_IN_WORD, ZEROS_IN_WORD,
    )  # fmt: skip
    before = 0.0
    EARLY: tl.constexpr = MODE == "residual" and BLOCK_M * BLOCK_N <= 2048
    if EARLY:  # behind the loads of x: what brings it to its place waits for it
        place = rm[None, :] * N + rn[:, None]
        before = tl.load(residual_ptr + place, mask=(rm < M)[None, :] & (rn < N)[:, None], other=0.0)
    acc = gather(acc, KIND, BLOCK_M, ROWS, WARPS, WARPS_K)
    if not EVEN_N:  # rows past the last repeat it
        acc = tl.where((first + tl.arange(0, ROWS) % BLOCK_N < N)[:, None], acc, 0.0)
    if SUMSQ_BLOCK > 0:
        acc = acc * tl.rsqrt(tl.sum(sumsq, 1) / K + eps)[None, :]
    up_acc = acc
    if GATED:
        acc, up_acc = tl.split(tl.permute(tl.reshape(acc, (2, BLOCK_N, BLOCK_M)), (1, 2, 0)))
    finish(
        acc, up_acc, before, out_ptr, residual_ptr, sumsq_out_ptr, partials_ptr, tickets_ptr, norm, bias, rm, rn, M, N,
        tl.program_id(0), split, sumsq_out_tiles, scale, softcap, MODE, ACTIVATION, HAS_SOFTCAP, SPLITS, EARLY, COLUMNS=0,
    )  # fmt: skip


def in_word(factors: Tensor | None, count: int) -> int:
    """How many of a row's scales, or zeros, are loaded together, `count` of them one after the other."""
    if factors is None:
        return 1
    together = max(1, 4 // factors.dtype.itemsize)
    while count % together or factors.shape[1] % together:
        together //= 2
    return together


def row_block(rows: int) -> int:
    """Rows of a program's tile when there are `rows`."""
    return 1 if rows == 1 else max(8, next_power_of_2(rows))


def plan(tile: WarpTile, x: Tensor, weight: Weight, columns: int, sumsq: Tensor | None) -> Plan:
    rows, width = x.shape
    run = RUN_BYTES * packed(weight.kind)
    runs = width // run // tile.warps_k // tile.splits
    least = max(1, weight.group // run)  # a chunk has whole groups
    chunk = max(n for n in range(least, runs + 1, least) if runs % n == 0 and (n <= tile.chunk or n == least))
    count = chunk // least if weight.group else 1
    own = {
        "x_ptr": x, **arguments(weight, x), "BLOCK_M": row_block(rows), "WARPS": tile.num_warps, "WARPS_K": tile.warps_k,
        "CHUNK": chunk, "TOUCH": tile.touch, "SCALES_IN_WORD": in_word(weight.scales, count),
        "ZEROS_IN_WORD": in_word(weight.zeros, count), "EVEN_N": columns % tile.block_n == 0,
        "SUMSQ_BLOCK": sumsq_block(sumsq, 64),
    }  # fmt: skip
    return Plan(_warp_kernel, (-(-columns // tile.block_n), tile.splits), own)
