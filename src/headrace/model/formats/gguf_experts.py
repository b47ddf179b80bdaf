"""GGUF architectures with mixtures of experts, whose tensors hold all of a layer's experts: one becomes many, one of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from headrace.errors import CheckpointError
from headrace.model.experts_config import MOST_EXPERTS
from headrace.model.formats.gguf_metadata import Metadata
from headrace.model.formats.tensor_file import TensorEntry

_SIGMOID = 2  # of expert_gating_func
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
    for expert in range(entry.num_rows):
        offset = entry.offset + expert * entry.row_bytes
        yield replace(
            entry, name=target.format(expert), shape=entry.shape[1:], offset=offset, num_bytes=entry.row_bytes
        )  # fmt: skip


def _experts(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    width = meta.integer("expert_feed_forward_length", config["intermediate_size"])
    return {
        "num_experts": meta.integer("expert_count"),
        "num_experts_per_tok": meta.integer("expert_used_count"),
        "moe_intermediate_size": width,
    }


def _grouped(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """Of DeepSeek's kind of router, behind some dense layers and before those that guess ahead."""
    if (kind := meta.get("expert_gating_func")) not in (None, _SIGMOID):
        raise CheckpointError(f"{meta.gguf.path}: {meta.prefix}expert_gating_func is {kind!r}, supported: {_SIGMOID}, sigmoid")
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
