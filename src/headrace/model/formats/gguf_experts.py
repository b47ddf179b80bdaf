"""GGUF architectures with mixtures of experts, whose tensors hold all of a layer's experts: one becomes many, one of each.
Those of latent attention that hold a matrix of each head do so, too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from headrace.errors import CheckpointError
from headrace.model.experts_config import MOST_EXPERTS
from headrace.model.formats.gguf_metadata import Metadata
from headrace.model.formats.tensor_file import TensorEntry

_SOFTMAX, _SIGMOID = 1, 2  # of expert_gating_func
_ONE = MappingProxyType({  # {} is an expert's number
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
})  # fmt: skip
MIXTRAL_NAMES = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
MINIMAX_NAMES = {**MIXTRAL_NAMES, "exp_probs_b": "block_sparse_moe.e_score_correction_bias"}


def shared_names(module: str) -> dict[str, str]:
    """Of an expert that all tokens have."""
    return {f"ffn_{part}_shexp": f"mlp.{module}.{part}_proj" for part in ("gate", "up", "down")}


QWEN_NAMES = {**_ONE, **shared_names("shared_expert"), "ffn_gate_inp_shexp": "mlp.shared_expert_gate"}
HUNYUAN_NAMES = {
    **_ONE, **shared_names("shared_mlp"), "ffn_gate_inp": "mlp.gate.wg",
    "attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm",
}  # fmt: skip
GLM_NAMES = {
    **_ONE, **shared_names("shared_experts"), "exp_probs_b": "mlp.gate.e_score_correction_bias",
    "post_attention_norm": "post_attention_layernorm",
}  # fmt: skip
_BY_HEAD = "self_attn.k_b.{}"  # a matrix of each head, turned by a quarter
DEEPSEEK_NAMES = {
    **_ONE, **shared_names("shared_experts"), "exp_probs_b": "mlp.gate.e_score_correction_bias",
    "attn_q_a": "self_attn.q_a_proj", "attn_q_a_norm": "self_attn.q_a_layernorm", "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj", "attn_k_b": _BY_HEAD, "attn_v_b": "self_attn.v_b.{}",
}  # fmt: skip
ERNIE_NAMES = {
    **_ONE, **shared_names("shared_experts"), "exp_probs_b": "mlp.moe_statics.e_score_correction_bias[0]",
}  # fmt: skip


def by_expert(entry: TensorEntry, target: str) -> Iterator[TensorEntry]:
    """The tensors that a tensor becomes, under their names. Raises CheckpointError for one that is not of experts."""
    if "{}" not in target:
        name = target.removesuffix(".bias") if "e_score_correction_bias" in target else target
        vector = target.endswith("shared_expert_gate.weight") and len(entry.shape) == 1
        yield replace(entry, name=name, shape=(1, *entry.shape) if vector else entry.shape)
        return
    if len(entry.shape) != 3 or entry.num_rows > MOST_EXPERTS:
        raise CheckpointError(
            f"{entry.file}: the tensor {entry.name!r} has shape {entry.shape}, wanted a matrix of each expert"
        )
    turned = _BY_HEAD in target
    for expert in range(entry.num_rows):
        offset = entry.offset + expert * entry.row_bytes
        yield replace(
            entry, name=target.format(expert), shape=entry.shape[:0:-1] if turned else entry.shape[1:], offset=offset,
            num_bytes=entry.row_bytes, transposed=turned,
        )  # fmt: skip


def _experts(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    width = meta.integer("expert_feed_forward_length", config["intermediate_size"])
    return {
        "num_experts": meta.integer("expert_count"),
        "num_experts_per_tok": meta.integer("expert_used_count"),
        "moe_intermediate_size": width,
    }


def _grouped(meta: Metadata, config: dict[str, Any], kind: int = _SIGMOID) -> dict[str, Any]:
    """Of DeepSeek's kind of router, behind some dense layers and before those that guess ahead."""
    if (found := meta.get("expert_gating_func")) not in (None, kind):
        name = "sigmoid" if kind == _SIGMOID else "softmax"
        raise CheckpointError(f"{meta.gguf.path}: {meta.prefix}expert_gating_func is {found!r}, supported: {kind}, {name}")
    ahead = meta.integer("nextn_predict_layers") if meta.get("nextn_predict_layers") else 0
    return {
        **_experts(meta, config),
        "num_hidden_layers": config["num_hidden_layers"] - ahead,
        "num_nextn_predict_layers": ahead,
        "first_k_dense_replace": meta.integer("leading_dense_block_count") if meta.get("leading_dense_block_count") else 0,
        "norm_topk_prob": bool(meta.get("expert_weights_norm")),
        "routed_scaling_factor": meta.number("expert_weights_scale", 1.0),
        "n_group": meta.integer("expert_group_count", 1),
        "topk_group": meta.integer("expert_group_used_count", 1),
    }


