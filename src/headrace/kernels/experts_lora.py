"""Low-rank additions to the products of experts: each expert of each adapter has matrices of its own.

Pairs of a token and an expert are sorted by expert and, of one expert, by adapter, so that a tile's rows have both in common.
*Shrink* makes the few numbers of a row, x A^T times the adapter's scale, in parts along x where rows are few; the experts' own
kernels (experts_tiles.py) add what B makes of them to their sums, before what follows. No row depends on another, and nothing
is read on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headrace.kernels.experts_sort import Sorted, sort_pairs, tile_end, tile_expert, tile_first
from headrace.kernels.launch import gdc_launch_dependents, gdc_wait, jit, next_power_of_2, pdl, tl
from headrace.kernels.lora import Pair, add_lora_reference

FEW = 32  # rows of a tile up to which a row's sum is cut
MOST_PARTS, SMALLEST_PART = 8, 256  # columns


@dataclass(slots=True)
class ExpertAdds:
    """What rows' adapters add. A Pair's adapters are slots * experts here, those of a slot together; `numbers` [T] int64: 0, or
    one more than the row's slot."""

    gate_up: Pair
    down: Pair
    slots: int
    numbers: Tensor

    def part(self, rows: slice) -> ExpertAdds:
        return ExpertAdds(self.gate_up, self.down, self.slots, self.numbers[rows])


def add_expert_reference(y: Tensor, x: Tensor, pair: Pair, numbers: Tensor, expert: int, count: int) -> None:
    """y [n, out] += what the adapters of rows of one of `count` experts make of x [n, in]."""
    add_lora_reference(y, x.to(pair.a.dtype), pair, torch.where(numbers > 0, (numbers - 1) * count + expert + 1, 0))


def sort_adapted(ids: Tensor, adds: ExpertAdds, count: int, first: int, block_m: int) -> tuple[Sorted, Sorted]:
    """As sort_pairs, of pairs with the same adapter in each tile; and the same with, in place of an expert, what it and the
    adapter's number are together: expert * (slots + 1) + number."""
    kinds = adds.slots + 1
    both = sort_pairs(ids * kinds + adds.numbers[:, None].int(), count * kinds, first * kinds, block_m)
    tiles = both.tiles.clone()
    tiles[:, 0] = both.tiles[:, 0].div(kinds, rounding_mode="floor")
    return Sorted(both.order, tiles), both


class LowRank(NamedTuple):
    """What `shrink_pairs` gives, [P, parts, slices * rank] float32 to be added up, with the matrices that it meets then."""

    shrunk: Tensor
    pair: Pair
    tiles: Tensor
    slots: int
    experts: int


