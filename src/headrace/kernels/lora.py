"""Low-rank additions to a product: y[row] += (x[row] A^T) B^T * scale, by each row's adapter; rows without one are left alone.

Two kernels: *shrink* makes the few numbers x A^T of a row, its sum cut into parts along x where rows are few; *expand* adds the
parts up in their order and adds what B makes of them to y, in float32 and rounded once. Both go by `Groups`: the rows of each
adapter, so that a matrix is read once for all its rows. A row's numbers depend on no other row.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.kernels.launch import gdc_launch_dependents, gdc_wait, jit, next_power_of_2, pdl, tl

MIN_RANK = 16  # that matrix units take; smaller ranks are filled up with zeros
FEW_ROWS, SOME_ROWS = 64, 512  # of a step: up to here sums are cut into more parts, as there are too few programs without
GROUP_BLOCK = 1024
WIDTHS = (128, 256)  # outputs of an expanding program


class ShrinkTile(NamedTuple):
    parts: int
    block_m: int
    block_k: int
    num_warps: int
    num_stages: int


class ExpandTile(NamedTuple):
    block_m: int
    block_n: int  # one of WIDTHS
    num_warps: int


def shrink_tile(rows: int, columns: int, width: int) -> ShrinkTile:
    """For x [rows, columns] and A of `width` rows in all. Of few rows a program reads all that it needs of A at once, as far as
    there are not too many parts."""
    if rows > FEW_ROWS:
        return ShrinkTile(max(1, min(4 if rows <= SOME_ROWS else 1, columns // 256)), 64, 64, 4, 3)
    block_k = min(512, (1 << 14) // min(64, next_power_of_2(width)), next_power_of_2(columns))
    return ShrinkTile(min(32, -(-columns // block_k)), 16, block_k, 4, 1)


def expand_tile(rows: int, outputs: int) -> ExpandTile:
    if rows <= FEW_ROWS:
        return ExpandTile(16, 128 if outputs < 16384 else 256, 4)
    return ExpandTile(32, 128, 4) if rows <= SOME_ROWS else ExpandTile(64, 128, 8)


@dataclass(slots=True)
class Pair:
    """A and B of one product for each slot of adapters. Its outputs are cut into runs of slices (queries, keys, values), each
    with an A of its own; where an adapter has none, zeros are."""

    a: Tensor  # [slots, slices * rank, in]
    b: Tensor  # [slots, out, rank]
    scales: Tensor  # [slots, slices] float32
    tiles: dict[int, Tensor]  # of each of WIDTHS [any, 3] int32: slice, first output, and the one behind the last
    runs: tuple[tuple[int, int], ...]  # along the outputs: whose they are, and the one behind the last
    slices: Tensor  # [out] int32: whose each of them is

    @property
    def rank(self) -> int:
        return self.b.shape[2]

    def has_whole(self, block_n: int) -> bool:
        """Whether all outputs of a tile of so many have one A."""
        return all(end % block_n == 0 for _, end in self.runs[:-1])

    @property
    def of_slots(self) -> tuple[Tensor, Tensor, Tensor]:
        """What each slot has a part of."""
        return self.a, self.b, self.scales


def new_pair(
    slots: int, sizes: tuple[int, ...], columns: int, rank: int, dtype: torch.dtype, device: torch.device,
    slices: tuple[int, ...] | None = None,
) -> Pair:  # fmt: skip
    """Zeros, for runs of so many outputs, which belong to these slices (None: each is one); `rank` is filled up to what kernels
    take."""
    rank, of = max(MIN_RANK, next_power_of_2(rank)), slices or tuple(range(len(sizes)))
    runs = list(zip(of, sizes, itertools.accumulate(sizes), strict=True))
    tiles = {}
    for width in WIDTHS:
        found = [
            (index, first, min(first + width, end)) for index, size, end in runs for first in range(end - size, end, width)
        ]  # fmt: skip
        tiles[width] = torch.tensor(found, dtype=torch.int32).to(device)
    slices_of = torch.tensor(of, dtype=torch.int32).repeat_interleave(torch.tensor(sizes)).to(device)
    return Pair(
        torch.zeros((slots, (max(of) + 1) * rank, columns), dtype=dtype, device=device),
        torch.zeros((slots, sum(sizes), rank), dtype=dtype, device=device),
        torch.zeros((slots, max(of) + 1), dtype=torch.float32, device=device), tiles,
        tuple((index, end) for index, _, end in runs), slices_of,
    )  # fmt: skip


@dataclass(slots=True)
class Groups:
    """The rows of each slot: order[slot, : counts[slot]], ascending."""

    order: Tensor  # [slots, T] int32
    counts: Tensor  # [slots] int32


def group_rows(adapters: Tensor, slots: int) -> Groups:
    """adapters [T] int64: 0, or one more than the row's slot."""
    rows = len(adapters)
    order = torch.empty((slots, rows), dtype=torch.int32, device=adapters.device)
    counts = torch.empty(slots, dtype=torch.int32, device=adapters.device)
    block = min(GROUP_BLOCK, next_power_of_2(max(rows, 16)))
    _group[(slots,)](adapters, order, counts, rows, BLOCK=block, num_warps=4)
    return Groups(order, counts)


