"""Which tensors of a checkpoint make up each of the decoder's weights, with their shapes: the loader's work list."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from headrace.model.config import ModelConfig
from headrace.model.latent_config import LatentConfig

# what no option quantizes; the gates of a delta net are a few rows that decide how fast all is forgotten
_KEPT_FLOATS = ("embedding", "delta_gates")
# Our name of a layer's weight -> the modules of a Hugging Face layer that are stacked (along dimension 0) to make it.
_SPLIT = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
    "q_norm": ("self_attn.q_norm",),
    "k_norm": ("self_attn.k_norm",),
}
PRE_NORM_NAMES = {**_SPLIT, "input_norm": ("input_layernorm",), "mlp_norm": ("post_attention_layernorm",)}
POST_NORM_NAMES = {
    **_SPLIT,
    "post_attn_norm": ("post_attention_layernorm",),
    "post_mlp_norm": ("post_feedforward_layernorm",),
}
SANDWICH_NORM_NAMES = {
    **POST_NORM_NAMES,
    "input_norm": ("input_layernorm",),
    "mlp_norm": ("pre_feedforward_layernorm",),
}
GLM_NAMES = {
    **SANDWICH_NORM_NAMES,
    "gate_up": ("mlp.gate_up_proj",),
    "post_attn_norm": ("post_self_attn_layernorm",),
    "mlp_norm": ("post_attention_layernorm",),
    "post_mlp_norm": ("post_mlp_layernorm",),
}
HUNYUAN_NAMES = {**PRE_NORM_NAMES, "q_norm": ("self_attn.query_layernorm",), "k_norm": ("self_attn.key_layernorm",)}
STARCODER_NAMES = {**PRE_NORM_NAMES, "gate_up": ("mlp.c_fc",), "down": ("mlp.c_proj",)}
APERTUS_NAMES = {
    **PRE_NORM_NAMES,
    "gate_up": ("mlp.up_proj",),
    "input_norm": ("attention_layernorm",),
    "mlp_norm": ("feedforward_layernorm",),
}
UNGATED_NAMES = {**PRE_NORM_NAMES, "gate_up": ("mlp.up_proj",)}
FUSED_NAMES = {**PRE_NORM_NAMES, "qkv": ("self_attn.qkv_proj",), "gate_up": ("mlp.gate_up_proj",)}

PART = re.compile(r"(.+)\[(\d+)\]")  # the name of a source that is a part of a tensor: one expert's of that of all
_NORMS = ("input_norm", "post_attn_norm", "mlp_norm", "post_mlp_norm")

# Tensors that some checkpoints hold and no decoder needs: recomputed tables and buffers.
IGNORED_PREFIXES = ("mtp.", "model.mtp_")  # heads for several tokens at once (Qwen3.5, Qwen3-Next, EXAONE; ERNIE)
IGNORED_SUFFIXES = (
    ".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached", ".masked_bias", ".act_fn.beta", ".act_fn.eps",
)  # fmt: skip


def drafting_layers(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Beginnings of the names of what a checkpoint has behind its model's layers to guess further tokens with (DeepSeek V3)."""
    count = config.get("num_nextn_predict_layers")
    layers = range(config["num_hidden_layers"], config["num_hidden_layers"] + count) if isinstance(count, int) else ()
    return tuple(f"model.layers.{layer}." for layer in layers[:16])


