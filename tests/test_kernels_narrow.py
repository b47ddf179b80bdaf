"""Products with narrow weights against the matrices that these stand for, in Triton's interpreter or on the card."""

from __future__ import annotations

import pytest
import torch

from headrace.fast_decode import products
from headrace.fast_decode.epilogues import glu_reference, project_reference, residual_reference, runs_triton
from headrace.fast_decode.gemv import GemvTile
from headrace.fast_decode.skinny_gemm import GemmTile
from headrace.fast_decode.wide_gemm import WideTile
from headrace.kernels import narrow_gemm as narrow_gemm_module
from headrace.kernels import quantize_rows as quantizing
from headrace.kernels.activation import act_mul_triton
from headrace.kernels.narrow_gemm import narrow_gemm, widen_rows
from headrace.kernels.norm import add_rms_norm_triton
from headrace.kernels.quantize_rows import Rounded, quantize_gated, quantize_normed, quantize_rows, quantize_rows_reference
from headrace.model.weight import Weight, dequantized
from narrow_cases import FORMS, narrow
from test_kernels_fused_decode import DEVICE, NAN, close, random, split_space

pytestmark = pytest.mark.skipif(not runs_triton(torch.empty(0, device=DEVICE)), reason="needs Triton")

GEMV = GemvTile(16, 512, 2, 1)
GEMM = GemmTile(32, 128, 2, 4, 2, touch=2)
WIDE = WideTile(16, 64, 64, 1, 4, 2)
TOLERANCE = 1e-4  # sums of n - z and of n less z times those of x round differently
# the card's instructions convert for bfloat16 only
DTYPES = [torch.float32] if DEVICE == "cpu" else [torch.float32, torch.bfloat16]


