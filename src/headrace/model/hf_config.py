"""Checked reading of a Hugging Face `config.json`: every value has its type and range, or an error that names it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from headrace.errors import CheckpointError
from headrace.model.config import RopeConfig

Activation = Literal["silu", "gelu_tanh", "gelu", "relu2", "xielu"]
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu2": "relu2",
    "xielu": "xielu",
}
MOST_HEADS = 2**14  # of attention: plans and ranks count them one by one
_FLOAT32 = 3e38  # what is computed with lies below
_UNGATED = ("relu2", "xielu")
RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"]
# Which entries of rope_parameters / rope_scaling each kind reads: required, then optional.
_ROPE_ENTRIES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("original_max_position_embeddings",),
        ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": (
        ("short_factor", "long_factor", "original_max_position_embeddings"),
        ("factor", "attention_factor"),
    ),
    "proportional": ((), ("factor", "partial_rotary_factor")),
}


@dataclass(frozen=True, slots=True)
class HfConfig:
    """A parsed config.json (`raw`). Readers raise CheckpointError; null counts as absent."""

    raw: Mapping[str, Any]

    def count(self, name: str, default: int | None = None, most: int = 2**40) -> int:
        """A size: an integer in [1, most] (or the default)."""
        value = self.raw.get(name)
        if value is None:
            if default is None:
                raise CheckpointError(f"config.json: {name} is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise CheckpointError(f"config.json: {name} is {value!r}, wanted an integer in [1, {most}]")
        return value

    def num_layers(self) -> int:
        return self.count("num_hidden_layers", most=10_000)

    def number(self, name: str, default: float) -> float:
        value = self.raw.get(name)
        return default if value is None else _positive(name, value)

    def flag(self, name: str) -> bool:
        value = self.raw.get(name)
        if value is not None and not isinstance(value, bool):
            raise CheckpointError(f"config.json: {name} is {value!r}, wanted true or false")
        return bool(value)

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One id, a list of ids or nothing."""
        value = self.raw.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
            raise CheckpointError(f"config.json: {name} is {value!r}, wanted a token id or a list of them")
        return tuple(ids)

    def activation(self, gated: bool) -> Activation:
        # Gemma-2's older files carry both names, and only the second is meant
        name = self.raw.get("hidden_activation") or self.raw.get("hidden_act") or "silu"
        if not isinstance(name, str) or name not in _ACTIVATIONS or (gated and name in _UNGATED):
            known = ", ".join(name for name in _ACTIVATIONS if not gated or name not in _UNGATED)
            raise CheckpointError(f"config.json: activation {name!r} is not supported; known: {known}")
        return _ACTIVATIONS[name]

    def dtype(self) -> str:
        name = str(self.raw.get("dtype") or self.raw.get("torch_dtype") or "float32").removeprefix("torch.")
        return name if name in ("float32", "float16", "bfloat16") else "float32"

    def rope(self, layer_type: str, theta: float) -> RopeConfig:
        """Rope of the layers of `layer_type`, from `rope_parameters` (Transformers 5; flat or one entry per layer type)
        or `rope_theta` + `rope_scaling` (before; scaling is of the full-attention layers). `theta`: where none is given.
        """
        entries = self.rope_entries(layer_type)
        kind = entries.get("rope_type") or "default"
        if kind == "su" or (kind == "yarn" and "short_factor" in entries):  # early names in Phi-3's files
            kind = "longrope"
        if not isinstance(kind, str) or kind not in _ROPE_ENTRIES:
            known = ", ".join(_ROPE_ENTRIES)
            raise CheckpointError(f"config.json: rope type {kind!r} is not supported; known: {known}")
        max_position = self.count("max_position_embeddings", 2048)
        head_dim = self.count("head_dim", self.count("hidden_size") // self.count("num_attention_heads"))
        partial = entries.get("partial_rotary_factor", self.raw.get("partial_rotary_factor"))
        if kind == "proportional":  # all of a head is in its table
            partial = None
        dim = int(head_dim * (1.0 if partial is None else _positive("partial_rotary_factor", partial)))
        if dim % 2 or not 2 <= dim <= head_dim:
            raise CheckpointError(f"config.json: rotary dimension {dim}, wanted an even number up to head_dim {head_dim}")
        if self.raw.get("original_max_position_embeddings") is not None:  # Phi-3 keeps it outside, and there it counts
            entries["original_max_position_embeddings"] = self.count("original_max_position_embeddings")
        entries.setdefault("original_max_position_embeddings", max_position)
        base = entries.get("rope_theta")
        return RopeConfig(
            theta=theta if base is None else _positive("rope_theta", base),
            dim=dim,
            kind=cast(RopeKind, kind),
            max_position=max_position,
            params=_checked_rope(kind, entries, dim),
        )

    def rope_entries(self, layer_type: str) -> dict[str, Any]:
        """What the config says of these layers' rope, in the names of Transformers 5."""
        new, old = self.raw.get("rope_parameters") or {}, self.raw.get("rope_scaling") or {}
        for name, entries in (("rope_parameters", new), ("rope_scaling", old)):
            if not isinstance(entries, dict):
                raise CheckpointError(f"config.json: {name} is {entries!r}, wanted an object")
        by_layer = any(isinstance(value, dict) for value in new.values())
        if by_layer:
            new = new.get(layer_type) or {}
            if not isinstance(new, dict):
                raise CheckpointError(f"config.json: rope_parameters of {layer_type} is {new!r}, wanted an object")
        elif layer_type != "full_attention":
            return {}
        spelled = ({**part, "rope_type": part.get("rope_type") or part.get("type")} for part in (new, old))
        parts = [{k: v for k, v in part.items() if v is not None} for part in spelled]
        if layer_type != "full_attention" or not parts[1]:
            return parts[0]
        # as in Transformers: the old field takes the new one's place, or adds to that of the layers which it is about
        return {**parts[0], **parts[1]} if by_layer else parts[1]


def _positive(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _FLOAT32:
        raise CheckpointError(f"config.json: {name} is {value!r}, wanted a positive number within float32")
    return value


def _checked_rope(kind: str, entries: dict[str, Any], dim: int) -> tuple[tuple[str, object], ...]:
    required, optional = _ROPE_ENTRIES[kind]
    kept: dict[str, object] = {}
    for name in required + optional:
        value = entries.get(name)
        if value is None:
            if name in required:
                raise CheckpointError(f"config.json: rope type {kind!r} needs {name}")
        elif name == "truncate":
            kept[name] = bool(value)
        elif name in ("short_factor", "long_factor"):
            if not isinstance(value, list) or len(value) != dim // 2:
                raise CheckpointError(f"config.json: rope {name} must be a list of {dim // 2} numbers")
            kept[name] = tuple(_positive(name, v) for v in value)
        else:
            kept[name] = _positive(name, value)
    return tuple(sorted(kept.items()))
