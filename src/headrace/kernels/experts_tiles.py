"""Products of tiles of rows, each of one expert, on the tensor cores: the form for more than a few rows.

As in `fast_decode.skinny_gemm` the weights are the left operand. A gated product has gate and up rows side by side in a tile
of weights, so that both are one product, and its results lie in the order of the sort: the next product's rows are neighbours.
That one scales by the rows' shares and leaves what each pair adds, in float32; a third kernel adds up a token's pairs in order.
A sum runs over K from its beginning to its end in one program, whatever rows are beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from headrace.kernels.activation import gated
from headrace.kernels.experts_ends import Joining, alone, finish_row, row_target
from headrace.kernels.experts_lora import LowRank, add_low, low_arguments
from headrace.kernels.experts_sort import Sorted, tile_end, tile_expert, tile_first
from headrace.kernels.launch import capability, gdc_launch_dependents, gdc_wait, jit, next_power_of_2, pdl, tl
from headrace.kernels.narrow import NarrowMatrix, arguments, bytes_together, held_width, packed, span_bytes
from headrace.kernels.narrow_gemm import narrow_sums


@jit
def _float_sums(
    w_ptr, rows, of_row, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    rk = tl.arange(0, BLOCK_K)
    weights = w_ptr + of_row[:, None] * K + rk[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for k in range(0, K, BLOCK_K):
        if EVEN:
            w, x = tl.load(weights + k), tl.load(rows + k)
        else:
            w = tl.load(weights + k, mask=(k + rk < K)[None, :], other=0.0)
            x = tl.load(rows + k, mask=(k + rk < K)[:, None], other=0.0)
        acc = tl.dot(w, x, acc, input_precision="ieee")
    return acc


@jit(do_not_specialize=["clamp"])
def _expert_tiles(
    x_ptr, w_ptr, scales_ptr, zeros_ptr, bias_ptr, order_ptr, tiles_ptr, factors_ptr, shares_ptr, out_ptr, N, K, out_width,
    clamp, low_ptr, low_b_ptr, low_tiles_ptr,
    LOW_SLOTS: tl.constexpr, LOW_EXPERTS: tl.constexpr, RANK: tl.constexpr, LOW_PARTS: tl.constexpr,
    CHOSEN: tl.constexpr, GLU: tl.constexpr, ACTIVATION: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, SCALE_ROWS: tl.constexpr, ZEROS: tl.constexpr,
    ASM: tl.constexpr, BYTES: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    COLUMNS: tl.constexpr = BLOCK_N // 2 if GLU else BLOCK_N  # of the result
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.program_id(1)
    expert = tile_expert(tiles_ptr, slot)
    if expert < 0:
        return
    place = tile_first(tiles_ptr, slot) + tl.arange(0, BLOCK_M)
    end = tile_end(tiles_ptr, slot)
    ok = place < end
    place = tl.minimum(place, end - 1)  # rows past the expert's last repeat it, unstored
    pair = tl.load(order_ptr + place)
    r = tl.arange(0, BLOCK_N)
    if GLU:
        of_row = tl.minimum(tl.program_id(0) * COLUMNS + r % COLUMNS, N - 1) + r // COLUMNS * N
        of_row += expert.to(tl.int64) * (2 * N)
        x_row = pair // CHOSEN
    else:
        of_row = tl.minimum(tl.program_id(0) * COLUMNS + r, N - 1) + expert.to(tl.int64) * N
        x_row = place
    rk = tl.arange(0, BLOCK_K if KIND == "float" else WIDTH)
    rows = x_ptr + x_row[None, :].to(tl.int64) * K + rk[:, None]
    if KIND == "float":
        acc = _float_sums(w_ptr, rows, of_row, K, BLOCK_M, BLOCK_N, BLOCK_K, EVEN)
    else:
        acc = narrow_sums(
            w_ptr, scales_ptr, zeros_ptr, rows, of_row, K, KIND, GROUP, GROUPS, SCALE_ROWS, ZEROS, ASM, BYTES, WIDTH, BLOCK_M,
            BLOCK_N, BLOCK_K, EVEN, False,
        )  # fmt: skip
    if RANK > 0:
        acc = add_low(
            acc, low_ptr, low_b_ptr, low_tiles_ptr, tl.program_id(0) * COLUMNS, place, N, LOW_SLOTS, LOW_EXPERTS, RANK,
            LOW_PARTS, GLU, BLOCK_M, BLOCK_N, COLUMNS,
        )  # fmt: skip
    if factors_ptr is not None:
        acc = acc * tl.load(factors_ptr + x_row)[None, :]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + of_row).to(tl.float32)[:, None]
    if GLU:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (2, COLUMNS, BLOCK_M)), (1, 2, 0)))
        y = tl.where((column < N)[:, None], gated(gate, up, clamp, ACTIVATION), 0.0)  # past its end a row is 0
        target = place
    else:
        y = acc * tl.load(shares_ptr + pair)[None, :]
        target = pair
    at = target[:, None].to(tl.int64) * out_width + column[None, :]
    tl.store(out_ptr + at, tl.trans(y).to(out_ptr.dtype.element_ty), mask=ok[:, None] & (column < out_width)[None, :])


@dataclass(frozen=True, slots=True)
class ExpertTile:
    """A program's work: block_n rows of an expert's weights times up to block_m rows, num_stages steps of block_k ahead."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def tile_rows(pairs: int, count: int, itemsize: int) -> int:
    """Of a tile, so that most experts' rows are one tile where rows are few, and tiles are large where they are many."""
    mean = pairs / count
    rows = 16 if mean <= 8 else 32 if mean <= 20 else 64 if mean <= 48 else 128
    return rows if itemsize == 2 else min(rows, 32)


