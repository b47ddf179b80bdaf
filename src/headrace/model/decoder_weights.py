"""The decoder's weights as the loader gives them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from headrace.model.config import ModelConfig
from headrace.model.weight import Weight

MATRICES = ("qkv", "o", "gate_up", "down")  # of LayerWeights


@dataclass(slots=True)
class LayerWeights:
    """One layer; the field names are the last part of WeightSpec.target. Matrices are [out, in], fused along out."""

    qkv: Weight = field(default_factory=Weight.nothing)  # [q + 2 kv, H]
    o: Weight = field(default_factory=Weight.nothing)  # [H, q]
    gate_up: Weight = field(default_factory=Weight.nothing)  # [2 I, H]; [I, H] without a gate
    down: Weight = field(default_factory=Weight.nothing)  # [H, I]
    input_norm: Tensor | None = None  # [H], or [2 H] of LayerNorm, before attention (pre, sandwich)
    post_attn_norm: Tensor | None = None  # [H], on attention's output (post, sandwich)
    mlp_norm: Tensor | None = None  # [H], before the feed-forward part (pre, sandwich)
    post_mlp_norm: Tensor | None = None  # [H], on the feed-forward part's output (post, sandwich)
    q_norm: Tensor | None = None  # [head_dim] or [q]
    k_norm: Tensor | None = None  # [head_dim] or [kv]
    qkv_bias: Tensor | None = None
    o_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    more: dict[str, Any] = field(default_factory=dict)  # of a wing's mixer or MLP, by names of its own; matrices are Weights


@dataclass(slots=True)
class DecoderWeights:
    """All weights; `lm_head` holds `embedding` itself where they are tied.

    `norm_offset` is what remains to be added to every norm weight: the family's offset, or 0 where the loader added it.
    """

    embedding: Tensor  # [V, H]
    layers: list[LayerWeights]
    final_norm: Tensor  # [H]
    lm_head: Weight  # [V, H]
    norm_offset: float = 0.0

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Any], config: ModelConfig) -> DecoderWeights:
        """From {WeightSpec.target: tensor}, or weight that is narrow; without "lm_head" the embedding is used."""
        layers: list[dict[str, Any]] = [{} for _ in range(config.num_layers)]
        if config.norm == "centred":  # a LayerNorm whose bias is 0
            tensors = {n: torch.cat([t, torch.zeros_like(t)]) if n.endswith("_norm") else t for n, t in tensors.items()}
        for target, tensor in tensors.items():
            if target.startswith("layers."):
                _, index, name = target.split(".")
                layer = layers[int(index)]
                known = layer if name in LayerWeights.__slots__ else layer.setdefault("more", {})
                known[name] = Weight.of(tensor) if isinstance(tensor, Weight) or tensor.ndim == 2 else tensor
        return cls(
            embedding=tensors["embedding"],
            layers=[LayerWeights(**layer) for layer in layers],
            final_norm=tensors["final_norm"],
            lm_head=Weight.of(tensors.get("lm_head", tensors["embedding"])),
            norm_offset=config.norm_offset,
        )

    @property
    def unread_bytes(self) -> int:
        """Of an embedding that is no head: a step reads a few rows of it."""
        held = self.embedding
        return 0 if any(t.data_ptr() == held.data_ptr() for t in self.lm_head.tensors) else held.numel() * held.itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of all distinct tensors."""
        held = [getattr(layer, f.name) for layer in self.layers for f in fields(layer) if f.name != "more"]
        held += [value for layer in self.layers for value in layer.more.values()]
        tensors = [self.embedding, self.final_norm, *self.lm_head.tensors]
        for value in held:
            tensors += value.tensors if isinstance(value, Weight) else [] if value is None else [value]
        return sum({t.data_ptr(): t.numel() * t.itemsize for t in tensors}.values())
