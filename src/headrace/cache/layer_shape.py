"""What the KV cache keeps of one layer, for those who plan without torch."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class LayerShape(NamedTuple):
    """What a layer keeps of a token; 0 heads: nothing (it reads another layer's, or has no attention)."""

    heads: int
    k_dim: int
    v_dim: int


class CacheShape(Protocol):
    """What a model's cache follows from; a ModelConfig has it."""

    @property
    def kv_shapes(self) -> tuple[LayerShape, ...]: ...
