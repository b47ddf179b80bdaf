"""What a decoder's ranks do together besides adding up the parts of a sum: the two ends, which are split by vocabulary, and
norms over a projection of which each has some heads."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.model.config import ModelConfig
from headrace.model.linear import Linear
from headrace.model.shard import Group
from headrace.model.vocabulary import TokenlessIds


class VocabPart:
    """The ids whose rows of embedding and head this rank has: `ids`, and behind them rows of no id, up to `rows`."""

    def __init__(self, group: Group, vocab_size: int, device: torch.device):
        self.group, self.vocab_size = group, vocab_size
        self.ids, self.rows = group.shard.vocab(vocab_size), group.shard.vocab_rows(vocab_size)
        self._all = TokenlessIds(np.ones(vocab_size, np.bool_), device)
        self._masked: tuple[TokenlessIds | None, TokenlessIds | None] = None, self._all.part(self.ids, self.rows)

    def embed(self, token_ids: Tensor, table: Tensor, scale: float = 1.0) -> Tensor:
        """The rows of all ranks' tables [rows, H] for token_ids [T] int32, the nearest for one that is in none, times `scale`:
        [T, H]."""
        here = token_ids.clamp(0, self.vocab_size - 1) - self.ids.start
        there = (here >= 0) & (here < len(self.ids))
        found = F.embedding(here.clamp(0, self.rows - 1), table)
        rows = self.group.sum(found.masked_fill_(~there[:, None], 0.0))
        return rows if scale == 1.0 else rows.mul_(scale)

    def mask(self, logits: Tensor, tokenless: TokenlessIds | None) -> Tensor:
        """-inf, in place, for what is no token among this part's logits [R, rows]; `tokenless` is of the whole vocabulary."""
        of, part = self._masked
        if tokenless is not of:
            part = (tokenless or self._all).part(self.ids, self.rows)
            self._masked = tokenless, part
        return logits if part is None else part.mask(logits)

    def whole(self, logits: Tensor) -> Tensor:
        """All ranks' logits [R, rows] as those of the vocabulary [R, V], whose rows may lie apart; on every rank."""
        return self.group.gather(logits).transpose(0, 1).flatten(1)[:, : self.vocab_size]


def normed_together(
    qkv: Linear, q_norm: Tensor | None, k_norm: Tensor | None, config: ModelConfig, group: Group | None, offset: float
) -> tuple[Linear, Tensor | None, Tensor | None]:  # fmt: skip
    """A layer's fused projection and its norms; those that need all ranks' heads are part of the projection."""
    if group is None or q_norm is None or k_norm is None or config.qk_norm != "full":
        return qkv, q_norm, k_norm
    return NormedQkv(qkv, q_norm, k_norm, config, group, offset), None, None


class NormedQkv(Linear):
    """A part of a fused projection, and then an RMSNorm over all ranks' queries, and one over all their keys (OLMo-2)."""

    def __init__(self, product: Linear, q_norm: Tensor, k_norm: Tensor, config: ModelConfig, group: Group, offset: float):
        """`config` is the rank's."""
        super().__init__(product)
        self.sizes, self.eps, self.offset, self.group = (len(q_norm), len(k_norm)), config.norm_eps, offset, group
        self.weights = q_norm.float() + offset, k_norm.float() + offset
        # where several ranks have the same keys, their squares are in the sum as often
        counts = [size * group.shard.size for size in self.sizes]
        self.counts = torch.tensor(counts, dtype=torch.float32, device=q_norm.device)

    def __call__(self, x: Tensor) -> Tensor:
        projected = super().__call__(x)
        parts = projected[:, : sum(self.sizes)].float().split(self.sizes, 1)
        squares = self.group.sum(torch.stack([part.square().sum(1) for part in parts], 1))
        factors = torch.rsqrt(squares / self.counts + self.eps).unbind(1)
        begin = 0
        for part, weight, factor in zip(parts, self.weights, factors, strict=True):
            stop = begin + part.shape[1]
            projected[:, begin:stop] = part * factor[:, None] * weight
            begin = stop
        return projected
