"""(Token, expert) pairs put in the order of their experts on the device, and cut into tiles of one expert's rows each.

A counting sort: a program for each expert counts the pairs of those before it, and places its own in their order. What a tile
is lies in a slot of a table of fixed size, so the grids of the products over tiles need nothing of the host. Programs behind
these bring rows of x into the order of columns in which warps multiply (experts_widened.py), if that is wanted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels.launch import gdc_launch_dependents, gdc_wait, jit, pdl, tl

AT_ONCE = (128, 1024, 4096)  # pairs that a program looks at in a step


@jit
def turned(column):
    """Of every four columns the second and the third change places."""
    return column & -4 | (column & 1) << 1 | (column & 2) >> 1


@jit
def placed(k):
    """Which column, or row, lies at k: of 32 the order that a thread's bytes have as a left operand (experts_roles.py)."""
    return (k & -32) | (k >> 3 & 1) | (k & 1) << 1 | (k >> 4 & 1) << 2 | (k >> 1 & 3) << 3


@jit
def tile_expert(tiles_ptr, slot):
    """Of a slot of `Sorted.tiles`; below 0 it is empty."""
    return tl.load(tiles_ptr + 3 * slot)


@jit
def tile_first(tiles_ptr, slot):
    """The tile's first place in the order of the sort."""
    return tl.load(tiles_ptr + 3 * slot + 1)


@jit
def tile_end(tiles_ptr, slot):
    """The place behind the last of the tile's expert."""
    return tl.load(tiles_ptr + 3 * slot + 2)


@jit(do_not_specialize=["P", "first", "slots"])
def _sort(
    ids_ptr, order_ptr, tiles_ptr, x_ptr, turned_ptr, P, first, count, slots,
    BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, DENSE: tl.constexpr, COLUMNS: tl.constexpr, HELD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if HELD > 0:  # noqa: SIM102  (the compiler decides this one)
        if expert >= count:
            row = (expert - count).to(tl.int64)
            for k in range(0, HELD, 1024):
                column = k + tl.arange(0, 1024)
                x = tl.load(x_ptr + row * COLUMNS + column, mask=column < COLUMNS, other=0.0)
                tl.store(turned_ptr + row * HELD + turned(column), x, mask=column < HELD)
            return
    pairs = tl.arange(0, BLOCK)
    before = 0
    mine = 0
    for p in range(0, P, BLOCK):
        at = tl.load(ids_ptr + p + pairs, mask=p + pairs < P, other=-1) - first
        before += tl.sum(((at >= 0) & (at < expert)).to(tl.int32), 0)
        mine += tl.sum((at == expert).to(tl.int32), 0)
    end = before
    for p in range(0, P, BLOCK):
        at = tl.load(ids_ptr + p + pairs, mask=p + pairs < P, other=-1) - first
        own = at == expert
        rank = tl.cumsum(own.to(tl.int32), 0)
        tl.store(order_ptr + end + rank - 1, p + pairs, mask=own)
        end += tl.sum(own.to(tl.int32), 0)
    # Slots of its own that no other expert's overlap: as many as pairs, or one more than whole tiles that begin among them
    if DENSE:
        slot = before // BLOCK_M + expert
        next_slot = (before + mine) // BLOCK_M + expert + 1
    else:
        slot = before
        next_slot = before + mine
    if expert == count - 1:
        next_slot = slots
    for i in range(slot, next_slot, 64):
        tile = i - slot + tl.arange(0, 64)
        entry = tiles_ptr + 3 * (slot + tile)
        ok = slot + tile < next_slot
        tl.store(entry, tl.where(tile * BLOCK_M < mine, expert, -1), mask=ok)
        tl.store(entry + 1, before + tile * BLOCK_M, mask=ok)
        tl.store(entry + 2, tl.zeros([64], tl.int32) + before + mine, mask=ok)


@dataclass(frozen=True, slots=True)
class Sorted:
    """order [P]: sorted places -> pairs, those of held experts first. tiles [slots, 3]: an expert (-1: the slot is empty), the
    tile's first place, and the place behind the expert's last."""

    order: Tensor
    tiles: Tensor


def sort_form(pairs: int, count: int, block_m: int) -> tuple[int, int, bool]:
    """Rows of a tile, pairs that a program looks at in a step, and whether a slot stands for whole tiles rather than a pair:
    that which takes fewer slots."""
    block = next((n for n in AT_ONCE if pairs <= n), AT_ONCE[-1])
    return block_m, block, pairs // block_m + count < pairs


def sort_pairs(ids: Tensor, count: int, first: int, block_m: int, rows: tuple[Tensor, Tensor] | None = None) -> Sorted:
    """ids [T, k] int32 -> the pairs t * k + j of experts `first` to `first` + `count`, in tiles of up to `block_m`. Of `rows`
    the second [T, W] becomes the first [T, H] with its columns turned, and 0 past them."""
    pairs = ids.numel()
    _, block, dense = sort_form(pairs, count, block_m)
    slots = pairs // block_m + count if dense else pairs
    order = torch.empty(pairs, dtype=torch.int32, device=ids.device)
    tiles = torch.empty((slots, 3), dtype=torch.int32, device=ids.device)
    x, held = rows or (None, None)
    _sort[count + (0 if x is None else len(x)),](
        ids, order, tiles, x, held, P=pairs, first=first, count=count, slots=slots, BLOCK=block, BLOCK_M=block_m, DENSE=dense,
        COLUMNS=0 if x is None else x.shape[1], HELD=0 if held is None else held.shape[1], num_warps=4 if block <= 1024 else 8,
        **pdl(ids),
    )  # fmt: skip
    return Sorted(order, tiles)
