"""Qwen3.5, Qwen3.6 and Qwen3-Next as data: gated delta nets, and attention with a gate in every fourth layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from headrace.errors import CheckpointError
from headrace.model.delta_config import DeltaConfig
from headrace.model.families_experts import QWEN_MOE_NAMES, experts_of, qwen_layers
from headrace.model.family import Family
from headrace.model.formats.tensor_file import TensorEntry
from headrace.model.hf_config import MOST_HEADS, HfConfig

_KINDS = ("linear_attention", "full_attention")


def _hybrid(c: HfConfig) -> dict[str, Any]:
    if c.flag("attention_bias"):
        raise CheckpointError("config.json: attention_bias is true: attention with a gate has no biases here")
    if c.raw.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"config.json: hidden_act is {c.raw['hidden_act']!r}, a gated delta net has silu")
    delta = DeltaConfig(
        key_heads=c.count("linear_num_key_heads", 16, MOST_HEADS),
        value_heads=c.count("linear_num_value_heads", 32, MOST_HEADS),
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
    if _KINDS[1] not in types:
        raise CheckpointError(f"config.json: layer_types {types!r}: a model with no layer with attention is not supported")
    return tuple(kind == "linear_attention" for kind in types)


def _hybrid_experts(c: HfConfig) -> dict[str, Any]:
    fields = {"renormalize": c.flag("norm_topk_prob"), "layers": qwen_layers(c), "shared_gate": True}
    shared = c.count("shared_expert_intermediate_size", 512)
    return {**_hybrid(c), **experts_of(c, 256, "moe_intermediate_size", shared_inner=shared, **fields)}


def _next(c: HfConfig) -> dict[str, Any]:
    switches = _hybrid_experts(c)
    return {**switches, "delta": replace(switches["delta"], by_key_head=True)}


def fused_apart(entries: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Published files have all experts of a layer in two tensors [experts, out, in]: as many as there are, by the names that an
    expert's own would have."""
    found = dict(entries)
    for name, whole in entries.items():
        prefix, _, kind = name.rpartition(".")
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(kind, ())
        if not parts or not prefix.endswith(".mlp.experts") or len(whole.shape) != 3:
            continue
        del found[name]
        count, rows, columns = whole.shape
        rows, size = rows // len(parts), whole.num_bytes // (count * len(parts))
        for i in range(count * len(parts)):
            own = f"{prefix}.{i // len(parts)}.{parts[i % len(parts)]}.weight"
            offset = whole.offset + i * size
            found[own] = replace(whole, name=own, shape=(rows, columns), offset=offset, num_bytes=size)
    return found


QWEN35_MOE = "qwen3_5_moe_text"
_DEFAULTS = {"head_dim": 256, "partial_rotary_factor": 0.25}

HYBRID_FAMILIES: Mapping[str, Family] = MappingProxyType({
    "qwen3_5_text": Family(("Qwen3_5ForCausalLM",), _hybrid, defaults={**_DEFAULTS, "num_key_value_heads": 4}),
    QWEN35_MOE: Family(
        ("Qwen3_5MoeForCausalLM",), _hybrid_experts, QWEN_MOE_NAMES,
        {
            **_DEFAULTS, "num_key_value_heads": 2, "intermediate_size": 512, "moe_intermediate_size": 512,
            "num_experts_per_tok": 8, "norm_topk_prob": True,
        },
    ),
    "qwen3_next": Family(
        ("Qwen3NextForCausalLM",), _next, QWEN_MOE_NAMES,
        {
            **_DEFAULTS, "num_key_value_heads": 2, "num_experts": 512, "moe_intermediate_size": 512,
            "num_experts_per_tok": 10, "norm_topk_prob": True,
        },
    ),
})  # fmt: skip
