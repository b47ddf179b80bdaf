"""What the decoder asks of attention over the paged KV cache; the backends are in headrace.attention."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from headrace.cache.kv_cache import KVCache
from headrace.model.batch import ForwardBatch

KeyValues = tuple[Tensor, Tensor]  # of rows: [T, kv_heads, head_dim] each


class AttentionBackend(ABC):
    """Computes causal attention of a batch's rows over their sequences' cached keys and values."""

    keeps_own = False  # set by `begin`: `attend` wants the rows' own keys and values

    def begin(self, batch: ForwardBatch, kv: KVCache) -> None:  # noqa: B027  (a hook: most backends need none)
        """Called once per forward, before the first layer: work that all layers share."""

    def workspace_bytes(self, max_num_seqs: int) -> int:
        """Device memory that this backend keeps, for the memory plan."""
        return 0

    @abstractmethod
    def attend(
        self, q: Tensor, layer: int, kv: KVCache, batch: ForwardBatch, *, scale: float, window: int, softcap: float,
        own: KeyValues | None = None, sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """q [T, num_heads, head_dim] -> [T, num_heads * head_dim], q's dtype.

        The batch's own keys and values were written to `kv` before; `own` has those of all rows, if `keeps_own` asked for them.
        A row at position p sees positions <= p and, with a window > 0, > p - window. softcap > 0: scores become
        softcap * tanh(scores / softcap) after `scale`. sinks [num_heads] float32: a score of each head that is weighed beside
        all others, after scale and soft cap, and has no value.
        """