def add_lora_reference(
    y: Tensor, x: Tensor, pair: Pair, adapters: Tensor, squares: Tensor | None = None, eps: float = 0.0, scale: float = 1.0
) -> None:
    """y [T, out] += what the rows' adapters [T] (see `group_rows`) make of x [T, in], times `scale`.

    With `squares` [T, any] float32, partial sums of squares of the rows that x are made of, divided by their root mean square.
    """
    factor = torch.tensor(scale) if squares is None else scale * torch.rsqrt(squares.sum(1, keepdim=True) / x.shape[1] + eps)
    rank = pair.rank
    for one in adapters.unique().tolist():
        if not one:
            continue
        rows, slot = (adapters == one).nonzero()[:, 0], one - 1
        shrunk = (x[rows] @ pair.a[slot].T).float()
        added, first = [], 0
        for index, end in pair.runs:
            part = (shrunk[:, index * rank : (index + 1) * rank] * pair.scales[slot, index]).to(x.dtype)
            added.append(part @ pair.b[slot, first:end].T)
            first = end
        of_rows = factor if squares is None else factor[rows]
        y.index_add_(0, rows, (torch.cat(added, 1) * of_rows).to(y.dtype))


def add_lora(
    y: Tensor, x: Tensor, pair: Pair, groups: Groups, squares: Tensor | None = None, eps: float = 0.0, scale: float = 1.0
) -> None:
    """As `add_lora_reference`, on a card."""
    (rows, columns), width = x.shape, pair.a.shape[1]
    shrunk = shrink(x, pair, groups, shrink_tile(rows, columns, width))
    expand(y, shrunk, pair, groups, expand_tile(rows, y.shape[1]), squares, columns, eps, scale)


