"""A GGUF file of a shape with random weights, for engines that read nothing else: speed does not depend on their values.

    python benchmarks/random_gguf.py benchmarks/shapes/qwen3-8b.json OUT.gguf [--kind Q8_0] [--tokenizer-of FILE.gguf]

Qwen3's shapes (a config.json of that family). Written tensor by tensor: memory stays small. Norms are ones. Engines that want
text need a tokenizer: that of another file, filled up to the shape's vocabulary with tokens that no text has.
"""

from __future__ import annotations

import argparse
import json
from typing import Any, NamedTuple

import numpy as np
from gguf import GGML_QUANT_VERSION, GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType, TokenType

BLOCK = 32  # weights with a scale in common
Shape = tuple[int, ...]


class Kind(NamedTuple):
    """How weights are stored: bytes of a block, and the float16 numbers that it begins with, in units of 1 / sqrt(inputs)."""

    block_bytes: int
    head: tuple[float, ...]


KINDS = {"Q4_0": Kind(18, (0.25,)), "Q4_1": Kind(20, (0.25, -1.9)), "Q8_0": Kind(34, (0.016,))}


def tensors(c: dict[str, Any]) -> dict[str, Shape]:
    """Name and shape of all tensors, matrices as [outputs, inputs]."""
    hidden, width, head = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    queries, keys = head * c["num_attention_heads"], head * c["num_key_value_heads"]
    found: dict[str, Shape] = {"token_embd": (c["vocab_size"], hidden), "output_norm": (hidden,)}
    if not c["tie_word_embeddings"]:
        found["output"] = (c["vocab_size"], hidden)
    for i in range(c["num_hidden_layers"]):
        parts: dict[str, Shape] = {
            "attn_norm": (hidden,), "ffn_norm": (hidden,), "attn_q_norm": (head,), "attn_k_norm": (head,),
            "attn_q": (queries, hidden), "attn_k": (keys, hidden), "attn_v": (keys, hidden), "attn_output": (hidden, queries),
            "ffn_gate": (width, hidden), "ffn_up": (width, hidden), "ffn_down": (hidden, width),
        }  # fmt: skip
        found |= {f"blk.{i}.{name}": shape for name, shape in parts.items()}
    return {f"{name}.weight": shape for name, shape in found.items()}


def describe(writer: GGUFWriter, c: dict[str, Any], kind: str, tokenizer_of: str | None) -> None:
    writer.add_block_count(c["num_hidden_layers"])
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_feed_forward_length(c["intermediate_size"])
    writer.add_head_count(c["num_attention_heads"])
    writer.add_head_count_kv(c["num_key_value_heads"])
    writer.add_key_length(c["head_dim"])
    writer.add_value_length(c["head_dim"])
    writer.add_layer_norm_rms_eps(c["rms_norm_eps"])
    writer.add_rope_freq_base(c["rope_theta"])
    writer.add_vocab_size(c["vocab_size"])
    writer.add_file_type(LlamaFileType[f"MOSTLY_{kind}"])
    writer.add_quantization_version(GGML_QUANT_VERSION)
    if tokenizer_of is None:
        writer.add_tokenizer_model("none")
        return
    for name, field in GGUFReader(tokenizer_of).fields.items():
        if name.startswith("tokenizer."):
            key, value = field.types[0], field.contents()
            if name.endswith((".tokens", ".token_type", ".scores")):
                value = filled_up(name, value, c["vocab_size"])
            writer.add_key_value(name, value, key, field.types[-1] if key == GGUFValueType.ARRAY else None)


def filled_up(name: str, values: list[Any], count: int) -> list[Any]:
    """A tokenizer's list with an entry for each id of a vocabulary of `count`."""
    if len(values) > count:
        raise SystemExit(f"{name} has {len(values)} entries, more than the vocabulary's {count}")
    fill = {".tokens": "[unused {}]", ".token_type": int(TokenType.UNUSED), ".scores": 0.0}[name[name.rindex(".") :]]
    more = range(len(values), count)
    return values + [fill.format(i) if isinstance(fill, str) else fill for i in more]


def values(shape: Shape, kind: Kind, random: np.random.Generator) -> np.ndarray:
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    blocks = random.integers(0, 256, (shape[0], shape[1] // BLOCK, kind.block_bytes), np.uint8)
    head = (np.array(kind.head) / np.sqrt(shape[1])).astype(np.float16).view(np.uint8)
    blocks[:, :, : len(head)] = head
    return blocks.reshape(shape[0], -1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("out")
    parser.add_argument("--kind", choices=KINDS, default="Q4_1", help="of the matrices")
    parser.add_argument("--tokenizer-of", help="take the tokenizer of this GGUF file; without it the file has none")
    args = parser.parse_args()
    with open(args.config, encoding="utf-8") as file:
        config = json.load(file)
    writer, random, kind = GGUFWriter(args.out, config["model_type"]), np.random.default_rng(0), KINDS[args.kind]
    describe(writer, config, args.kind, args.tokenizer_of)
    found = tensors(config)
    for name, shape in found.items():
        if len(shape) == 1:
            writer.add_tensor_info(name, shape, np.dtype(np.float32), 4 * shape[0])
        else:
            stored = (shape[0], shape[1] // BLOCK * kind.block_bytes)
            writer.add_tensor_info(name, stored, np.dtype(np.uint8), stored[0] * stored[1], GGMLQuantizationType[args.kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for shape in found.values():
        writer.write_tensor_data(values(shape, kind, random))
    writer.close()


if __name__ == "__main__":
    main()
