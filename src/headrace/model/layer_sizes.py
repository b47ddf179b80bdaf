"""Sizes of layers that are not alike (Gemma 4), and what the cache keeps for each layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from headrace.cache.layer_shape import LayerShape
from headrace.model.delta_config import DeltaConfig
from headrace.model.latent_config import LatentConfig


class LayerSizes(NamedTuple):
    head_dim: int
    kv_heads: int  # 0: it reads the keys and values of another layer
    inner: int  # columns of its MLP
    source: int  # the layer whose keys and values it reads: itself, if it has some
    values: bool = True  # they are a projection of their own; else of the keys, before these are normed and rotated


@dataclass(frozen=True, slots=True)
class PerLayer:
    """What ModelConfig says of all layers, and is different in some; there it has the largest of each."""

    sizes: tuple[LayerSizes, ...]
    inputs: int = 0  # numbers of a token's embedding for each layer, beside that for all; 0: there is none
    input_rows: int = 0  # of its table

    @property
    def writing(self) -> int:
        """From this layer on (counted from 1) rows that nobody asks for can be left out: no later one writes keys. With inputs
        only, whose mixers see to that."""
        owners = [layer for layer, of in enumerate(self.sizes) if of.kv_heads]
        return min(owners[-1] + 2, len(self.sizes)) if self.inputs else len(self.sizes)

    @property
    def row_elements(self) -> int:
        """Numbers of a row while all layers' inputs are made: of the table, of the first embedding, scaled, normed, both."""
        return 5 * len(self.sizes) * self.inputs

    def fields(self, layer: int) -> dict[str, Any]:
        """Of ModelConfig."""
        of = self.sizes[layer]
        return {"head_dim": of.head_dim, "num_kv_heads": of.kv_heads, "intermediate_size": of.inner}


class OfLayer(Protocol):
    """Of ModelConfig."""

    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def delta(self) -> DeltaConfig | None: ...
    @property
    def latent(self) -> LatentConfig | None: ...


def shape_of(config: OfLayer, layer: int) -> LayerShape:
    """What the cache keeps of a token for this layer; `config` is the layer's."""
    if config.delta is not None and config.delta.layers[layer]:
        return LayerShape(0, 0, 0)
    return LayerShape(config.num_kv_heads, config.head_dim, config.head_dim if config.latent is None else 0)
