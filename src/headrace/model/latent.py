"""Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2): all heads read one cached row a token, whatever the step.

A head's key is W_k c of the token's latent c, and its value W_v c. So its query meets W_k c by meeting c with W_k^T q, and a
weighted sum of values is W_v of the weighted sum of latents: neither keys nor values of heads need be made. Attention is then
that of many query heads over one key head, whose values are the first columns of its keys. Only a card's backend may ask for
those of long fresh prompts (`Expanding`).

    normed -> qkv: queries' latent | latent | shared key  -> norms, rotation, cache: latent_rope_write
           -> q_b -> W_k^T per head -> attention over the rows -> W_v per head -> o
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from headrace.kernels.latent_rows import latent_rope_write
from headrace.kernels.norm import rms_norm
from headrace.model.batch import WantedRows
from headrace.model.config import ModelConfig
from headrace.model.linear import Linear
from headrace.model.mixer import Pass


class Part(Protocol):
    """Adjacent rows of a batch: `rows` of each of `num_seqs` sequences that see nothing but one another."""

    @property
    def first_row(self) -> int: ...
    @property
    def num_seqs(self) -> int: ...
    @property
    def rows(self) -> int: ...


class Expanding(Protocol):
    """A backend that leaves some rows to be attended by keys and values of heads; `keeps_own` says when."""

    dense: Sequence[Part]

    def attend_dense(self, part: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Causal attention of the part's rows, q, k [n, heads, query], v [n, heads, value]: [n, heads, value]."""
        ...


class LatentAttention:
    """A Mixer. `more` has "q_a_norm" and "q_b" (where queries have a latent of their own), "kv_a_norm" and "kv_b": of each head
    the rows of W_k [nope, rank], then those of W_v [value, rank], held in floats."""

    def __init__(
        self, qkv: Linear, out: Linear, more: dict[str, Any], config: ModelConfig, layer: int, make: Callable[..., Linear]
    ):
        assert config.latent is not None
        self.latent, self.heads, self.scale = config.latent, config.num_heads, config.attn_scale
        self.qkv, self.out, self.layer, self.rope = qkv, out, layer, config.rope_of(layer)
        self.q_b: Linear | None = make(more["q_b"], None, None) if self.latent.query_rank else None
        self.q_norm, self.kv_norm = more.get("q_a_norm"), more["kv_a_norm"]
        self.kv_b = more["kv_b"].data
        self.adds: Any = more.pop("kv_b_adds", None)  # a lora.latent.HeadAdds
        by_head = self.kv_b.view(self.heads, -1, self.latent.rank)
        self.keys, self.values = by_head[:, : self.latent.nope], by_head[:, self.latent.nope :].transpose(1, 2)
        if self.q_b is not None:  # the layer counts that of `qkv`
            qkv.workspace_bytes = max(qkv.workspace_bytes, self.q_b.workspace_bytes)

    def __call__(self, normed: Tensor, shared: Pass, last: WantedRows | None) -> Tensor:
        """See Mixer: [T, heads * value]."""
        batch, kv, latent, attention = shared.batch, shared.kv, self.latent, shared.attention
        cos, sin = shared.tables[self.rope]
        projected = self.qkv(normed)
        queries, row = projected.split((projected.shape[1] - latent.row, latent.row), 1)
        if self.q_b is not None:
            assert self.q_norm is not None
            queries = self.q_b(rms_norm(queries, self.q_norm, latent.norm_eps))
        q = queries.new_empty(len(normed), self.heads, latent.row)
        own = latent_rope_write(
            q, queries, row, shared.positions, cos, sin, self.kv_norm, kv.k[self.layer], batch.slot_mapping, latent,
            attention.keeps_own and last is None,
        )  # fmt: skip
        queries = queries.view(len(normed), self.heads, latent.query)
        if last is not None:
            batch, q, queries = last.batch, q[last.index], queries[last.index]
            if not batch.num_rows:
                return q.flatten(1)
        expanding = cast(Expanding, attention)
        dense = expanding.dense if own is not None else []
        rest = _between(dense, len(q))
        for rows in rest:
            straight, into = queries[rows, :, : latent.nope].transpose(0, 1), q[rows, :, : latent.rank].transpose(0, 1)
            torch.bmm(straight, self.keys, out=into)
            if self.adds is not None:
                self.adds.keys(into, straight, rows)
        out = q.new_empty(len(q), self.heads, latent.value)
        for part in dense:
            assert own is not None
            rows = slice(part.first_row, part.first_row + part.num_seqs * part.rows)
            expanded = self._expanded(q[rows, :, latent.rank :], queries[rows], own[rows], rows)
            out[rows] = expanding.attend_dense(part, *expanded, self.scale)
        del queries, row, projected, own  # attention is where a layer is widest
        if rest:
            found = attention.attend(q, self.layer, kv, batch, scale=self.scale, window=0, softcap=0.0)
            found = found.view(len(q), self.heads, latent.rank)
            for rows in rest:
                latents, into = found[rows].transpose(0, 1), out[rows].transpose(0, 1)
                torch.bmm(latents, self.values, out=into)
                if self.adds is not None:
                    self.adds.values(into, latents, rows)
        return out.flatten(1)

    def _expanded(self, rotated: Tensor, queries: Tensor, own: Tensor, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of heads, of queries [n, heads, query], whose last columns `rotated` [n, heads, rope] are to
        replace, and of what is cached of the batch's `rows`, `own` [n, row]."""
        nope, rank = self.latent.nope, self.latent.rank
        q = torch.cat((queries[..., :nope], rotated), -1)
        made = torch.mm(own[:, :rank], self.kv_b.t())
        if self.adds is not None:
            self.adds.expanded(made, own[:, :rank], rows)
        made = made.view(len(q), self.heads, -1)
        k = torch.cat((made[..., :nope], own[:, None, rank:].expand(-1, self.heads, -1)), -1)
        return q, k, made[..., nope:]


def _between(dense: Sequence[Part], count: int) -> list[slice]:
    """Rows 0 .. count without those of `dense`, which are in order."""
    found, begin = [], 0
    for part in dense:
        found.append(slice(begin, part.first_row))
        begin = part.first_row + part.num_seqs * part.rows
    return [rows for rows in (*found, slice(begin, count)) if rows.stop > rows.start]
