"""The experts of few rows in MXFP4 by each warp for itself: the very instructions of a card, in the interpreter or on the card."""

from __future__ import annotations

import pytest
import torch

from headrace.fast_decode.epilogues import runs_triton
from headrace.kernels import experts_triton, experts_warp
from headrace.kernels.experts_digits import digits
from test_kernels_experts import check, check_joining, mxfp4, reference
from test_kernels_fused_decode import DEVICE, close, random

pytestmark = pytest.mark.skipif(not runs_triton(torch.empty(0, device=DEVICE)), reason="needs Triton")
BF16 = torch.bfloat16
TOLERANCE = 1e-2 if DEVICE == "cpu" else 6e-3  # the interpreter does not round to bfloat16, it cuts


@pytest.fixture(autouse=True)
def instructions(monkeypatch) -> None:
    if DEVICE == "cpu":
        import ptx_interpreter

        ptx_interpreter.install(monkeypatch)
        monkeypatch.setattr(experts_warp, "assembly", lambda x: 80)


def warp_case(rows: int, hidden: int, inner: int, count: int, chosen: int):
    arguments, given = mxfp4(rows, hidden, inner, count, chosen, (torch.float16, BF16))
    x, gate_up, down, *_ = arguments
    assert experts_warp.takes_warps(x, gate_up, down, chosen)
    return arguments, given


@pytest.mark.parametrize(("rows", "hidden", "inner", "count", "chosen"), [(1, 144, 12, 3, 2), (2, 48, 20, 3, 1), (1, 400, 40, 2, 2), (3, 144, 70, 7, 2), (3, 400, 40, 8, 2)])
def test_rows(rows: int, hidden: int, inner: int, count: int, chosen: int) -> None:
    """Rows that end within a run, columns that end within a tile, more warps than runs; of more than two rows by tiles."""
    arguments, given = warp_case(rows, hidden, inner, count, chosen)
    given |= {"clamp": 7.0}
    got = experts_triton.run_experts(*arguments, **given)
    assert got.isfinite().all()
    close(got.float(), reference(*arguments, **given), TOLERANCE)


@pytest.mark.parametrize("exponent", [-60, 0, 60])
def test_numbers_of_two_bytes(exponent: int) -> None:
    """Rows of any size: each number to the 2^15th part of its group's largest, those of bfloat16 near that exactly."""
    x = torch.exp2(random(3, 100, seed=1).double() * 4 + exponent).float() * random(3, 100, seed=2).sign()
    x[1, 32:64] = 0.0
    for rows in (x, x.to(BF16)):
        numbers, scales = digits(rows, 128)
        whole = numbers[:, 0].double() * 256 + numbers[:, 1]
        got = whole * 2 * scales.double().repeat_interleave(32, 1)
        want = torch.nn.functional.pad(rows.double(), (0, 28))
        most = want.unflatten(1, (4, 32)).abs().amax(2).repeat_interleave(32, 1)
        assert ((got - want).abs() <= most * 2.0**-14).all() and (whole.abs() <= 2**14).all()
        if rows.dtype == BF16:
            assert torch.equal(torch.where(want.abs() * 64 >= most, got - want, 0.0), torch.zeros_like(want))


def test_what_is_no_number_stays_so() -> None:
    for value in (torch.nan, torch.inf):
        x = random(1, 64)
        x[0, 40] = value
        assert digits(x, 128).scales.isnan().tolist() == [[False, True, False, False]]


def test_experts_elsewhere_give_nothing() -> None:
    (x, gate_up, down, ids, shares), given = warp_case(1, 32, 8, 4, 2)
    check((x, gate_up, down, ids + 2, shares), given, TOLERANCE, first=4)


def test_joining_a_residual() -> None:
    """Each program chooses for itself, and rows are not divided by their norm yet."""
    check_joining(*warp_case(1, 48, 8, 6, 4), TOLERANCE, of_sums=2e-4)  # both rows are whole numbers of 15 bits then
