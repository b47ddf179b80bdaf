"""Tiny random models with mixtures of experts, for tiny_models.py."""

from __future__ import annotations

from typing import Any

TINY_EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            "head_dim": 16, "num_attention_heads": 4, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48,
            "norm_topk_prob": True, "mlp_only_layers": [1],
        },
    ),
    "mixtral": (
        "MixtralConfig",
        {"num_attention_heads": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 56, "sliding_window": 11},
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
