"""The text part of checkpoints that see images, too: its config, and the names of its tensors. Vision is left in the file."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from headrace.errors import CheckpointError

# Architecture -> what its text_config means where it is silent and that the same model alone would not leave out.
WRAPPERS: Mapping[str, Mapping[str, Any]] = MappingProxyType({
    "Mistral3ForConditionalGeneration": {"model_type": "mistral"},
    "LlavaForConditionalGeneration": {"model_type": "llama"},
    "Qwen3_5ForConditionalGeneration": {"model_type": "qwen3_5_text"},
    "Qwen3_5MoeForConditionalGeneration": {"model_type": "qwen3_5_moe_text"},
    "Gemma3ForConditionalGeneration": {
        "model_type": "gemma3_text", "vocab_size": 262_208, "num_attention_heads": 8, "max_position_embeddings": 131_072,
    },
    "Gemma4ForConditionalGeneration": {"model_type": "gemma4_text", "vocab_size": 262_144, "num_attention_heads": 8},
    "Gemma4UnifiedForConditionalGeneration": {
        "model_type": "gemma4_unified_text", "vocab_size": 262_144, "num_attention_heads": 8,
    },
})  # fmt: skip
# Where these lie: in the files of Transformers 4 and of others, in those of Transformers 5.
_TEXT = {
    "language_model.model.": "model.", "model.language_model.": "model.", "language_model.lm_head.": "lm_head.",
}  # fmt: skip
_IMAGES = (  # and sounds
    "vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.", "model.visual.",
    "embed_vision.", "model.embed_vision.", "vision_embedder.", "model.vision_embedder.", "model.audio_tower.",
    "model.embed_audio.",
)  # fmt: skip
_OF_ALL = (
    "quantization_config", "compression_config", "quantization", "dtype", "torch_dtype", "bos_token_id", "eos_token_id",
)  # fmt: skip
_LISTS = ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules", "exclude")  # of a quantization_config
_Entry = TypeVar("_Entry")


def wrapper_of(config: Mapping[str, Any]) -> str | None:
    """The architecture, if it is one whose text part can be run alone."""
    names = config.get("architectures")
    return next((name for name in WRAPPERS if isinstance(names, list) and name in names), None)


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the text part as that of a model of its own; of a model without others the config as it is. Raises
    CheckpointError."""
    wrapper = wrapper_of(config)
    if wrapper is None:
        return dict(config)
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise CheckpointError(f"config.json: text_config is {text!r}, {wrapper} needs an object")
    of_all = {name: config[name] for name in _OF_ALL if config.get(name) is not None}
    given = {name: value for name, value in text.items() if name not in _OF_ALL or value is not None}
    found = {**WRAPPERS[wrapper], **of_all, **given}
    found.pop("architectures", None)  # the model_type says it
    found.pop("tie_word_embeddings", None)  # here the whole model's counts
    if config.get("tie_word_embeddings") is not None:
        found["tie_word_embeddings"] = config["tie_word_embeddings"]
    for method in ("quantization_config", "compression_config"):
        if isinstance(found.get(method), dict):
            found[method] = {name: _renamed(value) if name in _LISTS else value for name, value in found[method].items()}
    return found


def text_tensors(entries: Mapping[str, _Entry]) -> dict[str, _Entry]:
    """By the names that the text part alone would have; nothing of what sees images."""
    return {_text_name(name): entry for name, entry in entries.items() if not name.startswith(_IMAGES)}


def _text_name(name: str) -> str:
    for theirs, ours in _TEXT.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def _renamed(names: Any) -> Any:
    """Modules that are not quantized, in a list; a name may be a module's, or all that begin with it."""
    if not isinstance(names, list):
        return names
    return [_text_name(f"{name}.").removesuffix(".") if isinstance(name, str) else name for name in names]
