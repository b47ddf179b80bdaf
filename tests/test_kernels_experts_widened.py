"""The experts of some rows in MXFP4, widened by each warp: the very instructions of a card, in the interpreter or on the card."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headrace.fast_decode.epilogues import runs_triton
from headrace.kernels import experts_triton, experts_widened
from headrace.kernels.experts_sort import sort_pairs
from headrace.kernels.experts_widened import WidenedTile, takes_widened, widened_tile
from headrace.model.weight import E2M1
from test_kernels_experts import check, check_joining, mxfp4, reference
from test_kernels_fused_decode import DEVICE, close, random

pytestmark = pytest.mark.skipif(not runs_triton(torch.empty(0, device=DEVICE)), reason="needs Triton")
BF16 = torch.bfloat16
TOLERANCE = 1.5e-2 if DEVICE == "cpu" else 6e-3  # the interpreter does not round to bfloat16, it cuts


@pytest.fixture(autouse=True)
def instructions(monkeypatch) -> None:
    if DEVICE == "cpu":
        import ptx_interpreter

        ptx_interpreter.install(monkeypatch)
        monkeypatch.setattr(experts_widened, "assembly", lambda x: 80)


def widened_case(rows: int, hidden: int, inner: int, count: int, chosen: int):
    arguments, given = mxfp4(rows, hidden, inner, count, chosen, (BF16, BF16))
    x, gate_up, down, *_ = arguments
    assert takes_widened(x, gate_up, down) and widened_tile(rows * chosen, count)
    return arguments, given


@pytest.mark.parametrize(("rows", "hidden", "inner", "count", "chosen"), [(3, 144, 12, 3, 2), (10, 400, 36, 6, 3), (10, 140, 64, 3, 2)])
def test_rows(rows: int, hidden: int, inner: int, count: int, chosen: int) -> None:
    """Rows that end within a run, columns that end within a tile and those that do not, experts of more rows than a tile has."""
    arguments, given = widened_case(rows, hidden, inner, count, chosen)
    given |= {"clamp": 7.0}
    got = experts_triton.run_experts(*arguments, **given)
    assert got.isfinite().all()
    close(got.float(), reference(*arguments, **given), TOLERANCE)


@pytest.mark.parametrize("tile", [WidenedTile(8, 2, 4, 4, 2, 2, True, 168), WidenedTile(16, 1, 4, 2, 1, 1, False, 128), WidenedTile(24, 2, 2, 1, 3, 2, True, 255)])
def test_other_tiles(tile: WidenedTile, monkeypatch) -> None:
    """Warps that share columns, some of which have no run; loads ahead by more than there are; several eight rows of x."""
    monkeypatch.setattr(experts_triton, "widened_tile", lambda pairs, count: tile)
    for hidden in (144, 700):
        arguments, given = widened_case(11, hidden, 40, 3, 2)
        close(experts_triton.run_experts(*arguments, **given).float(), reference(*arguments, **given), TOLERANCE)


def test_every_code_and_scale() -> None:
    """A row with a single one finds each weight times its scale, exactly."""
    (x, gate_up, _, ids, _), _ = widened_case(16, 128, 32, 2, 1)
    exponents = torch.arange(2 * 64, device=DEVICE).view(-1, 1) % 40 - 30 + torch.arange(4, device=DEVICE)
    gate_up.scales = torch.exp2(exponents.float()).to(BF16)
    x.zero_()
    at = torch.arange(16, device=DEVICE) * 8 + torch.arange(16, device=DEVICE) % 8
    x[torch.arange(16, device=DEVICE), at] = 1.0
    found = _gate_and_up(x, gate_up, ids)
    codes = torch.cat([half.unflatten(1, (1, 64)) for half in (gate_up.data & 15, gate_up.data >> 4)], 2).flatten(1)
    table = torch.tensor([*E2M1, *(-value for value in E2M1)], device=DEVICE)
    weights = table[codes.int()] * gate_up.scales.float().repeat_interleave(32, 1)
    assert torch.equal(found, weights.view(2, 64, 128)[ids[:, 0].long(), :, at])


def _gate_and_up(x: Tensor, weight, ids: Tensor) -> Tensor:
    """[T, N] float32: rows times all rows of their expert, as the second product makes it."""
    rows = x.new_empty(x.shape)
    pairs = sort_pairs(ids, 2, 0, 8, (x, rows))
    out, ones = torch.empty(len(x), 64, device=DEVICE), torch.ones(len(x), 1, device=DEVICE)
    in_order = rows[pairs.order.long()]
    experts_widened.launch_widened(in_order, weight, None, pairs, 1, out, 64, WidenedTile(8, 1, 4, 1, 2, 3, True, 128), shares=ones)
    return out


def test_a_row_is_the_same_beside_any_others() -> None:
    (x, gate_up, down, ids, shares), given = widened_case(12, 144, 20, 4, 2)
    together = experts_triton.run_experts(x, gate_up, down, ids, shares, **given)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    moved = experts_triton.run_experts(x[order], gate_up, down, ids[order], shares[order], **given)
    assert torch.equal(moved, together[order])
    x[1:], ids[1:] = random(11, 144, seed=3, dtype=BF16), ids[:1]
    assert torch.equal(experts_triton.run_experts(x, gate_up, down, ids, shares, **given)[0], together[0])


def test_experts_elsewhere_give_nothing() -> None:
    (x, gate_up, down, ids, shares), given = widened_case(5, 32, 8, 4, 2)
    check((x, gate_up, down, ids + 2, shares), given, TOLERANCE, first=4)


def test_joining_a_residual() -> None:
    """Rows are not divided by their norm yet."""
    check_joining(*widened_case(5, 48, 8, 6, 4), TOLERANCE, of_sums=TOLERANCE)


def test_rows_with_their_columns_turned() -> None:
    x, held = random(3, 1200, dtype=BF16), torch.full((3, 1280), torch.nan, dtype=BF16, device=DEVICE)
    pairs = sort_pairs(torch.tensor([[1], [0], [1]], dtype=torch.int32, device=DEVICE), 2, 0, 8, (x, held))
    assert pairs.order.tolist() == [1, 0, 2]
    padded = torch.nn.functional.pad(x, (0, 80)).unflatten(1, (-1, 4))
    assert torch.equal(held, padded[:, :, [0, 2, 1, 3]].flatten(1))


def test_which_products_take_them() -> None:
    (x, gate_up, down, *_), _ = widened_case(5, 48, 8, 4, 2)
    assert widened_tile(31, 32) is None and widened_tile(385, 32) is None
    assert [widened_tile(pairs, 32).rows for pairs in (32, 128, 129, 384)] == [8, 8, 16, 16]
    down.scales = down.scales.float()
    assert not takes_widened(x, gate_up, down)
