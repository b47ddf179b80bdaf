"""Each supported architecture as data, and the way from a Hugging Face config to our ModelConfig.

A family is a table entry: its architecture names, how its switches follow from the config, and where its weights lie in
a checkpoint. To add one, write the entry and a test that holds its logits against Transformers (tests/tiny_models.py,
tests/test_model_families.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from headrace.errors import CheckpointError
from headrace.model.config import ModelConfig, RopeConfig
from headrace.model.delta_weights import delta_plan
from headrace.model.experts_weights import experts_plan
from headrace.model.families_experts import EXPERTS_FAMILIES
from headrace.model.families_gemma4 import GEMMA4_FAMILIES, gemma4_plan
from headrace.model.families_hybrid import HYBRID_FAMILIES
from headrace.model.families_latent import LATENT_FAMILIES
from headrace.model.family import Family, biases, every_layer, granite, hunyuan, qwen_windows, rope_local, typed_windows
from headrace.model.formats.quantized import quantization_of
from headrace.model.gpt_oss import GPT_OSS_FAMILY, sinks_plan
from headrace.model.hf_config import MOST_HEADS, HfConfig
from headrace.model.text_part import WRAPPERS, text_config
from headrace.model.weight_names import (
    APERTUS_NAMES,
    FUSED_NAMES,
    GLM_NAMES,
    HUNYUAN_NAMES,
    POST_NORM_NAMES,
    SANDWICH_NORM_NAMES,
    STARCODER_NAMES,
    UNGATED_NAMES,
    WeightSpec,
    plan_weights,
    xielu_plan,
)

MOST_POSITIONS = 2**24  # as max_model_len has it: there is a table of them


def _mistral(c: HfConfig) -> dict[str, Any]:
    return {"windows": every_layer(c, c.count("sliding_window", 0))}


def _qwen2(c: HfConfig) -> dict[str, Any]:
    return {"qkv_bias": True, "windows": qwen_windows(c)}


def _qwen3(c: HfConfig) -> dict[str, Any]:
    bias = c.flag("attention_bias")
    return {"qkv_bias": bias, "o_bias": bias, "qk_norm": "head", "windows": qwen_windows(c)}


def _olmo2(c: HfConfig) -> dict[str, Any]:
    bias = c.flag("attention_bias")
    return {"qkv_bias": bias, "o_bias": bias, "norm_place": "post", "qk_norm": "full"}


def _olmo3(c: HfConfig) -> dict[str, Any]:
    return {
        **_olmo2(c),
        "windows": typed_windows(c, lambda layer: (layer + 1) % 4 != 0),
        "rope_local": rope_local(c, c.number("rope_theta", 500_000.0)),
    }


def _smollm3(c: HfConfig) -> dict[str, Any]:
    layers, interval = c.num_layers(), c.count("no_rope_layer_interval", 4)
    rotated = c.raw.get("no_rope_layers")  # 1: the layer has rotary embedding
    if rotated is None:
        rotated = [int((layer + 1) % interval != 0) for layer in range(layers)]
    if not isinstance(rotated, list) or len(rotated) < layers or any(value not in (0, 1) for value in rotated):
        raise CheckpointError(f"config.json: no_rope_layers is {rotated!r}, wanted {layers} times 0 or 1")
    rope_layers = tuple(map(bool, rotated[:layers]))
    windowed = c.flag("use_sliding_window")
    windows = typed_windows(c, lambda layer: windowed and not rope_layers[layer])
    return {**biases(c), "rope_layers": rope_layers, "windows": windows}


def _exaone4(c: HfConfig) -> dict[str, Any]:
    windows = typed_windows(c, lambda layer: (layer + 1) % c.count("sliding_window_pattern", 4) != 0)
    # with a window in the config, the layers without one have no rotary embedding
    rope_layers = tuple(map(bool, windows or (0,) * c.num_layers())) if c.count("sliding_window", 0) else ()
    return {"norm_place": "post", "qk_norm": "head", "windows": windows, "rope_layers": rope_layers}


def _seed_oss(c: HfConfig) -> dict[str, Any]:
    return {"qkv_bias": c.flag("attention_bias"), "o_bias": c.flag("attention_out_bias"), "mlp_bias": c.flag("mlp_bias")}


def _glm4(c: HfConfig) -> dict[str, Any]:
    return {"qkv_bias": c.flag("attention_bias"), "norm_place": "sandwich", "rope_interleaved": True}


def _ernie(c: HfConfig) -> dict[str, Any]:
    bias = c.flag("use_bias")
    return {"qkv_bias": bias, "o_bias": bias, "mlp_bias": bias, "rope_interleaved": True}


def _ministral3(c: HfConfig) -> dict[str, Any]:
    if not (c.raw.get("rope_parameters") or c.raw.get("rope_scaling")):
        c = HfConfig({**c.raw, "rope_parameters": _MINISTRAL_ROPE})
    entries = HfConfig(c.rope_entries("full_attention"))
    growth = entries.number("llama_4_scaling_beta", 0.0)
    period = entries.count("original_max_position_embeddings", c.count("max_position_embeddings", 2048))
    rope = c.rope("full_attention", c.number("rope_theta", 10_000.0))
    return {**_mistral(c), "rope": rope, "query_scale": (growth, period) if growth else None}


def _starcoder2(c: HfConfig) -> dict[str, Any]:
    bias = c.flag("use_bias")
    return {
        **_mistral(c),
        "qkv_bias": bias,
        "o_bias": bias,
        "mlp_bias": bias,
        "norm": "layer",
        "norm_eps": c.number("norm_epsilon", 1e-5),
        "gated": False,
    }


def _nemotron(c: HfConfig) -> dict[str, Any]:
    return {**biases(c), "norm": "layer", "norm_offset": 1.0, "norm_eps": c.number("norm_eps", 1e-5), "gated": False}


def _apertus(c: HfConfig) -> dict[str, Any]:
    if not (c.raw.get("rope_parameters") or c.raw.get("rope_scaling")):
        c = HfConfig({**c.raw, "rope_parameters": _APERTUS_ROPE})
    bias, rope = c.flag("attention_bias"), c.rope("full_attention", c.number("rope_theta", 12_000_000.0))
    return {"qkv_bias": bias, "o_bias": bias, "qk_norm": "head", "gated": False, "rope": rope}


def _cohere(c: HfConfig) -> dict[str, Any]:
    if c.flag("use_qk_norm"):
        raise CheckpointError("config.json: use_qk_norm is true: a LayerNorm over each head is not supported")
    bias = c.flag("attention_bias")
    return {
        "qkv_bias": bias,
        "o_bias": bias,
        "norm": "centred",
        "norm_eps": c.number("layer_norm_eps", 1e-5),
        "parallel": True,
        "rope_interleaved": True,
        "logit_scale": c.number("logit_scale", 0.0625),
    }


def _cohere2(c: HfConfig) -> dict[str, Any]:
    pattern = c.count("sliding_window_pattern", 4)
    windows = typed_windows(c, lambda layer: (layer + 1) % pattern != 0)
    # layers without a window have no rotary embedding
    return {**_cohere(c), "windows": windows, "rope_layers": tuple(map(bool, windows or (0,) * c.num_layers()))}


def _gemma(c: HfConfig) -> dict[str, Any]:
    if c.flag("use_bidirectional_attention"):
        raise CheckpointError("config.json: use_bidirectional_attention is not supported")
    bias = c.flag("attention_bias")
    return {
        "qkv_bias": bias,
        "o_bias": bias,
        "norm_place": "sandwich",
        "norm_offset": 1.0,
        "attn_scale": c.number("query_pre_attn_scalar", 256.0) ** -0.5,
        "embed_scale": math.sqrt(c.count("hidden_size")),
    }


def _gemma2(c: HfConfig) -> dict[str, Any]:
    return {
        **_gemma(c),
        "windows": typed_windows(c, lambda layer: layer % 2 == 0),
        "attn_softcap": c.number("attn_logit_softcapping", 50.0 if "attn_logit_softcapping" not in c.raw else 0.0),
        "logit_softcap": c.number("final_logit_softcapping", 30.0 if "final_logit_softcapping" not in c.raw else 0.0),
    }


def _gemma3(c: HfConfig) -> dict[str, Any]:
    if c.raw.get("attn_logit_softcapping"):
        raise CheckpointError("config.json: attn_logit_softcapping is not defined for Gemma-3")
    pattern = c.count("sliding_window_pattern", 6)
    return {
        **_gemma(c),
        "qk_norm": "head",
        "windows": typed_windows(c, lambda layer: (layer + 1) % pattern != 0),
        "logit_softcap": c.number("final_logit_softcapping", 0.0),
        "rope_local": rope_local(c, c.number("rope_local_base_freq", 10_000.0)),
    }


_QWEN_DEFAULTS = {"num_key_value_heads": 32, "sliding_window": 4096}
_MINISTRAL_ROPE = {
    "rope_type": "yarn", "rope_theta": 1_000_000.0, "factor": 16.0, "original_max_position_embeddings": 16384,
    "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
_APERTUS_ROPE = {
    "rope_type": "llama3", "rope_theta": 12_000_000.0, "factor": 8.0, "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
_GEMMA_DEFAULTS = {
    "head_dim": 256, "num_key_value_heads": 4, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 4096,
}  # fmt: skip

FAMILIES: Mapping[str, Family] = MappingProxyType({
    "llama": Family(("LlamaForCausalLM",), biases),
    "mistral": Family(("MistralForCausalLM",), _mistral, defaults={"num_key_value_heads": 8, "sliding_window": 4096}),
    "qwen2": Family(("Qwen2ForCausalLM",), _qwen2, defaults=_QWEN_DEFAULTS),
    "qwen3": Family(("Qwen3ForCausalLM",), _qwen3, defaults={**_QWEN_DEFAULTS, "head_dim": 128}),
    "olmo2": Family(("Olmo2ForCausalLM",), _olmo2, POST_NORM_NAMES, {"rms_norm_eps": 1e-5}),
    "olmo3": Family(
        ("Olmo3ForCausalLM",), _olmo3, POST_NORM_NAMES,
        {"rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "sliding_window": 4096},
    ),
    "smollm3": Family(("SmolLM3ForCausalLM",), _smollm3, defaults={"num_key_value_heads": 4, "rope_theta": 2_000_000.0}),
    "exaone4": Family(
        ("Exaone4ForCausalLM",), _exaone4, POST_NORM_NAMES,
        {"rms_norm_eps": 1e-5, "num_key_value_heads": 32, "sliding_window": 4096},
    ),
    "seed_oss": Family(
        ("SeedOssForCausalLM",), _seed_oss, defaults={"attention_bias": True, "head_dim": 128, "num_key_value_heads": 8}
    ),
    "ministral3": Family(
        ("Ministral3ForCausalLM",), _ministral3,
        defaults={"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5},
    ),
    "glm4": Family(
        ("Glm4ForCausalLM",), _glm4, GLM_NAMES,
        {
            "num_key_value_heads": 2, "head_dim": 128, "attention_bias": True, "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1.5625e-7,
        },
    ),
    "ernie4_5": Family(
        ("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"), _ernie,
        defaults={"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0},
    ),
    "hunyuan_v1_dense": Family(("HunYuanDenseV1ForCausalLM",), hunyuan, HUNYUAN_NAMES, {"rms_norm_eps": 1e-5}),
    "starcoder2": Family(
        ("Starcoder2ForCausalLM",), _starcoder2, STARCODER_NAMES,
        {"num_key_value_heads": 2, "hidden_act": "gelu_pytorch_tanh", "use_bias": True},
    ),
    "nemotron": Family(
        ("NemotronForCausalLM",), _nemotron, UNGATED_NAMES, {"hidden_act": "relu2", "partial_rotary_factor": 0.5}
    ),
    "apertus": Family(
        ("ApertusForCausalLM",), _apertus, APERTUS_NAMES,
        {"hidden_act": "xielu", "rms_norm_eps": 1e-5},
    ),
    "cohere": Family(("CohereForCausalLM",), _cohere, defaults={"max_position_embeddings": 8192, "rope_theta": 500_000.0}),
    "cohere2": Family(("Cohere2ForCausalLM",), _cohere2, defaults={"max_position_embeddings": 8192, "sliding_window": 4096}),
    "granite": Family(("GraniteForCausalLM",), granite),
    "phi3": Family(
        ("Phi3ForCausalLM",), _mistral, FUSED_NAMES,
        {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    ),
    "gemma2": Family(("Gemma2ForCausalLM",), _gemma2, SANDWICH_NORM_NAMES, _GEMMA_DEFAULTS),
    "gemma3_text": Family(
        ("Gemma3ForCausalLM",), _gemma3, SANDWICH_NORM_NAMES, {**_GEMMA_DEFAULTS, "rope_theta": 1_000_000.0}
    ),
    **EXPERTS_FAMILIES,
    **HYBRID_FAMILIES,
    **GPT_OSS_FAMILY,
    **LATENT_FAMILIES,
    **GEMMA4_FAMILIES,
})  # fmt: skip


def model_config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """ModelConfig of a parsed `config.json`, of Transformers 4 or 5.

    Raises CheckpointError that names the architecture, or the field and its value, when it is missing, malformed or not
    supported.
    """
    config = text_config(config)
    key = family_of(config)
    family = FAMILIES[key]
    c = HfConfig({**family.defaults, **config})
    quantization_of(config)  # refused here if it is not supported
    heads, hidden = c.count("num_attention_heads", most=MOST_HEADS), c.count("hidden_size")
    kv_heads = c.count("num_key_value_heads", heads)
    head_dim = c.count("head_dim", hidden // heads)
    if heads % kv_heads:
        raise CheckpointError(f"config.json: {heads} attention heads are no multiple of {kv_heads} num_key_value_heads")
    rope = c.rope("full_attention", c.number("rope_theta", 10_000.0))
    fields: dict[str, Any] = {
        "family": key,
        "vocab_size": c.count("vocab_size"),
        "hidden_size": hidden,
        "num_layers": c.num_layers(),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": c.count("intermediate_size"),
        "rope": rope,
        "norm_eps": c.number("rms_norm_eps", 1e-6),
        "attn_scale": head_dim**-0.5,
        "dtype": c.dtype(),
        "bos_token_id": c.token_ids("bos_token_id")[0] if c.token_ids("bos_token_id") else None,
        "eos_token_ids": c.token_ids("eos_token_id"),
    }
    fields.update(family.switches(c))
    fields["activation"] = c.activation(gated=fields.get("gated", True))
    longest = fields["max_position"] = _max_position(fields["rope"], two_bases=fields.get("rope_local") is not None)
    if longest > MOST_POSITIONS:
        raise CheckpointError(f"config.json: max_position_embeddings, scaled, is {longest}, wanted at most {MOST_POSITIONS}")
    return ModelConfig(**fields)


def weight_plan(config: ModelConfig) -> list[WeightSpec]:
    """The weights that a checkpoint of `config` must hold; see WeightSpec."""
    names = FAMILIES[config.family].weight_names
    plan = plan_weights(config, names)
    if config.per_layer is not None:
        return gemma4_plan(plan, config, names)
    plan = plan if config.activation != "xielu" else xielu_plan(plan)
    plan = plan if config.experts is None else experts_plan(plan, config, names)
    plan = sinks_plan(plan, config, names) if config.sinks else plan
    return plan if config.delta is None else delta_plan(plan, config)


def family_of(config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or []
    if not isinstance(names, list):
        raise CheckpointError(f"config.json: architectures is {names!r}, wanted a list of names")
    kind = config.get("model_type")
    if not names and isinstance(kind, str) and kind in FAMILIES:
        return kind
    for key, family in FAMILIES.items():
        if any(name in family.architectures for name in names):
            return key
    known = ", ".join([*(name for family in FAMILIES.values() for name in family.architectures), *WRAPPERS])
    shown = ", ".join(map(str, names)) or f"model_type {config.get('model_type')!r}"
    raise CheckpointError(f"config.json: architecture {shown} is not supported; known: {known}")


def _max_position(rope: RopeConfig, two_bases: bool) -> int:
    """Longest sequence that the model is made for. Configs with linear, dynamic or yarn scaling give the length before
    it (as vLLM reads them); only Gemma-3, with its two bases, gives the one after."""
    if rope.kind == "yarn" and rope.param("factor"):
        return max(rope.max_position, int(rope.param("original_max_position_embeddings") * rope.param("factor")))
    if rope.kind in ("linear", "dynamic") and not two_bases:
        return int(rope.max_position * rope.param("factor"))
    return rope.max_position
