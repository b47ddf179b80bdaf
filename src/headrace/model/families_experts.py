"""The table of the families with mixtures of experts; see families.py."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from headrace.errors import CheckpointError
from headrace.model.experts_config import MOST_EXPERTS, MOST_IN_ALL, ExpertsConfig
from headrace.model.family import Family, every_layer, granite, hunyuan, typed_windows
from headrace.model.hf_config import HfConfig
from headrace.model.weight_names import HUNYUAN_NAMES, PRE_NORM_NAMES

_EXPERTS = {
    "router": ("mlp.gate.weight",),
    "experts_gate_up": ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight"),
    "experts_down": ("mlp.experts.{}.down_proj.weight",),
}
_SHARED = {
    "shared_gate_up": ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"),
    "shared_down": ("mlp.shared_experts.down_proj.weight",),
}
DEEPSEEK_EXPERTS = {**_EXPERTS, **_SHARED, "correction": ("mlp.gate.e_score_correction_bias",)}
QWEN_MOE_NAMES = {
    **PRE_NORM_NAMES,
    **_EXPERTS,
    "shared_gate_up": ("mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"),
    "shared_down": ("mlp.shared_expert.down_proj.weight",),
    "shared_gate": ("mlp.shared_expert_gate.weight",),
}
MIXTRAL_NAMES = {
    **PRE_NORM_NAMES,
    "router": ("block_sparse_moe.gate.weight",),
    "correction": ("block_sparse_moe.e_score_correction_bias",),
    "experts_gate_up": ("block_sparse_moe.experts.{}.w1.weight", "block_sparse_moe.experts.{}.w3.weight"),
    "experts_down": ("block_sparse_moe.experts.{}.w2.weight",),
}
GRANITE_MOE_NAMES = {
    **PRE_NORM_NAMES,
    "router": ("block_sparse_moe.router.layer.weight",),
    "experts_gate_up": ("block_sparse_moe.input_linear.weight[{}]",),
    "experts_down": ("block_sparse_moe.output_linear.weight[{}]",),
}
HUNYUAN_MOE_NAMES = {
    **HUNYUAN_NAMES,
    **_EXPERTS,
    "router": ("mlp.gate.wg.weight",),
    "shared_gate_up": ("mlp.shared_mlp.gate_proj.weight", "mlp.shared_mlp.up_proj.weight"),
    "shared_down": ("mlp.shared_mlp.down_proj.weight",),
}

_COUNTS = ("n_routed_experts", "moe_num_experts", "num_local_experts", "num_experts")  # names of one thing
_CHOSEN = ("moe_k", "moe_topk", "num_experts_per_tok")


def experts_of(c: HfConfig, count: int, inner: str, **fields: Any) -> dict[str, ExpertsConfig]:
    """ModelConfig's field: `count` experts where the config does not say; their width has the name `inner`. Raises
    CheckpointError for numbers that do not go together."""
    c = HfConfig({name: _alike(name, value) if name in (*_COUNTS, *_CHOSEN) else value for name, value in c.raw.items()})
    counts, choices = (next((n for n in names if c.raw.get(n) is not None), names[-1]) for names in (_COUNTS, _CHOSEN))
    number = c.count(counts, count, most=min(MOST_EXPERTS, MOST_IN_ALL // c.num_layers()))
    experts = ExpertsConfig(number, c.count(choices, most=number), c.count(inner), **fields)
    groups, taken = experts.groups, experts.groups_chosen
    if number % groups or taken > groups or taken * (number // groups) < experts.chosen:
        raise CheckpointError(
            f"config.json: n_group {groups} and topk_group {taken} do not go with {number} experts, {experts.chosen} of a token"
        )
    return {"experts": experts}


def _alike(name: str, value: Any) -> Any:
    """Of a list with a number for each layer the one that they all are."""
    if not isinstance(value, list):
        return value
    if not value or any(one != value[0] for one in value):
        raise CheckpointError(f"config.json: {name} is {value!r}, and only layers that are alike are supported")
    return value[0]


def only(c: HfConfig, name: str, *allowed: Any) -> None:
    """Raises CheckpointError for another value; null, or nothing, is the first."""
    value = c.raw.get(name)
    if value is not None and value not in allowed:
        raise CheckpointError(f"config.json: {name} is {value!r}, supported: {', '.join(map(repr, allowed))}")


def sparse_layers(c: HfConfig, layers: list[bool]) -> tuple[bool, ...]:
    """ExpertsConfig's field. Raises CheckpointError where no layer has experts."""
    if not any(layers):
        raise CheckpointError(f"config.json: none of {c.num_layers()} layers has experts")
    return () if all(layers) else tuple(layers)


