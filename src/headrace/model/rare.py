"""What few families have, out of the decoder's way: queries scaled after their rotation, norms after it, LayerNorms.

Only the common decoder runs these, but for what another path takes by name; `rare_parts` says what makes it step aside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from headrace.cache.kv_cache import KVCache
from headrace.kernels.narrow_linear import rounds
from headrace.kernels.norm import add_rms_norm, rms_norm
from headrace.kernels.quantize_rows import quantize_normed
from headrace.model.attention import AttentionBackend, KeyValues
from headrace.model.batch import ForwardBatch
from headrace.model.config import ModelConfig


class HeadNorms(Protocol):
    """Of a layer's weights."""

    q_norm: Tensor | None
    k_norm: Tensor | None


def rare_parts(config: ModelConfig) -> list[str]:
    """What of the model only the common decoder runs, in words."""
    there = {
        "a mixture of experts": config.experts is not None,
        "gated delta nets": config.delta is not None,
        "LayerNorm": config.norm != "rms",
        "attention and MLP side by side": config.parallel,
        "an MLP without gate": not config.gated,
        "a norm after the rotation": config.qk_norm == "rotated",
        "queries scaled by position": config.query_scale is not None,
        "layers of different sizes": config.per_layer is not None,
        "attention sinks": config.sinks,
        "multi-head latent attention": config.latent is not None,
    }
    return [name for name, has in there.items() if has]


def as_needed(config: ModelConfig, max_model_len: int) -> ModelConfig:
    """Without what sequences of up to so many tokens do not meet: before the first period ends, queries are scaled by 1."""
    scale = config.query_scale
    return config if scale is None or max_model_len > scale[1] else replace(config, query_scale=None)


def norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Over the last dimension of x [..., H]: RMSNorm by a weight [H], LayerNorm by [2 H]: weight, then bias."""
    if weight.shape[0] == x.shape[-1]:
        return rms_norm(x, weight, eps, offset)
    factor, bias = weight.float().chunk(2)
    return torch.nn.functional.layer_norm(x.float(), factor.shape, factor + offset, bias, eps).to(x.dtype)


def add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0, scale: float = 1.0,
    post: Tensor | None = None, reader: Any = None,
) -> tuple[Any, Tensor]:  # fmt: skip
    """residual + scale * x, and its `norm`: (normed, new residual), both [T, H]. With `post` x is normed by that before; it
    may be [P, T, H], parts of a sum. Many rows come in FP8, as `Rounded`, where their `reader` takes them so."""
    if getattr(reader, "takes_rounded", False) and post is None and weight.shape[0] == residual.shape[-1] and rounds(residual):
        return quantize_normed(x, residual, weight, eps, offset, scale)
    if weight.shape[0] == residual.shape[-1] and (post is None or post.shape == weight.shape):
        return add_rms_norm(x, residual, weight, eps, offset, scale, post)
    x = x if x.dim() == residual.dim() else x.sum(0)
    x = x if post is None else norm(x, post, eps, offset)
    residual = torch.add(residual, x, alpha=scale)
    return norm(residual, weight, eps, offset), residual


def scaled_logits(logits: Tensor, config: ModelConfig) -> Tensor:
    """`logits`, changed in place: scaled (Granite), bent by a soft cap (Gemma)."""
    if config.logit_scale != 1.0:
        logits = logits.mul_(config.logit_scale)
    if config.logit_softcap:
        logits = logits.div_(config.logit_softcap).tanh_().mul_(config.logit_softcap)
    return logits


def before_rotation(config: ModelConfig, weight: Tensor | None) -> Tensor | None:
    """What a head is normed with before it is rotated. A rotation keeps lengths: of a norm after it only the weights have to
    wait (see `scaling_queries`)."""
    return weight if weight is None or config.qk_norm != "rotated" else torch.ones_like(weight)


def scaling_queries(
    attention: AttentionBackend, config: ModelConfig, layers: Sequence[HeadNorms], length: int, device: torch.device
) -> AttentionBackend:
    """`attention`, behind what a model still does to its queries after their rotation; positions are below `length`.

    Queries and keys that are normed after it meet in a product only, so that the keys' weights can be the queries' as well.
    """
    by_layer, by_position = None, None
    if config.qk_norm == "rotated":
        norms = [(layer.q_norm, layer.k_norm) for layer in layers]
        by_layer = [q.float() * k.float() for q, k in norms if q is not None and k is not None]
    if config.query_scale is not None:
        growth, period = config.query_scale
        by_position = 1 + growth * torch.log(1 + torch.floor(torch.arange(length, dtype=torch.float32, device=device) / period))
    if by_layer is None and by_position is None:
        return attention
    return _ScaledQueries(attention, by_layer, by_position)


class _ScaledQueries(AttentionBackend):
    """Multiplies queries by a vector [head_dim] of the layer, and by a factor of their position."""

    def __init__(self, inner: AttentionBackend, by_layer: list[Tensor] | None, by_position: Tensor | None):
        self._inner, self._by_layer, self._by_position = inner, by_layer, by_position

    def begin(self, batch: ForwardBatch, kv: KVCache) -> None:
        self._inner.begin(batch, kv)
        self.keeps_own = self._inner.keeps_own

    def workspace_bytes(self, max_num_seqs: int) -> int:
        return self._inner.workspace_bytes(max_num_seqs)

    def attend(
        self, q: Tensor, layer: int, kv: KVCache, batch: ForwardBatch, *, scale: float, window: int, softcap: float,
        own: KeyValues | None = None, sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        scaled = q.float()
        if self._by_layer is not None:
            scaled = scaled * self._by_layer[layer]
        if self._by_position is not None:
            scaled = scaled * self._by_position[batch.positions][:, None, None]
        return self._inner.attend(
            scaled.to(q.dtype), layer, kv, batch, scale=scale, window=window, softcap=softcap, own=own, sinks=sinks
        )  # fmt: skip
