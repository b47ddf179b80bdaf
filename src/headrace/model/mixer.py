"""The part of a layer in which rows meet those before them: attention over the paged cache; others are wings of its shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from headrace.cache.kv_cache import KVCache
from headrace.kernels.qkv import qkv_rope_write
from headrace.model.attention import AttentionBackend
from headrace.model.batch import ForwardBatch, WantedRows
from headrace.model.config import ModelConfig, RopeConfig
from headrace.model.linear import Linear
from headrace.model.rare import before_rotation


@dataclass(slots=True)
class Pass:
    """What all layers of one forward share."""

    batch: ForwardBatch
    kv: KVCache
    attention: AttentionBackend
    positions: Tensor | None  # None: `tables` has the rows' own rotations already
    tables: dict[RopeConfig, tuple[Tensor, Tensor]]
    more: Any = None  # what a wing's mixers tell each other


class Mixer(Protocol):
    """Normed rows [T, H] -> what `out` makes an addition to the residual stream of; all state of the rows is written."""

    out: Linear

    def __call__(self, normed: Tensor, shared: Pass, last: WantedRows | None) -> Tensor:
        """[T, any]; with `last` only of those rows, [R, any]."""
        ...


class SelfAttention:
    """Softmax attention: projections, norms of heads, rotation, cache, and the backend's sum over the cached rows."""

    def __init__(
        self, qkv: Linear, out: Linear, config: ModelConfig, layer: int, q_norm: Tensor | None, k_norm: Tensor | None,
        norm_offset: float, sinks: Tensor | None = None,
    ):  # fmt: skip
        self.qkv, self.out, self.config, self.layer = qkv, out, config, layer
        self.norm_offset, self.sinks, self.normed_values, self.takes_rounded = norm_offset, sinks, False, qkv.takes_rounded
        self.rope, self.window = config.rope_of(layer), config.window(layer)
        self.q_norm, self.k_norm = before_rotation(config, q_norm), before_rotation(config, k_norm)

    def __call__(self, normed: Tensor, shared: Pass, last: WantedRows | None) -> Tensor:
        return self.attend(self.qkv(normed), shared, last)

    def attend(self, projected: Tensor, shared: Pass, last: WantedRows | None) -> Tensor:
        config, batch, kv, attention = self.config, shared.batch, shared.kv, shared.attention
        cos, sin = shared.tables[self.rope]
        q, own = qkv_rope_write(
            projected, shared.positions, cos, sin, kv, self.layer, batch.slot_mapping,
            num_heads=config.num_heads, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim,
            q_norm=self.q_norm, k_norm=self.k_norm, eps=config.norm_eps, norm_offset=self.norm_offset,
            normed_values=self.normed_values, keep=attention.keeps_own,
        )  # fmt: skip
        if last is not None:
            batch, q = last.batch, q[last.index]
            if not batch.num_rows:
                return q.flatten(1)
        return attention.attend(
            q, self.layer, kv, batch,
            scale=config.attn_scale, window=self.window, softcap=config.attn_softcap, own=own, sinks=self.sinks,
        )  # fmt: skip
