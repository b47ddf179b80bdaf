"""FP8 by FP8 of some dozens of rows, against float32, in Triton's interpreter or on the card."""

from __future__ import annotations

import pytest
import torch

from headrace.fast_decode.epilogues import runs_triton
from headrace.kernels.quantize_rows import Rounded, quantize_rows_reference
from headrace.kernels.scaled_gemm import MOST_ROWS, ScaledProduct, ScaledTile, default_tile
from test_kernels_fused_decode import DEVICE, NAN, close, random

pytestmark = pytest.mark.skipif(not runs_triton(torch.empty(0, device=DEVICE)), reason="needs Triton")


SIZES = [(40, 64, 176, 400), (72, 128, 192, 256), (130, 130, 64, 512), (33, 64, 48, 1040)]
TILES = [
    ScaledTile(64, 128, 128, 3, 4, 2), ScaledTile(64, 64, 128, 1, 4, 2), ScaledTile(128, 64, 128, 2, 8, 3),
    default_tile(33, 48, 1040),
]  # fmt: skip


def rounded(rows: int, width: int, room: int = 0) -> Rounded:
    """With room for more, in which anything lies."""
    x = quantize_rows_reference(random(max(rows, room), width))
    x.values.view(torch.uint8)[rows:], x.scales[rows:] = 0x7F, NAN
    return x._replace(rows=rows)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("size", "tile"), zip(SIZES, TILES, strict=True))
def test_products(size: tuple[int, int, int, int], tile: ScaledTile, bias: bool) -> None:
    rows, room, columns, width = size
    x = rounded(rows, width, room)
    weight, scales = random(columns, width, seed=1).to(torch.float8_e4m3fn), random(1, columns, seed=2).abs()
    product = ScaledProduct(weight, scales, random(columns, seed=3) if bias else None)
    expected = (x.values[:rows].float() * x.scales[:rows]) @ (weight.float() * scales.t()).t()
    for _ in range(2):  # the tickets are as they were
        out = torch.full((rows, columns), NAN, device=DEVICE)
        assert product(x, tile, out) is out
        close(out, expected + (product.bias if bias else 0.0), 1e-4 if DEVICE == "cpu" else 2e-3)  # a card adds with 14 bits


def test_a_row_depends_on_no_other_one() -> None:
    x = rounded(72, 256)
    product = ScaledProduct(random(192, 256, seed=1).to(torch.float8_e4m3fn), torch.ones(1, 192, device=DEVICE), None)
    tile = ScaledTile(64, 64, 64, 2, 4, 2)
    some = product(Rounded(x.values[5:50], x.scales[5:50], 45), tile)
    assert torch.equal(product(x, tile)[5:50], some)


@pytest.mark.parametrize(("columns", "width"), [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (512, 1024), (48, 16)])
def test_parts_have_room(columns: int, width: int) -> None:
    product = ScaledProduct.__new__(ScaledProduct)
    product.weight = torch.empty(columns, width, device="meta")
    for rows in (33, 64, 65, 128, 129, MOST_ROWS):
        tile = default_tile(rows, columns, width)
        assert tile is None or tile.splits == 1 or 4 * tile.splits * rows * columns <= product.workspace_bytes
    assert default_tile(MOST_ROWS + 1, columns, width) is None


def test_parts_of_rows() -> None:
    x = rounded(300, 32, 384)
    parts = x.split(128)
    assert [part.rows for part in parts] == [128, 128, 44] and [len(part.values) for part in parts] == [128] * 3
    assert torch.equal(parts[2].scales[:44], x.scales[256:300])
