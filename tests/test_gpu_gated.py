"""Gate and up with their activation in one kernel, on a card that has it: beside two kernels and against float64, the same bits
whatever the tile and whatever the other rows are."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from headrace.kernels.activation import Activation, act_mul
from headrace.kernels.launch import capability

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
TILES = [(3, 256), (2, 256), (3, 128)]  # groups, rows of x


@pytest.fixture(scope="module", autouse=True)
def card() -> None:
    if capability(DEVICE) != (9, 0):
        pytest.skip("not on this card")


def product(x: torch.Tensor, weight: torch.Tensor, kind: Activation, tile: tuple[int, int]) -> torch.Tensor:
    """With what lies behind the last row."""
    from headrace.kernels.gated_roles import launch

    out = torch.full((len(x) + 8, len(weight) // 2), 7.0, dtype=x.dtype, device=DEVICE)
    launch(x, weight, kind, out[: len(x)], *tile)
    assert (out[len(x) :] == 7.0).all()
    return out[: len(x)]


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows, inner, width", [(72, 12288, 4096), (257, 3072, 1024), (200, 4744, 896), (1030, 1000, 2304)])
def test_products(rows: int, inner: int, width: int, dtype: torch.dtype, kind: Activation) -> None:
    generator = torch.Generator(DEVICE).manual_seed(rows)
    x = torch.randn(rows, width, device=DEVICE, generator=generator).to(dtype)
    weight = (torch.randn(2 * inner, width, device=DEVICE, generator=generator) * width**-0.5).to(dtype)
    gate, up = (x.double() @ weight.double().t()).chunk(2, -1)
    exact = (F.silu(gate) if kind == "silu" else F.gelu(gate, approximate="tanh")) * up

    def error(got: torch.Tensor) -> float:
        return float((got.double() - exact).norm() / exact.norm())

    found = [product(x, weight, kind, tile) for tile in TILES]
    assert error(found[0]) < error(act_mul(torch.mm(x, weight.t()), kind))  # rounded once
    assert all(torch.equal(other, found[0]) for other in found[1:])
    few = product(x[-40:].contiguous(), weight, kind, TILES[1])
    assert torch.equal(few, found[0][-40:])
    assert all(torch.equal(product(x, weight, kind, TILES[i % 3]), found[0]) for i in range(20))
