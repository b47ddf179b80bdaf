"""What layers without keys and values remember of their sequences: one row a slot, however long the sequence is."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
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


@dataclass(slots=True, eq=False)
class LayerStates:
    """What a delta layer remembers, by row of a StatePool: inputs [rows, ring, width], those of position p at p modulo `ring`;
    states [rows, value_heads, key_dim, value_dim] float32. Width is that of q, k and v; with drafts the gates follow.

    `behind` [rows, value_heads] int32, where there may be drafts: how many tokens a state is made of. It is never made of a row
    that may be wrong: whoever comes next takes the rows since then out of the ring, when it is known which they are.
    """

    inputs: Tensor
    states: Tensor
    behind: Tensor | None


class States(Protocol):
    """What of a sequence's state a step begins and ends with."""

    def restore(self, admitted: Iterable[Admitted]) -> None:
        """Before a step: whoever goes on from a snapshot gets a copy."""
        ...

    def keep(self, kept: Iterable[tuple[int, int]]) -> None:
        """After a step: (slot, snapshot) of what is to be kept."""
        ...

    def of(self, layer: int) -> LayerStates: ...


class NoStates:
    """Of a model whose layers all have keys and values."""

    def restore(self, admitted: Iterable[Admitted]) -> None: ...

    def keep(self, kept: Iterable[tuple[int, int]]) -> None: ...

    def of(self, layer: int) -> LayerStates:
        raise ValueError(f"layer {layer} keeps no state")


class StatePool:
    """Per delta layer of the model LayerStates; inputs are what goes into the convolution, in the model's dtype.

    The first `slots` rows belong to slots, the last of these to padded rows; those behind them are snapshots. The input of
    position p lies at p modulo `ring`, and no row reads its own place: what a step writes nobody reads in that step. Nothing is
    cleared: a sequence that begins at position 0 reads nothing of what was there.
    """

    def __init__(
        self, shape: DeltaShape, slots: int, snapshots: int, dtype: torch.dtype, device: torch.device, drafts: int = 0
    ):
        """`drafts`: of a sequence in one step, at most."""
        self.slots = slots
        count, rows = sum(shape.layers), slots + snapshots
        ordinals = iter(range(count))
        self._places = [next(ordinals) if there else -1 for there in shape.layers]
        self.inputs = zeros((count, rows, *_ring(shape, drafts)), dtype, device)
        self.states = zeros((count, rows, shape.value_heads, shape.key_dim, shape.value_dim), torch.float32, device)
        self.behind = zeros((count, rows, shape.value_heads), torch.int32, device) if drafts else None

    def of(self, layer: int) -> LayerStates:
        """Of the model's layer `layer`."""
        place = self._places[layer]
        return LayerStates(self.inputs[place], self.states[place], None if self.behind is None else self.behind[place])

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
        if self.behind is not None:
            self.behind[:, target].copy_(self.behind[:, source])

    @staticmethod
    def bytes_per_row(shape: DeltaShape, dtype: torch.dtype, drafts: int = 0) -> int:
        state = 4 * shape.value_heads * (shape.key_dim * shape.value_dim + 1)
        return sum(shape.layers) * (math.prod(_ring(shape, drafts)) * dtype.itemsize + state)


def _ring(shape: DeltaShape, drafts: int) -> tuple[int, int]:
    """Places and width of the inputs of a row: those that a step writes must not lie where any row of it reads, up to all that
    the step before may have left behind, and what its first one's convolution sees."""
    if not drafts:
        return shape.kernel, shape.channels
    return shape.kernel + 2 * drafts + 1, shape.channels + 2 * shape.value_heads
