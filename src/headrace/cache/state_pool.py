"""What layers without keys and values remember of their sequences: one row a slot, however long the sequence is."""

from __future__ import annotations

from collections.abc import Iterable
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


class Admitted(Protocol):
    """See scheduler/plan.py."""

    slot: int
    snapshot: int


class States(Protocol):
    """What of a sequence's state a step begins and ends with."""

    def restore(self, admitted: Iterable[Admitted]) -> None:
        """Before a step: whoever goes on from a snapshot gets a copy."""
        ...

    def keep(self, kept: Iterable[tuple[int, int]]) -> None:
        """After a step: (slot, snapshot) of what is to be kept."""
        ...

    def of(self, layer: int) -> tuple[Tensor, Tensor]: ...


class NoStates:
    """Of a model whose layers all have keys and values."""

    def restore(self, admitted: Iterable[Admitted]) -> None: ...

    def keep(self, kept: Iterable[tuple[int, int]]) -> None: ...

    def of(self, layer: int) -> tuple[Tensor, Tensor]:
        raise ValueError(f"layer {layer} keeps no state")


class StatePool:
    """Per delta layer of the model: inputs [rows, ring, channels], what goes into the convolution, in the model's dtype; and
    states [rows, value heads, key_dim, value_dim] in float32.

    The first `slots` rows belong to slots, the last of these to padded rows; those behind them are snapshots. The input of
    position p lies at p modulo `ring`, and no row reads its own place: what a step writes nobody reads in that step. Nothing is
    cleared: a sequence that begins at position 0 reads nothing of what was there.
    """

    def __init__(self, shape: DeltaShape, slots: int, snapshots: int, dtype: torch.dtype, device: torch.device):
        self.slots, self.ring = slots, shape.kernel
        count, rows = sum(shape.layers), slots + snapshots
        ordinals = iter(range(count))
        self._places = [next(ordinals) if there else -1 for there in shape.layers]
        self.inputs = zeros((count, rows, self.ring, shape.channels), dtype, device)
        self.states = zeros((count, rows, shape.value_heads, shape.key_dim, shape.value_dim), torch.float32, device)

    def of(self, layer: int) -> tuple[Tensor, Tensor]:
        """Inputs and states of the model's layer `layer`."""
        place = self._places[layer]
        return self.inputs[place], self.states[place]

    def restore(self, admitted: Iterable[Admitted]) -> None:
        """Before a step: whoever goes on from a snapshot gets a copy."""
        for new in admitted:
            if new.snapshot >= 0:
                self._copy(self.slots + new.snapshot, new.slot)

    def keep(self, kept: Iterable[tuple[int, int]]) -> None:
        """After a step: (slot, snapshot) of what is to be kept."""
        for slot, snapshot in kept:
            self._copy(slot, self.slots + snapshot)

    def _copy(self, source: int, target: int) -> None:
        self.inputs[:, target].copy_(self.inputs[:, source])
        self.states[:, target].copy_(self.states[:, source])

    @staticmethod
    def bytes_per_row(shape: DeltaShape, dtype: torch.dtype) -> int:
        state = 4 * shape.value_heads * shape.key_dim * shape.value_dim
        return sum(shape.layers) * (shape.kernel * shape.channels * dtype.itemsize + state)
