"""What an entry in the tables of families is, and what several families read of their config in the same way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from headrace.errors import CheckpointError
from headrace.model.config import RopeConfig
from headrace.model.hf_config import HfConfig
from headrace.model.weight_names import PRE_NORM_NAMES


@dataclass(frozen=True, slots=True)
class Family:
    """`switches` gives the ModelConfig fields in which the family differs from plain Llama; `defaults` what its config
    means where it is silent and that is not what Llama means."""

    architectures: tuple[str, ...]
    switches: Callable[[HfConfig], dict[str, Any]] = lambda c: {}
    weight_names: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: PRE_NORM_NAMES)
    defaults: Mapping[str, Any] = field(default_factory=dict)


def biases(c: HfConfig) -> dict[str, Any]:
    """Of all projections, in the names that Llama has for them."""
    bias = c.flag("attention_bias")
    return {"qkv_bias": bias, "o_bias": bias, "mlp_bias": c.flag("mlp_bias")}


def rope_local(c: HfConfig, theta: float) -> RopeConfig:
    """Of the layers with a window, in families that have two."""
    rope = c.raw.get("rope_parameters")
    if isinstance(rope, dict) and rope and not any(isinstance(value, dict) for value in rope.values()):
        raise CheckpointError(f"config.json: rope_parameters is {rope!r}, wanted full_attention and sliding_attention in it")
    return c.rope("sliding_attention", theta)


def every_layer(c: HfConfig, window: int) -> tuple[int, ...]:
    """The same window everywhere; 0: none."""
    return (window,) * c.num_layers() if window else ()


def qwen_windows(c: HfConfig) -> tuple[int, ...]:
    """Those of Qwen2 and Qwen3: of the last layers, where they are in use."""
    if not c.flag("use_sliding_window"):
        return ()
    first = c.count("max_window_layers", 28)
    return typed_windows(c, lambda layer: layer >= first)


def typed_windows(c: HfConfig, sliding: Callable[[int], bool]) -> tuple[int, ...]:
    """Window of each layer: by the config's `layer_types`, or without them by the family's rule `sliding(layer)`."""
    layers, window = c.num_layers(), c.count("sliding_window", 0)
    types = c.raw.get("layer_types")
    if types is None:
        types = ["sliding_attention" if sliding(layer) else "full_attention" for layer in range(layers)]
    known = ("sliding_attention", "full_attention")
    if not isinstance(types, list) or len(types) != layers or any(kind not in known for kind in types):
        raise CheckpointError(f"config.json: layer_types {types!r}: wanted {layers} times sliding_attention or full_attention")
    windows = tuple(window if kind == "sliding_attention" else 0 for kind in types)
    return windows if any(windows) else ()


def hunyuan(c: HfConfig) -> dict[str, Any]:
    """Heads that are normed after their rotation, whose base is stretched by a fixed factor."""
    bias, rope = c.flag("attention_bias"), c.rope("full_attention", c.number("rope_theta", 10_000.0))
    entries = HfConfig(c.rope_entries("full_attention"))
    if rope.kind == "dynamic" and entries.raw.get("alpha"):  # a base stretched once, whatever the length
        theta = rope.theta * entries.number("alpha", 1.0) ** (rope.dim / (rope.dim - 2))
        rope = replace(rope, theta=theta, kind="default", params=())
    return {"qkv_bias": bias, "o_bias": bias, "qk_norm": "rotated", "rope": rope}


def granite(c: HfConfig) -> dict[str, Any]:
    """Four factors."""
    return {
        **biases(c),
        "attn_scale": c.number("attention_multiplier", 1.0),
        "embed_scale": c.number("embedding_multiplier", 1.0),
        "residual_scale": c.number("residual_multiplier", 1.0),
        "logit_scale": 1.0 / c.number("logits_scaling", 1.0),
    }