def grouped_sigmoid(c: HfConfig, shared: str) -> dict[str, Any]:
    """The router of DeepSeek V3 and those after it, with `shared` the name of how many experts every token has."""
    only(c, "scoring_func", "sigmoid")
    only(c, "topk_method", "noaux_tc")
    return {
        "score": "sigmoid",
        "renormalize": c.flag("norm_topk_prob"),
        "scale": c.number("routed_scaling_factor", 1.0),
        "correction": True,
        "groups": c.count("n_group", 1),
        "groups_chosen": c.count("topk_group", 1),
        "shared_inner": _shared(c, shared),
    }


def dense_first(c: HfConfig) -> tuple[bool, ...]:
    """All layers have experts but the first so many."""
    dense = 0 if c.raw.get("first_k_dense_replace") == 0 else c.count("first_k_dense_replace", 1)
    return sparse_layers(c, [layer >= dense for layer in range(c.num_layers())])


def _shared(c: HfConfig, name: str) -> int:
    """So many experts are one MLP as wide as all of them."""
    return 0 if c.raw.get(name) in (0, None) else c.count(name) * c.count("moe_intermediate_size")


def qwen_layers(c: HfConfig) -> tuple[bool, ...]:
    """ExpertsConfig's field, as Qwen's configs say it."""
    step, dense = c.count("decoder_sparse_step", 1), c.raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(not isinstance(layer, int) for layer in dense):
        raise CheckpointError(f"config.json: mlp_only_layers is {dense!r}, wanted a list of layers")
    return sparse_layers(c, [layer not in dense and (layer + 1) % step == 0 for layer in range(c.num_layers())])


def _qwen2_moe(c: HfConfig) -> dict[str, Any]:
    last = c.count("max_window_layers", 28)
    windows = typed_windows(c, lambda layer: layer % 2 == 0 and layer < last) if c.flag("use_sliding_window") else ()
    fields = {"renormalize": c.flag("norm_topk_prob"), "layers": qwen_layers(c), "shared_gate": True}
    shared = c.count("shared_expert_intermediate_size", 5632)
    experts = experts_of(c, 60, "moe_intermediate_size", shared_inner=shared, **fields)
    return {"qkv_bias": c.flag("qkv_bias"), "windows": windows, **experts}


def _qwen3_moe(c: HfConfig) -> dict[str, Any]:
    bias, window = c.flag("attention_bias"), c.count("sliding_window", 0) if c.flag("use_sliding_window") else 0
    fields = {"renormalize": c.flag("norm_topk_prob"), "layers": qwen_layers(c)}
    experts = experts_of(c, 128, "moe_intermediate_size", **fields)
    return {"qkv_bias": bias, "o_bias": bias, "qk_norm": "head", "windows": every_layer(c, window), **experts}


def _mixtral(c: HfConfig) -> dict[str, Any]:
    windows = every_layer(c, c.count("sliding_window", 0))
    return {"windows": windows, **experts_of(c, 8, "intermediate_size", renormalize=True)}


def _olmoe(c: HfConfig) -> dict[str, Any]:
    only(c, "clip_qkv", None)
    bias, renormalize = c.flag("attention_bias"), c.flag("norm_topk_prob")
    experts = experts_of(c, 64, "intermediate_size", renormalize=renormalize)
    return {"qkv_bias": bias, "o_bias": bias, "qk_norm": "full", **experts}


def _granite_moe(c: HfConfig) -> dict[str, Any]:
    return {**granite(c), "mlp_bias": False, **experts_of(c, 8, "intermediate_size", score="chosen")}


def _ernie_moe(c: HfConfig) -> dict[str, Any]:
    only(c, "use_bias", False)
    layers, step = c.num_layers(), c.count("moe_layer_interval", 1)
    first, last = (c.raw.get(f"moe_layer_{end}_index") for end in ("start", "end"))
    first, last = 1 if first is None else first, layers - 1 if last in (None, -1) else last
    if not isinstance(first, int) or not isinstance(last, int):
        raise CheckpointError(f"config.json: moe_layer_start_index is {first!r} and _end_index {last!r}, wanted layers")
    sparse = sparse_layers(c, [(layer + 1) % step == 0 and first <= layer <= last for layer in range(layers)])
    shared = _shared(c, "moe_num_shared_experts")
    fields = {"renormalize": True, "correction": True, "shared_inner": shared, "layers": sparse}
    return {"rope_interleaved": True, **experts_of(c, 64, "moe_intermediate_size", **fields)}


def _hunyuan_moe(c: HfConfig) -> dict[str, Any]:
    only(c, "use_cla", False)
    only(c, "use_mixed_mlp_moe", True)
    inner = c.count("intermediate_size")
    for name, wanted in (("moe_intermediate_size", inner), ("num_shared_expert", 1)):
        only(HfConfig({name: _alike(name, c.raw.get(name))}), name, wanted)
    return {**hunyuan(c), **experts_of(c, 1, "intermediate_size", renormalize=True, shared_inner=inner)}


