"""Gemma 4 in GGUF: what its metadata say of layers that are not alike, and where its tensors belong."""

from __future__ import annotations

from typing import Any

from headrace.errors import CheckpointError
from headrace.model.formats.gguf_metadata import Metadata

NAMES = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "ffn_gate_inp": "router.proj",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
TENSORS = {  # whole names, of the model or of a layer
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
    "layer_output_scale.weight": "layer_scalar",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "ffn_gate_up_exps.weight": "experts.gate_up_proj[{}]",
    "ffn_down_exps.weight": "experts.down_proj[{}]",
}


def gemma4(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    layers = config["num_hidden_layers"]
    sliding = meta.pattern("attention.sliding_window_pattern", layers, 6)
    kv_heads = meta.integers("attention.head_count_kv", layers)
    inner = meta.integers("feed_forward_length", layers)
    own = {"head_dim": meta.integer("attention.key_length")}
    full = {str(i): {**own, "num_key_value_heads": kv_heads[i]} for i in range(layers) if not sliding[i]}
    embedding = meta.gguf.tensors.get("per_layer_token_embd.weight")
    inputs = 0 if embedding is None else meta.integer("embedding_length_per_layer_input")
    parts = {
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": meta.integer("attention.key_length_swa"),
        "num_key_value_heads": next((count for count, mark in zip(kv_heads, sliding, strict=True) if mark), kv_heads[0]),
        "intermediate_size": inner[0],
        "sliding_window": meta.integer("attention.sliding_window"),
        "layer_types": ["sliding_attention" if mark else "full_attention" for mark in sliding],
        "per_layer_config": full,
        "attention_k_eq_v": any(not meta.has_tensor(f"blk.{i}.attn_v.weight") for i in map(int, full) if _has_keys(meta, i)),
        "num_kv_shared_layers": sum(not _has_keys(meta, i) for i in range(layers)),
        "use_double_wide_mlp": inner[-1] == 2 * inner[0],
        "hidden_size_per_layer_input": inputs,
        "vocab_size_per_layer_input": embedding.shape[0] if embedding is not None else None,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": meta.number("rope.freq_base_swa", 10_000.0)},
            "full_attention": {
                "rope_type": "proportional", "rope_theta": config["rope_theta"], "partial_rotary_factor": _rotated(meta),
            },
        },
        "enable_moe_block": meta.get("expert_count") is not None,
    }  # fmt: skip
    if meta.get("final_logit_softcapping") is not None:
        parts["final_logit_softcapping"] = meta.number("final_logit_softcapping", 30.0)
    if parts["enable_moe_block"]:
        parts |= {
            "num_experts": meta.integer("expert_count"),
            "top_k_experts": meta.integer("expert_used_count"),
            "moe_intermediate_size": meta.integer("expert_feed_forward_length"),
        }
    return parts


def _has_keys(meta: Metadata, layer: int) -> bool:
    """Files may hold those of the last layers, which nobody reads: the metadata say how many."""
    shared = meta.get("attention.shared_kv_layers")
    return layer < meta.integer("block_count") - (shared if isinstance(shared, int) else 0)


def _rotated(meta: Metadata) -> float:
    """The part of a head that is rotated: pairs whose frequency is divided by 1; the others' is divided by next to infinity."""
    factors = meta.vector("rope_freqs.weight")
    rotated = sum(factor == 1.0 for factor in factors)
    if not rotated or any(factor != 1.0 and factor < 1e20 for factor in factors):
        raise CheckpointError(f"{meta.gguf.path}: 'rope_freqs.weight' does not say which pairs are rotated")
    return rotated / len(factors)
