"""Products with FP8 weights by numbers that are sums of two in FP8: in the interpreter or on the card."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import ptx_interpreter
from fast_decode_cases import PLAIN, random_weights, with_narrow
from headrace.fast_decode import forward, products, tiles
from headrace.fast_decode.epilogues import glu_reference, project_reference, residual_reference, runs_triton
from headrace.fast_decode.pair_gemm import PairTile, all_suit
from headrace.kernels.pairs import PAIR_TEXT
from headrace.model.weight import dequantized
from narrow_cases import narrow
from test_kernels_fused_decode import DEVICE, NAN, close, random, split_space

pytestmark = pytest.mark.skipif(not runs_triton(torch.empty(0, device=DEVICE)), reason="needs Triton")
BF16 = torch.bfloat16
TOLERANCE = 2e-5 if DEVICE == "cpu" else 1e-3  # tensor cores add up FP8 products with about 14 bits


@pytest.mark.parametrize(("tile", "rows"), [(PairTile(16, 3, 1, 4, 2), 2), (PairTile(32, 1, 2, 4, 2, touch=1), 16)], ids=str)
@pytest.mark.parametrize("scale_rows", [1, 24])
def test_project(tile: PairTile, rows: int, scale_rows: int) -> None:
    """Several tiles of a program, splits, columns past the last, a scale for each row or for several."""
    columns, width = 72, 512
    x, w, bias = random(rows, width, dtype=BF16), narrow("fp8 row", columns, width, DEVICE, seed=1), random(columns, seed=2)
    w.scales, w.scale_rows = w.scales[::scale_rows].contiguous(), scale_rows
    sumsq = random(rows, 70, seed=3).square() * width
    out = torch.full((tile.splits, rows, columns), NAN, device=DEVICE)
    products.project(x, w, out, tile, sumsq=sumsq, eps=1e-5, bias=bias, scale=0.5)
    close(out.sum(0), project_reference(x, w, sumsq, 1e-5, bias, 0.5, 0.0), TOLERANCE)


@pytest.mark.parametrize("tile", [PairTile(32, 3, 1, 4, 5), PairTile(32, 1, 1, 4, 2, touch=1)], ids=str)
def test_gate_and_up(tile: PairTile) -> None:
    columns, width, rows = 88, 256, 5
    x, w = random(rows, width, dtype=BF16), narrow("fp8 row", 2 * columns, width, DEVICE, seed=1)
    sumsq = random(rows, 3, seed=3).square() * width
    out = torch.full((rows, columns), NAN, device=DEVICE)
    products.glu(x, w, out, tile, sumsq=sumsq, eps=1e-5)
    close(out, glu_reference(x, w, sumsq, 1e-5, "silu"), TOLERANCE)


@pytest.mark.parametrize("splits", [1, 2])
def test_joining_the_residual(splits: int) -> None:
    columns, width, rows, tile = 72, 256, 3, PairTile(64, 1, splits, 4, 2)
    x, w = random(rows, width, dtype=BF16), narrow("fp8 row", columns, width, DEVICE, seed=1)
    norm, total = random(columns, seed=3), random(rows, columns, seed=4)
    expected = residual_reference(x, w, total, norm, 0.5, 0.3, None)
    normed, sumsq = (torch.full((rows, n), NAN, device=DEVICE) for n in (columns, 2))
    space = split_space(tile, rows, columns) if tile.splits > 1 else None
    products.residual(x, w, total, normed, sumsq, norm, tile, space, norm_offset=0.5, scale=0.3)
    assert space is None or not space.tickets.any()
    close(total, expected[0], TOLERANCE)
    close(normed, expected[1], TOLERANCE)
    close(sumsq.sum(1, keepdim=True), expected[2], TOLERANCE)


def test_numbers_of_any_size() -> None:
    """Rows a million million times as large or small; beside a number 2^17 times its size one still counts; a row that is not
    finite spoils no other one."""
    w = narrow("fp8 row", 32, 256, DEVICE, seed=1)
    x = random(6, 256, dtype=BF16).float()
    x[1] *= 2.0**100
    x[2] *= 2.0**-100
    x[3] *= torch.logspace(0, -17, 256, base=2.0, device=DEVICE)
    x[4] = 0
    x[5, 7] = float("inf")
    x = x.to(BF16)
    out = torch.full((1, 6, 32), NAN, device=DEVICE)
    products.project(x, w, out, PairTile(16, 1, 1, 4, 2))
    expected = project_reference(x, w, None, 0.0, None, 1.0, 0.0)
    for row in range(4):
        size = expected[row].abs().max()
        close(out[0, row] / size, expected[row] / size, TOLERANCE)
    assert not out[0, 4].any() and out[0, 5].isnan().all()


def test_every_code_is_what_it_stands_for() -> None:
    """Products with unit vectors give the weights themselves."""
    w = narrow("fp8 row", 64, 128, DEVICE, seed=1)
    for first in range(0, 128, 16):
        x = torch.eye(128, dtype=BF16, device=DEVICE)[first : first + 16]
        out = torch.full((1, 16, 64), NAN, device=DEVICE)
        products.project(x, w, out, PairTile(64, 1, 1, 4, 2))
        close(out[0], dequantized(w, torch.float32)[:, first : first + 16].T, 1e-6)


def test_a_row_does_not_depend_on_others() -> None:
    w, x = narrow("fp8 row", 64, 256, DEVICE, seed=1), random(16, 256, dtype=BF16)
    results = []
    for rows in (x, x[[3] * 12]):
        results.append(torch.full((1, len(rows), 64), NAN, device=DEVICE))
        products.project(rows, w, results[-1], PairTile(64, 1, 1, 4, 2))
    assert torch.equal(results[1][0], results[0][0, [3] * 12]) or DEVICE == "cpu"  # NumPy's products are others of other sizes
    close(results[1][0], results[0][0, [3] * 12], 1e-6)


def test_what_is_refused() -> None:
    x, tile = torch.zeros(2, 256, dtype=BF16, device=DEVICE), PairTile(64, 1, 1, 4, 2)
    out, w = torch.empty(1, 2, 64, device=DEVICE), narrow("fp8 row", 64, 256, DEVICE)
    for form in ("int8 row", "int4 by 128", "fp8 blocks"):
        with pytest.raises(ValueError, match="takes fp8 without groups"):
            products.project(x, narrow(form, 64, 256, DEVICE), out, tile)
    with pytest.raises(ValueError, match="multiple of 512"):
        products.project(x, w, out, replace(tile, splits=4))
    with pytest.raises(ValueError, match="1 to 16 rows, not 17"):
        products.project(x[:1].expand(17, 256), w, out, tile)
    with pytest.raises(ValueError, match="one tile a program"):
        products.residual(x, w, x, x, x, x, replace(tile, tiles=2))


def test_only_large_products_of_few_rows_are_pairs_by_default() -> None:
    up, down = tiles.Shape(12288, 4096, gated=True, splittable=False), tiles.Shape(4096, 12288)

    def pairs(shape: tiles.Shape, rows: int = 16, **options) -> bool:
        tile = tiles.narrow_tile(shape, rows, options.pop("kind", "fp8"), **options)
        return isinstance(tile, PairTile)

    assert all(pairs(shape, rows) for shape in (up, down) for rows in (2, 16))
    assert not any(pairs(shape, rows) for shape in (up, down) for rows in (1, 17, 64))
    assert not any(pairs(shape, kind=kind) for shape in (up, down) for kind in ("int8", "int4", "fp4"))
    assert not pairs(up, pairs=False) and not pairs(tiles.Shape(4096, 12288, splittable=False))
    others = [tiles.Shape(6144, 4096), tiles.Shape(4096, 4096), tiles.Shape(4096, 12416), tiles.Shape(5120, 25600)]
    assert not any(map(pairs, [*others, replace(up, columns=13000), replace(up, columns=8192, width=8192)]))


@pytest.mark.parametrize(("form", "capability"), [("fp8 row", 9), ("fp8 row", 10), ("fp8 blocks", 9)])
def test_a_table_s_pairs_are_for_what_they_suit(form: str, capability: int, monkeypatch) -> None:
    """Weights by blocks and other cards have the tiles that they had."""
    monkeypatch.setattr("headrace.fast_decode.pair_gemm.capability", lambda device: (capability, 0))
    weights = with_narrow(random_weights(PLAIN, dtype=BF16), [(form,) * 4] * 2)
    usual = tiles.default_table(PLAIN, copy_engine=False, kinds=forward.usual_kinds(weights))
    gated, down = PairTile(32, 1, 1, 4, 2), PairTile(64, 1, 1, 4, 2)
    table = {rows: replace(step, gate_up=gated, down=down) if 1 < rows <= 16 else step for rows, step in usual.items()}
    step = forward.FastDecode(PLAIN, weights, 32, torch.device("cpu"), table)
    suits = (form, capability) == ("fp8 row", 9)
    assert all_suit([weights.layers[0].down], BF16, torch.device("cpu")) == suits
    assert step.tiles == (table if suits else usual) and not all_suit([], torch.float16, torch.device("cpu"))


def fp8(codes: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(codes.astype(np.uint32).view(np.uint8)).view(torch.float8_e4m3fn).float()


@pytest.mark.parametrize("exponent", [8, 127, 254])
def test_the_instructions_for_a_pair(exponent: int) -> None:
    """For all bfloat16 beside one that is as large as theirs or larger."""
    bits = torch.arange(65536, dtype=torch.int32)
    bits = bits[(bits >> 7 & 255) <= exponent].to(torch.int16)
    factor = torch.tensor([(261 - exponent) << 7], dtype=torch.int32).to(torch.int16)
    words = bits.numpy().view(np.uint32)
    factors = np.full(len(words) // 2, int(factor) * 0x10001, np.uint32)
    high, low = map(fp8, ptx_interpreter.run(PAIR_TEXT, [words[::2], words[1::2], factors, factors], 2))
    exact = (bits.view(BF16).double() * 2.0 ** (134 - exponent)).float()
    assert exact.abs().max() < 256
    error = (high + low - exact).abs()
    assert error.max() < 2**-9 and not error[exact.abs() >= 0.5].any()
