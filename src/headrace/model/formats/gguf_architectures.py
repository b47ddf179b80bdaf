"""The GGUF architectures: the Hugging Face class each comes from, its names of tensors, and what its metadata say beyond the
common. Facts are of llama.cpp's converter and, where that drops something, of its graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from headrace.model.formats import gguf_experts as experts
from headrace.model.formats.gguf_gemma4 import NAMES as GEMMA4
from headrace.model.formats.gguf_gemma4 import TENSORS as GEMMA4_TENSORS
from headrace.model.formats.gguf_gemma4 import gemma4
from headrace.model.formats.gguf_metadata import Metadata

Parts = Callable[[Metadata, dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Architecture:
    """`parts` gives what config.json says beyond the common, from the metadata and the common part. `interleaved`: the
    converter put pairs of q and k rows side by side that lie half a head apart in Transformers (where both have them side by
    side nothing is to be done)."""

    hf_class: str
    model_type: str
    parts: Parts = lambda meta, config: {}
    interleaved: bool = False
    norms_plus_one: bool = False
    names: Mapping[str, str] = field(default_factory=dict)  # differences from the layer names of gguf_model.py
    tensors: Mapping[str, str] = field(default_factory=dict)  # of those whose whole name is another one
    uneven: bool = False  # layers are not alike, and `parts` says so


def _granite(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "embedding_multiplier": meta.number("embedding_scale", 1.0),
        "residual_multiplier": meta.number("residual_scale", 1.0),
        "attention_multiplier": meta.number("attention.scale", config["head_dim"] ** -0.5),
        "logits_scaling": meta.number("logit_scale", 1.0),
    }


def _partial_rotary(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    return {"partial_rotary_factor": meta.integer("rope.dimension_count", config["head_dim"]) / config["head_dim"]}


def _phi3(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    parts = _partial_rotary(meta, config)
    parts["original_max_position_embeddings"] = meta.integer(
        "rope.scaling.original_context_length", config["max_position_embeddings"]
    )
    if meta.get("attention.sliding_window"):
        parts["sliding_window"] = meta.integer("attention.sliding_window")
    return parts


def _gemma(meta: Metadata, config: dict[str, Any], period: int, large: int, window: int) -> dict[str, Any]:
    """`large`: the number of layers of the 27B, which scales by hidden size per head."""
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    return {
        "query_pre_attn_scalar": config["hidden_size"] // heads if layers == large else config["head_dim"],
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": meta.integer("attention.sliding_window", window),
        "layer_types": ["full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in range(layers)],
    }


def _gemma2(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    parts = _gemma(meta, config, period=2, large=46, window=4096)
    parts["final_logit_softcapping"] = meta.number("final_logit_softcapping", 30.0)
    parts["attn_logit_softcapping"] = meta.number("attn_logit_softcapping", 50.0)
    return parts


def _gemma3(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    parts = _gemma(meta, config, period=6, large=62, window=1024)
    if meta.get("final_logit_softcapping") is not None:
        parts["final_logit_softcapping"] = meta.number("final_logit_softcapping", 30.0)
    parts["rope_local_base_freq"] = meta.number("rope.freq_base_swa", 10000.0)
    return parts


def _windows(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """Of three layers in four, if the file says nothing but how long; null without."""
    if not meta.get("attention.sliding_window"):
        return {"sliding_window": None}
    marks = meta.pattern("attention.sliding_window_pattern", config["num_hidden_layers"], 4)
    types = ["sliding_attention" if mark else "full_attention" for mark in marks]
    return {"sliding_window": meta.integer("attention.sliding_window"), "layer_types": types}


def _olmo(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """OLMo 2 and, with windows, OLMo 3."""
    if not meta.get("attention.sliding_window"):
        return {}
    parts: dict[str, Any] = {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", **_windows(meta, config)}
    if config["rope_scaling"]:  # its attention_factor is yarn's own; converters wrote it as a factor on top, or not at all
        parts["rope_scaling"] = {k: v for k, v in config["rope_scaling"].items() if k != "attention_factor"}
    return parts


def _mistral3(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    scaling = config["rope_scaling"] or {"rope_type": "default"}
    if meta.get("attention.temperature_scale"):
        scaling |= {"llama_4_scaling_beta": meta.number("attention.temperature_scale", 0.0)}
    return {"rope_scaling": scaling, "sliding_window": None}


def _smollm3(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    return {"no_rope_layer_interval": 4}  # no file says it


def _seed_oss(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    return {"attention_out_bias": meta.has_tensor("blk.0.attn_output.bias")}


def _ernie(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    return {"use_bias": config["attention_bias"]}


def _layer_norm_eps(meta: Metadata) -> float:
    return meta.number("attention.layer_norm_epsilon", 1e-5)


def _starcoder2(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "norm_epsilon": _layer_norm_eps(meta),
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": config["attention_bias"],
        "sliding_window": meta.integer("attention.sliding_window", 4096),  # of all that were published; no file says it
    }


def _nemotron(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    return {"norm_eps": _layer_norm_eps(meta), "hidden_act": "relu2", **_partial_rotary(meta, config)}


def _cohere(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "layer_norm_eps": _layer_norm_eps(meta),
        "logit_scale": meta.number("logit_scale", 0.0625),
        "use_qk_norm": meta.has_tensor("blk.0.attn_q_norm.weight"),
    }


def _cohere2(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    return {**_cohere(meta, config), **_windows(meta, config), **_partial_rotary(meta, config)}


def _gpt_oss(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """Nothing in the file says that yarn's edges are not rounded, nor which layers have windows."""
    return {
        "intermediate_size": meta.integer("expert_feed_forward_length", config["intermediate_size"]),
        "num_local_experts": meta.integer("expert_count"),
        "num_experts_per_tok": meta.integer("expert_used_count"),
        "sliding_window": meta.integer("attention.sliding_window"),
        "rope_scaling": config["rope_scaling"] and {**config["rope_scaling"], "truncate": False},
    }


