"""gpt-oss as a family: experts with biases and a clamped activation, attention sinks, windows in every second layer.

How its files hold the experts is in formats/gpt_oss_experts.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from headrace.errors import CheckpointError
from headrace.model.config import ModelConfig
from headrace.model.families_experts import experts_of
from headrace.model.family import Family, typed_windows
from headrace.model.hf_config import HfConfig
from headrace.model.weight_names import PRE_NORM_NAMES, WeightSpec

GPT_OSS, GPT_OSS_APART = "gpt_oss", "gpt_oss_apart"  # the other: gate and up in tensors of their own, as in GGUF files
_SLOPE = 1.702  # that of kernels/experts.py, which imports torch
_NAMES = {
    **PRE_NORM_NAMES,
    "router": ("mlp.router.weight",),
    "router_bias": ("mlp.router.bias",),
    "experts_gate_up": ("mlp.experts.gate_up_proj[{}]",),
    "experts_gate_up_bias": ("mlp.experts.gate_up_proj_bias[{}]",),
    "experts_down": ("mlp.experts.down_proj[{}]",),
    "experts_down_bias": ("mlp.experts.down_proj_bias[{}]",),
    "sinks": ("self_attn.sinks",),
}
_NAMES_APART = {
    **_NAMES,
    "experts_gate_up": ("mlp.experts.gate_proj.weight[{}]", "mlp.experts.up_proj.weight[{}]"),
    "experts_gate_up_bias": ("mlp.experts.gate_proj.bias[{}]", "mlp.experts.up_proj.bias[{}]"),
    "experts_down": ("mlp.experts.down_proj.weight[{}]",),
    "experts_down_bias": ("mlp.experts.down_proj.bias[{}]",),
    "sinks": ("self_attn.sinks.weight",),
}
_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def _gpt_oss(c: HfConfig) -> dict[str, Any]:
    if (slope := c.number("swiglu_alpha", _SLOPE)) != _SLOPE:
        raise CheckpointError(f"config.json: swiglu_alpha is {slope}, and {_SLOPE} alone is supported")
    if not (c.raw.get("rope_parameters") or c.raw.get("rope_scaling")):
        c = HfConfig({**c.raw, "rope_scaling": _ROPE})
    bias = c.flag("attention_bias")
    return {
        "qkv_bias": bias,
        "o_bias": bias,
        "sinks": True,
        "windows": typed_windows(c, lambda layer: layer % 2 == 0),
        "rope": c.rope("full_attention", c.number("rope_theta", 150_000.0)),
        **experts_of(
            c, 128, "intermediate_size", score="chosen", router_bias=True, biases=True, clamp=c.number("swiglu_limit", 7.0)
        ),
    }


_DEFAULTS = {
    "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 150_000.0, "sliding_window": 128,
    "num_experts_per_tok": 4, "attention_bias": True,
}  # fmt: skip
GPT_OSS_FAMILY: Mapping[str, Family] = MappingProxyType({
    GPT_OSS: Family(("GptOssForCausalLM",), _gpt_oss, _NAMES, _DEFAULTS),
    GPT_OSS_APART: Family(("GptOssForCausalLM of GGUF",), _gpt_oss, _NAMES_APART, _DEFAULTS),
})


def sinks_plan(plan: list[WeightSpec], config: ModelConfig, names: Mapping[str, tuple[str, ...]]) -> list[WeightSpec]:
    """`plan` with every layer's sinks [heads], behind its products."""
    found = []
    for spec in plan:
        found.append(spec)
        layer, _, name = spec.target.rpartition(".")
        if name == "o":
            source = f"model.{layer}.{names['sinks'][0]}"
            found.append(WeightSpec(f"{layer}.sinks", (config.num_heads,), ((source, config.num_heads),), exact=True))
    return found
