"""Tiny random models with multi-head latent attention, for tiny_models.py: dense layers before others with experts."""

from __future__ import annotations

from typing import Any

_SIZES: dict[str, Any] = {  # no head_dim: it would be taken for that of rotary embedding
    "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 24,
    "v_head_dim": 20, "n_routed_experts": 8, "moe_intermediate_size": 24, "num_experts_per_tok": 3, "n_shared_experts": 2,
}  # fmt: skip
TINY_LATENT: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": (
        "DeepseekV2Config",
        {
            **_SIZES, "q_lora_rank": None, "first_k_dense_replace": 1, "topk_method": "greedy", "routed_scaling_factor": 1.3,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 5000.0, "factor": 16.0, "original_max_position_embeddings": 16,
                "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.7, "mscale_all_dim": 0.5,
            },
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {**_SIZES, "q_lora_rank": 40, "rms_norm_eps": 1e-3, "first_k_dense_replace": 2, "n_group": 4, "topk_group": 2},
    ),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", {**_SIZES, "q_lora_rank": 40, "rope_interleave": False}),
}  # fmt: skip