def num_groups(rows: int, block_m: int) -> int:
    """Programs that share the rows of one adapter; few rows are seldom all of one."""
    return 1 if rows <= FEW_ROWS else min(-(-rows // block_m), 64)


def shrink(x: Tensor, pair: Pair, groups: Groups, tile: ShrinkTile) -> Tensor:
    """x [T, in] -> x A^T, to be added up: [parts, T, slices * rank] float32; only the rows of adapters are written."""
    (slots, width, columns), rows = pair.a.shape, len(x)
    out = torch.empty((tile.parts, rows, width), dtype=torch.float32, device=x.device)
    block_r = min(64, next_power_of_2(width))
    each = -(-columns // (tile.parts * tile.block_k)) * tile.block_k
    _shrink[(tile.parts * -(-width // block_r), slots, num_groups(rows, tile.block_m))](
        x, pair.a, groups.order, groups.counts, out, rows, x.stride(0), columns, width, each, PARTS=tile.parts,
        BLOCK_M=tile.block_m, BLOCK_R=block_r, BLOCK_K=tile.block_k, AHEAD=each == tile.block_k, num_warps=tile.num_warps,
        num_stages=tile.num_stages, **_pdl(x),
    )  # fmt: skip
    return out


def _pdl(x: Tensor) -> dict[str, bool]:
    """Of more rows the groups may have been made just before."""
    return pdl(x) if len(x) <= FEW_ROWS else {"PDL": False}


def expand(
    y: Tensor, shrunk: Tensor, pair: Pair, groups: Groups, tile: ExpandTile, squares: Tensor | None = None, columns: int = 1,
    eps: float = 0.0, scale: float = 1.0,
) -> None:  # fmt: skip
    """y [T, out] += the sum of `shrunk` over its parts, times the scales and B^T."""
    parts, rows, width = shrunk.shape
    block_r = min(64 if rows <= FEW_ROWS else 32, pair.rank)
    tiles = pair.tiles[tile.block_n]
    _expand[(len(tiles), len(pair.b), num_groups(rows, tile.block_m))](
        y, shrunk, pair.b, pair.scales, tiles, groups.order, groups.counts, squares, rows, y.stride(0), y.shape[1], width,
        0 if squares is None else squares.shape[1], columns, eps, scale, SLICES=pair.scales.shape[1], PARTS=parts,
        RANK=pair.rank, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_R=block_r,
        SQUARES=0 if squares is None else next_power_of_2(squares.shape[1]), num_warps=tile.num_warps, **_pdl(y),
    )  # fmt: skip


@jit(do_not_specialize=["rows"])
def _group(adapters, order, counts, rows, BLOCK: tl.constexpr):
    slot = tl.program_id(0)
    seen = 0
    for first in range(0, rows, BLOCK):
        row = first + tl.arange(0, BLOCK)
        here = (tl.load(adapters + row, row < rows, 0) == slot + 1).to(tl.int32)
        place = seen + tl.cumsum(here, 0) - here
        tl.store(order + slot.to(tl.int64) * rows + place, row, here != 0)
        seen += tl.sum(here, 0)
    tl.store(counts + slot, seen)


@jit(do_not_specialize=["rows"])
def _shrink(
    x, a, order, counts, out, rows, x_stride, columns, width, each, PARTS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(1).to(tl.int64)
    part = tl.program_id(0) % PARTS
    r = tl.program_id(0) // PARTS * BLOCK_R + tl.arange(0, BLOCK_R)
    count = tl.load(counts + slot)
    matrix = a + (slot * width + r.to(tl.int64)[None, :]) * columns
    here = (r < width)[None, :] & (tl.program_id(2) * BLOCK_M < count)
    if AHEAD:  # all that it reads of A, while the kernel before it ends
        k = part * each + tl.arange(0, BLOCK_K)
        right = tl.load(matrix + k[:, None], (k < columns)[:, None] & here, 0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for first in range(tl.program_id(2) * BLOCK_M, count, tl.num_programs(2) * BLOCK_M):
        m = first + tl.arange(0, BLOCK_M)
        row = tl.load(order + slot * rows + m, m < count, 0).to(tl.int64)
        total = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
        if AHEAD:
            left = tl.load(x + row[:, None] * x_stride + k[None, :], (m < count)[:, None] & (k < columns)[None, :], 0.0)
            total = tl.dot(left, right, total, input_precision="ieee")
        else:
            for begin in range(part * each, min(part * each + each, columns), BLOCK_K):
                k = begin + tl.arange(0, BLOCK_K)
                left = tl.load(x + row[:, None] * x_stride + k[None, :], (m < count)[:, None] & (k < columns)[None, :], 0.0)
                right = tl.load(matrix + k[:, None], (k < columns)[:, None] & here, 0.0)
                total = tl.dot(left, right, total, input_precision="ieee")
        place = out + (part * rows + row[:, None]) * width + r[None, :]
        tl.store(place, total, (m < count)[:, None] & (r < width)[None, :])


@jit(do_not_specialize=["rows"])
def _expand(
    y, shrunk, b, scales, tiles, order, counts, squares, rows, y_stride, outputs, width, num_squares, columns, eps, factor,
    SLICES: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr, SQUARES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(1).to(tl.int64)
    tile = tiles + tl.program_id(0) * 3
    count = tl.load(counts + slot)
    index, begin, end = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    n = begin + tl.arange(0, BLOCK_N)
    scale = tl.load(scales + slot * SLICES + index)
    here = (n < end)[None, :] & (tl.program_id(2) * BLOCK_M < count)
    matrix = b + (slot * outputs + n[None, :]) * RANK
    r = tl.arange(0, BLOCK_R)
    right = tl.load(matrix + r[:, None], here, 0.0)  # while the kernel before it ends
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for first in range(tl.program_id(2) * BLOCK_M, count, tl.num_programs(2) * BLOCK_M):
        m = first + tl.arange(0, BLOCK_M)
        row = tl.load(order + slot * rows + m, m < count, 0).to(tl.int64)
        place = y + row[:, None] * y_stride + n[None, :]
        there = (m < count)[:, None] & (n < end)[None, :]
        before = tl.load(place, there, 0.0).to(tl.float32)
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for low in range(0, RANK, BLOCK_R):
            if RANK > BLOCK_R:
                r = low + tl.arange(0, BLOCK_R)
                right = tl.load(matrix + r[:, None], here, 0.0)
            left = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
            source = shrunk + row[:, None] * width + index * RANK + r[None, :]
            for part in tl.static_range(PARTS):
                left += tl.load(source + part * rows * width, (m < count)[:, None], 0.0)
            total = tl.dot((left * scale).to(right.dtype), right, total, input_precision="ieee")
        total *= factor
        if SQUARES:
            s = tl.arange(0, SQUARES)
            inside = (m < count)[:, None] & (s < num_squares)[None, :]
            mine = tl.load(squares + row[:, None] * num_squares + s[None, :], inside, 0.0)
            total *= tl.rsqrt(tl.sum(mine, 1) / columns + eps)[:, None]
        tl.store(place, (before + total).to(y.dtype.element_ty), there)
