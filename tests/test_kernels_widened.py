"""Products whose weights are widened on the way into the tensor cores: the kernels' own text, without a card
(gluon_interpreter.py) or on it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from headrace.fast_decode import products, ring_ends, tiles, widened_gemm, widened_tile
from headrace.fast_decode.adapters import adapted_glu
from headrace.fast_decode.epilogues import glu_reference, project_reference, residual_reference
from headrace.fast_decode.widened_tile import WidenedTile
from headrace.kernels import folded_gemm, folded_tile, gluon_rings
from headrace.kernels.activation import act_mul
from headrace.kernels.folded_product import FoldedProduct
from headrace.kernels.folded_tile import FORMS, MOST_ROWS, PROGRAMS, FoldedTile, default_tile
from headrace.kernels.launch import next_power_of_2, pdl
from headrace.kernels.narrow import RUN
from headrace.kernels.split import SplitSpace
from headrace.model.weight import Weight, dequantized
from narrow_cases import narrow
from test_kernels_fused_decode import DEVICE, NAN, close, random

BF16 = torch.bfloat16
TOLERANCE = 1e-5  # whole numbers, scaled in float32
FORM = ["int4 by 128, zeros", "int4 by 128", "int8 row"]


@pytest.fixture(autouse=True)
def without_a_card(monkeypatch) -> None:
    if DEVICE == "cpu":
        from gluon_interpreter import Interpreted

        beside = gluon_rings.__file__, ring_ends.__file__
        monkeypatch.setattr(widened_tile, "runs", lambda x: True)
        monkeypatch.setattr(products, "_runs", lambda x, sizes: True)
        monkeypatch.setattr(products, "pdl", lambda x: {"PDL": True})
        monkeypatch.setattr(folded_gemm, "pdl", lambda x: {"PDL": True})
        interpreted = Interpreted(widened_gemm.__file__, "_widened_kernel", *beside, folded_gemm.__file__)
        monkeypatch.setattr(widened_gemm, "_widened_kernel", interpreted)
        monkeypatch.setattr(folded_gemm, "_folded_gemm", Interpreted(folded_gemm.__file__, "_folded_gemm", beside[0]))


@pytest.mark.parametrize("form", FORM)
@pytest.mark.parametrize(
    ("tile", "rows", "runs"), [(WidenedTile(64, 1, 8), 9, 3), (WidenedTile(64, 2, 2), 40, 6), (WidenedTile(128, 1, 2, 8), 17, 4)], ids=str
)  # fmt: skip
def test_project(form: str, tile: WidenedTile, rows: int, runs: int) -> None:
    """Rings longer than the steps and shorter, in one part and two."""
    columns, width = 128, runs * RUN
    x, w, bias = random(rows, width).to(BF16), narrow(form, columns, width, DEVICE, seed=1), random(columns, seed=2)
    sumsq = random(rows, 70, seed=3).square() * width
    out = torch.full((tile.splits, rows, columns), NAN, device=DEVICE)
    products.project(x, w, out, tile, sumsq=sumsq, eps=1e-5, bias=bias, scale=0.5)
    close(out.sum(0), project_reference(x, w, sumsq, 1e-5, bias, 0.5, 0.0), TOLERANCE)


@pytest.mark.parametrize("form", FORM)
@pytest.mark.parametrize("tile", [WidenedTile(64, 1, 3), WidenedTile(32, 1, 3), WidenedTile(64, 1, 2, 8)], ids=str)
def test_gate_and_up(form: str, tile: WidenedTile) -> None:
    """Gate and up rows in tiles of their own, and as halves of one."""
    rows, columns, width = 20, 128, 4 * RUN
    x, w = random(rows, width).to(BF16), narrow(form, 2 * columns, width, DEVICE, seed=1)
    sumsq = random(rows, 3, seed=3).square() * width
    out = torch.full((rows, columns), NAN, device=DEVICE)
    products.glu(x, w, out, tile, sumsq=sumsq, eps=1e-5)
    close(out, glu_reference(x, w, sumsq, 1e-5, "silu"), TOLERANCE)


GATED = [WidenedTile(32, 1, 3), WidenedTile(64, 1, 3), WidenedTile(128, 1, 3), WidenedTile(64, 1, 2, 8)]


@pytest.mark.parametrize("form", FORM)
@pytest.mark.parametrize("tile", GATED, ids=str)
def test_gate_and_up_of_adapters(monkeypatch, form: str, tile: WidenedTile) -> None:
    """Whose activation is a kernel of its own, by the tile of a table that has rows of both: by the same kernel."""
    monkeypatch.setattr(products, "NARROW_PLAN", None)
    config = SimpleNamespace(norm_eps=1e-5, activation="silu")
    adapters = SimpleNamespace(add_to=lambda target, y, x, squares, eps: y.add_(0.25))
    x, w = random(20, 4 * RUN).to(BF16), narrow(form, 256, 4 * RUN, DEVICE, seed=1)
    sumsq = random(20, 3, seed=3).square() * 4 * RUN
    found = adapted_glu(adapters, 0, x, w, tile, sumsq, config)
    both = project_reference(x, w, sumsq, 1e-5, None, 1.0, 0.0).to(BF16) + 0.25
    torch.testing.assert_close(found, act_mul(both, "silu"), rtol=0.02, atol=1e-2)


@pytest.mark.parametrize("tile", GATED, ids=str)
def test_a_tile_of_other_rows_than_its_warps_have_goes_another_way(monkeypatch, tile: WidenedTile) -> None:
    monkeypatch.setattr(products, "pdl", pdl)  # what goes another way is Triton's
    x, w = random(20, 4 * RUN).to(BF16), narrow(FORM[0], 256, 4 * RUN, DEVICE, seed=1)
    out = torch.full((1, 20, 256), NAN, device=DEVICE)
    products.project(x, w, out, tile)
    close(out[0], project_reference(x, w, None, 1e-5, None, 1.0, 0.0), TOLERANCE)


@pytest.mark.parametrize("form", FORM)
@pytest.mark.parametrize("tile", [WidenedTile(64, 3, 2), WidenedTile(64, 1, 4)], ids=str)
def test_joining_the_residual(form: str, tile: WidenedTile) -> None:
    rows, columns, width = 33, 128, 6 * RUN
    x, w = random(rows, width).to(BF16), narrow(form, columns, width, DEVICE, seed=1)
    norm, total = random(columns, seed=3), random(rows, columns, seed=4)
    space = SplitSpace(tile.partial_elements(rows, columns), columns // tile.block_n, torch.device(DEVICE))
    for _ in range(2):  # the tickets are as they were
        expected = residual_reference(x, w, total, norm, 0.5, 0.3, None)
        normed, sumsq = (torch.full((rows, n), NAN, device=DEVICE) for n in (columns, columns // tile.block_n))
        products.residual(x, w, total, normed, sumsq, norm, tile, space, norm_offset=0.5, scale=0.3)
        for found, of_torch in zip((total, normed, sumsq.sum(1, keepdim=True)), expected, strict=True):
            close(found, of_torch, TOLERANCE)


@pytest.mark.parametrize("runs", [1, 2])
def test_every_place_and_code(runs: int) -> None:
    """Rows with a one in one place give the weights of that column."""
    for form in FORM[:2] if runs == 2 else FORM:
        w = narrow(form, 64, 2 * RUN, DEVICE, seed=1)
        expected = dequantized(w, torch.float32).t() * -0.75
        for first in range(0, 2 * RUN, 64):
            x = torch.zeros(64, 2 * RUN, dtype=BF16, device=DEVICE)
            x[torch.arange(64), first + torch.arange(64)] = -0.75
            out = torch.full((1, 64, 64), NAN, device=DEVICE)
            products.project(x, w, out, WidenedTile(64, 1, 2, runs=runs))
            assert torch.equal(out[0], expected[first : first + 64])


def test_forms_that_it_does_not_take_go_another_way() -> None:
    x = torch.zeros(20, 4 * RUN, dtype=BF16, device=DEVICE)
    for form in ("int4 by 32, minima", "int8 by 32", "int4 row", "int4 by 128, minima", "int8 row, zeros", "fp8 row"):
        assert not widened_tile.takes(narrow(form, 64, 4 * RUN, DEVICE), x, WidenedTile(64, 1, 2), 64)
    w = narrow(FORM[0], 64, 4 * RUN, DEVICE)
    assert widened_tile.takes(w, x, WidenedTile(64, 2, 2), 64) and not widened_tile.takes(w, x, WidenedTile(64, 3, 2), 64)
    assert not widened_tile.takes(w, x, WidenedTile(128, 1, 2), 64)
    assert [WidenedTile(64, 2, 2).otherwise(gated).block_n for gated in (False, True)] == [64, 128]


def folded(w: Weight) -> torch.Tensor:
    """The matrix as the kernel multiplies it: rounded once."""
    return dequantized(w, BF16).float()


@pytest.mark.parametrize("form", ["int4 by 128, zeros", "int4 by 128"])
@pytest.mark.parametrize(
    ("tile", "rows", "columns"),
    [(FoldedTile(32, 64, 1, 6), 20, 192), (FoldedTile(128, 128, 2, 2), 130, 176), (FoldedTile(64, 64, 3, 2), 50, 72)], ids=str,
)  # fmt: skip
def test_folded(form: str, tile: FoldedTile, rows: int, columns: int) -> None:
    """Two tiles of rows, columns that are no whole tiles, sums in parts; a bias and none."""
    x, w = random(rows, 6 * RUN).to(BF16), narrow(form, columns, 6 * RUN, DEVICE, seed=1)
    tickets = torch.zeros(2 * PROGRAMS, dtype=torch.int32, device=DEVICE)
    for bias in (None, random(columns, seed=3)):
        out = torch.full((rows, columns), NAN, device=DEVICE)
        assert folded_gemm.folded_gemm(x, w, bias, tile, tickets, out) is out
        close(out, x.float() @ folded(w).t() + (0.0 if bias is None else bias), 1e-4)
    assert not tickets.any()


def test_folded_numbers_are_those_of_the_widened_matrix() -> None:
    """Of scales that bfloat16 holds, and of float16's, within a thousandth of a step of bfloat16."""
    for form, off in (("int4 by 128, zeros", 0.0), ("int4 by 128", 2.0**-9)):
        w = narrow(form, 64, RUN, DEVICE, seed=1)
        found = folded_gemm.folded_gemm(
            torch.eye(RUN, dtype=BF16, device=DEVICE), w, None, FoldedTile(128, 64, 1, 2), torch.zeros(1, dtype=torch.int32, device=DEVICE)
        )  # fmt: skip
        expected = dequantized(w, BF16).t()
        assert (found != expected).float().mean() <= off
        torch.testing.assert_close(found, expected, rtol=2.0**-7, atol=0.0)


