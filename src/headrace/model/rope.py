"""Rotary position embedding: the cos and sin tables of every scaling kind, fixed when the engine is built.

The tables depend on the checkpoint and `max_len` (the engine's max_model_len) alone, never on a request's length, its
chunks or its batch mates: keys in the cache stay valid, and a prompt means the same however it is scheduled. Two kinds
whose published rule looks at the sequence's length are therefore pinned (in brackets: when Hugging Face Transformers,
which chooses the frequencies anew at each forward, gives the same logits for a single prompt):

- dynamic (NTK by length): unscaled while max_len <= max_position [at every length]; above that, the base of a sequence
  of exactly max_len tokens [at length max_len].
- longrope: short factors while max_len <= original_max_position_embeddings [at every length]; above that, the long
  factors at all positions [at lengths above original_max_position_embeddings].
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headrace.errors import CheckpointError
from headrace.model.config import RopeConfig


def rope_tables(rope: RopeConfig, max_len: int, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """cos, sin [max_len, rope.dim / 2] float32 on `device`, the kind's attention factor multiplied in."""
    inv_freq, factor = inverse_frequencies(rope, max_len)
    # the product in float32, as the models were trained: in float64 it would be better and different
    angles = torch.outer(torch.arange(max_len, dtype=torch.float32), inv_freq)
    return (angles.cos() * factor).to(device), (angles.sin() * factor).to(device)


def inverse_frequencies(rope: RopeConfig, max_len: int) -> tuple[Tensor, float]:
    """Radians per position of each rotated pair [rope.dim / 2] float32, and the factor on cos and sin."""
    try:
        kind = _KINDS[rope.kind]
    except KeyError:
        raise CheckpointError(f"rope type {rope.kind!r} is not supported; known: {', '.join(_KINDS)}") from None
    return kind(rope, max_len)


def _wavelengths(rope: RopeConfig, theta: float) -> Tensor:
    """theta ** (2i / dim): positions per radian of pair i."""
    return theta ** (torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim)


def _default(rope: RopeConfig, max_len: int) -> tuple[Tensor, float]:
    return 1.0 / _wavelengths(rope, rope.theta), 1.0


def _linear(rope: RopeConfig, max_len: int) -> tuple[Tensor, float]:
    """Position interpolation (Chen et al. 2023)."""
    return 1.0 / _wavelengths(rope, rope.theta) / rope.param("factor"), 1.0


def _dynamic(rope: RopeConfig, max_len: int) -> tuple[Tensor, float]:
    """NTK-aware base, pinned to max_len (see the module's docstring)."""
    factor = rope.param("factor")
    length = max(max_len, rope.max_position)
    stretch = factor * length / rope.max_position - (factor - 1)
    return 1.0 / _wavelengths(rope, rope.theta * stretch ** (rope.dim / (rope.dim - 2))), 1.0


def _llama3(rope: RopeConfig, max_len: int) -> tuple[Tensor, float]:
    """Llama 3.1: long wavelengths divided by the factor, short ones kept, a linear blend between."""
    factor, original = rope.param("factor"), rope.param("original_max_position_embeddings")
    low, high = rope.param("low_freq_factor"), rope.param("high_freq_factor")
    inv_freq = 1.0 / _wavelengths(rope, rope.theta)
    rotations = original * inv_freq / (2 * math.pi)  # over the original context
    keep = ((rotations - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * inv_freq / factor + keep * inv_freq, 1.0


def _yarn(rope: RopeConfig, max_len: int) -> tuple[Tensor, float]:
    """YaRN (Peng et al. 2023): interpolate pairs with few rotations over the original context, keep those with many."""
    original = rope.param("original_max_position_embeddings")
    factor = rope.param("factor") or rope.max_position / original

    def pair_with(rotations: float) -> float:
        return rope.dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_with(rope.param("beta_fast") or 32), pair_with(rope.param("beta_slow") or 1)
    if rope.param("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001  # the ramp's slope must stay finite
    ramp = ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    waves = _wavelengths(rope, rope.theta)
    return ramp / (factor * waves) + (1 - ramp) / waves, _yarn_attention_factor(rope, factor)


def _yarn_attention_factor(rope: RopeConfig, factor: float) -> float:
    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    given = rope.param("attention_factor")
    if given is not None:
        return given
    mscale, mscale_all = rope.param("mscale"), rope.param("mscale_all_dim")
    return magnitude(mscale) / magnitude(mscale_all) if mscale and mscale_all else magnitude(1.0)


def _longrope(rope: RopeConfig, max_len: int) -> tuple[Tensor, float]:
    """LongRoPE (Ding et al. 2024): a searched factor per pair, the set pinned by max_len (module docstring)."""
    original = rope.param("original_max_position_embeddings")
    factors = rope.param("long_factor" if max_len > original else "short_factor")
    factor = rope.param("factor") or rope.max_position / original
    attention = rope.param("attention_factor")
    if attention is None:
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * _wavelengths(rope, rope.theta)), attention


def _proportional(rope: RopeConfig, max_len: int) -> tuple[Tensor, float]:
    """Of the pairs of a whole head the first ones are rotated, with the angles that they would have if all were (Gemma 4)."""
    rotated = int(rope.param("partial_rotary_factor", 1.0) * rope.dim // 2)
    inv_freq = 1.0 / _wavelengths(rope, rope.theta)
    inv_freq[rotated:] = 0.0
    return inv_freq / rope.param("factor", 1.0), 1.0


def _none(rope: RopeConfig, max_len: int) -> tuple[Tensor, float]:
    """No angle at any position: what runs layers with rotation runs those without."""
    return torch.zeros(rope.dim // 2), 1.0


_KINDS = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
    "none": _none,
}
