"""Sums of many rows over two ranks, on their way while products go on: rows go through a layer's products in pieces.

    computed:    o 0 | o 1 | norm 0, gate_up 0, down 0 | norm 1, gate_up 1, down 1 | norm 0, qkv 0 | norm 1, qkv 1 | attention
    on its way:        o 0   o 1                         down 0                      down 1

A norm adds up both ranks' parts of what it reads, in float32, and rounds once: after the residual is added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.norm import add_rms_norm
from headrace.model.config import ModelConfig
from headrace.model.linear import MatrixLinear
from headrace.model.mixer import SelfAttention
from headrace.model.mlp import DenseMlp
from headrace.model.shard import Exchange, Group

PIECE_ROWS = 4096  # about so many
MOST_COLUMNS = 3072  # of a projection to heads that is sooner there in halves


def least_rows() -> int:
    """That make two pieces; of fewer the sums take no longer by NCCL."""
    return 3 * PIECE_ROWS // 2


def spans(rows: int) -> list[slice]:
    each = -(-rows // (max(1, round(rows / PIECE_ROWS)) * 128)) * 128
    return [slice(first, min(first + each, rows)) for first in range(0, rows, each)]


class Pieces:
    """Normed rows of which each piece is there when it is asked for; once, in order."""

    def __init__(
        self, exchange: Exchange, sent: list[tuple[slice, Tensor, int]], residual: Tensor, norm: Callable[..., object]
    ):  # fmt: skip
        self.exchange, self.sent, self.residual, self._norm = exchange, sent, residual, norm
        self.normed = torch.empty_like(residual)

    def __len__(self) -> int:
        return len(self.residual)

    def __iter__(self) -> Iterator[tuple[slice, Tensor]]:
        for span, parts, number in self.sent:
            self.exchange.wait(number)
            into = self.normed[span], self.residual[span]
            self._norm(parts, into[1], into=into)
            yield span, into[0]

    def whole(self) -> Tensor:
        for _ in self:
            pass
        return self.normed


class HeadsProjection(MatrixLinear):
    """A rank's projection to heads: of many rows also of Pieces, of few in halves [2, T, out], whose sum it is, where that
    takes less time: what rotates the heads adds them up."""

    def __init__(self, whole: MatrixLinear):
        super().__init__(whole.transposed.t(), whole.reduce)

    def __call__(self, x: Tensor | Pieces) -> Tensor:
        width = self.transposed.shape[1]
        if isinstance(x, Tensor):
            halves = self.halves(len(x)) if width <= MOST_COLUMNS else None
            return super().__call__(x) if halves is None else halves(x)
        out = x.residual.new_empty((len(x), width))
        for span, rows in x:
            torch.mm(rows, self.transposed, out=out[span])
        return out


def exchange_of(
    config: ModelConfig, layers: Sequence[Any], group: Group, rows: int, dtype: torch.dtype
) -> Exchange | None:  # fmt: skip
    """Where sums of up to so many rows meet, if all layers do their part. Every rank says the same: a bias, which one alone
    has, is not looked for in the layers."""
    fit = not (config.o_bias or config.mlp_bias) and all(
        type(layer.mixer) is SelfAttention and type(layer.mlp) is DenseMlp
        and all(type(of) is MatrixLinear for of in (layer.mixer.out, layer.mlp.down))
        and layer.post_attn_norm is None and layer.post_mlp_norm is None
        for layer in layers
    )  # fmt: skip
    return group.exchange(rows, config.hidden_size, dtype) if fit and rows >= least_rows() else None


def product_into(part: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """(out, x) -> out, which gets this rank's part of what a layer's `part` gives."""
    if not isinstance(part, DenseMlp):
        return part.into
    into, inner = part.down.into, part._inner
    assert into is not None
    return lambda out, x: into(out, inner(x))


def add_in_pieces(
    product: Callable[[Tensor, Tensor], Tensor], x: Tensor | Pieces, residual: Tensor, exchange: Exchange, norm: Tensor,
    eps: float, offset: float, scale: float,
) -> Pieces:  # fmt: skip
    """RMSNorm(residual + scale * the sum of both ranks' product(x)), on its way; the residual is changed in place."""
    begin, sent = exchange.begin(), []
    for span, rows in x if isinstance(x, Pieces) else [(span, x[span]) for span in spans(len(x))]:
        parts = begin(span)
        product(parts[exchange.rank], rows)
        sent.append((span, parts, exchange.send(parts)))
    return Pieces(
        exchange, sent, residual,
        lambda parts, before, into: add_rms_norm(parts, before, norm, eps, offset, scale, into=into),
    )  # fmt: skip