def shrink_pairs(
    x: Tensor, pair: Pair, pairs: Sorted, slots: int, count: int, chosen: int, block_m: int
) -> LowRank:  # fmt: skip
    """x [T, any], of the tokens whose pairs with `chosen` experts each are sorted, or (0) [P, any] in the order of the sort; of
    rows without an adapter nothing is written."""
    width, columns = pair.a.shape[1:]
    number = len(x) * max(1, chosen)
    parts = max(1, min(MOST_PARTS, columns // SMALLEST_PART)) if block_m <= FEW else 1
    block_k = min(128 if block_m <= FEW else 64, max(16, next_power_of_2(columns)))
    each = -(-columns // (parts * block_k)) * block_k
    shrunk = torch.empty((number, parts, width), dtype=torch.float32, device=x.device)
    block_r = min(64, width)
    _shrink_pairs[parts * -(-width // block_r), len(pairs.tiles)](
        x, pair.a, pair.scales, pairs.order, pairs.tiles, shrunk, x.stride(0), columns, each, CHOSEN=chosen, KINDS=slots + 1,
        EXPERTS=count, WIDTH=width, RANK=pair.rank, PARTS=parts, BLOCK_M=block_m, BLOCK_R=block_r, BLOCK_K=block_k, num_warps=4,
        num_stages=3, **pdl(x),
    )  # fmt: skip
    return LowRank(shrunk, pair, pairs.tiles, slots, count)


@jit
def _shrink_pairs(
    x_ptr, a_ptr, scales_ptr, order_ptr, tiles_ptr, out_ptr, x_stride, columns, each,
    CHOSEN: tl.constexpr, KINDS: tl.constexpr, EXPERTS: tl.constexpr, WIDTH: tl.constexpr, RANK: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0) % PARTS
    r = tl.program_id(0) // PARTS * BLOCK_R + tl.arange(0, BLOCK_R)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.program_id(1)
    kind = tile_expert(tiles_ptr, slot)
    if kind < 0:
        return
    if kind % KINDS == 0:
        return
    adapter = (kind % KINDS - 1) * EXPERTS + kind // KINDS
    place = tile_first(tiles_ptr, slot) + tl.arange(0, BLOCK_M)
    end = tile_end(tiles_ptr, slot)
    ok = place < end
    row = tl.minimum(place, end - 1)
    if CHOSEN > 0:
        row = tl.load(order_ptr + row) // CHOSEN
    rows = x_ptr + row.to(tl.int64)[:, None] * x_stride
    matrix = a_ptr + (adapter.to(tl.int64) * WIDTH + r[None, :]) * columns
    total = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    for begin in range(part * each, min(part * each + each, columns), BLOCK_K):
        k = begin + tl.arange(0, BLOCK_K)
        left = tl.load(rows + k[None, :], (k < columns)[None, :], 0.0)
        right = tl.load(matrix + k[:, None], (k < columns)[:, None] & (r < WIDTH)[None, :], 0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    scale = tl.load(scales_ptr + adapter * (WIDTH // RANK) + r // RANK, r < WIDTH, 0.0)
    at = out_ptr + (place.to(tl.int64)[:, None] * PARTS + part) * WIDTH + r[None, :]
    tl.store(at, total * scale[None, :], ok[:, None] & (r < WIDTH)[None, :])


@jit
def add_low(
    acc, low_ptr, b_ptr, tiles_ptr, first, place, N, SLOTS: tl.constexpr, EXPERTS: tl.constexpr, RANK: tl.constexpr,
    PARTS: tl.constexpr, GLU: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """acc [BLOCK_N, BLOCK_M] and what the tile's adapter adds, if its rows have one, to a product's columns from `first` on; of
    GLU to as many columns of up behind those of gate."""
    SLICES: tl.constexpr = 2 if GLU else 1
    BLOCK_R: tl.constexpr = RANK if RANK < 32 else 32
    kind = tile_expert(tiles_ptr, tl.program_id(1))
    if kind % (SLOTS + 1) > 0:
        adapter = (kind % (SLOTS + 1) - 1) * EXPERTS + kind // (SLOTS + 1)
        n = tl.arange(0, BLOCK_N)
        column = tl.minimum(first + n % COLUMNS, N - 1) + n // COLUMNS * N
        matrix = b_ptr + (adapter.to(tl.int64) * (SLICES * N) + column[:, None]) * RANK
        shrunk = low_ptr + place.to(tl.int64)[None, :] * (PARTS * SLICES * RANK)
        for i in tl.static_range(SLICES * (RANK // BLOCK_R)):  # of each slice in turn
            r = i * BLOCK_R + tl.arange(0, BLOCK_R)
            left = tl.load(matrix + (r % RANK)[None, :], (n // COLUMNS == i * BLOCK_R // RANK)[:, None], 0.0)
            right = tl.zeros([BLOCK_R, BLOCK_M], tl.float32)
            for part in tl.static_range(PARTS):
                right += tl.load(shrunk + part * (SLICES * RANK) + r[:, None])
            acc = tl.dot(left, right.to(left.dtype), acc, input_precision="ieee")
    return acc


def low_arguments(low: LowRank | None) -> dict[str, Any]:
    """Of a kernel that calls `add_low`; RANK 0: it does not."""
    if low is None:
        return {"low_ptr": None, "low_b_ptr": None, "low_tiles_ptr": None} | dict.fromkeys(
            ("LOW_SLOTS", "LOW_EXPERTS", "RANK", "LOW_PARTS"), 0
        )
    return {
        "low_ptr": low.shrunk, "low_b_ptr": low.pair.b, "low_tiles_ptr": low.tiles, "LOW_SLOTS": low.slots,
        "LOW_EXPERTS": low.experts, "RANK": low.pair.rank, "LOW_PARTS": low.shrunk.shape[1],
    }  # fmt: skip
