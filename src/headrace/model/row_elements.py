"""What a row of a step takes in memory, for plans of it."""

from __future__ import annotations

from headrace.model.config import ModelConfig


def row_elements(model: ModelConfig) -> int:
    """Numbers per row at the widest moment of a layer: residual, normed input, qkv, attention output, gate_up, its product."""
    inner = max(3 * model.intermediate_size, 0 if model.experts is None else model.experts.row_elements(model.hidden_size))
    mixed = sum(of.row_elements for of in (model.delta, model.per_layer) if of is not None)
    mixed += 0 if model.latent is None else model.latent.row_elements(model.num_heads)
    return 2 * model.hidden_size + 2 * model.q_size + 2 * model.kv_size + inner + mixed
