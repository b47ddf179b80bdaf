"""Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2): all heads read one cached row a token, whatever the step.

A head's key is W_k c of the token's latent c, and its value W_v c. So its query meets W_k c by meeting c with W_k^T q, and a
weighted sum of values is W_v of the weighted sum of latents: neither keys nor values of heads are ever made. Attention is then
that of many query heads over one key head, whose values are the first columns of its keys.

    normed -> qkv: queries' latent | latent | shared key  -> norms, rotation, cache: latent_rope_write
           -> q_b -> W_k^T per head -> attention over the rows -> W_v per head -> o
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.latent_rows import latent_rope_write
from headrace.kernels.norm import rms_norm
from headrace.model.batch import WantedRows
from headrace.model.config import ModelConfig
from headrace.model.linear import Linear
from headrace.model.mixer import Pass


class LatentAttention:
    """A Mixer. `more` has "q_a_norm" and "q_b" (where queries have a latent of their own), "kv_a_norm" and "kv_b": of each head
    the rows of W_k [nope, rank], then those of W_v [value, rank], held in floats."""

    def __init__(
        self, qkv: Linear, out: Linear, more: Mapping[str, Any], config: ModelConfig, layer: int, make: Callable[..., Linear]
    ):
        assert config.latent is not None
        self.latent, self.heads, self.scale = config.latent, config.num_heads, config.attn_scale
        self.qkv, self.out, self.layer, self.rope = qkv, out, layer, config.rope_of(layer)
        self.q_b: Linear | None = make(more["q_b"], None, None) if self.latent.query_rank else None
        self.q_norm, self.kv_norm = more.get("q_a_norm"), more["kv_a_norm"]
        by_head = more["kv_b"].data.view(self.heads, -1, self.latent.rank)
        self.keys, self.values = by_head[:, : self.latent.nope], by_head[:, self.latent.nope :].transpose(1, 2)
        if self.q_b is not None:  # the layer counts that of `qkv`
            qkv.workspace_bytes = max(qkv.workspace_bytes, self.q_b.workspace_bytes)

    def __call__(self, normed: Tensor, shared: Pass, last: WantedRows | None) -> Tensor:
        """See Mixer: [T, heads * value]."""
        batch, kv, latent = shared.batch, shared.kv, self.latent
        cos, sin = shared.tables[self.rope]
        projected = self.qkv(normed)
        queries, row = projected.split((projected.shape[1] - latent.row, latent.row), 1)
        if self.q_b is not None:
            assert self.q_norm is not None
            queries = self.q_b(rms_norm(queries, self.q_norm, latent.norm_eps))
        q = self._absorbed(queries, len(normed))
        latent_rope_write(
            q, queries, row, shared.positions, cos, sin, self.kv_norm, kv.k[self.layer], batch.slot_mapping, latent
        )
        if last is not None:
            batch, q = last.batch, q[last.index]
            if not batch.num_rows:
                return q.flatten(1)
        del queries, row, projected  # attention is where a layer is widest
        found = shared.attention.attend(q, self.layer, kv, batch, scale=self.scale, window=0, softcap=0.0)
        found = found.view(len(q), self.heads, latent.rank).transpose(0, 1)
        out = found.new_empty(len(q), self.heads, latent.value)
        torch.bmm(found, self.values, out=out.transpose(0, 1))
        return out.flatten(1)

    def _absorbed(self, queries: Tensor, rows: int) -> Tensor:
        """[T, heads, row]: W_k^T of each head's query that is not rotated; place is left for the rest."""
        latent = self.latent
        q = queries.new_empty(rows, self.heads, latent.row)
        straight = queries.view(rows, self.heads, latent.query)[:, :, : latent.nope].transpose(0, 1)
        torch.bmm(straight, self.keys, out=q[:, :, : latent.rank].transpose(0, 1))
        return q
