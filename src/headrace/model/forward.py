"""What the engine asks of whatever runs a model. Which one does is chosen in engine/forwards.py, for target and draft alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from headrace.cache.kv_cache import KVCache
from headrace.model.batch import ForwardBatch, WantedRows
from headrace.model.ranks import VocabPart
from headrace.model.vocabulary import TokenlessIds
from headrace.sampling.sampler import Choose

# called before each layer with its index and the residual stream [T, H]: for heads that read the model's inside
HiddenStateHook = Callable[[int, Tensor, ForwardBatch], None]


class Forward(Protocol):
    """Runs the rows of a step; writes their keys and values to the cache. Nothing in it waits for the device."""

    vocab_size: int
    dtype: torch.dtype  # of hidden states
    cache_dtype: torch.dtype  # of keys and values (see KVCache)
    hidden_state_hook: HiddenStateHook | None
    tokenless: TokenlessIds | None  # ids that no logits are given to
    vocab: VocabPart | None  # of one of several ranks: what its logits are
    choose: Choose | None  # its own sampler of rows; None: sampling.sampler's

    def forward(self, batch: ForwardBatch, kv: KVCache, wanted: WantedRows | None = None) -> Tensor:
        """Hidden states [T, H] after the final norm; with `wanted` only those rows' [R, H]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, H] -> logits [R, V], or those of `vocab`."""
        ...

    def decode(self, batch: ForwardBatch, kv: KVCache) -> Tensor:
        """Logits [R, V] of a batch whose sequences have one row each; on a GPU it can be captured."""
        ...

    def activation_bytes(self, max_rows: int) -> int:
        """Of the largest step, of so many rows, for the memory plan: what is freed again."""
        ...

    def workspace_bytes(self, max_num_seqs: int) -> int:
        """Device memory that is kept beside the weights, for the memory plan."""
        ...
