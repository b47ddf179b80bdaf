"""The decoder whose decode steps of few rows are fused ones (forward.py)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from headrace.cache.kv_cache import KVCache
from headrace.fast_decode.epilogues import runs_triton
from headrace.fast_decode.forward import FastDecode
from headrace.fast_decode.pieces import (
    HeadsProjection,
    Pieces,
    add_in_pieces,
    exchange_of,
    least_rows,
    product_into,
)
from headrace.model.attention import AttentionBackend
from headrace.model.batch import ForwardBatch
from headrace.model.config import ModelConfig
from headrace.model.decoder import Decoder, MakeLinear
from headrace.model.decoder_weights import DecoderWeights
from headrace.model.linear import Linear, MatrixLinear, make_linear
from headrace.model.mixer import Mixer, SelfAttention
from headrace.model.mlp import DenseMlp, Mlp
from headrace.model.shard import Exchange, Group


class FastDecoder(Decoder):
    """The decoder, with decode steps of few rows on the fused path."""

    def __init__(
        self, config: ModelConfig, weights: DecoderWeights, attention: AttentionBackend, fast: FastDecode, *,
        max_model_len: int | None = None, decode_rows: int = 0, group: Group | None = None, make: MakeLinear = make_linear,
        most_rows: int = 0,
    ):  # fmt: skip
        """As Decoder. Steps of up to `most_rows` rows of two ranks add up beside products, where none as large is captured (an
        Exchange counts on the host)."""
        super().__init__(
            config, weights, attention, max_model_len=max_model_len, decode_rows=decode_rows, make=make, group=group
        )  # fmt: skip
        self.fast = fast
        self.exchange: Exchange | None = None
        if group is None:
            return
        for mixer in [layer.mixer for layer in self.layers if type(layer.mixer) is SelfAttention]:
            if type(mixer.qkv) is MatrixLinear:
                mixer.qkv = HeadsProjection(mixer.qkv)
        self.exchange = exchange_of(config, self.layers, group, most_rows if decode_rows < least_rows() else 0, self.dtype)

    def decode(self, batch: ForwardBatch, kv: KVCache) -> Tensor:
        adapters = self.adapters if batch.adapted else None
        if batch.num_rows > self.fast.max_rows or (adapters is not None and not self.fast.takes_adapters(batch.num_rows)):
            return super().decode(batch, kv)
        if adapters is not None:
            adapters.begin(batch, None, fused=runs_triton(batch.token_ids))
        return self.masked(self.fast.forward(batch, kv, self.hidden_state_hook, adapters))

    def _add(self, part: Linear | Mlp, x: Any, residual: Tensor, post: Tensor | None, following: Tensor | None, reader: Any):
        """As Decoder; where few rows of several ranks are added up, in the kernel that does so, and many in pieces. `x` may be
        `Pieces`, or `Rounded` as there."""
        ranks, scale, rows = self.fast.ranks, self.config.residual_scale, len(residual)
        if ranks is not None and post is None and following is not None:
            if ranks.adds_up(rows):
                halves = part.halves(rows)
                return ranks.add_norm(part.product(x)[None] if halves is None else halves(x), residual, following, scale)
            if self.exchange is not None and isinstance(x, Tensor | Pieces) and least_rows() <= rows <= self.exchange.rows:
                eps, offset = ranks.eps, ranks.norm_offset
                pieces = add_in_pieces(product_into(part), x, residual, self.exchange, following, eps, offset, scale)
                return pieces if self._takes_pieces(reader) else pieces.whole(), residual
        return super()._add(part, x, residual, post, following, reader)

    def _takes_pieces(self, reader: Mixer | Mlp | None) -> bool:
        """Attention does so unless a hook reads the whole residual before."""
        if isinstance(reader, SelfAttention):
            return isinstance(reader.qkv, HeadsProjection) and self.hidden_state_hook is None
        return isinstance(reader, DenseMlp)

    def workspace_bytes(self, max_num_seqs: int) -> int:
        return super().workspace_bytes(max_num_seqs) + self.fast.num_bytes
