"""Products with narrow weights by each warp for itself: the very instructions of a card, in the interpreter or on the card."""

from __future__ import annotations

import pytest
import torch

from headrace.fast_decode import products, warp_gemm
from headrace.fast_decode.epilogues import glu_reference, project_reference, residual_reference, runs_triton
from headrace.fast_decode.warp_gemm import WarpTile, takes
from headrace.kernels import narrow as narrow_kernels
from headrace.model.weight import Weight, dequantized
from narrow_cases import narrow
from test_kernels_fused_decode import DEVICE, NAN, close, random, split_space

pytestmark = pytest.mark.skipif(not runs_triton(torch.empty(0, device=DEVICE)), reason="needs Triton")
BF16 = torch.bfloat16
DTYPE = torch.float32 if DEVICE == "cpu" else BF16  # where other kernels take over, that the interpreter runs in float32
TAKEN = [
    "fp8 row", "fp8 blocks", "int8 row, zeros", "int8 by 128", "int4 row", "int4 by 128", "int4 by 128, zeros",
    "int4 by 128, minima",
]  # fmt: skip
TOLERANCE = 2e-5  # sums of 128 + n less 128 times those of x


@pytest.fixture(autouse=True)
def instructions(monkeypatch) -> None:
    if DEVICE == "cpu":
        import ptx_interpreter

        ptx_interpreter.install(monkeypatch)
        for module in (narrow_kernels, warp_gemm):
            monkeypatch.setattr(module, "assembly", lambda x: 80)


TILES = [(WarpTile(16, 2, 2, 1), 1), (WarpTile(32, 2, 1, 2), 9), (WarpTile(32, 1, 1, 2, 2), 5)]
CASES = [(form, *TILES[i % 3]) for i, form in enumerate(TAKEN)] + [("int4 by 128, zeros", *TILES[i]) for i in range(2)]


@pytest.mark.parametrize(("form", "tile", "rows"), CASES, ids=str)
def test_every_form(form: str, tile: WarpTile, rows: int) -> None:
    """Warps beside each other and over each other, in chunks of K, one or several tiles of 16 rows, splits."""
    columns, width = 20, 512
    x, w, bias = random(rows, width, dtype=BF16), narrow(form, columns, width, DEVICE, seed=1), random(columns, seed=2)
    assert takes(w, x, tile)
    sumsq = random(rows, 70, seed=3).square() * width
    out = torch.full((tile.splits, rows, columns), NAN, device=DEVICE)
    products.project(x, w, out, tile, sumsq=sumsq, eps=1e-5, bias=bias, scale=0.5)
    close(out.sum(0), project_reference(x, w, sumsq, 1e-5, bias, 0.5, 0.0), TOLERANCE)


@pytest.mark.parametrize("form", ["fp8 blocks", "int4 by 128, zeros"])
def test_gate_and_up(form: str) -> None:
    columns, width, rows = 128 if form == "fp8 blocks" else 24, 128, 3
    x, w = random(rows, width, dtype=BF16), narrow(form, 2 * columns, width, DEVICE, seed=1)
    sumsq = random(rows, 3, seed=3).square() * width
    out = torch.full((rows, columns), NAN, device=DEVICE)
    products.glu(x, w, out, WarpTile(64 if form == "fp8 blocks" else 16, 2, 1, 2), sumsq=sumsq, eps=1e-5)
    close(out, glu_reference(x, w, sumsq, 1e-5, "silu"), TOLERANCE)


@pytest.mark.parametrize(
    ("form", "tile", "rows"), [("fp8 row", WarpTile(16, 1, 1, 2), 1), ("int4 by 128, zeros", WarpTile(32, 2, 2, 1, 2), 3)]
)
def test_joining_the_residual(form: str, tile: WarpTile, rows: int) -> None:
    columns, width = 40, 512
    x, w = random(rows, width, dtype=BF16), narrow(form, columns, width, DEVICE, seed=1)
    norm, total = random(columns, seed=3), random(rows, columns, seed=4)
    expected = residual_reference(x, w, total, norm, 0.5, 0.3, None)
    normed, sumsq = (torch.full((rows, n), NAN, device=DEVICE) for n in (columns, -(-columns // tile.block_n)))
    space = split_space(tile, rows, columns) if tile.splits > 1 else None
    products.residual(x, w, total, normed, sumsq, norm, tile, space, norm_offset=0.5, scale=0.3)
    assert space is None or not space.tickets.any()
    close(total, expected[0], TOLERANCE)
    close(normed, expected[1], TOLERANCE)
    close(sumsq.sum(1, keepdim=True), expected[2], TOLERANCE)


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_every_code_is_what_it_stands_for(kind: str) -> None:
    """Products with unit vectors give the weights themselves, also those below the smallest normal number."""
    width, columns = 256, 16
    if kind == "int4":
        w = narrow("int4 by 128, zeros", columns, width, DEVICE)
        assert w.scales is not None
        w.scales = torch.ones_like(w.scales)
    else:
        codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).repeat(columns, 1)
        codes = torch.where(codes % 128 == 127, 0, codes) if kind == "fp8" else codes
        dtype = torch.float8_e4m3fn if kind == "fp8" else torch.int8
        w = Weight(codes.view(dtype), torch.ones(columns, 1, device=DEVICE), None, kind)  # type: ignore[arg-type]
    expected = dequantized(w, torch.float32)
    for first in range(0, width, 8 if DEVICE == "cuda" else 248):
        x = torch.zeros(8, width, dtype=BF16, device=DEVICE)
        x[range(8), range(first, first + 8)] = 1.0
        out = torch.full((1, 8, columns), NAN, device=DEVICE)
        products.project(x, w, out, WarpTile(16, 2, 2, 1))
        assert torch.equal(out[0], expected[:, first : first + 8].T)


def test_a_row_alone_is_the_same_bits() -> None:
    x, w = random(8, 512, dtype=BF16), narrow("int4 by 128, zeros", 32, 512, DEVICE)
    tile = WarpTile(16, 2, 2, 2)
    together, alone = torch.empty(1, 8, 32, device=DEVICE), torch.empty(1, 1, 32, device=DEVICE)
    products.project(x, w, together, tile)
    for row in (0, 5):
        products.project(x[row : row + 1], w, alone, tile)
        assert torch.equal(alone[0, 0], together[0, row])


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("form", ["int4 by 32, minima", "fp4 by 16"])
def test_forms_that_it_does_not_take_go_another_way(form: str, rows: int, monkeypatch) -> None:
    columns, width, tile = 40, 512, WarpTile(16, 2, 2, 1, 2)
    x, w = random(rows, width, dtype=DTYPE), narrow(form, columns, width, DEVICE, seed=1)
    assert not takes(w, x, tile)
    norm, total = random(columns, seed=3), random(rows, columns, seed=4)
    expected = residual_reference(x, w, total, norm, 0.5, 0.3, None)
    normed, sumsq = (torch.full((rows, n), NAN, device=DEVICE) for n in (columns, -(-columns // tile.block_n)))
    if DEVICE == "cpu":  # these have instructions that nothing runs here
        monkeypatch.setattr(narrow_kernels, "assembly", lambda x: 0)
    products.residual(x, w, total, normed, sumsq, norm, tile, split_space(tile, rows, columns) if tile.splits > 1 else None, norm_offset=0.5, scale=0.3)
    close(total, expected[0], TOLERANCE)
    close(sumsq.sum(1, keepdim=True), expected[2], TOLERANCE)
