"""Layers whose attention and MLP read the same normed rows and are added to the residual stream at once (Cohere)."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.model.batch import WantedRows
from headrace.model.linear import Linear
from headrace.model.mixer import Mixer, Pass
from headrace.model.mlp import Mlp


class SideBySide:
    """A mixer that is both parts: what it gives is added as it is. The layer's MLP is then `Nothing`, and has no norm."""

    def __init__(self, attention: Mixer, mlp: Mlp):
        self.attention, self.mlp = attention, mlp
        self.out = Linear(lambda x: x, attention.out.reduce)  # ranks add up both parts together

    def __call__(self, normed: Tensor, shared: Pass, last: WantedRows | None) -> Tensor:
        attended = self.attention(normed, shared, last)
        rows = normed if last is None else normed[last.index]
        return self.attention.out.product(attended) + self.mlp.product(rows)


class Nothing(Mlp):
    """An MLP that adds nothing."""

    fuses_add = True
    workspace_bytes = 0

    def __call__(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    def product(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    def add_to(self, total: Tensor, x: Tensor) -> None:
        """`total` stays what it is."""
