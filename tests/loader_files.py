"""Writes small GGUF and safetensors files for the loader's tests, right ones and broken ones."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np

VOCAB, HIDDEN, INNER, LAYERS, HEADS, KV_HEADS = 300, 64, 96, 2, 4, 2
HEAD_DIM = HIDDEN // HEADS


def interleave(weight: np.ndarray, head_dim: int = HEAD_DIM) -> np.ndarray:
    """What llama.cpp's converter does to q and k: rows of a head's two rotary halves alternate."""
    heads = weight.reshape(-1, 2, head_dim // 2, *weight.shape[1:])
    return heads.swapaxes(1, 2).reshape(weight.shape)


def llama_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """A random Llama model's tensors by GGUF name, in the order of rows that Hugging Face uses."""
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for i in range(LAYERS):
        kv = KV_HEADS * HEAD_DIM
        shapes |= {
            f"blk.{i}.attn_norm.weight": (HIDDEN,),
            f"blk.{i}.attn_q.weight": (HIDDEN, HIDDEN),
            f"blk.{i}.attn_k.weight": (kv, HIDDEN),
            f"blk.{i}.attn_v.weight": (kv, HIDDEN),
            f"blk.{i}.attn_output.weight": (HIDDEN, HIDDEN),
            f"blk.{i}.ffn_norm.weight": (HIDDEN,),
            f"blk.{i}.ffn_gate.weight": (INNER, HIDDEN),
            f"blk.{i}.ffn_up.weight": (INNER, HIDDEN),
            f"blk.{i}.ffn_down.weight": (HIDDEN, INNER),
        }
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def write_gguf(
    path: Path, tensors: dict[str, np.ndarray], arch: str = "llama", kinds: Mapping[str, Any] = MappingProxyType({}), parts: int = 1, **metadata: Any
) -> Path:  # fmt: skip
    """A GGUF model file with the package's own writer; `metadata` are further keys under the architecture's prefix, or under `general`. `kinds`: of
    tensors that are bytes. `parts`: in so many files, whose names say it."""
    writer = gguf.GGUFWriter(str(path), arch, split_max_tensors=-(-len(tensors) // parts) if parts > 1 else 0)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in metadata.items():
        key = key.replace("__", ".")
        add: Any = writer.add_uint32 if isinstance(value, int) else writer.add_float32
        if isinstance(value, str):
            add = writer.add_string
        add(key if key.startswith("general.") else f"{arch}.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["a", "b", "c"])
    writer.add_eos_token_id(2)
    for name, data in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kinds.get(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_llama_gguf(path: Path, seed: int = 0, **metadata: Any) -> Path:
    """A Llama GGUF in F32, with interleaved q and k as the converter writes it."""
    tensors = llama_tensors(seed)
    stored = {n: interleave(t) if "attn_q." in n or "attn_k." in n else t for n, t in tensors.items()}
    return write_gguf(path, stored, **metadata)


def gguf_string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def raw_gguf(
    path: Path, *, values: bytes = b"", tensors: bytes = b"", num_values: int = 0, num_tensors: int = 0, data: bytes = b"",
    version: int = 3, magic: bytes = b"GGUF",
) -> Path:  # fmt: skip
    """A GGUF file from its parts, as wrong as they are."""
    head = magic + struct.pack("<IQQ", version, num_tensors, num_values) + values + tensors
    path.write_bytes(head + b"\0" * (-len(head) % 32) + data)
    return path


def tensor_info(name: str, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return gguf_string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def raw_safetensors(path: Path, header: Any, data: bytes = b"", claimed: int | None = None) -> Path:
    """A safetensors file from a header (JSON value or bytes) and data, with a header length of choice."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if claimed is None else claimed) + raw + data)
    return path