def check_project(form: str, tile, rows: int, columns: int, width: int, dtype: torch.dtype) -> None:
    x, w = random(rows, width, dtype=dtype), narrow(form, columns, width, DEVICE, seed=1)
    sumsq = random(rows, 70, seed=3).square() * width
    splits = products.num_splits(tile)
    out = torch.full((splits, rows, columns), NAN, device=DEVICE)
    products.project(x, w, out, tile, sumsq=sumsq, eps=1e-5, bias=random(columns, seed=2), scale=0.5)
    close(out.sum(0), project_reference(x, w, sumsq, 1e-5, random(columns, seed=2), 0.5, 0.0), TOLERANCE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tile", "rows"), [(GEMV, 1), (GEMM, 3), (WIDE, 20)], ids=["one row", "few rows", "many rows"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form(form: str, tile, rows: int, dtype: torch.dtype) -> None:
    check_project(form, tile, rows, 20, 256, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tile", "rows"), [(GEMV, 1), (GEMM, 3)], ids=["one row", "few rows"])
@pytest.mark.parametrize(("form", "width"), [("fp8 row", 80), ("int8 by 16", 112), ("fp8 blocks", 200), ("int4 by 32", 128)])
def test_widths_of_no_whole_step(form: str, width: int, tile, rows: int, dtype: torch.dtype) -> None:
    check_project(form, tile, rows, 32, width, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tile", "rows"), [(GEMV, 1), (GemmTile(16, 128, 1, 4, 2), 3), (WIDE, 20)], ids=["one row", "few rows", "many rows"])
@pytest.mark.parametrize("form", ["fp8 row", "fp8 blocks", "int8 row, zeros", "int4 by 128, zeros", "int4 by 64"])
def test_gate_and_up(form: str, tile, rows: int, dtype: torch.dtype) -> None:
    """Rows of the two halves have scales of their own, also where a block of rows shares one."""
    columns, width = 128 if form == "fp8 blocks" else 24, 128
    x, w = random(rows, width, dtype=dtype), narrow(form, 2 * columns, width, DEVICE, seed=1)
    sumsq = random(rows, 3, seed=3).square() * width
    out = torch.full((rows, columns), NAN, device=DEVICE)
    products.glu(x, w, out, tile, sumsq=sumsq, eps=1e-5)
    close(out, glu_reference(x, w, sumsq, 1e-5, "silu"), TOLERANCE)


@pytest.mark.parametrize(("tile", "rows"), [(GEMV, 1), (GEMM, 3), (WideTile(16, 64, 64, 2, 4, 2), 20)], ids=["one row", "few rows", "many rows"])
@pytest.mark.parametrize("form", ["fp8 row", "int8 by 32, minima", "int4 by 128, zeros"])
def test_joining_the_residual(form: str, tile, rows: int) -> None:
    columns, width = 40, 256
    x, w = random(rows, width, dtype=DTYPES[-1]), narrow(form, columns, width, DEVICE, seed=1)
    norm, total = random(columns, seed=3), random(rows, columns, seed=4)
    expected = residual_reference(x, w, total, norm, 0.5, 0.3, None)
    tiles = -(-columns // tile.block_n)
    normed, sumsq = (torch.full((rows, n), NAN, device=DEVICE) for n in (columns, tiles))
    space = None if isinstance(tile, GemvTile) else split_space(tile, rows, columns)
    products.residual(x, w, total, normed, sumsq, norm, tile, space, norm_offset=0.5, scale=0.3)
    assert space is None or not space.tickets.any()
    close(total, expected[0], TOLERANCE)
    close(normed, expected[1], TOLERANCE)
    close(sumsq.sum(1, keepdim=True), expected[2], TOLERANCE)


@pytest.mark.parametrize("form", ["fp8 row", "int8 row", "int4 by 128", "fp4 by 32"])
@pytest.mark.parametrize(("tile", "rows"), [(GEMV, 1), (WIDE, 16)], ids=["one row", "many rows"])
def test_every_code_is_what_it_stands_for(form: str, tile, rows: int) -> None:
    """Products with unit vectors give the weights themselves, also those below the smallest normal number."""
    width, columns = 256, 16
    w = narrow(form, columns, width, DEVICE)
    if w.kind in ("fp8", "int8"):  # each row has all codes
        codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).repeat(columns, 1)
        codes = torch.where(codes % 128 == 127, 0, codes) if w.kind == "fp8" else codes
        w = Weight(codes.view(w.data.dtype), torch.ones(columns, 1, device=DEVICE), None, w.kind)
    else:
        w.scales = torch.ones_like(w.scales)
    expected = dequantized(w, torch.float32)
    for first in (0, 112, 240):
        x = torch.zeros(rows, width, dtype=DTYPES[-1], device=DEVICE)
        x[range(rows), range(first, first + rows)] = 1.0
        out = torch.full((1, rows, columns), NAN, device=DEVICE)
        products.project(x, w, out, tile)
        assert torch.equal(out[0], expected[:, first : first + rows].T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16] if DEVICE == "cpu" else [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("form", ["fp8 row", "fp8 blocks", "int8 by 32, minima", "int4 by 128, zeros", "fp4 by 16"])
def test_a_product_alone(form: str, rows: int, dtype: torch.dtype) -> None:
    width = 128 if form.startswith(("int4", "fp4")) else 200
    w, x, bias = narrow(form, 100, width, DEVICE), random(rows, width, dtype=dtype, seed=1), random(100, dtype=dtype, seed=2)
    expected = torch.nn.functional.linear(x.float(), dequantized(w, torch.float32), bias.float())
    close(narrow_gemm(x, w, bias), expected, TOLERANCE if dtype == torch.float32 else 4e-3)


@pytest.mark.parametrize("rows", [70, 300])
def test_a_product_of_int8_with_many_rows(rows: int, monkeypatch) -> None:
    """By the tiles that Hopper takes for it."""
    monkeypatch.setattr(narrow_gemm_module, "takes_many_rows", lambda weight, x: True)
    w, x = narrow("int8 row", 150, 200, DEVICE), random(rows, 200, dtype=DTYPES[-1], seed=1)
    close(narrow_gemm(x, w), torch.nn.functional.linear(x.float(), dequantized(w, torch.float32)), TOLERANCE if DEVICE == "cpu" else 4e-3)


@pytest.mark.parametrize("form", FORMS)
def test_widened_rows(form: str) -> None:
    w = narrow(form, 260, 384, DEVICE)
    out = torch.full((132, 384), NAN, device=DEVICE)
    close(widen_rows(w, 128, out), dequantized(w, torch.float32)[128:], 1e-6)


def test_quantized_rows() -> None:
    x = torch.cat([random(3, 200, dtype=DTYPES[-1]), torch.zeros(1, 200, dtype=DTYPES[-1], device=DEVICE)])
    x[1] *= 1e-4
    values, scales, rows = quantize_rows(x)
    assert rows == 4
    for part, expected in zip((values.float(), scales), quantize_rows_reference(x), strict=False):
        close(part[:3], expected[:3], 1e-3)
    values, scales = values[:rows], scales[:rows]
    close(values.float() * scales, x, 0.04)
    assert not values[3].float().any()


def assert_same(found: Rounded, expected: Rounded) -> None:
    """To the bit."""
    rows = found.rows
    assert rows == expected.rows and torch.equal(found.scales[:rows], expected.scales[:rows])
    assert torch.equal(found.values[:rows].view(torch.uint8), expected.values[:rows].view(torch.uint8))


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_quantized_as_it_comes_from_an_activation(kind: str, monkeypatch) -> None:
    """The same bits as of the activation stored first."""
    monkeypatch.setattr(quantizing, "on_gpu", lambda tensor: True)
    gate_up = random(3, 2 * 200, dtype=DTYPES[-1])
    assert_same(quantize_gated(gate_up, kind), quantize_rows(act_mul_triton(gate_up, kind)))  # type: ignore[arg-type]


@pytest.mark.parametrize(("width", "offset", "scale"), [(200, 0.0, 1.0), (1030, 1.0, 0.22)])
def test_quantized_as_it_comes_from_the_norm_of_a_sum(width: int, offset: float, scale: float, monkeypatch) -> None:
    """The same bits as of the norm stored first, and the same sum."""
    monkeypatch.setattr(quantizing, "on_gpu", lambda tensor: True)
    x, residual, weight = (random(*shape, dtype=DTYPES[-1]) for shape in ((5, width), (5, width), (width,)))
    found, total = quantize_normed(x, residual, weight, 1e-6, offset, scale)
    normed, summed = add_rms_norm_triton(x, residual, weight, 1e-6, offset, scale)
    assert_same(found, quantize_rows(normed))
    assert torch.equal(total, summed)
    monkeypatch.setattr(quantizing, "on_gpu", lambda tensor: False)
    again, total = quantize_normed(x, residual, weight, 1e-6, offset, scale)
    close(total, summed, 1e-2)
    close(again.values.float() * again.scales, normed, 0.05)
