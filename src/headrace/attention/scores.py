"""Attention whose scores are written out, in float32: for soft caps and sinks, which torch's fused kernel does not know."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Scoring(NamedTuple):
    """What becomes of a product q.k, and what it is weighed beside (see AttentionBackend.attend)."""

    scale: float
    softcap: float
    sinks: Tensor | None  # [heads] float32

    @property
    def plain(self) -> bool:
        """Nothing that torch's fused kernel does not know."""
        return not self.softcap and self.sinks is None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, heads_at: int) -> Tensor:
        """q [.., kv heads, group, .., dim] with the kv heads in dimension `heads_at` and their group behind it; k, v
        [.., keys, dim]: [.., rows, dim] in q's dtype."""
        scores = torch.matmul(q.float(), k.float().transpose(-1, -2))
        if self.softcap:
            scores.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap)
        else:
            scores.mul_(self.scale)
        if mask is not None:
            scores += mask
        if self.sinks is None:
            weights = scores.softmax(-1)
        else:  # one more key, which has no value
            shape = *q.shape[heads_at : heads_at + 2], *(1,) * (q.ndim - heads_at - 2)
            sinks = self.sinks.view(shape).expand(*scores.shape[:-1], 1)
            weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
        return torch.matmul(weights, v.float()).to(q.dtype)
