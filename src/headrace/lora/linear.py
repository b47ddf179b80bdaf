"""A product that adds what its rows' adapters do."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from headrace.model.linear import Linear


class LoraLinear(Linear):
    """`inner`, and behind it the additions, before partial sums meet those of other ranks.

    `add`: (y [T, out], x [T, in]) -> None, in place.
    """

    def __init__(self, inner: Linear, add: Callable[[Tensor, Tensor], None]):
        self.inner, self.add = inner, add
        super().__init__(self._product, inner.reduce)
        self.fuses_add, self.workspace_bytes = inner.fuses_add, inner.workspace_bytes

    def _product(self, x: Tensor) -> Tensor:
        out = self.inner.product(x)
        self.add(out, x)
        return out

    def add_to(self, total: Tensor, x: Tensor) -> None:
        if not self.fuses_add:
            return super().add_to(total, x)
        self.inner.add_to(total, x)
        self.add(total, x)
