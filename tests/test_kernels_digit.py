"""One row by 4-bit weights in rings, as whole numbers: the kernel's own text, without a card (gluon_interpreter.py) or on it."""

from __future__ import annotations

import pytest
import torch

from headrace.fast_decode import digit_gemm, digit_tile, products, ring_ends, tiles
from headrace.fast_decode.digit_tile import DigitTile
from headrace.fast_decode.epilogues import glu_reference, project_reference, residual_reference
from headrace.fast_decode.gemv import GemvTile
from headrace.fast_decode.warp_gemm import WarpTile
from headrace.kernels import gluon_rings
from narrow_cases import narrow
from test_kernels_fused_decode import DEVICE, NAN, close, random

BF16 = torch.bfloat16
TOLERANCE = 1e-5  # whole sums, scaled in float32
K = digit_tile.IN_PHASE


@pytest.fixture(autouse=True)
def without_a_card(monkeypatch) -> None:
    if DEVICE == "cpu":
        monkeypatch.setattr(digit_tile, "runs", lambda x: True)
        monkeypatch.setattr(products, "_runs", lambda x, sizes: True)
        from gluon_interpreter import Interpreted

        beside = gluon_rings.__file__, ring_ends.__file__
        monkeypatch.setattr(digit_gemm, "_digit_kernel", Interpreted(digit_gemm.__file__, "_digit_kernel", *beside))
        monkeypatch.setattr(products, "pdl", lambda x: {"PDL": True})


def spread(width: int) -> torch.Tensor:
    """A row whose numbers are a thousand times larger in some places than in others."""
    return (random(1, width, dtype=torch.float32) * torch.logspace(0, 10, width, base=2.0, device=DEVICE)).to(BF16)


@pytest.mark.parametrize("form", ["int4 by 128, zeros", "int4 by 128"])
@pytest.mark.parametrize(("tile", "phases"), [(DigitTile(48, 3), 1), (DigitTile(16, 2), 2), (DigitTile(32, 1), 2)], ids=str)
def test_project(form: str, tile: DigitTile, phases: int) -> None:
    """Rings as long as the steps are many and shorter, several phases."""
    columns, width = 96, phases * K
    x, w, bias = spread(width), narrow(form, columns, width, DEVICE, seed=1), random(columns, seed=2)
    sumsq = random(1, 70, seed=3).square() * width
    out = torch.full((1, 1, columns), NAN, device=DEVICE)
    products.project(x, w, out, tile, sumsq=sumsq, eps=1e-5, bias=bias, scale=0.5)
    close(out[0], project_reference(x, w, sumsq, 1e-5, bias, 0.5, 0.0), TOLERANCE)


@pytest.mark.parametrize("tile", [DigitTile(24, 2), DigitTile(16, 4)], ids=str)
def test_gate_and_up(tile: DigitTile) -> None:
    columns = 48
    x, w = spread(K), narrow("int4 by 128, zeros", 2 * columns, K, DEVICE, seed=1)
    sumsq = random(1, 3, seed=3).square() * K
    out = torch.full((1, columns), NAN, device=DEVICE)
    products.glu(x, w, out, tile, sumsq=sumsq, eps=1e-5)
    close(out, glu_reference(x, w, sumsq, 1e-5, "silu"), TOLERANCE)


@pytest.mark.parametrize(("tile", "phases"), [(DigitTile(32, 2), 2), (DigitTile(16, 1), 1)], ids=str)
def test_joining_the_residual(tile: DigitTile, phases: int) -> None:
    columns, width = 64, phases * K
    x, w = spread(width), narrow("int4 by 128, zeros", columns, width, DEVICE, seed=1)
    norm, total = random(columns, seed=3), random(1, columns, seed=4)
    expected = residual_reference(x, w, total, norm, 0.5, 0.3, None)
    normed, sumsq = (torch.full((1, n), NAN, device=DEVICE) for n in (columns, columns // tile.block_n))
    products.residual(x, w, total, normed, sumsq, norm, tile, norm_offset=0.5, scale=0.3)
    close(total, expected[0], TOLERANCE)
    close(normed, expected[1], TOLERANCE)
    close(sumsq.sum(1, keepdim=True), expected[2], TOLERANCE)


def test_every_place_and_code() -> None:
    """Rows with a one in one place give the weights of that column, in whatever warp, register and digit."""
    w = narrow("int4 by 128, zeros", 16, K, DEVICE, seed=1)
    expected = project_reference(torch.eye(K, device=DEVICE), w, None, 0.0, None, 1.0, 0.0)
    out = torch.full((1, 1, 16), NAN, device=DEVICE)
    for place in [*range(0, 128, 3 if DEVICE == "cpu" else 1), *range(128, K, 397)]:
        x = torch.zeros(1, K, dtype=BF16, device=DEVICE)
        x[0, place] = -0.75
        products.project(x, w, out, DigitTile(16, 1))
        assert torch.equal(out[0, 0], -0.75 * expected[place])


def test_what_is_no_number_spoils_the_row() -> None:
    w = narrow("int4 by 128, zeros", 16, K, DEVICE, seed=1)
    for value in (NAN, float("inf")):
        x, out = spread(K), torch.zeros(1, 1, 16, device=DEVICE)
        x[0, 700] = value
        products.project(x, w, out, DigitTile(16, 1))
        assert not out.isfinite().any()


def test_forms_that_it_does_not_take_go_another_way() -> None:
    x = torch.zeros(1, K, dtype=BF16, device=DEVICE)
    for form in ("int4 by 32, minima", "int8 row", "int4 row"):
        w = narrow(form, 32, K, DEVICE)
        assert not digit_tile.takes(w, x, DigitTile(32, 2), 32)
    w = narrow("int4 by 128, zeros", 32, K, DEVICE)
    assert digit_tile.takes(w, x, DigitTile(32, 2), 32) and not digit_tile.takes(w, x, DigitTile(48, 2), 32)
    assert not digit_tile.takes(narrow("int4 by 128, zeros", 32, K // 2, DEVICE), x, DigitTile(32, 2), 32)
    assert [DigitTile(n, 2).otherwise(False).block_n for n in (16, 32, 48)] == [16, 32, 16]


def test_a_table_for_weights_that_it_does_not_suit() -> None:
    """Only what has such tiles is another."""
    plain = dict.fromkeys(("qkv", "o", "gate_up", "down", "lm_head"), GemvTile(4, 256, 1, 1))
    step, instead = tiles.StepTiles(**plain), tiles.StepTiles(**{**plain, "o": WarpTile(16, 4, 4, 2)})
    by_digits = tiles.StepTiles(**{**plain, "down": DigitTile(32, 2)})
    found = tiles.without(DigitTile, {1: by_digits, 2: step}, {1: instead, 2: instead})
    assert found[1].down == plain["down"] and found[1].o == instead.o and found[2] == step
