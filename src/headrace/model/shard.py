"""Which part of a model a rank has, and what the ranks of one core say to each other on the device.

Attention is split by heads, the feed-forward part by its inner columns, embedding and head by ids of the vocabulary. What a
rank gives after o and down is a part of a sum. Loaded without torch: options are checked with it.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from headrace.errors import ParameterError
from headrace.model.config import ModelConfig
from headrace.model.experts_config import ExpertsConfig
from headrace.model.layer_sizes import PerLayer

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor

    from headrace.kernels.all_reduce import PushSpace

_ROWS_TOGETHER = 8  # a head's rows on a rank are a multiple of these, as matrix units like them


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `rank` of the `size` parts of a model; 0 of 1 is the whole."""

    rank: int = 0
    size: int = 1

    def part(self, count: int) -> range:
        """Of `count` things in a row, which `size` divides."""
        each = count // self.size
        return range(self.rank * each, (self.rank + 1) * each)

    def kv_heads(self, count: int) -> range:
        """Of `count` key-value heads; where there are fewer than ranks, several ranks have the same one."""
        if count >= self.size:
            return self.part(count)
        head = self.rank // (self.size // count)
        return range(head, head + 1)

    def vocab_rows(self, vocab_size: int) -> int:
        """Rows of logits that every rank has: the last ones' may stand for no id."""
        if self.size == 1:
            return vocab_size
        return -(-vocab_size // (self.size * _ROWS_TOGETHER)) * _ROWS_TOGETHER

    def vocab(self, vocab_size: int) -> range:
        """The ids whose rows of embedding and head are here."""
        rows = self.vocab_rows(vocab_size)
        return range(min(self.rank * rows, vocab_size), min((self.rank + 1) * rows, vocab_size))

    def config(self, whole: ModelConfig) -> ModelConfig:
        """What the decoder of this rank runs: its heads and inner columns; sizes of hidden states and vocabulary are the
        whole model's. Raises ParameterError, as `check_size`."""
        check_size(whole, self.size)
        return dataclasses.replace(
            whole,
            num_heads=len(self.part(whole.num_heads)),
            num_kv_heads=len(self.kv_heads(whole.num_kv_heads)),
            intermediate_size=len(self.part(whole.intermediate_size)),
            experts=whole.experts and self.experts(whole.experts),
            delta=None if whole.delta is None else whole.delta.part(self.size),
            per_layer=whole.per_layer and self.per_layer(whole.per_layer),
        )

    def per_layer(self, whole: PerLayer) -> PerLayer:
        """As of `config`, layer by layer."""
        parts = (
            of._replace(kv_heads=len(self.kv_heads(of.kv_heads)) if of.kv_heads else 0, inner=len(self.part(of.inner)))
            for of in whole.sizes
        )
        return dataclasses.replace(whole, sizes=tuple(parts))

    def experts(self, whole: ExpertsConfig) -> ExpertsConfig:
        """Whole experts, and a part of the shared one."""
        own = self.part(whole.count)
        return dataclasses.replace(whole, first=own.start, held=len(own), shared_inner=len(self.part(whole.shared_inner)))


WHOLE = Shard()


class Exchange(Protocol):
    """Where two ranks bring each other their parts of large sums while they compute on. Both call the same, in the same order;
    of two sums one after the other at least one is there as a whole before the next begins."""

    rank: int
    rows: int  # that a sum has at most

    def begin(self) -> Callable[[slice], Tensor]:
        """Of a new sum: span of rows -> both ranks' parts of these, [2, rows, width], where this one leaves its own."""
        ...

    def send(self, parts: Tensor) -> int:
        """This rank's part of `parts`, that the current stream writes, is on its way: the number of this."""
        ...

    def wait(self, number: int) -> None:
        """The current stream waits for the part of the other rank of this number."""
        ...


class Group(Protocol):
    """The ranks of one core. Every rank calls the same, in the same order, with tensors of the same shape and dtype."""

    shard: Shard

    def sum(self, part: Tensor) -> Tensor:
        """All parts, added in the order of ranks in float32 and rounded once: the same bits on every rank. `part` is given up:
        it may be changed."""
        ...

    def prepare(self, rows: int, width: int, dtype: torch.dtype) -> None:
        """Captured steps will add up as many as `rows` rows of `width` columns. Once, before the first step."""
        ...

    def push_space(self, rows: int, width: int, dtype: torch.dtype) -> PushSpace | None:
        """Where kernels of all ranks meet for such rows, if the ranks are cards that see each other's memory."""
        ...

    def exchange(self, rows: int, width: int, dtype: torch.dtype) -> Exchange | None:
        """Memory for sums of up to so many rows that are not captured, of two cards that see each other's. Not in a step."""
        ...

    def peer_bytes(self) -> int:
        """What both have taken of this rank's card, beside what torch counts."""
        ...

    def gather(self, part: Tensor) -> Tensor:
        """[size, *part.shape]: all parts, in the order of ranks."""
        ...

    def share(self, tensor: Tensor) -> None:
        """Rank 0's content into everybody's, in place."""
        ...


def sizes_of(model: ModelConfig) -> list[int]:
    """The numbers of ranks that the model can be split into."""
    heads, kv_heads = model.num_heads, {of.heads for of in model.kv_shapes if of.heads}
    return [
        size
        for size in range(1, heads + 1)
        if not (
            heads % size
            or any(count % size and size % count for count in kv_heads)
            or any(count % size for count, _ in _of_layers(model))
        )
    ]


def _of_layers(model: ModelConfig) -> list[tuple[int, str]]:
    """What of the layers is divided besides heads of attention: how many, of what."""
    inners = {model.at(layer).intermediate_size for layer in range(model.num_layers)}
    experts, inner = model.experts, (math.gcd(*inners), "inner columns")
    delta = [] if model.delta is None else [(model.delta.key_heads, "key heads of delta nets")]
    if experts is None:
        return [inner, *delta]
    dense = model.per_layer is not None or not all(experts.at(layer) for layer in range(model.num_layers))
    shared = (experts.shared_inner, "inner columns of the shared expert")
    return [(experts.count, "experts")] + [inner] * dense + [shared] * bool(experts.shared_inner) + delta


def check_size(model: ModelConfig, size: int) -> None:
    """Raises ParameterError for a tensor_parallel_size that does not divide the model."""
    sizes = sizes_of(model)
    if size not in sizes:
        allowed = ", ".join(map(str, sizes))
        counts = [(model.num_heads, "heads"), (model.num_kv_heads, "key-value heads"), *_of_layers(model)]
        *parts, last = (f"{count} {what}" for count, what in counts)
        what = f"{', '.join(parts)} and {last}"
        raise ParameterError("tensor_parallel_size", size, f"{allowed} (what divides this model's {what})")