def _glm4_moe(c: HfConfig) -> dict[str, Any]:
    experts = experts_of(c, 128, "moe_intermediate_size", layers=dense_first(c), **grouped_sigmoid(c, "n_shared_experts")
    )  # fmt: skip
    return {
        "qkv_bias": c.flag("attention_bias"), "qk_norm": "head" if c.flag("use_qk_norm") else "none", **experts,
    }  # fmt: skip


def _minimax_m2(c: HfConfig) -> dict[str, Any]:
    only(c, "scoring_func", "sigmoid")
    only(c, "qk_norm_type", "per_layer")
    if c.raw.get("rotary_dim") is not None:
        share = c.count("rotary_dim") / c.count("head_dim")
        c = HfConfig({**c.raw, "partial_rotary_factor": share})
    experts = experts_of(c, 256, "intermediate_size", score="sigmoid", renormalize=True, correction=True)
    return {"qk_norm": "full", "rope": c.rope("full_attention", c.number("rope_theta", 5e6)), **experts}


def _exaone_moe(c: HfConfig) -> dict[str, Any]:
    windows = typed_windows(c, lambda layer: (layer + 1) % c.count("sliding_window_pattern", 4) != 0)
    rope_layers = tuple(map(bool, windows or (0,) * c.num_layers())) if c.count("sliding_window", 0) else ()
    kinds = c.raw.get("mlp_layer_types")
    layers = dense_first(c)
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != c.num_layers() or any(k not in ("dense", "sparse") for k in kinds):
            raise CheckpointError(f"config.json: mlp_layer_types is {kinds!r}, wanted dense or sparse for each layer")
        layers = sparse_layers(c, [kind == "sparse" for kind in kinds])
    experts = experts_of(c, 64, "moe_intermediate_size", layers=layers, **grouped_sigmoid(c, "num_shared_experts"))
    return {"qk_norm": "head", "windows": windows, "rope_layers": rope_layers, **experts}


EXPERTS_FAMILIES: Mapping[str, Family] = MappingProxyType({
    "qwen2_moe": Family(
        ("Qwen2MoeForCausalLM",), _qwen2_moe, QWEN_MOE_NAMES,
        {
            "num_key_value_heads": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "qkv_bias": True,
            "sliding_window": 4096,
        },
    ),
    "qwen3_moe": Family(
        ("Qwen3MoeForCausalLM",), _qwen3_moe, QWEN_MOE_NAMES,
        {"num_key_value_heads": 4, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "sliding_window": 4096},
    ),
    "mixtral": Family(
        ("MixtralForCausalLM",), _mixtral, MIXTRAL_NAMES,
        {"num_key_value_heads": 8, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0},
    ),
    "olmoe": Family(("OlmoeForCausalLM",), _olmoe, QWEN_MOE_NAMES, {"num_experts_per_tok": 8, "rms_norm_eps": 1e-5}),
    "granitemoe": Family(("GraniteMoeForCausalLM",), _granite_moe, GRANITE_MOE_NAMES, {"num_experts_per_tok": 2}),
    "ernie4_5_moe": Family(
        ("Ernie4_5_MoeForCausalLM",), _ernie_moe,
        {
            **PRE_NORM_NAMES, **_EXPERTS, **_SHARED,
            "correction": ("mlp.moe_statics.e_score_correction_bias[0]",),  # of one group
        },
        {
            "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "moe_intermediate_size": 1536,
            "moe_num_shared_experts": 2, "num_experts_per_tok": 6,
        },
    ),
    "hunyuan_v1_moe": Family(
        ("HunYuanMoEV1ForCausalLM",), _hunyuan_moe, HUNYUAN_MOE_NAMES, {"num_experts_per_tok": 1, "rms_norm_eps": 1e-5}
    ),
    "glm4_moe": Family(
        ("Glm4MoeForCausalLM",), _glm4_moe, {**PRE_NORM_NAMES, **DEEPSEEK_EXPERTS},
        {
            "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "moe_intermediate_size": 1408,
            "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 8,
        },
    ),
    "minimax_m2": Family(
        ("MiniMaxM2ForCausalLM",), _minimax_m2, MIXTRAL_NAMES,
        {"num_key_value_heads": 8, "num_experts_per_tok": 8, "head_dim": 128, "rope_theta": 5_000_000.0},
    ),
    "exaone_moe": Family(
        ("ExaoneMoeForCausalLM",), _exaone_moe,
        {**PRE_NORM_NAMES, **DEEPSEEK_EXPERTS, "correction": ("mlp.e_score_correction_bias",)},
        {
            "num_key_value_heads": 32, "rms_norm_eps": 1e-5, "sliding_window": 4096, "moe_intermediate_size": 1024,
            "num_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 8, "routed_scaling_factor": 2.5,
        },
    ),
})  # fmt: skip
