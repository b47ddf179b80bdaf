"""Gemma 4 converted to GGUF, as llama.cpp's converter does it, loads as its Hugging Face checkpoint does; and its tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import hypothesis.strategies as st
import pytest
import tokenizers
from hypothesis import given, settings
from safetensors.torch import load_file
from tokenizers import decoders, models, normalizers

from headrace.config import EngineConfig
from headrace.errors import CheckpointError
from headrace.model.checkpoint import resolve_checkpoint
from headrace.model.tokenizer import Tokenizer
from test_loader_gguf_families import assert_same_model
from test_tokenizer_gguf import BYTE, CONTROL, NORMAL, PATH, UNKNOWN
from tiny_gemma4 import EXPERTS, SMALL
from tiny_models import write_tiny

VARIANTS: dict[str, dict[str, Any]] = {"dense": {}, "experts": EXPERTS, "small": SMALL}


def convert(source: Path, path: Path, rotated: list[float] | None = None) -> Path:
    config = json.loads((source / "config.json").read_text())
    layers, shared = config["num_hidden_layers"], config["num_kv_shared_layers"]
    full = {int(layer): own for layer, own in config["per_layer_config"].items()}
    writer = gguf.GGUFWriter(str(path), "gemma4")
    writer.add_block_count(layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    inner = config["intermediate_size"]
    wide = config["use_double_wide_mlp"]
    writer.add_feed_forward_length([inner * (1 + (i >= layers - shared)) for i in range(layers)] if wide else inner)
    writer.add_head_count(config["num_attention_heads"])
    heads = [full.get(i, {}).get("num_key_value_heads", config["num_key_value_heads"]) for i in range(layers)]
    writer.add_head_count_kv(heads if len(set(heads)) > 1 else heads[0])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    head_dim = next(iter(full.values()))["head_dim"]
    writer.add_key_length(head_dim)
    writer.add_key_length_swa(config["head_dim"])
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if config["enable_moe_block"]:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["top_k_experts"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, layers)
    for name, tensor in load_file(source / "model.safetensors").items():
        layer = name.split(".")[2]
        if name.endswith("router.scale"):
            found = f"blk.{layer}.ffn_gate_inp.scale"
        elif name.endswith("per_expert_scale"):
            found = f"blk.{layer}.ffn_down_exps.scale"
        else:
            whole = name.endswith("layer_scalar") or ".experts." in name
            found = names.get_name(f"{name}.weight" if whole else name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(found, tensor.numpy())
    import numpy as np

    first = int(head_dim * rope["full_attention"]["partial_rotary_factor"] / 2)
    factors = rotated or [1.0] * first + [1e30] * (head_dim // 2 - first)
    writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_gguf_is_the_checkpoint_that_it_was_made_from(variant: str, tmp_path: Path):
    source = write_tiny("gemma4", tmp_path / "hf", **VARIANTS[variant])
    assert_same_model(source, convert(source, tmp_path / "model.gguf"))


def test_other_factors_of_frequencies_are_refused(tmp_path: Path):
    source = write_tiny("gemma4", tmp_path / "hf")
    path = convert(source, tmp_path / "model.gguf", [1.0, 2.0] * 8)
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
        _ = resolve_checkpoint(EngineConfig(model=str(path))).config


PIECES = ["▁", "a", "b", "c", "\n", "é", "ab", "▁a", "▁ab", "\n\n", "abc", "▁▁"]
MERGES = [("a", "b"), ("▁", "a"), ("▁", "ab"), ("\n", "\n"), ("ab", "c"), ("▁", "▁")]
TOKENS = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]


@pytest.fixture(scope="module")
def pair() -> tuple[Tokenizer, tokenizers.Tokenizer]:
    """Ours from metadata, and what the published tokenizer.json says."""
    ours = Tokenizer.from_gguf_metadata(PATH, {
        "tokenizer.ggml.model": "gemma4", "tokenizer.ggml.tokens": TOKENS, "tokenizer.ggml.scores": [0.0] * len(TOKENS),
        "tokenizer.ggml.token_type": [CONTROL] * 3 + [UNKNOWN] + [BYTE] * 256 + [NORMAL] * len(PIECES),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in MERGES], "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.unknown_token_id": 3, "tokenizer.ggml.add_space_prefix": False,
    })  # fmt: skip
    vocab = {token: i for i, token in enumerate(TOKENS)}
    theirs = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=MERGES, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    theirs.normalizer = normalizers.Replace(" ", "▁")
    theirs.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return ours, theirs


@settings(max_examples=100)
@given(text=st.text(st.sampled_from("aabbc \n é日"), max_size=24))
def test_the_tokenizer_follows_the_files_merges(pair, text: str):
    ours, theirs = pair
    ids = ours.encode(text, add_special_tokens=False)
    assert ids == theirs.encode(text).ids
    assert ours.decode(ids) == text
    assert ours.encode(text) == [2, *ids]
