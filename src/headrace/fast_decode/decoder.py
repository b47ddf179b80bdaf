"""The decoder whose decode steps of few rows are fused ones (forward.py)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from headrace.cache.kv_cache import KVCache
from headrace.fast_decode.epilogues import runs_triton
from headrace.fast_decode.forward import FastDecode
from headrace.model.attention import AttentionBackend
from headrace.model.batch import ForwardBatch
from headrace.model.config import ModelConfig
from headrace.model.decoder import Decoder, MakeLinear
from headrace.model.decoder_weights import DecoderWeights
from headrace.model.linear import Linear, make_linear
from headrace.model.mlp import Mlp
from headrace.model.shard import Group


class FastDecoder(Decoder):
    """The decoder, with decode steps of few rows on the fused path."""

    def __init__(
        self, config: ModelConfig, weights: DecoderWeights, attention: AttentionBackend, fast: FastDecode, *,
        max_model_len: int | None = None, decode_rows: int = 0, group: Group | None = None, make: MakeLinear = make_linear,
    ):  # fmt: skip
        super().__init__(
            config, weights, attention, max_model_len=max_model_len, decode_rows=decode_rows, make=make, group=group
        )  # fmt: skip
        self.fast = fast

    def decode(self, batch: ForwardBatch, kv: KVCache) -> Tensor:
        adapters = self.adapters if batch.adapted else None
        if batch.num_rows > self.fast.max_rows or (adapters is not None and not self.fast.takes_adapters(batch.num_rows)):
            return super().decode(batch, kv)
        if adapters is not None:
            adapters.begin(batch, None, fused=runs_triton(batch.token_ids))
        return self.masked(self.fast.forward(batch, kv, self.hidden_state_hook, adapters))

    def _add(self, part: Linear | Mlp, x: Tensor, residual: Tensor, post: Tensor | None, following: Tensor | None, reader: Any):
        """As Decoder; where few rows of several ranks are added up, in the kernel that does so."""
        ranks = self.fast.ranks
        if ranks is None or post is not None or following is None or not ranks.adds_up(len(x)):
            return super()._add(part, x, residual, post, following, reader)
        halves = part.halves(len(x))
        parts = part.product(x)[None] if halves is None else halves(x)
        return ranks.add_norm(parts, residual, following, self.config.residual_scale)

    def workspace_bytes(self, max_num_seqs: int) -> int:
        return super().workspace_bytes(max_num_seqs) + self.fast.num_bytes
