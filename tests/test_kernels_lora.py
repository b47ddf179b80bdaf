"""Low-rank additions by kernels, in Triton's interpreter or on the card, against float64; rows know nothing of each other."""

from __future__ import annotations

import pytest
import torch

from headrace.fast_decode.epilogues import runs_triton
from headrace.fast_decode.gemv import GemvTile
from headrace.fast_decode.products import glu, num_splits, project, residual
from headrace.fast_decode.skinny_gemm import GemmTile
from headrace.fast_decode.wide_gemm import WideTile
from headrace.kernels import lora_product
from headrace.kernels.lora import Pair, add_lora, add_lora_reference, group_rows, new_pair
from headrace.kernels.lora_product import LowRank, members_of, new_flags, num_tickets, shrink_few
from headrace.kernels.split import SplitSpace
from headrace.model.weight import Weight
from test_kernels_fused_decode import DEVICE, close, random

pytestmark = pytest.mark.skipif(not runs_triton(torch.empty(0, device=DEVICE)), reason="needs Triton")
DTYPES = [torch.float32] if DEVICE == "cpu" else [torch.float32, torch.bfloat16]
SIZES, SLICES, COLUMNS, SLOTS = (48, 16, 16, 48), (0, 1, 2, 1), 528, 3  # of a slice in two places


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


TILES = {  # rows, rank, tile
    "gemm": (20, 16, GemmTile(16, 32, 1, 4, 2, prefetch=1)), "split": (12, 100, GemmTile(16, 64, 2, 4, 2, touch=1)),
    "few": (7, 16, GemmTile(16, 64, 1, 4, 2)), "wide": (40, 64, WideTile(64, 16, 32, 2, 4, 2)),
    "one row": (1, 40, GemvTile(8, 256, 1, 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", TILES)
def test_a_product_adds_what_its_rows_adapters_make(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its three kinds, with the rest of what it does; what a row gets does not depend on other rows' adapters."""
    if name == "few":  # wider than what is loaded before the wait
        monkeypatch.setattr(lora_product, "ROW_COLUMNS", 256)
        monkeypatch.setattr(lora_product, "ROW_STEPS", 1)
    (rows, rank, tile), dtype, outputs, device = TILES[name], DTYPES[-1], sum(SIZES), torch.device(DEVICE)
    pair, x = pair_of(rank, dtype), random(rows, COLUMNS, dtype=dtype, seed=5)
    weight, squares = random(outputs, COLUMNS, dtype=dtype, seed=8) / COLUMNS**0.5, random(rows, 3, seed=7).square() * COLUMNS
    adapters = [(7 * row) % 4 if rows > 1 else 2 for row in range(rows)]
    others = [one if row % 2 else row // 2 % 2 for row, one in enumerate(adapters)]  # so the second slot has no rows
    tickets, tolerance = torch.zeros(num_tickets(pair), dtype=torch.int32, device=device), 5e-3 if DEVICE == "cuda" else 1e-5
    plain = exact(torch.zeros(rows, outputs, device=DEVICE), x, pair, adapters)
    factor, splits = torch.rsqrt(squares.double().sum(1, keepdim=True) / COLUMNS + 1e-5), num_splits(tile)

    def made(of_rows: list[int]) -> LowRank:
        members = members_of(torch.tensor(of_rows, device=DEVICE), SLOTS)
        return shrink_few(x, pair, members, new_flags(1, device)[0], tickets)

    sums = [torch.empty(splits, rows, outputs, device=DEVICE) for _ in range(3)]
    for out, low_rank in zip(sums, (made(adapters), made(others), None), strict=True):
        project(x, Weight(weight), out, tile, sumsq=squares, eps=1e-5, low_rank=low_rank)
    found, beside, alone = (out.sum(0) for out in sums)
    close(found, factor * (x.double() @ weight.double().T + plain), tolerance)
    assert torch.equal(found[1::2], beside[1::2])
    assert rows == 1 or not torch.equal(found, beside)
    without = torch.tensor(adapters, device=DEVICE) == 0
    if rows > 1:
        close(found[without], alone[without].double(), tolerance)
    total, norm, tiles = random(rows, outputs, seed=4), random(outputs, seed=3), -(-outputs // tile.block_n)
    space = None if isinstance(tile, GemvTile) else SplitSpace(tile.partial_elements(rows, outputs), 2 * tiles, device)
    wanted = total.double() + 0.3 * (x.double() @ weight.double().T + plain)
    normed, norms = torch.empty(rows, outputs, dtype=dtype, device=DEVICE), torch.empty(rows, tiles, device=DEVICE)
    residual(x, Weight(weight), total, normed, norms, norm, tile, space, norm_offset=0.5, scale=0.3, low_rank=made(adapters))
    close(total, wanted, tolerance)
    close(norms.sum(1), wanted.square().sum(1), tolerance)
    if splits == 1:
        gate, up = (factor * (x.double() @ weight.double().T + plain)).chunk(2, 1)
        out = torch.empty(rows, outputs // 2, device=DEVICE)
        glu(x, Weight(weight), out, tile, sumsq=squares, eps=1e-5, low_rank=made(adapters))
        close(out, torch.nn.functional.silu(gate) * up, tolerance)
    assert not tickets.any()


def test_who_has_rows() -> None:
    used, places = members_of(torch.tensor([0, 40, 3, 40, 0, 1, 1], device=DEVICE), 40)
    assert used.tolist() == [3, 0, 2, 39] + [-1] * 37
    assert places.tolist() == [-1, 2, 1, 2, -1, 0, 0]