def tile_for(weight: NarrowMatrix, x: Tensor, block_m: int) -> ExpertTile:
    """As the rows of a tile and the card's shared memory allow; of few rows what counts are bytes in flight."""
    has_wgmma = capability(x.device)[0] in (0, 9, 10)
    if x.dtype.itemsize > 2:
        return ExpertTile(block_m, 32, 128 if packed(weight.kind) == 2 else 32, 4, 2)
    if weight.kind != "float":
        block_k = 128 if block_m <= 32 or packed(weight.kind) == 2 else 64
        if block_m < 128:
            return ExpertTile(block_m, 64, block_k, 4, 3)
        return ExpertTile(block_m, 128 if has_wgmma else 64, block_k, 8, 2)
    if block_m <= 32:
        return ExpertTile(block_m, 64, 128, 4, 4)
    if block_m == 64:
        return ExpertTile(64, 128, 64, 4, 4)
    return ExpertTile(128, 256, 64, 8, 4) if has_wgmma else ExpertTile(128, 128, 32, 8, 4)


def launch(
    x: Tensor, weight: NarrowMatrix, bias: Tensor | None, pairs: Sorted, chosen: int, out: Tensor, columns: int,
    tile: ExpertTile, *, shares: Tensor | None = None, activation: str = "silu", clamp: float = 0.0,
    factors: Tensor | None = None, low: LowRank | None = None,
) -> None:  # fmt: skip
    """Without `shares` x [T, K], times `factors` [T] -> out [P, W], gated products in the order of the sort, 0 past `columns`;
    with them x [P, K] in that order -> out [P, W] float32, what each pair adds. `low`: what adapters add to the products."""
    width, glu = held_width(weight), shares is None
    of_tile = tile.block_n // 2 if glu else tile.block_n
    _expert_tiles[-(-out.shape[1] // of_tile), len(pairs.tiles)](
        x, bias_ptr=bias, order_ptr=pairs.order, tiles_ptr=pairs.tiles, factors_ptr=factors, shares_ptr=shares, out_ptr=out,
        N=columns, K=width, out_width=out.shape[1], clamp=clamp, **low_arguments(low), CHOSEN=chosen, GLU=glu,
        ACTIVATION="clamped" if clamp else activation, **arguments(weight, x),
        BYTES=bytes_together(tile.block_n, tile.num_warps, x), WIDTH=span_bytes(weight, tile.block_k), BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, EVEN=width % tile.block_k == 0, num_warps=tile.num_warps,
        num_stages=tile.num_stages, **pdl(x),
    )  # fmt: skip


@jit(do_not_specialize=["first"])
def _sum_pairs(
    parts_ptr, ids_ptr, out_ptr, residual_ptr, norm_ptr, sumsq_ptr, N, first, count, scale, norm_offset,
    CHOSEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    before, norm = row_target(residual_ptr, norm_ptr, row, column, N, norm_offset)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(CHOSEN):
        expert = tl.load(ids_ptr + row * CHOSEN + j) - first
        held = (expert >= 0) & (expert < count)
        total += tl.load(parts_ptr + (row * CHOSEN + j) * N + column, mask=held & (column < N), other=0.0).to(tl.float32)
    finish_row(total, before, norm, out_ptr, residual_ptr, sumsq_ptr, row, column, N, scale, 0)


def sum_pairs(parts: Tensor, ids: Tensor, out: Tensor | Joining, count: int, first: int) -> Tensor | None:
    """out [T, N] = the sum of parts [T * k, N] over a token's pairs whose experts are held, in the order of ids [T, k]; of a
    residual the sums of squares."""
    rows, columns = len(ids), parts.shape[1]
    block = min(1024, next_power_of_2(columns))
    tiles = -(-columns // block)
    target = alone(out) if isinstance(out, Tensor) else out.arguments(tiles)
    _sum_pairs[tiles, rows](
        parts, ids, N=columns, first=first, count=count, CHOSEN=ids.shape[1], BLOCK=block, num_warps=4, **target, **pdl(parts)
    )  # fmt: skip
    return target["sumsq_ptr"]
