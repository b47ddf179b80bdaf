"""The table of the families with mixtures of experts; see families.py."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from headrace.errors import CheckpointError
from headrace.model.experts_config import ExpertsConfig
from headrace.model.family import Family, every_layer
from headrace.model.hf_config import HfConfig
from headrace.model.weight_names import PRE_NORM_NAMES

QWEN_MOE_NAMES = {
    **PRE_NORM_NAMES,
    "router": ("mlp.gate.weight",),
    "experts_gate_up": ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight"),
    "experts_down": ("mlp.experts.{}.down_proj.weight",),
    "shared_gate_up": ("mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"),
    "shared_down": ("mlp.shared_expert.down_proj.weight",),
    "shared_gate": ("mlp.shared_expert_gate.weight",),
}
MIXTRAL_NAMES = {
    **PRE_NORM_NAMES,
    "router": ("block_sparse_moe.gate.weight",),
    "experts_gate_up": ("block_sparse_moe.experts.{}.w1.weight", "block_sparse_moe.experts.{}.w3.weight"),
    "experts_down": ("block_sparse_moe.experts.{}.w2.weight",),
}


_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")  # names of one thing
MOST_EXPERTS = 4096


def experts_of(c: HfConfig, count: int, inner: str, **fields: Any) -> dict[str, ExpertsConfig]:
    """ModelConfig's field: `count` experts where the config does not say, whose width it has by the name `inner`. Raises
    CheckpointError for numbers that do not go together."""
    name = next((name for name in _COUNTS if c.raw.get(name) is not None), _COUNTS[0])
    number = c.count(name, count, most=MOST_EXPERTS)
    return {"experts": ExpertsConfig(number, c.count("num_experts_per_tok", most=number), c.count(inner), **fields)}


def sparse_layers(c: HfConfig) -> tuple[bool, ...]:
    """Those with experts, by Qwen's two fields."""
    layers, step, dense = c.num_layers(), c.count("decoder_sparse_step", 1), c.raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(not isinstance(layer, int) for layer in dense):
        raise CheckpointError(f"config.json: mlp_only_layers is {dense!r}, wanted a list of layers")
    found = tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))
    return () if all(found) else found


def _qwen3_moe(c: HfConfig) -> dict[str, Any]:
    bias, renormalize, layers = c.flag("attention_bias"), c.flag("norm_topk_prob"), sparse_layers(c)
    return {
        "qkv_bias": bias,
        "o_bias": bias,
        "qk_norm": "head",
        "windows": every_layer(c, c.count("sliding_window", 0) if c.flag("use_sliding_window") else 0),
        **experts_of(c, 128, "moe_intermediate_size", renormalize=renormalize, layers=layers),
    }


def _mixtral(c: HfConfig) -> dict[str, Any]:
    windows = every_layer(c, c.count("sliding_window", 0))
    return {"windows": windows, **experts_of(c, 8, "intermediate_size", renormalize=True)}


EXPERTS_FAMILIES: Mapping[str, Family] = MappingProxyType({
    "qwen3_moe": Family(
        ("Qwen3MoeForCausalLM",), _qwen3_moe, QWEN_MOE_NAMES,
        {
            "num_key_value_heads": 4, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
            "sliding_window": 4096,
        },
    ),
    "mixtral": Family(
        ("MixtralForCausalLM",), _mixtral, MIXTRAL_NAMES,
        {
            "num_key_value_heads": 8, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
        },
    ),
})  # fmt: skip
