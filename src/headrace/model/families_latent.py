"""How the families with multi-head latent attention say what they are: DeepSeek V2 and V3, Kimi K2, GLM-4.7-Flash."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from headrace.errors import CheckpointError
from headrace.model.config import RopeConfig
from headrace.model.families_experts import experts_of
from headrace.model.family import Family
from headrace.model.hf_config import HfConfig
from headrace.model.latent_config import LatentConfig
from headrace.model.weight_names import PRE_NORM_NAMES


def _latent(c: HfConfig) -> dict[str, Any]:
    """Attention: the same in all of them."""
    if c.flag("attention_bias"):
        raise CheckpointError("config.json: attention_bias is true, wanted false with multi-head latent attention")
    interleaved = c.raw.get("rope_interleave") is None or c.flag("rope_interleave")
    latent = LatentConfig(
        rank=c.count("kv_lora_rank"), rope=c.count("qk_rope_head_dim"), nope=c.count("qk_nope_head_dim"),
        value=c.count("v_head_dim"), query_rank=0 if c.raw.get("q_lora_rank") is None else c.count("q_lora_rank"),
        interleaved=interleaved,
    )  # fmt: skip
    rope = HfConfig({**c.raw, "head_dim": latent.rope}).rope("full_attention", c.number("rope_theta", 10_000.0))
    if rope.dim != latent.rope:
        raise CheckpointError("config.json: partial_rotary_factor is not 1, wanted that with multi-head latent attention")
    return {
        "latent": latent, "rope": rope, "num_kv_heads": 1, "head_dim": latent.row,
        "attn_scale": latent.query**-0.5 * _magnitude(rope) ** 2,
    }  # fmt: skip


def _magnitude(rope: RopeConfig) -> float:
    """What yarn multiplies all of queries and keys by, not only what is rotated."""
    weight = rope.param("mscale_all_dim")
    factor = rope.param("factor") or 1.0
    return 0.1 * weight * math.log(factor) + 1.0 if rope.kind == "yarn" and weight and factor > 1 else 1.0


def _sparse_layers(c: HfConfig, dense: int) -> tuple[bool, ...]:
    """Those with experts: all but the first, `dense` of them where the config is silent."""
    layers, kinds, first = c.num_layers(), c.raw.get("mlp_layer_types"), c.raw.get("first_k_dense_replace")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != layers or not {"dense", "sparse"}.issuperset(map(str, kinds)):
            raise CheckpointError(f"config.json: mlp_layer_types is {kinds!r}, wanted {layers} times dense or sparse")
        return tuple(kind == "sparse" for kind in kinds)
    if c.count("moe_layer_freq", 1) != 1:
        raise CheckpointError(f"config.json: moe_layer_freq is {c.raw['moe_layer_freq']!r}, wanted 1")
    first = c.count("first_k_dense_replace", dense) if first != 0 else 0
    return tuple(layer >= first for layer in range(layers))


def _experts(c: HfConfig, layers: tuple[bool, ...], fields: dict[str, Any]) -> dict[str, Any]:
    """`fields` of ExpertsConfig, and those that all have."""
    if not any(layers) or c.raw["n_routed_experts"] is None:
        return {}
    shared = (c.count("n_shared_experts") if c.raw.get("n_shared_experts") else 0) * c.count("moe_intermediate_size")
    fields |= {"layers": () if all(layers) else layers, "shared_inner": shared, "scale": c.number("routed_scaling_factor", 1.0)}
    return experts_of(c, 0, "moe_intermediate_size", **fields)


def _only(c: HfConfig, name: str, *allowed: Any) -> None:
    """Raises CheckpointError where the config says something else than what is served; it may be silent."""
    if (value := c.raw.get(name)) is not None and value not in allowed:
        raise CheckpointError(f"config.json: {name} is {value!r}, wanted {' or '.join(map(repr, allowed))}")


def _deepseek_v2(c: HfConfig) -> dict[str, Any]:
    """Only the choice by single scores: that among groups of DeepSeek-V2 weighs a group by its best expert alone."""
    _only(c, "topk_method", "greedy")
    _only(c, "scoring_func", "softmax")
    _only(c, "norm_topk_prob", False)
    return {**_latent(c), **_experts(c, _sparse_layers(c, 0), {})}


def _deepseek_v3(c: HfConfig, dense: int = 3, groups: int = 8, groups_chosen: int = 4) -> dict[str, Any]:
    _only(c, "topk_method", "noaux_tc")
    _only(c, "scoring_func", "sigmoid")
    fields = {
        "score": "sigmoid", "renormalize": c.raw.get("norm_topk_prob") is None or c.flag("norm_topk_prob"), "correction": True,
        "groups": c.count("n_group", groups), "groups_chosen": c.count("topk_group", groups_chosen),
    }  # fmt: skip
    return {**_latent(c), **_experts(c, _sparse_layers(c, dense), fields)}


def _glm4_moe_lite(c: HfConfig) -> dict[str, Any]:
    return _deepseek_v3(c, dense=1, groups=1, groups_chosen=1)


LATENT_NAMES = {  # queries and the row that is cached are made of the hidden state in one product; see latent.py
    **PRE_NORM_NAMES,
    "qkv": ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
    "q_a_norm": ("self_attn.q_a_layernorm",),
    "q_b": ("self_attn.q_b_proj",),
    "kv_a_norm": ("self_attn.kv_a_layernorm",),
    "kv_b": ("self_attn.kv_b_proj",),
    "router": ("mlp.gate.weight",),
    "correction": ("mlp.gate.e_score_correction_bias",),
    "experts_gate_up": ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight"),
    "experts_down": ("mlp.experts.{}.down_proj.weight",),
    "shared_gate_up": ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"),
    "shared_down": ("mlp.shared_experts.down_proj.weight",),
}
_SIZES = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
_DEEPSEEK = {**_SIZES, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "v_head_dim": 128}
_BY_HEAD = {**LATENT_NAMES, "kv_b": ("self_attn.k_b.{}", "self_attn.v_b.{}")}  # as GGUF files have it
LATENT_FAMILIES: Mapping[str, Family] = MappingProxyType({
    "deepseek_v2": Family(
        ("DeepseekV2ForCausalLM",), _deepseek_v2, LATENT_NAMES,
        {**_DEEPSEEK, "n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407, "num_experts_per_tok": 6},
    ),
    "deepseek_v2_by_head": Family(("DeepseekV2ForCausalLM of GGUF",), _deepseek_v2, _BY_HEAD),
    "deepseek_v3_by_head": Family(("DeepseekV3ForCausalLM of GGUF",), _deepseek_v3, _BY_HEAD),
    "deepseek_v3": Family(
        ("DeepseekV3ForCausalLM",), _deepseek_v3, LATENT_NAMES,
        {
            **_DEEPSEEK, "n_routed_experts": 256, "n_shared_experts": 1, "moe_intermediate_size": 2048,
            "num_experts_per_tok": 8, "routed_scaling_factor": 2.5,
        },
    ),
    "glm4_moe_lite": Family(
        ("Glm4MoeLiteForCausalLM",), _glm4_moe_lite, LATENT_NAMES,
        {
            **_SIZES, "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256, "rms_norm_eps": 1e-5,
            "n_routed_experts": 64, "n_shared_experts": 1, "moe_intermediate_size": 1536, "num_experts_per_tok": 4,
            "routed_scaling_factor": 1.8,
        },
    ),
})  # fmt: skip
