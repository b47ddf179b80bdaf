"""Matrix products of 2 to 16 rows with FP8 weights on Hopper's FP8 tensor cores, activations as exact as ever.

Each number of x is the sum of two in FP8 (kernels/pairs.py), so weights are multiplied as they lie in shared memory, none is
converted. Making the pairs costs more than all else: a program has as many weights of one K as it can, so that there is one
for each multiprocessor. It pays for large products (tiles.py says which). The order of every sum is fixed, and what a row gets
does not depend on others. products.py says what is computed.
"""

# mypy: disable-error-code="assignment, var-annotated"
# (kernels grow tuples of tiles in loops that the compiler unrolls)

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.fast_decode.epilogues import Plan, column_parameters, finish, sumsq_block
from headrace.fast_decode.skinny_gemm import row_block
from headrace.kernels.launch import capability, gdc_launch_dependents, gdc_wait, jit, tl, touch
from headrace.kernels.narrow import assembly
from headrace.kernels.pairs import exponents, joined, pairs, size
from headrace.model.weight import Weight

MAX_ROWS = 16  # of 32 the products that widen weights are as fast, of 64 faster (an 8B on an H200)
STEP = 128  # columns of K at a time, of one byte: a cache line


@dataclass(frozen=True, slots=True)
class PairTile:
    """One program's work: `tiles` times block_n columns of all rows over 1 / splits of K, `num_stages` steps of 128 in flight.

    The weights of the first `touch` steps are asked for before the wait for the previous kernel, into the L2 cache. Each split
    is whole steps; a product that joins the residual has one tile.
    """

    block_n: int
    tiles: int
    splits: int
    num_warps: int
    num_stages: int
    touch: int = 0

    def row_tiles(self, rows: int) -> int:
        return 1

    def partial_elements(self, rows: int, columns: int) -> int:
        """Floats of partial sums that a residual product of this tile keeps."""
        return row_block(rows) * -(-columns // self.block_n) * self.block_n * self.splits if self.splits > 1 else 0


def all_suit(weights: Iterable[Weight], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether all FP8 weights of a model may be multiplied so: on Hopper, by bfloat16, with one scale for a row or several."""
    return capability(device)[0] == 9 and dtype == torch.bfloat16 and all(w.group == 0 for w in weights if w.kind == "fp8")


@jit
def _load_all(pointers, at):
    found = ()
    for t in tl.static_range(len(pointers)):
        found = found + (tl.load(pointers[t] + at),)
    return found


@jit
def _add_step(acc, weights, x, ASM: tl.constexpr):
    """acc + the products of a step, of each tile [ROWS, 2 M]: with high and low parts of x. Tensor cores add up 128 columns, in
    less than float32; the sum joins others in that."""
    exponent = exponents(x, 0)
    parts, of_block = pairs(x, exponent, ASM), size(exponent)
    of_pair = tl.reshape(tl.join(of_block, of_block), (parts.shape[1],))
    new = ()
    for t in tl.static_range(len(acc)):
        new = new + (acc[t] + tl.dot(weights[t], parts) * of_pair[None, :],)
    return new


@jit(do_not_specialize=["M", "sumsq_tiles", "sumsq_out_tiles"])
def _pair_kernel(
    x_ptr, w_ptr, scales_ptr, bias_ptr, sumsq_ptr, out_ptr, residual_ptr, norm_ptr, sumsq_out_ptr, partials_ptr, tickets_ptr,
    M, N, K, sumsq_tiles, sumsq_out_tiles, eps, scale, softcap, norm_offset,
    SCALE_ROWS: tl.constexpr, ASM: tl.constexpr, STEPS: tl.constexpr, STEP: tl.constexpr, TOUCH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr, SPLITS: tl.constexpr, MODE: tl.constexpr,
    SUMSQ_BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    ROWS: tl.constexpr = BLOCK_N * 2 if MODE == "glu" else BLOCK_N
    first, split = tl.program_id(0) * (BLOCK_N * TILES), tl.program_id(1)
    rm, rk, rw = tl.arange(0, BLOCK_M), tl.arange(0, STEP), tl.arange(0, ROWS)
    w_ptr = w_ptr.to(tl.pointer_type(tl.float8e4nv), bitcast=True) + split * STEPS * STEP
    weights, scales, acc = (), (), ()
    for t in tl.static_range(TILES):  # of a gated product half the rows are gate rows and half the up rows of the same columns
        of_row = tl.minimum(first + t * BLOCK_N + rw % BLOCK_N, N - 1).to(tl.int64) + rw // BLOCK_N * N
        weights = weights + (w_ptr + of_row[:, None] * K + rk[None, :],)
        scales = scales + (scales_ptr + of_row // SCALE_ROWS,)
        acc = acc + (tl.zeros([ROWS, 2 * BLOCK_M], tl.float32),)
        if PDL:
            for i in tl.static_range(TOUCH):
                touch(w_ptr + of_row * K + i * STEP)
    s = _load_all(scales, 0)
    rows = x_ptr + (rm % M)[None, :] * K + split * STEPS * STEP + rk[:, None]  # past M others once more, unstored
    if PDL:
        gdc_wait()
    for step in range(STEPS):
        x = tl.load(rows + step * STEP)
        acc = _add_step(acc, _load_all(weights, step * STEP), x, ASM)
    if SUMSQ_BLOCK > 0:
        rs = tl.arange(0, SUMSQ_BLOCK)
        squares = sumsq_ptr + tl.minimum(rm, M - 1)[:, None] * sumsq_tiles + rs[None, :]
        sumsq = tl.load(squares, mask=(rs < sumsq_tiles)[None, :], other=0.0)
        factor = tl.rsqrt(tl.sum(sumsq, 1) / K + eps)[None, :]
    for t in tl.static_range(TILES):
        rn = first + t * BLOCK_N + tl.arange(0, BLOCK_N)
        norm, bias = column_parameters(norm_ptr, bias_ptr, rn, N, norm_offset, split, BLOCK_N, MODE, HAS_BIAS, SPLITS)
        total = joined(acc[t]) * s[t].to(tl.float32)[:, None]
        if MODE == "residual":
            total = tl.where((rn < N)[:, None], total, 0.0)
        if SUMSQ_BLOCK > 0:
            total = total * factor
        up = total
        if MODE == "glu":
            total, up = tl.split(tl.permute(tl.reshape(total, (2, BLOCK_N, BLOCK_M)), (1, 2, 0)))
        finish(
            total, up, 0.0, out_ptr, residual_ptr, sumsq_out_ptr, partials_ptr, tickets_ptr, norm, bias, rm, rn, M, N,
            tl.program_id(0), split, sumsq_out_tiles, scale, softcap, MODE, ACTIVATION, HAS_SOFTCAP, SPLITS, False, COLUMNS=0,
        )  # fmt: skip


def plan(tile: PairTile, x: Tensor, weight: Weight, columns: int, sumsq: Tensor | None) -> Plan:
    """Raises ValueError for weights and numbers that this kernel does not multiply."""
    rows, width = x.shape
    multiple = STEP * tile.splits
    if weight.kind != "fp8" or weight.group or x.dtype != torch.bfloat16 or width % multiple:
        form = f"{weight.kind} in groups of {weight.group} by {x.dtype}, {width} columns"
        raise ValueError(f"{tile} takes fp8 without groups by bfloat16, a multiple of {multiple} columns, not {form}")
    steps = width // STEP // tile.splits
    assert weight.scales is not None
    own = {
        "x_ptr": x, "w_ptr": weight.data.view(torch.uint8), "scales_ptr": weight.scales, "SCALE_ROWS": weight.scale_rows,
        "ASM": assembly(x) > 0, "BLOCK_M": row_block(rows), "STEPS": steps, "STEP": STEP, "TILES": tile.tiles,
        "TOUCH": min(tile.touch, steps), "SUMSQ_BLOCK": sumsq_block(sumsq, 64),
    }  # fmt: skip
    return Plan(_pair_kernel, (-(-columns // (tile.block_n * tile.tiles)), tile.splits), own)
