"""Tiny Gemma 4 checkpoints: as the dense 31B is, the 26B with experts, and E2B with inputs and shared keys; see tiny_models.py."""

from __future__ import annotations

from typing import Any

TINY_GEMMA4: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4": (
        "Gemma4TextConfig",
        {
            "num_attention_heads": 4, "head_dim": 16, "global_head_dim": 32, "sliding_window": 9, "attention_k_eq_v": True,
            "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 512,
            "final_logit_softcapping": 3.0, "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "gemma4_unified": (
        "Gemma4UnifiedTextConfig",
        {
            "num_attention_heads": 4, "head_dim": 16, "global_head_dim": 32, "sliding_window": 9, "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        },
    ),
}  # fmt: skip
EXPERTS = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 24}
SMALL = {
    "hidden_size_per_layer_input": 12, "num_kv_shared_layers": 3, "use_double_wide_mlp": True, "attention_k_eq_v": False,
    "num_hidden_layers": 6, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
}  # fmt: skip
