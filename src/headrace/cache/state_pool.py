"""What layers without keys and values remember of their sequences: one row a slot, however long the sequence is."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from headrace.cache.memory import zeros


class DeltaShape(Protocol):
    """Of a layer; see model/delta_config.py."""

    @property
    def value_heads(self) -> int: ...
    @property
    def key_dim(self) -> int: ...
    @property
    def value_dim(self) -> int: ...
    @property
    def kernel(self) -> int: ...
    @property
    def channels(self) -> int: ...
    @property
    def layers(self) -> tuple[bool, ...]: ...


class StatePool:
    """Per delta layer of the model: inputs [rows, ring, channels], what goes into the convolution, in the model's dtype; and
    states [rows, value heads, key_dim, value_dim] in float32.

    A row belongs to a slot; the last one is that of padded rows. The input of position p lies at p modulo `ring`, and no row
    reads its own place: what a step writes nobody reads in that step. Nothing is cleared: a sequence that begins at position 0
    reads nothing of what was there.
    """

    def __init__(self, shape: DeltaShape, rows: int, dtype: torch.dtype, device: torch.device):
        self.ring = shape.kernel
        count = sum(shape.layers)
        ordinals = iter(range(count))
        self._places = [next(ordinals) if there else -1 for there in shape.layers]
        self.inputs = zeros((count, rows, self.ring, shape.channels), dtype, device)
        self.states = zeros((count, rows, shape.value_heads, shape.key_dim, shape.value_dim), torch.float32, device)

    def of(self, layer: int) -> tuple[Tensor, Tensor]:
        """Inputs and states of the model's layer `layer`."""
        place = self._places[layer]
        return self.inputs[place], self.states[place]

    @staticmethod
    def bytes_per_row(shape: DeltaShape, dtype: torch.dtype) -> int:
        state = 4 * shape.value_heads * shape.key_dim * shape.value_dim
        return sum(shape.layers) * (shape.kernel * shape.channels * dtype.itemsize + state)
