"""The mixers of Qwen3.5, 3.6 and Qwen3-Next: gated delta nets, and between them attention whose output has a gate."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.activation import gate_rows
from headrace.kernels.delta_layer import DeltaLayer
from headrace.kernels.delta_rule import chunk_table, delta_rule
from headrace.model.batch import WantedRows
from headrace.model.config import ModelConfig
from headrace.model.decoder_weights import LayerWeights
from headrace.model.linear import Linear, MakeLinear
from headrace.model.mixer import Mixer, Pass, SelfAttention
from headrace.model.weight import Weight


class GatedAttention:
    """Attention, of which each head's output is multiplied by a sigmoid of the row; the gate lies behind q, k and v."""

    def __init__(self, attention: SelfAttention):
        self.attention, self.out = attention, attention.out
        self.split = attention.config.q_size + 2 * attention.config.kv_size

    def __call__(self, normed: Tensor, shared: Pass, last: WantedRows | None) -> Tensor:
        projected = self.attention.qkv(normed)
        attended = self.attention.attend(projected[:, : self.split], shared, last)
        gate = projected[:, self.split :]
        return gate_rows(attended, gate if last is None else gate[last.index])


class GatedDeltaNet:
    """See kernels/delta_rule.py; the state lies in the cache's StatePool, by slot."""

    def __init__(self, qkv: Linear, out: Linear, gates: Linear | None, config: ModelConfig, layer: int, weights: LayerWeights):
        """`gates`: a product of its own, where they are not in the last columns of `qkv`."""
        assert config.delta is not None
        self.qkv, self.out, self.gates, self.layer = qkv, out, gates, layer
        self.split = config.delta.channels + config.delta.v_size
        self.rule = rule_of(config, weights)

    def __call__(self, normed: Tensor, shared: Pass, last: WantedRows | None) -> Tensor:
        projected = self.qkv(normed)
        gates = projected[:, self.split :] if self.gates is None else self.gates(normed)
        if shared.more is None:
            shared.more = chunk_table(shared.batch)
        out = delta_rule(self.rule, projected, gates, shared.kv.states.of(self.layer), shared.batch, shared.more)
        return out if last is None else out[last.index]


def rule_of(config: ModelConfig, weights: LayerWeights) -> DeltaLayer:
    """What a layer's kernels are given beside the products."""
    delta, more = config.delta, weights.more
    assert delta is not None
    return DeltaLayer(
        delta.key_heads, delta.value_heads, delta.key_dim, delta.value_dim, more["delta_conv"].squeeze(1).contiguous(),
        more["delta_decay"], more["delta_bias"], more["delta_norm"], config.norm_eps,
    )  # fmt: skip


def hybrid_mixer(
    attention: SelfAttention, make: MakeLinear, config: ModelConfig, weights: LayerWeights
) -> Mixer:  # fmt: skip
    """What takes the place of attention in a model of both kinds, by the same two products."""
    assert config.delta is not None
    if config.delta.layers[attention.layer]:
        rows = weights.more.get("delta_gates")
        gates = None if rows is None else make(rows, None, None)
        return GatedDeltaNet(attention.qkv, attention.out, gates, config, attention.layer, weights)
    return GatedAttention(attention) if config.attn_gate else attention


def join_gates(weights: LayerWeights) -> None:
    """One product instead of two, where both are of floats: a small one costs a launch, and hardly more."""
    gates = weights.more.get("delta_gates")
    if gates is not None and gates.kind == weights.qkv.kind == "float":
        weights.qkv = Weight(torch.cat([weights.qkv.data, weights.more.pop("delta_gates").data]))
