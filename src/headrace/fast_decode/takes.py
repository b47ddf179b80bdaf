"""What the fused decode step takes of a model: how many rows, and which kinds of weights and activations."""

from __future__ import annotations

from collections import Counter

import torch

from headrace.fast_decode import ring_tile, rounded_tile
from headrace.fast_decode.tiles import FLOAT, Kinds, TileTable
from headrace.kernels.launch import capability
from headrace.kernels.narrow_linear import few_rows, is_scaled
from headrace.model.config import ModelConfig
from headrace.model.decoder_weights import MATRICES, DecoderWeights
from headrace.model.rare import rare_parts

MAX_ROWS = 64  # that an engine gives to this path where no table of tiles says more: see `most_rows`
MAX_EXPERT_ROWS = 32  # of models with experts: of 64 both paths are as fast (Qwen3-30B-A3B on an H200)
MAX_NORMED_ROWS = 32  # of models that norm what they add, without rings: of 64 cuBLAS is as fast (Gemma-2-2B on an H200)


def most_rows(config: ModelConfig, tiles: TileTable | None = None, weights: DecoderWeights | None = None) -> int:
    """That an engine gives to this path, which may have a table of tiles; `weights` of a model on one card: where all are
    multiplied as FP8 by FP8 from fewer rows on elsewhere, and here activations are not rounded, that is faster."""
    if config.experts is not None:
        return MAX_EXPERT_ROWS if tiles is None else min(max(tiles), MAX_EXPERT_ROWS)
    rings = weights is not None and ring_tile.runs(weights.embedding) and usual_kinds(weights) == FLOAT
    most = max(tiles) if tiles is not None else MAX_ROWS if config.norm_place == "pre" or rings else MAX_NORMED_ROWS
    if weights is None or config.delta is not None or hands_on_fp8(config, weights):
        return most
    matrices = [getattr(layer, name) for layer in weights.layers for name in MATRICES]
    return min(most, few_rows(matrices[0].data.device)) if all(map(is_scaled, matrices)) else most


def hands_on_fp8(config: ModelConfig, weights: DecoderWeights) -> bool:
    """Whether activations between the products of a model on one card may be FP8: see rounded_tile.py."""
    plain = config.norm_place == "pre" and set(rare_parts(config)) <= {"attention sinks"} and not config.attn_gate
    matrices = [getattr(layer, name) for layer in weights.layers for name in MATRICES]
    dtype, device = weights.embedding.dtype, weights.embedding.device
    return plain and config.head_dim in (64, 128) and rounded_tile.suit(matrices, dtype, device)


def has_copy_engine(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether products may run as WideTile: for matrices whose rows are multiples of 16 bytes, on Hopper and on the data centre
    cards after it (the others after it have half the shared memory)."""
    state = config.hidden_size if config.delta is None else config.delta.v_size
    widths = (config.hidden_size, config.q_size, config.intermediate_size, state)
    return capability(device)[0] in (9, 10) and dtype.itemsize == 2 and all(width % 8 == 0 for width in widths)


def kinds_of(weights: DecoderWeights) -> list[Kinds]:
    """Of each layer's matrices, and of the head."""
    return [(*(getattr(layer, name).kind for name in MATRICES), weights.lm_head.kind) for layer in weights.layers]


def usual_kinds(weights: DecoderWeights) -> Kinds:
    """Those of most layers, for which there may be a table of tiles."""
    return Counter(kinds_of(weights)).most_common(1)[0][0]
