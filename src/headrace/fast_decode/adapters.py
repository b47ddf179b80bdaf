"""Fused decode steps whose rows have adapters: where what they add joins what the kernels leave to each other.

A product of float weights adds it as one more step of its sum (kernels/lora_product.py). Where it runs in another way, queries,
keys and values get it before attention sums up its parts, and the residual before the kernel that adds a product to it; gate
and up are one product then and their activation a kernel of its own, as it needs the whole of both.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from headrace.fast_decode.epilogues import runs_triton
from headrace.fast_decode.products import Tile, WidenedTile, project
from headrace.kernels.activation import act_mul
from headrace.kernels.experts_lora import ExpertAdds
from headrace.kernels.lora_product import LowRank
from headrace.model.config import ModelConfig
from headrace.model.weight import Weight


class Adds(Protocol):
    """AdapterPool."""

    def low_rank(self, target: str, x: Tensor, block_n: int) -> LowRank | None:
        """What the product `target` of x [rows, in], launched next, is to add; None: tiles of block_n outputs cannot."""

    def add_to(self, target: str, y: Tensor, x: Tensor, **options: Any) -> None:
        """Of the product `target`: y [rows, out] += what the rows' adapters make of x [rows, in]."""

    def of_experts(self, layer: int, rows: int) -> ExpertAdds | None:
        """What the adapters of all rows add to experts' products; None: no adapter is of experts."""


def low_rank(adapters: Adds | None, target: str, x: Tensor, weight: Weight, tile: Tile) -> LowRank | None:
    """What the product is to add; None: nothing, or it is added otherwise."""
    if adapters is None or weight.kind != "float" or not runs_triton(x):
        return None
    return adapters.low_rank(target, x, tile.block_n)


def adapted_glu(
    adapters: Adds, layer: int, x: Tensor, weight: Weight, tile: Tile, sumsq: Tensor, config: ModelConfig
) -> Tensor:
    """What products.glu gives, in a tensor of its own."""
    both = x.new_empty((1, len(x), weight.shape[0]))
    tile = tile.of_one_kind() if isinstance(tile, WidenedTile) else tile
    project(x, weight, both, tile, sumsq=sumsq, eps=config.norm_eps)
    adapters.add_to(f"layers.{layer}.gate_up", both[0], x, squares=sumsq, eps=config.norm_eps)
    return act_mul(both[0], config.activation)
