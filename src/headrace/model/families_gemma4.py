"""Gemma 4: what its config says, and which weights its layers have beside the usual ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headrace.errors import CheckpointError
from headrace.model.config import ModelConfig
from headrace.model.experts_config import ExpertsConfig
from headrace.model.experts_weights import experts_plan
from headrace.model.family import Family, rope_local, typed_windows
from headrace.model.hf_config import HfConfig
from headrace.model.layer_sizes import LayerSizes, PerLayer
from headrace.model.weight_names import SANDWICH_NORM_NAMES, WeightSpec

GEMMA4_NAMES = {
    **SANDWICH_NORM_NAMES,
    "router": ("router.proj.weight",),
    "experts_gate_up": ("experts.gate_up_proj[{}]",),
    "experts_down": ("experts.down_proj[{}]",),
}
_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
_SHARED_MODULES = ("k_proj", "v_proj", "k_norm", "v_norm")


def _gemma4(c: HfConfig) -> dict[str, Any]:
    if c.raw.get("use_bidirectional_attention") not in (None, False, "vision"):  # vision: of tokens of images alone
        raise CheckpointError("config.json: use_bidirectional_attention is supported for vision alone")
    if c.flag("attention_bias"):
        raise CheckpointError("config.json: attention_bias is not supported for Gemma 4")
    layers, types = c.num_layers(), c.raw.get("layer_types")
    if isinstance(types, list) and types:
        types = [*types[:-1], "full_attention"]  # whatever it says of the last one
    rope = c.raw.get("rope_parameters") or _ROPE
    c = HfConfig({**c.raw, "layer_types": types, "sliding_window": c.count("sliding_window", 512), "rope_parameters": rope})
    windows = typed_windows(c, lambda layer: (layer + 1) % 6 != 0 and layer + 1 < layers)
    sizes = _sizes(c, [not window for window in windows or (0,) * layers])
    dims = max(of.head_dim for of in sizes)
    inputs = 0 if c.raw.get("hidden_size_per_layer_input") == 0 else c.count("hidden_size_per_layer_input", 256)
    rows = c.count("vocab_size_per_layer_input", c.count("vocab_size")) if inputs else 0
    full = next((of.head_dim for of, window in zip(sizes, windows or (0,) * layers, strict=True) if not window), dims)
    return {
        "norm_place": "sandwich",
        "qk_norm": "head",
        "attn_scale": 1.0,
        "embed_scale": math.sqrt(c.count("hidden_size")),
        "logit_softcap": c.number("final_logit_softcapping", 0.0),
        "windows": windows,
        "rope": HfConfig({**c.raw, "head_dim": full}).rope("full_attention", 1_000_000.0),
        "rope_local": rope_local(c, 10_000.0),
        "head_dim": dims,
        "num_kv_heads": max(of.kv_heads for of in sizes),
        "intermediate_size": max(of.inner for of in sizes),
        "per_layer": PerLayer(sizes, inputs, rows),
        "experts": _experts(c),
    }


def _sizes(c: HfConfig, full: list[bool]) -> tuple[LayerSizes, ...]:
    layers, inner, heads = len(full), c.count("intermediate_size"), c.count("num_attention_heads")
    shared = c.count("num_kv_shared_layers", most=layers - 1) if c.raw.get("num_kv_shared_layers") else 0
    owners = full[: layers - shared]
    same = c.flag("attention_k_eq_v")
    found: list[LayerSizes] = []
    dims: dict[bool, int] = {}
    for layer, whole in enumerate(full):
        head_dim, kv_heads = _of_layer(c, layer, whole, same)
        dims.setdefault(whole, head_dim)
        if head_dim != dims[whole]:  # rotated by one table, and some read others' keys
            raise CheckpointError(f"config.json: head_dim of layer {layer} is {head_dim}, wanted {dims[whole]} as before")
        if heads % kv_heads:
            raise CheckpointError(f"config.json: {heads} attention heads are no multiple of {kv_heads} key-value heads")
        if layer < len(owners):
            found.append(LayerSizes(head_dim, kv_heads, inner, layer, values=not (same and whole)))
            continue
        if whole not in owners:
            raise CheckpointError(f"config.json: num_kv_shared_layers is {shared}: layer {layer} has none to share with")
        source = max(i for i, other in enumerate(owners) if other == whole)
        found.append(LayerSizes(head_dim, 0, inner * (1 + c.flag("use_double_wide_mlp")), source))
    return tuple(found)


def _of_layer(c: HfConfig, layer: int, full: bool, same: bool) -> tuple[int, int]:
    """Head size and key-value heads, in the fields of published files, or in those of Transformers 5."""
    given = c.raw.get("per_layer_config")
    if given is not None and not isinstance(given, dict):
        raise CheckpointError(f"config.json: per_layer_config is {given!r}, wanted an object")
    found = [of for key, of in (given or {}).items() if str(key).lstrip("0") == str(layer).lstrip("0")]  # "07" is 7
    own: Any = found[0] if found else {}
    if not isinstance(own, dict):
        raise CheckpointError(f"config.json: per_layer_config of layer {layer} is {own!r}, wanted an object")
    of = HfConfig({**c.raw, **own})
    if given is not None or not full:
        return of.count("head_dim"), of.count("num_key_value_heads")
    kv_heads = of.count("num_key_value_heads")
    return of.count("global_head_dim", 512), of.count("num_global_key_value_heads", kv_heads) if same else kv_heads


def _experts(c: HfConfig) -> ExpertsConfig | None:
    if not c.flag("enable_moe_block"):
        return None
    count = c.count("num_experts", most=4096)
    return ExpertsConfig(
        count, c.count("top_k_experts", most=count), c.count("moe_intermediate_size"), score="softmax", renormalize=True
    )  # fmt: skip


def gemma4_plan(plan: list[WeightSpec], config: ModelConfig, names: Mapping[str, tuple[str, ...]]) -> list[WeightSpec]:
    """`plan` with what a layer has beside the usual, and without what it lacks."""
    assert config.per_layer is not None
    found: list[WeightSpec] = []
    for spec in plan:
        of, _, name = spec.target.rpartition(".")
        layer = int(of.removeprefix("layers.")) if of else -1
        sizes = config.per_layer.sizes[layer]
        if name == "qkv":
            sources = tuple((source, rows) for source, rows in spec.sources if rows)[: 3 if sizes.values else 2]
            found.append(replace(spec, sources=sources, shape=(sum(rows for _, rows in sources), spec.shape[1])))
        elif name == "post_mlp_norm":
            found += [replace(spec, target=f"{of}.closing_norm"), *_after(layer, config)]
        elif name == "input_norm" and layer == 0 and config.per_layer.inputs:  # the first layer reads the embedding itself
            found += [replace(spec, target=f"{of}.first_norm"), *_inputs(config)]
        elif name != "k_norm" or sizes.kv_heads:
            found.append(spec)
            if name == "gate_up" and config.experts is not None:
                found += experts_plan([spec], config, names)
    return found


def _after(layer: int, config: ModelConfig) -> list[WeightSpec]:
    assert config.per_layer is not None
    hidden, inputs, experts = config.hidden_size, config.per_layer.inputs, config.experts
    wanted: list[tuple[str, str, tuple[int, ...]]] = [("layer_scalar", "layer_scalar", (1,))]
    if inputs:
        wanted += [
            ("input_gate", "per_layer_input_gate.weight", (inputs, hidden)),
            ("input_back", "per_layer_projection.weight", (hidden, inputs)),
            ("input_norm_after", "post_per_layer_input_norm.weight", (hidden,)),
        ]
    if experts is not None:
        wanted += [
            ("router_scale", "router.scale", (hidden,)),
            ("expert_scale", "router.per_expert_scale", (experts.count,)),
            ("dense_norm", "post_feedforward_layernorm_1.weight", (hidden,)),
            ("norm_of_experts", "pre_feedforward_layernorm_2.weight", (hidden,)),
            ("mixed_norm", "post_feedforward_layernorm_2.weight", (hidden,)),
        ]
    return [
        WeightSpec(
            f"layers.{layer}.{name}", shape, ((f"model.layers.{layer}.{source}", shape[0]),),
            exact=name in ("router_scale", "expert_scale"),
        )
        for name, source, shape in wanted
    ]  # fmt: skip


def _inputs(config: ModelConfig) -> list[WeightSpec]:
    """What makes the inputs of all layers: with the first one's weights."""
    assert config.per_layer is not None
    each, rows = config.per_layer.inputs, config.per_layer.input_rows
    width = config.num_layers * each
    return [
        WeightSpec("layers.0.layer_embedding", (rows, width), (("model.embed_tokens_per_layer.weight", rows),), wide=True),
        WeightSpec(
            "layers.0.layer_projection", (width, config.hidden_size), (("model.per_layer_model_projection.weight", width),)
        ),
        WeightSpec("layers.0.layer_projection_norm", (each,), (("model.per_layer_projection_norm.weight", each),)),
    ]


def without_shared(entries: Mapping[str, Any], config: ModelConfig) -> dict[str, Any]:
    """`entries` without the keys and values that published files have of layers that read those of others."""
    if config.per_layer is None:
        return dict(entries)
    shared = [i for i, of in enumerate(config.per_layer.sizes) if not of.kv_heads]
    unread = {f"model.layers.{layer}.self_attn.{module}.weight" for layer in shared for module in _SHARED_MODULES}
    return {name: entry for name, entry in entries.items() if name not in unread}


_DEFAULTS = {
    "head_dim": 256, "num_key_value_heads": 4, "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131_072,
}  # fmt: skip
GEMMA4_FAMILIES: Mapping[str, Family] = {
    "gemma4_text": Family(("Gemma4ForCausalLM",), _gemma4, GEMMA4_NAMES, _DEFAULTS),
    "gemma4_unified_text": Family(
        ("Gemma4UnifiedForCausalLM",), _gemma4, GEMMA4_NAMES,
        {**_DEFAULTS, "max_position_embeddings": 262_144, "sliding_window": 1024, "hidden_size_per_layer_input": 0},
    ),
}  # fmt: skip
