"""Tiny random models with mixtures of experts, for tiny_models.py."""

from __future__ import annotations

from typing import Any

_FOUR = {"num_attention_heads": 4}

TINY_EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {
            **_FOUR, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "decoder_sparse_step": 2,
            "shared_expert_intermediate_size": 72,
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            **_FOUR, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48,
            "norm_topk_prob": True, "mlp_only_layers": [1],
        },
    ),
    "mixtral": (
        "MixtralConfig",
        {**_FOUR, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 56, "sliding_window": 11},
    ),
    "olmoe": ("OlmoeConfig", {**_FOUR, "num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 48}),
    "granitemoe": (
        "GraniteMoeConfig",
        {
            **_FOUR, "num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 48, "embedding_multiplier": 1.7,
            "logits_scaling": 1.9, "residual_multiplier": 0.6, "attention_multiplier": 0.3,
        },
    ),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        {**_FOUR, "moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 48, "moe_num_shared_experts": 2},
    ),
    "hunyuan_v1_moe": (
        "HunYuanMoEV1Config",
        {
            **_FOUR, "head_dim": 16, "num_experts": 8, "moe_topk": 3, "intermediate_size": 48,
            "rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 5000.0},
        },
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        {
            **_FOUR, "head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "n_group": 4,
            "topk_group": 2, "routed_scaling_factor": 1.7, "attention_bias": True, "use_qk_norm": True, "n_shared_experts": 2,
        },
    ),
    "minimax_m2": (
        "MiniMaxM2Config",
        {
            **_FOUR, "head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 48,
            "rotary_dim": 8,
        },
    ),
    "exaone_moe": (
        "ExaoneMoeConfig",
        {
            **_FOUR, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "sliding_window": 9,
            "sliding_window_pattern": 2, "n_group": 2, "topk_group": 1,
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            "head_dim": 16, "num_attention_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 64,
            "sliding_window": 11, "swiglu_limit": 0.5,
            "rope_parameters": {
                "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 32.0, "beta_slow": 1.0,
                "truncate": False, "rope_theta": 1500.0,
            },
        },
    ),
}  # fmt: skip
