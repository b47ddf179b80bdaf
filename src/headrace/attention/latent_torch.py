"""Attention over latents in plain torch: as torch_backend.py, with one key head whose values are its keys' first columns."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.attention.torch_backend import DecodeGroup, Prefill, Stored, TorchAttention
from headrace.cache.kv_cache import KVCache
from headrace.model.attention import KeyValues
from headrace.model.batch import ForwardBatch


class TorchLatentAttention(TorchAttention):
    """q [T, heads, row] -> [T, heads * rank]; all heads of a row meet the same keys in one product."""

    def __init__(self, rank: int):
        super().__init__()
        self.rank = rank

    def attend(
        self, q: Tensor, layer: int, kv: KVCache, batch: ForwardBatch, *, scale: float, window: int, softcap: float,
        own: KeyValues | None = None, sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """See AttentionBackend.attend. `begin` must have been called for this batch."""
        plan = self._plans.get(window)
        if plan is None:
            plan = self._plans[window] = self._plan(batch, kv, window, q.dtype, plain=True)
        groups, prefills = plan
        stored: Stored = kv.k[layer], None
        out = q.new_empty(q.shape[0], q.shape[1], self.rank)
        for group in groups:
            out[group.rows] = self._latent_decode(q[group.rows], group, stored, scale)
        for prefill in prefills:
            self._latent_prefill(q[prefill.rows], prefill, stored, out[prefill.rows], scale)
        return out.flatten(1)

    def _latent_decode(self, q: Tensor, group: DecodeGroup, stored: Stored, scale: float) -> Tensor:
        """q [D, heads, row] -> [D, heads, rank]."""
        rows = self._gather("k", stored, group.index, q.dtype).view(group.count, group.length, -1)
        return self._weighed(q, rows, None if group.mask is None else group.mask[:, 0], scale)

    def _latent_prefill(self, q: Tensor, prefill: Prefill, stored: Stored, out: Tensor, scale: float) -> None:
        """q [n, heads, row], out [n, heads, rank]: in tiles of rows, whose scores fit the scratch memory."""
        rows = self._gather("k", stored, prefill.index, q.dtype).flatten(1)
        count, heads = q.shape[:2]
        tile = max(1, min(self.tile_rows, self.scratch_bytes // (4 * heads * len(rows))))
        for first in range(0, count, tile):
            last = min(first + tile, count)
            mask = self._tile_mask(q, prefill, first, last, 0, 0)
            seen = rows[: prefill.start + last]
            out[first:last] = self._weighed(q[first:last].transpose(0, 1), seen, mask, scale).transpose(0, 1)

    def _weighed(self, q: Tensor, rows: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        """q [.., n, row], rows [.., K, row], mask [.., n or 1, K] -> [.., n, rank]; scores and weights in float32."""
        scores = torch.matmul(q, rows.transpose(-1, -2)).float().mul_(scale)
        if mask is not None:
            scores += mask
        return torch.matmul(scores.softmax(-1).to(q.dtype), rows[..., : self.rank])
