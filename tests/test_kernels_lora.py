"""Low-rank additions by kernels, in Triton's interpreter or on the card, against float64; rows know nothing of each other."""

from __future__ import annotations

import pytest
import torch

from headrace.fast_decode.epilogues import runs_triton
from headrace.kernels.lora import Pair, add_lora, add_lora_reference, group_rows, new_pair
from test_kernels_fused_decode import DEVICE, close, random

pytestmark = pytest.mark.skipif(not runs_triton(torch.empty(0, device=DEVICE)), reason="needs Triton")
DTYPES = [torch.float32] if DEVICE == "cpu" else [torch.float32, torch.bfloat16]
SIZES, SLICES, COLUMNS, SLOTS = (40, 24, 16, 24), (0, 1, 2, 1), 528, 3  # of a slice in two places


def pair_of(rank: int, dtype: torch.dtype) -> Pair:
    """Adapters of ranks below what is allocated."""
    pair = new_pair(SLOTS, SIZES, COLUMNS, rank, dtype, torch.device(DEVICE), SLICES)
    for slot in range(SLOTS):
        for run, (index, end) in enumerate(pair.runs):
            own, first = rank - slot, end - SIZES[run]
            begin = index * pair.rank
            pair.a[slot, begin : begin + own] = random(own, COLUMNS, dtype=dtype, seed=slot + 10 * index) / COLUMNS**0.5
            pair.b[slot, first:end, :own] = random(SIZES[run], own, dtype=dtype, seed=slot + 100 * run)
            pair.scales[slot, index] = 0.5 + slot + index
    return pair


def exact(y: torch.Tensor, x: torch.Tensor, pair: Pair, adapters: list[int]) -> torch.Tensor:
    out = y.double().clone()
    for row, one in enumerate(adapters):
        for run, (index, end) in enumerate(pair.runs if one else ()):
            first, r = end - SIZES[run], slice(index * pair.rank, (index + 1) * pair.rank)
            h = pair.a[one - 1, r].double() @ x[row].double() * pair.scales[one - 1, index].double()
            out[row, first:end] += pair.b[one - 1, first:end].double() @ h
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "rank"), [(1, 4), (20, 16), (70, 40), *([(700, 16), (700, 100)] if DEVICE == "cuda" else [])])
def test_against_float64(rows: int, rank: int, dtype: torch.dtype) -> None:
    pair, x = pair_of(rank, dtype), random(rows, COLUMNS, dtype=dtype, seed=5)
    adapters = [(7 * row) % 4 if rows > 1 else 2 for row in range(rows)]
    y = random(rows, sum(SIZES), dtype=dtype, seed=6)
    wanted, found, reference = exact(y, x, pair, adapters), y.clone(), y.clone()
    of_rows = torch.tensor(adapters, device=DEVICE)
    add_lora(found, x, pair, group_rows(of_rows, SLOTS))
    add_lora_reference(reference, x, pair, of_rows)
    tolerance = 1e-6 if dtype == torch.float32 else 5e-3
    close(found, wanted, tolerance)
    close(reference, wanted, tolerance)
    without = of_rows == 0
    assert torch.equal(found[without], y[without])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.float32])
def test_of_rows_that_are_not_normed_yet(dtype: torch.dtype) -> None:
    """As fused decode steps have them: divided by their root mean square, and added to a residual in float32."""
    pair, x = pair_of(16, dtype), random(20, COLUMNS, dtype=dtype, seed=5)
    squares, y = random(20, 3, seed=7).square() * COLUMNS, random(20, sum(SIZES), seed=6)
    adapters = [(7 * row) % 4 for row in range(20)]
    factor = 0.3 * torch.rsqrt(squares.double().sum(1, keepdim=True) / COLUMNS + 1e-5)
    wanted = y + factor * (exact(y, x, pair, adapters) - y)
    found, reference, of_rows = y.clone(), y.clone(), torch.tensor(adapters, device=DEVICE)
    add_lora(found, x, pair, group_rows(of_rows, SLOTS), squares, 1e-5, 0.3)
    add_lora_reference(reference, x, pair, of_rows, squares, 1e-5, 0.3)
    for one in (found, reference):
        close(one, wanted, 1e-6 if dtype == torch.float32 else 5e-3)


def test_a_row_is_the_same_bits_beside_others() -> None:
    pair, x = pair_of(16, DTYPES[-1]), random(20, COLUMNS, dtype=DTYPES[-1], seed=5)
    y = random(20, sum(SIZES), dtype=DTYPES[-1], seed=6)
    adapters = torch.tensor([(7 * row) % 4 for row in range(20)], device=DEVICE)
    together, alone = y.clone(), y.clone()
    add_lora(together, x, pair, group_rows(adapters, SLOTS))
    for rows in (slice(3, 4), slice(4, 9)):
        part = alone[rows]
        add_lora(part, x[rows], pair, group_rows(adapters[rows], SLOTS))
        assert torch.equal(part, together[rows])
