"""One of several ranks without the others: what it says to them is nothing, the kernels by which it would are noted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from headrace.compile_ahead.weights import META
from headrace.kernels.all_reduce import PushSpace, all_reduce, slots_shape, wire
from headrace.kernels.sample_ranks import WORDS, max_rows
from headrace.model.config import ModelConfig
from headrace.model.decoder_weights import DecoderWeights
from headrace.model.shard import Shard
from headrace.model.weight import Weight


class PlayedGroup:
    """A Group of cards that see each other's memory."""

    def __init__(self, size: int, rows: int, width: int, dtype: torch.dtype):
        self.shard = Shard(0, size)
        self._spaces = _space(size, rows, width, dtype), _space(size, min(rows, max_rows(META)), WORDS, torch.float32)

    def push_space(self, rows: int, width: int, dtype: torch.dtype) -> PushSpace | None:
        return next((space for space in self._spaces if space.takes(rows, width, dtype)), None)

    def sum(self, part: Tensor) -> Tensor:
        space = self.push_space(part.shape[0], part.shape[1], part.dtype) if part.dim() == 2 else None
        return part if space is None else all_reduce(part, space)

    def prepare(self, rows: int, width: int, dtype: torch.dtype) -> None:
        pass

    def exchange(self, rows: int, width: int, dtype: torch.dtype) -> PlayedExchange | None:
        return PlayedExchange(rows, width, dtype) if self.shard.size == 2 else None

    def peer_bytes(self) -> int:
        return 0

    def gather(self, part: Tensor) -> Tensor:
        return part.expand(self.shard.size, *part.shape)

    def share(self, tensor: Tensor) -> None:
        pass


class PlayedExchange:
    """An Exchange with the other of two ranks."""

    rank = 0

    def __init__(self, rows: int, width: int, dtype: torch.dtype):
        self.rows, self._width, self._dtype = rows, width, dtype

    def begin(self) -> Callable[[slice], Tensor]:
        return lambda span: torch.empty((2, span.stop - span.start, self._width), dtype=self._dtype, device=META)

    def send(self, parts: Tensor) -> int:
        return 0

    def wait(self, number: int) -> None:
        pass


def _space(size: int, rows: int, width: int, dtype: torch.dtype) -> PushSpace:
    slots = torch.empty(slots_shape(size, rows, width), dtype=wire(dtype), device=META)
    peers, turns = (torch.empty(n, dtype=of, device=META) for n, of in ((size, torch.int64), (rows, torch.int32)))
    return PushSpace(0, size, slots, peers, turns)


def with_part_of_vocabulary(weights: DecoderWeights, model: ModelConfig, size: int) -> DecoderWeights:
    """`weights` of a rank's layers, with as many rows of embedding and head as it has."""
    rows = Shard(0, size).vocab_rows(model.vocab_size)
    return replace(weights, embedding=weights.embedding[:rows], lm_head=Weight(weights.lm_head.data[:rows]))
