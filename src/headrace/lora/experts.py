"""Adapters of the experts that tokens choose: a place for each expert in each slot of adapters, and whose rows a layer has.

An expert of an adapter is to the kernels one of slots * experts adapters. A rank of several has those of its own experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.kernels.experts_lora import ExpertAdds
from headrace.kernels.lora import Pair, new_pair
from headrace.lora.format import Matrices
from headrace.lora.targets import halves_of, plain, together
from headrace.model.config import ModelConfig
from headrace.model.gpt_oss import GPT_OSS, GPT_OSS_APART
from headrace.model.shard import Shard
from headrace.model.weight_names import WeightSpec


class LayerExperts:
    """Of one layer. `numbers` gives the step's rows (0, or one more than the row's slot), None: nobody has an adapter."""

    def __init__(self, gate_up: Pair, down: Pair, slots: int, numbers: Callable[[], Tensor | None]):
        self.gate_up, self.down, self.slots, self.numbers = gate_up, down, slots, numbers

    def of_rows(self, first: int, count: int) -> ExpertAdds | None:
        """What is added to some of the step's rows."""
        numbers = self.numbers()
        return None if numbers is None else ExpertAdds(self.gate_up, self.down, self.slots, numbers[first : first + count])


class ExpertsProduct:
    """One of a layer's two: gate and up, or down, of the experts that a rank has."""

    def __init__(
        self, spec: WeightSpec, model: ModelConfig, shard: Shard, slots: int, rank: int, dtype: torch.dtype,
        device: torch.device,
    ):  # fmt: skip
        """`spec`: a rank's part of the weight."""
        assert model.experts is not None
        self.here = shard.part(model.experts.count)
        self.halves, self.all = halves_of(spec.target), together(spec.target)
        self.layer = int(spec.target.split(".")[1])
        self._take_turns = self.halves == 2 and model.family in (GPT_OSS, GPT_OSS_APART)  # gate and up in the adapter's rows
        # of each half of each expert; where a file has both halves in one, no module is one of these
        self.names = [plain(source.name) for source in spec.reads] if len(spec.reads) == len(self.here) * self.halves else []
        outputs = spec.shape[0] // len(self.here) // self.halves
        self.pair = new_pair(slots * len(self.here), (outputs,) * self.halves, spec.shape[1], rank, dtype, device)

    def read(self, tensors: Mapping[str, Tensor], found: Mapping[str, Matrices]) -> Placed | None:
        """An adapter's matrices as they lie in a slot, on the host; None if it has none of this product."""
        if self.all not in found and not any(name in found for name in self.names):
            return None
        placed = Placed(*(torch.zeros(len(self.here), *whole.shape[1:], dtype=whole.dtype) for whole in self.pair.of_slots))
        a, b = placed.a.unflatten(1, (self.halves, -1)), placed.b.unflatten(1, (self.halves, -1))
        if (one := found.get(self.all)) is not None:
            own, halves = slice(self.here.start, self.here.stop), (-1, self.halves) if self._take_turns else (self.halves, -1)
            a[:, :, : one.rank] = tensors[one.a].unflatten(0, (one.experts, one.rank))[own, None]
            parts = tensors[one.b].unflatten(1, (one.rank, one.experts)).permute(2, 0, 1)[own].unflatten(1, halves)
            b[..., : one.rank] = parts.transpose(1, 2) if self._take_turns else parts
            placed.scales[:] = one.scale
            return placed
        for number, name in enumerate(self.names):
            expert, half = divmod(number, self.halves)
            if (one := found.get(name)) is not None:
                a[expert, half, : one.rank], b[expert, half, :, : one.rank] = tensors[one.a], tensors[one.b]
                placed.scales[expert, half] = one.scale
        return placed

    def load(self, slot: int, placed: Placed | None) -> None:
        """Into a slot what `read` gave."""
        own = slice(slot * len(self.here), (slot + 1) * len(self.here))
        for number, whole in enumerate(self.pair.of_slots):
            if placed is None:
                whole[own].zero_()
            else:
                whole[own].copy_(placed[number])


class Placed(NamedTuple):
    """As a Pair's, of one slot."""

    a: Tensor
    b: Tensor
    scales: Tensor


def step_bytes(model: ModelConfig, rows: int, rank: int) -> int:
    """Of a step: each pair of a row and an expert in its order, and what its adapter's A makes of it."""
    assert model.experts is not None
    return 4 * rows * model.experts.chosen * (2 * rank + 6)