_POST = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_SANDWICH = {**_POST, "ffn_norm": "pre_feedforward_layernorm"}
_GLM = {
    "ffn_up": "mlp.gate_up_proj",
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}
_HUNYUAN = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
_GPT_OSS = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks": "self_attn.sinks",
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_STARCODER = {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType({
    "llama": Architecture("LlamaForCausalLM", "llama", experts.llama, interleaved=True, names=experts.MIXTRAL_NAMES),
    "granite": Architecture("GraniteForCausalLM", "granite", _granite, interleaved=True),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2"),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3"),
    "olmo2": Architecture("Olmo2ForCausalLM", "olmo2", _olmo, names=_POST),
    "exaone4": Architecture("Exaone4ForCausalLM", "exaone4", _windows, names=_POST),
    "smollm3": Architecture("SmolLM3ForCausalLM", "smollm3", _smollm3, interleaved=True),
    "seed_oss": Architecture(
        "SeedOssForCausalLM", "seed_oss", _seed_oss, names={"post_attention_norm": "post_attention_layernorm"}
    ),
    "mistral3": Architecture("Ministral3ForCausalLM", "ministral3", _mistral3, interleaved=True),
    "glm4": Architecture("Glm4ForCausalLM", "glm4", _partial_rotary, names=_GLM),
    "ernie4_5": Architecture("Ernie4_5ForCausalLM", "ernie4_5", _ernie),
    "hunyuan-dense": Architecture("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", names=_HUNYUAN),
    "starcoder2": Architecture("Starcoder2ForCausalLM", "starcoder2", _starcoder2, names=_STARCODER),
    "nemotron": Architecture("NemotronForCausalLM", "nemotron", _nemotron, norms_plus_one=True),
    "gpt-oss": Architecture("GptOssForCausalLM of GGUF", "gpt_oss", _gpt_oss, names=_GPT_OSS),
    "command-r": Architecture("CohereForCausalLM", "cohere", _cohere),
    "cohere2": Architecture("Cohere2ForCausalLM", "cohere2", _cohere2),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", "qwen2_moe", experts.qwen2_moe, names=experts.QWEN_NAMES),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", "qwen3_moe", experts.qwen3_moe, names=experts.QWEN_NAMES),
    "olmoe": Architecture("OlmoeForCausalLM", "olmoe", experts.olmoe, names=experts.QWEN_NAMES),
    "glm4moe": Architecture("Glm4MoeForCausalLM", "glm4_moe", experts.glm4_moe, names=experts.GLM_NAMES),
    "minimax-m2": Architecture("MiniMaxM2ForCausalLM", "minimax_m2", experts.minimax_m2, names=experts.MINIMAX_NAMES),
    "hunyuan-moe": Architecture("HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe", experts.hunyuan_moe, names=experts.HUNYUAN_NAMES),
    "ernie4_5-moe": Architecture("Ernie4_5_MoeForCausalLM", "ernie4_5_moe", experts.ernie_moe, names=experts.ERNIE_NAMES),
    "deepseek2": Architecture("DeepseekV3ForCausalLM", "deepseek_v3", experts.deepseek2, names=experts.DEEPSEEK_NAMES),
    "phi3": Architecture("Phi3ForCausalLM", "phi3", _phi3, names={"ffn_up": "mlp.gate_up_proj"}),
    "gemma2": Architecture("Gemma2ForCausalLM", "gemma2", _gemma2, norms_plus_one=True, names=_SANDWICH),
    "gemma3": Architecture("Gemma3ForCausalLM", "gemma3_text", _gemma3, norms_plus_one=True, names=_SANDWICH),
    "gemma4": Architecture("Gemma4ForCausalLM", "gemma4_text", gemma4, names=GEMMA4, tensors=GEMMA4_TENSORS, uneven=True),
})  # fmt: skip