def qwen2_moe(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """Shares that are not normed again, as its graph has them."""
    shared = meta.integer("expert_shared_feed_forward_length", config["intermediate_size"])
    return {**_experts(meta, config), "norm_topk_prob": False, "shared_expert_intermediate_size": shared}


def qwen3_moe(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """Shares that add up to 1, as its graph has them."""
    return {**_experts(meta, config), "norm_topk_prob": True}


def llama(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """Llama, or with experts Mixtral."""
    if not meta.get("expert_count"):
        return {}
    return {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "sliding_window": None, **_experts(meta, config)}


def olmoe(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    return {**_experts(meta, config), "norm_topk_prob": False}


def glm4_moe(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    rotated = meta.integer("rope.dimension_count", config["head_dim"]) / config["head_dim"]
    return {
        **_grouped(meta, config), "n_shared_experts": meta.integer("expert_shared_count"), "partial_rotary_factor": rotated,
        "use_qk_norm": meta.has_tensor("blk.0.attn_q_norm.weight"),
    }  # fmt: skip


def deepseek2(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """DeepSeek V2-Lite and V3 and what is built like them. Newer files hold keys' and values' parts of the latent by head, and
    call the row that is cached the key."""
    sigmoid = any(name.endswith(".exp_probs_b.bias") for name in meta.gguf.tensors)
    rope = meta.integer("rope.dimension_count")
    key = meta.integer("attention.key_length_mla", config["head_dim"])
    groups = _grouped(meta, config, _SIGMOID if sigmoid else _SOFTMAX)
    parts = {
        **groups, "n_routed_experts": groups["num_experts"], "n_shared_experts": meta.integer("expert_shared_count"),
        "kv_lora_rank": meta.integer("attention.kv_lora_rank"), "qk_rope_head_dim": rope, "qk_nope_head_dim": key - rope,
        "q_lora_rank": meta.integer("attention.q_lora_rank") if meta.get("attention.q_lora_rank") else None,
        "v_head_dim": meta.integer("attention.value_length_mla", meta.integer("attention.value_length")), "head_dim": rope,
        "num_key_value_heads": config["num_attention_heads"],
    }  # fmt: skip
    if not sigmoid:
        parts["topk_method"] = "greedy" if parts["n_group"] == 1 else "group_limited_greedy"
    version, by_head = 3 if sigmoid else 2, " of GGUF" if meta.has_tensor("blk.0.attn_k_b.weight") else ""
    parts |= {"architectures": [f"DeepseekV{version}ForCausalLM{by_head}"], "model_type": f"deepseek_v{version}"}
    if config["rope_scaling"] and "mscale_all_dim" in config["rope_scaling"]:  # a tenth of it is what the converter writes
        of_all = 10 * config["rope_scaling"]["mscale_all_dim"]
        parts["rope_scaling"] = {**config["rope_scaling"], "mscale": of_all, "mscale_all_dim": of_all}
    return parts


def minimax_m2(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    width = meta.integer("expert_feed_forward_length", config["intermediate_size"])
    rotated = meta.integer("rope.dimension_count", config["head_dim"])
    return {**_grouped(meta, config), "intermediate_size": width, "rotary_dim": rotated}


def hunyuan_moe(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    width = meta.integer("expert_feed_forward_length", config["intermediate_size"])
    return {**_experts(meta, config), "intermediate_size": width}


def ernie_moe(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    return {
        **_experts(meta, config), "moe_num_shared_experts": meta.integer("expert_shared_count"),
        "moe_layer_start_index": meta.integer("leading_dense_block_count") if meta.get("leading_dense_block_count") else 0,
        "moe_layer_interval": meta.integer("interleave_moe_layer_step", 1),
    }  # fmt: skip