def test_a_row_depends_on_no_other_one() -> None:
    x, w = random(72, 4 * RUN).to(BF16), narrow("int4 by 128, zeros", 64, 4 * RUN, DEVICE, seed=1)
    product = FoldedProduct(w, None)
    assert torch.equal(product(x)[5:70], product(x[5:70].contiguous()))


@pytest.mark.parametrize(("columns", "width"), [(6144, 4096), (24576, 4096), (4096, 12288), (1536, 8448), (64, 128), (896, 4864)])
def test_parts_have_room(columns: int, width: int) -> None:
    """Whole runs in each part, tickets for each tile, and room for the sums; FORMS has a number of rows of each tile."""
    product = FoldedProduct.__new__(FoldedProduct)
    forms = {default_tile(rows, columns, width) for rows in FORMS}
    for rows in range(17, MOST_ROWS + 1):
        tile = default_tile(rows, columns, width)
        tiles = -(-rows // tile.block_m) * -(-columns // tile.block_n)
        assert tile in forms and width // RUN % tile.splits == 0 and tile.stages >= 2
        if tile.splits > 1:
            assert tiles * tile.block_n // 64 <= 2 * PROGRAMS
            assert 4 * tiles * tile.splits * tile.block_n * tile.block_m <= product.workspace_bytes


def test_what_is_folded() -> None:
    assert not folded_tile.suits(narrow("int4 by 64", 64, RUN, "cpu")) and not folded_tile.suits(narrow("int8 row", 64, RUN, "cpu"))


def without_data(rows: int, width: int, scales: torch.dtype, zeros: torch.dtype | None) -> Weight:
    def empty(columns: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(rows, columns, dtype=dtype, device="meta")

    groups = width // RUN
    return Weight(empty(width // 2, torch.uint8), empty(groups, scales), None if zeros is None else empty(groups, zeros), "int4", RUN)


MOST_BYTES = 227 * 1024  # of shared memory that Hopper has for a program


@pytest.mark.parametrize("width", [128, 4096, 8192, 12288, 18432, 28672, 49152, 65536])
@pytest.mark.parametrize(("scales", "zeros"), [(torch.half, torch.uint8), (torch.half, None), (torch.float32, torch.uint8), (torch.float32, None)])
def test_what_a_program_has_fits_into_shared_memory(monkeypatch, width: int, scales: torch.dtype, zeros: torch.dtype | None) -> None:
    """Or the weights go another way, as those of Qwen1.5-110B in AWQ do, whose rows have 49,152 columns. Rings, as the kernels
    have them, scales and zeros."""
    monkeypatch.setattr(folded_tile, "capability", lambda device: (9, 0))
    monkeypatch.setattr(folded_tile, "takes_gluon", lambda: True)
    monkeypatch.setattr(widened_tile, "runs", lambda x: True)
    beside = (2 if scales == torch.half else 4) + (zeros is not None)

    def factors(columns: int, runs: int) -> int:
        return columns * beside * max(32, next_power_of_2(runs))

    for columns in (512, 4096, 8192, 24576):
        w, taken = without_data(columns, width, scales, zeros), width <= 16384 or (width <= 32768 and beside < 5)
        assert folded_tile.suits(w) or not taken
        for rows in range(17, MOST_ROWS + 1) if folded_tile.suits(w) else ():
            tile = default_tile(rows, columns, width)
            runs = width // RUN // tile.splits
            ring = min(tile.stages, runs) * (64 * tile.block_n + 256 * tile.block_m + 8)
            assert ring + factors(tile.block_n, runs) <= MOST_BYTES, (rows, columns, tile)
        for gated, rows in itertools.product((False, True), (8, 16, 32, 64)):
            w = without_data(columns * (1 + gated), width, scales, zeros)
            tile = tiles.widened_tile(tiles.Shape(columns, width, gated, not gated), rows, "int4")
            whole = tile if gated else replace(tile, splits=1)  # as where attention runs in two kernels
            for one in (tile, whole):
                runs, x = width // RUN // one.splits, torch.empty(rows, width, dtype=BF16, device="meta")
                held = 64 * (1 + gated)
                fits = min(one.stages, runs) * (64 * held + 256 * rows + 8) + factors(held, runs) <= MOST_BYTES
                takes = widened_tile.takes(w, x, one, columns)
                assert fits or not takes, (rows, columns, one)
                assert takes or width > 32768 or scales == torch.float32, (rows, columns, one)
