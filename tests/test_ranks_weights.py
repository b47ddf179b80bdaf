"""Ranks read their parts of a checkpoint, and nothing else: together they have it all."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

import loader_files as files
from headrace.config import EngineConfig
from headrace.model.checkpoint import Checkpoint, resolve_checkpoint
from headrace.model.decoder_weights import DecoderWeights
from headrace.model.families import model_config_from_hf, weight_plan
from headrace.model.formats.gguf import read_gguf
from headrace.model.loader import load_model, load_tensors
from headrace.model.parts import parts_of, taken, weight_bytes
from headrace.model.shard import Shard, sizes_of
from headrace.model.streaming import chunks_of
from headrace.model.weight import Weight
from headrace.model.weight_names import Slice, WeightSpec
from tiny_models import TINY, write_shape, write_tiny

CPU = torch.device("cpu")
MORE = {
    "llama": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False, "num_attention_heads": 4},
    "qwen2": {"vocab_size": 515}, "qwen3": {"num_attention_heads": 4}, "mistral": {"num_attention_heads": 8},
}  # fmt: skip


def of_checkpoint(path: Path, **options) -> Checkpoint:
    return resolve_checkpoint(EngineConfig(model=str(path), **options))


def tensors_of(weights: DecoderWeights) -> dict[str, Tensor]:
    named = {"embedding": weights.embedding, "final_norm": weights.final_norm, "lm_head": weights.lm_head}
    for i, layer in enumerate(weights.layers):
        named |= {f"layers.{i}.{f.name}": getattr(layer, f.name) for f in fields(layer) if f.name != "more"}
        named |= {f"layers.{i}.{name}": value for name, value in layer.more.items()}
    return {name: t.data if isinstance(t, Weight) else t for name, t in named.items() if t is not None and (not isinstance(t, Weight) or t.data.numel())}


def check_parts(checkpoint: Checkpoint, size: int) -> None:
    """What each rank loads is cut from what one rank loads."""
    config = model_config_from_hf(checkpoint.config)
    whole = tensors_of(load_model(checkpoint, config, torch.float32, CPU))
    specs = {spec.target: spec for spec in weight_plan(config)}
    for rank in range(size):
        shard = Shard(rank, size)
        weights = load_model(checkpoint, config, torch.float32, CPU, shard=shard)
        parts = {part.target: part for part in parts_of(list(specs.values()), config, shard)}
        loaded = tensors_of(weights)
        assert loaded.keys() == whole.keys() & parts.keys()
        for name, tensor in loaded.items():
            assert torch.equal(tensor, taken(whole[name], specs[name], parts[name])), (name, rank)
        assert (weights.lm_head.data is weights.embedding) == (whole["lm_head"] is whole["embedding"])
        assert weights.num_bytes <= weight_bytes(config, torch.float32, shard) + 4 * loaded["lm_head"].numel()


@pytest.mark.parametrize("family", TINY)
def test_every_family(family: str, tmp_path: Path):
    checkpoint = of_checkpoint(write_tiny(family, tmp_path / "model", **MORE.get(family, {})))
    sizes = sizes_of(model_config_from_hf(checkpoint.config))
    for size in {2, 4} & set(sizes):
        check_parts(checkpoint, size)


def test_parts_put_together_are_the_file(tmp_path: Path):
    """Not by our own cutting: rows and columns of all ranks side by side."""
    checkpoint = of_checkpoint(write_tiny("granite", tmp_path / "model", num_key_value_heads=4))
    config = model_config_from_hf(checkpoint.config)
    whole = load_model(checkpoint, config, torch.float32, CPU)
    parts = [load_model(checkpoint, config, torch.float32, CPU, shard=Shard(rank, 4)) for rank in range(4)]
    assert torch.equal(torch.cat([p.embedding for p in parts]), whole.embedding)
    for i, layer in enumerate(whole.layers):
        of = [p.layers[i] for p in parts]
        assert torch.equal(torch.cat([p.o.data for p in of], 1), layer.o.data)
        assert torch.equal(torch.cat([p.down.data for p in of], 1), layer.down.data)
        halves = [p.gate_up.data.chunk(2) for p in of]
        assert torch.equal(torch.cat([h[0] for h in halves] + [h[1] for h in halves]), layer.gate_up.data)
        own = [p.qkv.data.split([24, 12, 12]) for p in of]
        assert torch.equal(torch.cat([s[part] for part in range(3) for s in own]), layer.qkv.data)


def test_interleaved_heads_of_a_gguf_stay_whole(tmp_path: Path):
    check_parts(of_checkpoint(files.write_llama_gguf(tmp_path / "m.gguf")), 2)


@pytest.mark.parametrize("name", ["F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K", "IQ4_NL"])
def test_columns_are_read_by_whole_blocks(name: str, tmp_path: Path):
    """Cut anywhere: a block that the cut goes through is read by both ranks, and nothing beside it."""
    kind = gguf.GGMLQuantizationType[name]
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    width = 3 * max(block_size, 8)
    raw = np.random.default_rng(3).integers(0, 60, (8, width // block_size * block_bytes), dtype=np.uint8)
    writer = gguf.GGUFWriter(str(tmp_path / "x.gguf"), "llama")
    writer.add_tensor("o", raw if block_size > 1 else raw.view(np.uint16).view(np.float16), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    entries = read_gguf(tmp_path / "x.gguf").tensors
    (whole,) = load_tensors([WeightSpec("o", (8, width), (("o", 8),))], entries, torch.float32, CPU).values()
    for start, stop in ((0, width // 2), (width // 2, width), (3, 5), (width - 9, width), (0, width)):
        columns, rows = range(start, stop), range(2, 7)
        spec = WeightSpec("o", (5, len(columns)), (("o", 8),), slices=(Slice("o", rows, columns),))
        (part,) = load_tensors([spec], entries, torch.float32, CPU).values()
        assert torch.equal(part, whole[2:7, start:stop])
        blocks = -(-stop // block_size) - start // block_size
        assert sum(chunk.num_bytes for chunk in chunks_of([spec], entries, 100)) == 5 * blocks * block_bytes


def test_dummy_ranks_have_the_model_of_one(tmp_path: Path):
    small = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": 203}
    shape = write_shape(tmp_path, **small, num_attention_heads=8, num_key_value_heads=2, head_dim=16)
    check_parts(of_checkpoint(Path(shape), load_format="dummy"), 4)


def test_no_rank_reads_or_holds_more_than_its_part(tmp_path: Path):
    wide = {
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 2048,
    }
    checkpoint = of_checkpoint(write_tiny("mistral", tmp_path / "model", **wide))
    config = model_config_from_hf(checkpoint.config)

    def bytes_read(shard: Shard) -> tuple[int, int]:
        read = lambda: int(Path("/proc/self/io").read_text().split()[1])  # noqa: E731  (rchar: what was asked of the system)
        before = read()
        weights = load_model(checkpoint, config, torch.float32, CPU, shard=shard)
        return read() - before, weights.num_bytes

    read, held = bytes_read(Shard())
    for rank in range(4):
        of_rank = bytes_read(Shard(rank, 4))
        norms = 4 * 256 * (2 * config.num_layers + 1)
        assert abs(of_rank[1] - (held - norms) // 4 - norms) <= 4 * 8 * 256
        assert of_rank[0] <= of_rank[1] + (read - held) + 1024, "and the headers"
