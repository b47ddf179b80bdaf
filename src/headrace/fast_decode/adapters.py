"""Fused decode steps whose rows have adapters: where what they add joins what the kernels leave to each other.

Queries, keys and values get it before attention sums up its parts, and the residual before the kernel that adds a product to
it. Gate and up are one product then and their activation a kernel of its own, as it needs the whole of both.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from headrace.fast_decode.products import Tile, project
from headrace.kernels.activation import act_mul
from headrace.kernels.experts_lora import ExpertAdds
from headrace.model.config import ModelConfig
from headrace.model.weight import Weight


class Adds(Protocol):
    """AdapterPool."""

    def add_to(self, target: str, y: Tensor, x: Tensor, **options: Any) -> None:
        """Of the product `target`: y [rows, out] += what the rows' adapters make of x [rows, in]."""

    def of_experts(self, layer: int, rows: int) -> ExpertAdds | None:
        """What the adapters of all rows add to experts' products; None: no adapter is of experts."""


def adapted_glu(
    adapters: Adds, layer: int, x: Tensor, weight: Weight, tile: Tile, sumsq: Tensor, config: ModelConfig
) -> Tensor:
    """What products.glu gives, in a tensor of its own."""
    both = x.new_empty((1, len(x), weight.shape[0]))
    project(x, weight, both, tile, sumsq=sumsq, eps=config.norm_eps)
    adapters.add_to(f"layers.{layer}.gate_up", both[0], x, squares=sumsq, eps=config.norm_eps)
    return act_mul(both[0], config.activation)
