"""Translates a GGUF file's metadata and tensor names into those of the Hugging Face checkpoint it was made from.

So one table of families serves both formats. The translation undoes what llama.cpp's converter did: the order of rotary
halves in the q and k rows of llama-like architectures, and the 1 that it adds to Gemma's norm weights.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

from headrace.errors import CheckpointError
from headrace.model.formats.gguf import GgufFile
from headrace.model.formats.gguf_architectures import ARCHITECTURES, Architecture
from headrace.model.formats.gguf_experts import by_expert
from headrace.model.formats.gguf_metadata import Metadata
from headrace.model.formats.tensor_file import TensorEntry

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output_norm.bias": "model.norm.bias",
    "output.weight": "lm_head.weight",
}
_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def hf_tensors(gguf: GgufFile) -> dict[str, TensorEntry]:
    """The file's tensors by Hugging Face name. Raises CheckpointError for one that the architecture lacks."""
    arch = _architecture(gguf)
    head_dim = _hf_head_dim(gguf)
    layer_names, top_names = {**_LAYER_NAMES, **arch.names}, {**_TOP_NAMES, **arch.tensors}
    unused = _unused(Metadata(gguf))
    entries: dict[str, TensorEntry] = {}
    for name, entry in gguf.tensors.items():
        if name in _ROPE_TENSORS:
            continue
        part = ""
        if (target := top_names.get(name)) is None:
            if any(name.startswith(prefix) for prefix in unused):
                continue
            match = re.fullmatch(r"blk\.(\d{1,5})\.((\w+)\.(weight|bias|scale))", name)
            part = match[3] if match else ""
            own = arch.tensors.get(match[2]) if match else None
            if match is None or (own is None and (part not in layer_names or match[4] == "scale")):
                raise CheckpointError(f"{gguf.path}: unexpected tensor {name!r} for architecture {gguf.architecture!r}")
            target = f"model.layers.{int(match[1])}.{own or f'{layer_names[part]}.{match[4]}'}"
        changes: dict[str, Any] = {}
        if arch.interleaved and part in ("attn_q", "attn_k"):
            if entry.num_rows % head_dim:
                raise CheckpointError(f"{gguf.path}: {name!r} has {entry.num_rows} rows, not whole heads of {head_dim}")
            changes["head_dim"] = head_dim
        if arch.norms_plus_one and "norm" in name and name.endswith(".weight"):
            changes["shift"] = -1.0
        entries |= {part.name: part for part in by_expert(dataclasses.replace(entry, **changes), target)}
    return entries


def _unused(meta: Metadata) -> list[str]:
    """Layers behind the last, which guess several tokens ahead."""
    count = meta.get("nextn_predict_layers")
    last = meta.integer("block_count")
    return [f"blk.{layer}." for layer in range(last - min(meta.integer("nextn_predict_layers"), last), last)] if count else []


def hf_config(gguf: GgufFile) -> dict[str, Any]:
    """What the model's `config.json` would say. Raises CheckpointError for an unknown architecture or missing value."""
    arch, meta = _architecture(gguf), Metadata(gguf)
    heads = meta.integer("attention.head_count")
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{gguf.path}: no tensor 'token_embd.weight' of two dimensions")
    config: dict[str, Any] = {
        "architectures": [arch.hf_class],
        "model_type": arch.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": meta.integer("embedding_length"),
        "num_hidden_layers": meta.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.integer("attention.head_count_kv", heads, uneven=arch.uneven),
        "head_dim": _hf_head_dim(gguf),
        "intermediate_size": meta.integer("feed_forward_length", uneven=arch.uneven),
        "max_position_embeddings": meta.integer("context_length"),
        "rms_norm_eps": meta.number("attention.layer_norm_rms_epsilon", 1e-6),
        "rope_theta": meta.number("rope.freq_base", 10000.0),
        "rope_scaling": None if arch.uneven else _rope_scaling(gguf, meta),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "attention_bias": "blk.0.attn_q.bias" in gguf.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in gguf.tensors,
        "torch_dtype": "float32" if embedding.encoding.name == "F32" else "bfloat16",
        "bos_token_id": meta.token("bos"),
        "eos_token_id": end_token_ids(gguf),
    }
    config |= arch.parts(meta, config)
    return config