class Slice(NamedTuple):
    """Some rows of a tensor of the checkpoint, and of each these columns; None: all."""

    name: str
    rows: range
    columns: range | None = None


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One of the decoder's weights: `target` ("embedding", "layers.3.qkv", ...), its shape, and the tensors of the
    checkpoint (name, rows) that are stacked along dimension 0 to make it.

    `optional`: when the checkpoint has none of them the weight is not there (lm_head: the embedding is used). `slices`: what
    a rank reads of the sources, where that is not all (see parts.py); `shape` is then that of its part.
    """

    target: str
    shape: tuple[int, ...]
    sources: tuple[tuple[str, int], ...]
    optional: bool = False
    exact: bool = False  # held in float32, whatever the model's dtype, and never narrow
    wide: bool = False  # held in the model's dtype, and never narrow
    slices: tuple[Slice, ...] | None = None

    @property
    def reads(self) -> tuple[Slice, ...]:
        """What is stacked."""
        return tuple(Slice(name, range(rows)) for name, rows in self.sources) if self.slices is None else self.slices


def plan_weights(config: ModelConfig, names: Mapping[str, tuple[str, ...]]) -> list[WeightSpec]:
    """Every weight of the model in the order of its use; `names` is one of the maps above."""
    vocab, hidden = config.vocab_size, config.hidden_size
    if config.latent is not None and not config.latent.query_rank:
        names = {**names, "qkv": ("self_attn.q_proj", *names["qkv"][1:])}
    plan = [WeightSpec("embedding", (vocab, hidden), (("model.embed_tokens.weight", vocab),))]
    for layer in range(config.num_layers):
        for name, (rows, columns) in _layer_shapes(config.at(layer)).items():
            if name in _NORMS:
                plan.append(_norm(f"layers.{layer}.{name}", f"model.layers.{layer}.{names[name][0]}", config))
                continue
            suffix = ".bias" if name.endswith("_bias") else ".weight"
            modules = names[name.removesuffix("_bias")]
            if name == "kv_b" and len(modules) > 1:  # of each head two matrices
                modules = tuple(part.format(head) for head in range(config.num_heads) for part in modules)
            stacked = zip(modules, rows if len(modules) > 1 else (sum(rows),), strict=True)
            sources = tuple((f"model.layers.{layer}.{source}{suffix}", count) for source, count in stacked)
            shape = (sum(rows), columns) if columns else (sum(rows),)
            plan.append(WeightSpec(f"layers.{layer}.{name}", shape, sources, wide=name == "kv_b"))
    plan.append(_norm("final_norm", "model.norm", config))
    plan.append(WeightSpec("lm_head", (vocab, hidden), (("lm_head.weight", vocab),), optional=True))
    return plan


def _norm(target: str, module: str, config: ModelConfig) -> WeightSpec:
    """A LayerNorm's bias lies behind its weight."""
    parts, hidden = ("weight", "bias")[: 1 + (config.norm == "layer")], config.hidden_size
    return WeightSpec(target, (hidden * len(parts),), tuple((f"{module}.{part}", hidden) for part in parts))


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[tuple[int, ...], int]]:
    """Our name -> (rows of each stacked part, columns; 0 for a vector) of the weights that this model's layers have."""
    hidden, q, kv, inner = config.hidden_size, config.q_size, config.kv_size, config.intermediate_size
    shapes: dict[str, tuple[tuple[int, ...], int]] = {}
    if config.norm_place != "post":
        shapes["input_norm"] = ((hidden,), 0)
    if config.latent is not None:
        shapes |= _latent_shapes(config, config.latent)
        q = config.num_heads * config.latent.value
    else:
        shapes["qkv"] = ((q, kv, kv), hidden)
    if config.qkv_bias:
        shapes["qkv_bias"] = ((q, kv, kv), 0)
    if config.qk_norm != "none":
        whole = config.qk_norm == "full"
        shapes["q_norm"] = ((q if whole else config.head_dim,), 0)
        shapes["k_norm"] = ((kv if whole else config.head_dim,), 0)
    shapes["o"] = ((hidden,), q)
    if config.o_bias:
        shapes["o_bias"] = ((hidden,), 0)
    if config.norm_place != "pre":
        shapes["post_attn_norm"] = ((hidden,), 0)
    if config.norm_place != "post" and not config.parallel:
        shapes["mlp_norm"] = ((hidden,), 0)
    halves = (inner,) * (1 + config.gated)
    shapes["gate_up"] = (halves, hidden)
    shapes["down"] = ((hidden,), inner)
    if config.mlp_bias:
        shapes["gate_up_bias"] = (halves, 0)
        shapes["down_bias"] = ((hidden,), 0)
    if config.norm_place != "pre":
        shapes["post_mlp_norm"] = ((hidden,), 0)
    return shapes


def _latent_shapes(config: ModelConfig, latent: LatentConfig) -> dict[str, tuple[tuple[int, ...], int]]:
    """As `_layer_shapes`, of what comes before attention."""
    queries, rank = config.num_heads * latent.query, latent.query_rank
    shapes: dict[str, tuple[tuple[int, ...], int]] = {"qkv": ((rank or queries, latent.row), config.hidden_size)}
    if rank:
        shapes |= {"q_a_norm": ((rank,), 0), "q_b": ((queries,), rank)}
    kv_b = (latent.nope, latent.value) * config.num_heads, latent.rank
    return shapes | {"kv_a_norm": ((latent.rank,), 0), "kv_b": kv_b}


def xielu_plan(plan: list[WeightSpec]) -> list[WeightSpec]:
    """`plan` with the two weights that each layer's activation has in Apertus."""
    found = []
    for spec in plan:
        found.append(spec)
        of, _, name = spec.target.rpartition(".")
        if name == "gate_up":
            module = spec.sources[0][0].removesuffix("up_proj.weight") + "act_fn."
            for alpha in ("alpha_p", "alpha_n"):
                found.append(WeightSpec(f"{of}.{alpha}", (1,), ((module + alpha, 1),)))
    return found


def made_kind(spec: WeightSpec, made: str) -> str | None:
    """What the option `made` makes of floats that are `spec`'s; None: they stay. A head of its own has 8 bits that are evenly
    spaced, in any case: what its rounding changes shows in every logit, and FP8 of it is 20 times as far off."""
    name = spec.target.rpartition(".")[2]
    if len(spec.shape) != 2 or spec.exact or spec.wide or name in _KEPT_FLOATS:
        return None
    return "int8" if name == "lm_head" else made
