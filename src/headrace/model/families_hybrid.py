"""Qwen3.5, Qwen3.6 and Qwen3-Next as data: gated delta nets, and attention with a gate in every fourth layer."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from headrace.errors import CheckpointError
from headrace.model.delta_config import DeltaConfig
from headrace.model.family import Family
from headrace.model.hf_config import HfConfig

_KINDS = ("linear_attention", "full_attention")


def _hybrid(c: HfConfig) -> dict[str, Any]:
    if c.flag("attention_bias"):
        raise CheckpointError("config.json: attention_bias is true: attention with a gate has no biases here")
    if c.raw.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"config.json: hidden_act is {c.raw['hidden_act']!r}, a gated delta net has silu")
    delta = DeltaConfig(
        key_heads=c.count("linear_num_key_heads", 16),
        value_heads=c.count("linear_num_value_heads", 32),
        key_dim=c.count("linear_key_head_dim", 128),
        value_dim=c.count("linear_value_head_dim", 128),
        kernel=c.count("linear_conv_kernel_dim", 4),
        layers=_delta_layers(c),
    )
    if delta.value_heads % delta.key_heads:
        raise CheckpointError(
            f"config.json: {delta.value_heads} linear_num_value_heads are no multiple of {delta.key_heads} linear_num_key_heads"
        )
    return {"qk_norm": "head", "norm_offset": 1.0, "attn_gate": True, "delta": delta}


def _delta_layers(c: HfConfig) -> tuple[bool, ...]:
    layers, interval = c.num_layers(), c.count("full_attention_interval", 4)
    types = c.raw.get("layer_types")
    if types is None:
        types = [_KINDS[(layer + 1) % interval == 0] for layer in range(layers)]
    if not isinstance(types, list) or len(types) != layers or any(kind not in _KINDS for kind in types):
        raise CheckpointError(f"config.json: layer_types {types!r}: wanted {layers} times {' or '.join(_KINDS)}")
    return tuple(kind == "linear_attention" for kind in types)


_DEFAULTS = {"head_dim": 256, "partial_rotary_factor": 0.25}

HYBRID_FAMILIES: Mapping[str, Family] = MappingProxyType({
    "qwen3_5_text": Family(("Qwen3_5ForCausalLM",), _hybrid, defaults={**_DEFAULTS, "num_key_value_heads": 4}),
})  # fmt: skip