def end_token_ids(gguf: GgufFile) -> list[int]:
    """The tokens that end a generation: eos, end of turn and end of message where the metadata name them."""
    meta = Metadata(gguf)
    ids = [meta.token(name) for name in ("eos", "eot", "eom")]
    return sorted({i for i in ids if i is not None})


def _architecture(gguf: GgufFile) -> Architecture:
    name = gguf.architecture
    if name not in ARCHITECTURES:
        raise CheckpointError(f"{gguf.path}: GGUF architecture {name!r} is not supported ({', '.join(ARCHITECTURES)} are)")
    return ARCHITECTURES[name]


def _hf_head_dim(gguf: GgufFile) -> int:
    meta = Metadata(gguf)
    if meta.get("attention.key_length") is not None:
        return meta.integer("attention.key_length")
    hidden, heads = meta.integer("embedding_length"), meta.integer("attention.head_count")
    if hidden % heads:
        raise CheckpointError(f"{gguf.path}: embedding_length {hidden} is not a multiple of head_count {heads}")
    return hidden // heads


def _rope_scaling(gguf: GgufFile, meta: Metadata) -> dict[str, Any] | None:
    if "rope_factors_long.weight" in gguf.tensors:
        scaling: dict[str, Any] = {
            "rope_type": "longrope",
            "long_factor": meta.vector("rope_factors_long.weight"),
            "short_factor": meta.vector("rope_factors_short.weight"),
        }
        if meta.get("rope.scaling.attn_factor") is not None:
            scaling["attention_factor"] = meta.number("rope.scaling.attn_factor", 1.0)
        return scaling
    if "rope_freqs.weight" in gguf.tensors:
        return _llama3_scaling(gguf, meta)
    kind = meta.get("rope.scaling.type")
    if kind in (None, "none"):
        return None
    if kind not in ("linear", "yarn"):
        raise CheckpointError(f"{gguf.path}: rope scaling {kind!r} is not supported")
    scaling = {"rope_type": kind, "factor": meta.number("rope.scaling.factor", 1.0)}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = meta.integer("rope.scaling.original_context_length")
        if meta.get("rope.scaling.attn_factor") is not None:  # ggml multiplies it with yarn's own factor
            own = 0.1 * math.log(max(scaling["factor"], 1.0)) + 1.0
            scaling["attention_factor"] = meta.number("rope.scaling.attn_factor", 1.0) * own
        if meta.get("rope.scaling.yarn_log_multiplier"):
            scaling |= {"mscale": 1.0, "mscale_all_dim": meta.number("rope.scaling.yarn_log_multiplier", 1.0)}
        for name in ("beta_fast", "beta_slow"):
            if meta.get(f"rope.scaling.yarn_{name}") is not None:
                scaling[name] = meta.number(f"rope.scaling.yarn_{name}", 0.0)
    return scaling


def _llama3_scaling(gguf: GgufFile, meta: Metadata) -> dict[str, Any]:
    """The parameters behind `rope_freqs`: llama3 scaling is stored as one divisor per frequency.

    All published Llama 3 models share low 1, high 4 and 8192 original positions; the largest divisor is the factor. The
    divisors are computed again from these, and a file that does not agree is refused rather than approximated.
    """
    given = meta.vector("rope_freqs.weight")
    factor, low, high, original = max(given), 1.0, 4.0, 8192
    base, dim = meta.number("rope.freq_base", 10000.0), meta.integer("rope.dimension_count", _hf_head_dim(gguf))
    expected = []
    for i in range(0, dim, 2):
        turns = original / (2 * math.pi * base ** (i / dim))  # of this frequency within the original context
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        expected.append(1.0 / ((1.0 - smooth) / factor + smooth))
    if len(given) != len(expected) or any(not math.isclose(a, b, rel_tol=1e-3) for a, b in zip(given, expected, strict=True)):
        raise CheckpointError(f"{gguf.path}: 'rope_freqs.weight' is no llama3 rope scaling; no other is supported")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
