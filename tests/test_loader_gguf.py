"""GGUF: every encoding decoded as the gguf package does it, whole models loaded, every lie in a header answered."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path
from typing import Any

import gguf
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import example, given, settings

import loader_files as files
from headrace.config import EngineConfig
from headrace.engine.weight_sizes import weight_bytes
from headrace.errors import CheckpointError
from headrace.model.checkpoint import resolve_checkpoint
from headrace.model.families import model_config_from_hf
from headrace.model.formats.blocks import decode_rows
from headrace.model.formats.gguf import read_gguf
from headrace.model.formats.gguf_model import hf_config, hf_tensors
from headrace.model.loader import load_model

ENCODINGS = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "Q2_K", "Q3_K",
             "IQ4_NL", "IQ4_XS", "MXFP4", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M"]  # fmt: skip
CPU = torch.device("cpu")


def load(path: Path, dtype: torch.dtype = torch.float32):
    checkpoint = resolve_checkpoint(EngineConfig(model=str(path)))
    return load_model(checkpoint, model_config_from_hf(checkpoint.config), dtype, CPU)


def decode_entry(entry) -> torch.Tensor:
    with entry.file.open("rb") as file:
        file.seek(entry.offset)
        raw = torch.frombuffer(bytearray(file.read(entry.num_bytes)), dtype=torch.uint8)
    return decode_rows(entry, raw, entry.num_rows)


@pytest.mark.parametrize("name", ENCODINGS)
def test_every_encoding_decodes_as_the_package_does(name: str, tmp_path: Path):
    """Random bytes as blocks: all bit patterns of the packed fields occur, with scales that are finite."""
    kind = GGMLQuantizationType[name]
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(3).integers(0, 256, (8, 3 * block_bytes), dtype=np.uint8)
    raw[raw & 0x7C == 0x7C] &= 0x3F  # no infinities and NaNs among the half floats
    if block_size == 1:
        raw = np.random.default_rng(3).normal(size=(8, 40)).astype(np.float32)
        raw = gguf.quants.quantize(raw, kind)
    writer = gguf.GGUFWriter(str(tmp_path / "x.gguf"), "llama")
    writer.add_tensor("first", np.ones(5, np.float32))
    writer.add_tensor("token_embd.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    entry = read_gguf(tmp_path / "x.gguf").tensors["token_embd.weight"]
    expected = gguf.quants.dequantize(raw, kind).astype(np.float32)
    assert entry.encoding.name == name
    assert entry.shape == expected.shape
    np.testing.assert_array_equal(decode_entry(entry).float().numpy().view(np.uint32), expected.view(np.uint32))


def test_a_llama_file_loads_into_fused_weights_in_the_order_of_rows_of_hugging_face(tmp_path: Path):
    weights = load(files.write_llama_gguf(tmp_path / "m.gguf"))
    tensors = files.llama_tensors()
    for i, layer in enumerate(weights.layers):
        part = lambda name, i=i: tensors[f"blk.{i}.{name}.weight"]  # noqa: E731
        np.testing.assert_array_equal(layer.qkv.data, np.concatenate([part("attn_q"), part("attn_k"), part("attn_v")]))
        np.testing.assert_array_equal(layer.gate_up.data, np.concatenate([part("ffn_gate"), part("ffn_up")]))
        np.testing.assert_array_equal(layer.o.data, part("attn_output"))
        np.testing.assert_array_equal(layer.down.data, part("ffn_down"))
        np.testing.assert_array_equal(layer.input_norm, part("attn_norm"))
        np.testing.assert_array_equal(layer.mlp_norm, part("ffn_norm"))
    np.testing.assert_array_equal(weights.embedding, tensors["token_embd.weight"])
    assert weights.lm_head.data is weights.embedding


@pytest.mark.parametrize(("kind", "item"), [("Q2_K", 2), ("IQ3_S", 2), ("Q4_K", 144 / 256)])
def test_blocks_that_nothing_multiplies_count_as_floats_on_a_card(kind: str, item: float, tmp_path: Path):
    name, number = "blk.0.ffn_down.weight", GGMLQuantizationType[kind]
    rows = np.zeros((files.HIDDEN, 4 * GGML_QUANT_SIZES[number][1]), np.uint8)
    path = files.write_gguf(tmp_path / "m.gguf", files.llama_tensors() | {name: rows}, kinds={name: number})
    config = EngineConfig(model=str(path))
    checkpoint = resolve_checkpoint(config)
    others = sum(entry.num_bytes for entry in read_gguf(path).tensors.values() if entry.name != name)
    assert weight_bytes(config, checkpoint, on_card=True) - others == files.HIDDEN * 4 * 256 * item


def write_parts(folder: Path, count: int) -> list[Path]:
    """With the package's own writer, which splits."""
    folder.mkdir()
    files.write_llama_gguf(folder / "m-q4.gguf", parts=count)
    found = sorted(folder.iterdir())
    assert [path.name for path in found] == [f"m-q4-{i + 1:05d}-of-{count:05d}.gguf" for i in range(count)]
    return found


def test_a_file_in_parts_is_one_whichever_part_is_named(tmp_path: Path):
    parts = write_parts(tmp_path / "parts", 3)
    whole = load(files.write_llama_gguf(tmp_path / "m.gguf"))
    for path in (*parts, parts[0].parent):
        found = load(path)
        for a, b in zip(whole.layers, found.layers, strict=True):
            assert torch.equal(a.qkv.data, b.qkv.data) and torch.equal(a.down.data, b.down.data)
        assert torch.equal(whole.embedding, found.embedding)


def test_parts_that_are_missing_or_do_not_belong_together_are_said(tmp_path: Path):
    first, second, third = write_parts(tmp_path / "parts", 3)
    content = second.read_bytes()
    second.unlink()
    with pytest.raises(CheckpointError, match=f"{second}: cannot be read"):
        read_gguf(third)
    second.write_bytes(third.read_bytes())
    with pytest.raises(CheckpointError, match=f"{third}: the tensor 'blk.* is in an earlier part, too"):
        read_gguf(first)
    second.write_bytes(content)
    alone = first.rename(first.with_name("m.gguf"))
    with pytest.raises(CheckpointError, match=r"m\.gguf: its metadata say 3 parts \(split\.count\), its name 1: keep all of"):
        read_gguf(alone)
    alone.rename(first)
    third.write_bytes(files.write_gguf(tmp_path / "x.gguf", {"token_more": np.ones(3, np.float32)}).read_bytes())
    with pytest.raises(CheckpointError, match=r"its parts have \d+ tensors, split\.tensors\.count is \d+"):
        read_gguf(first)


def test_chunks_of_any_size_give_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = files.write_llama_gguf(tmp_path / "m.gguf")
    whole = load(path)
    monkeypatch.setattr("headrace.model.loader._CPU_CHUNK", 700)  # less than a head's rows, no multiple of a row
    pieces = load(path)
    for a, b in zip(whole.layers, pieces.layers, strict=True):
        assert torch.equal(a.qkv.data, b.qkv.data)
        assert torch.equal(a.down.data, b.down.data)
    assert torch.equal(whole.embedding, pieces.embedding)


def test_an_own_output_matrix_is_not_tied(tmp_path: Path):
    tensors = files.llama_tensors()
    tensors["output.weight"] = tensors["token_embd.weight"] + 1
    weights = load(files.write_gguf(tmp_path / "m.gguf", tensors))
    np.testing.assert_array_equal(weights.lm_head.data, tensors["output.weight"])
    assert not torch.equal(weights.lm_head.data, weights.embedding)


def test_qwen2_keeps_rows_and_has_biases(tmp_path: Path):
    tensors = files.llama_tensors()
    rng = np.random.default_rng(1)
    for i in range(files.LAYERS):
        for part, rows in (("q", 64), ("k", 32), ("v", 32)):
            tensors[f"blk.{i}.attn_{part}.bias"] = rng.normal(size=rows).astype(np.float32)
    weights = load(files.write_gguf(tmp_path / "m.gguf", tensors, "qwen2"))
    np.testing.assert_array_equal(weights.layers[0].qkv.data[:64], tensors["blk.0.attn_q.weight"])
    np.testing.assert_array_equal(weights.layers[1].qkv_bias[64:96], tensors["blk.1.attn_k.bias"])


def gemma_tensors() -> dict[str, np.ndarray]:
    tensors = files.llama_tensors()
    for i in range(files.LAYERS):
        for name in ("post_attention_norm", "post_ffw_norm"):
            tensors[f"blk.{i}.{name}.weight"] = tensors[f"blk.{i}.attn_norm.weight"] + 0.5
    return tensors


def test_gemma_norms_lose_the_one_that_the_converter_added(tmp_path: Path):
    tensors = gemma_tensors()
    path = files.write_gguf(tmp_path / "m.gguf", tensors, "gemma2", attention__sliding_window=16)
    weights = load(path)
    np.testing.assert_array_equal(weights.final_norm, tensors["output_norm.weight"] - np.float32(1))
    np.testing.assert_array_equal(weights.layers[1].post_mlp_norm, tensors["blk.1.post_ffw_norm.weight"] - np.float32(1))
    np.testing.assert_array_equal(weights.layers[1].down.data, tensors["blk.1.ffn_down.weight"])
    config = model_config_from_hf(hf_config(read_gguf(path)))
    assert config.windows == (16, 0)
    assert (config.attn_softcap, config.logit_softcap, config.norm_offset) == (50.0, 30.0, 1.0)


def rope_factors(factor: float, base: float, dim: int) -> np.ndarray:
    """Llama 3's divisors by its published rule: unscaled above 8192 / 4 turns, by `factor` below 8192 / 1, a blend between."""
    wavelength = 2 * np.pi * base ** (np.arange(0, dim, 2) / dim)
    smooth = (8192 / wavelength - 1) / 3
    blend = 1 / ((1 - smooth) / factor + smooth)
    return np.where(wavelength < 8192 / 4, 1, np.where(wavelength > 8192, factor, blend)).astype(np.float32)


@pytest.mark.parametrize("name", ["m.gguf", "m-00001-of-00002.gguf"])
def test_llama3_rope_scaling_is_recovered_from_the_divisors(tmp_path: Path, name: str):
    """In whichever part they are."""
    tensors = files.llama_tensors()
    tensors["rope_freqs.weight"] = rope_factors(32.0, 500000.0, 16)
    files.write_gguf(tmp_path / "m.gguf", tensors, parts=1 if name == "m.gguf" else 2, rope__freq_base=500000.0)
    path = tmp_path / name
    rope = model_config_from_hf(hf_config(read_gguf(path))).rope
    assert rope.kind == "llama3"
    assert [rope.param(k) for k in ("factor", "low_freq_factor", "high_freq_factor")] == [32.0, 1.0, 4.0]
    assert rope.param("original_max_position_embeddings") == 8192
    tensors["rope_freqs.weight"][3] *= 1.1
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
        hf_config(read_gguf(files.write_gguf(tmp_path / "n.gguf", tensors, rope__freq_base=500000.0)))


def test_rope_scaling_of_the_metadata(tmp_path: Path):
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 32}
    path = files.write_llama_gguf(tmp_path / "m.gguf", rope__freq_base=1000.0, **yarn)
    rope = model_config_from_hf(hf_config(read_gguf(path))).rope
    assert (rope.kind, rope.theta, rope.param("factor")) == ("yarn", 1000.0, 4.0)
    with pytest.raises(CheckpointError, match="'ntk'"):
        hf_config(read_gguf(files.write_llama_gguf(tmp_path / "n.gguf", rope__scaling__type="ntk")))


def test_unknown_architectures_and_tensors_are_named(tmp_path: Path):
    with pytest.raises(CheckpointError, match="'mamba' is not supported"):
        hf_config(read_gguf(files.write_gguf(tmp_path / "a.gguf", files.llama_tensors(), "mamba")))
    tensors = files.llama_tensors() | {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}
    with pytest.raises(CheckpointError, match=r"unexpected tensor 'blk\.0\.attn_sinks\.weight'"):
        hf_tensors(read_gguf(files.write_gguf(tmp_path / "b.gguf", tensors)))


def test_missing_and_misshapen_tensors_are_named(tmp_path: Path):
    tensors = files.llama_tensors()
    del tensors["blk.1.ffn_up.weight"]
    with pytest.raises(CheckpointError, match=r"'model\.layers\.1\.mlp\.up_proj\.weight' is missing"):
        load(files.write_gguf(tmp_path / "a.gguf", tensors))
    tensors = files.llama_tensors()
    tensors["blk.1.ffn_up.weight"] = tensors["blk.1.ffn_up.weight"][:-1]
    with pytest.raises(CheckpointError, match=r"up_proj\.weight' has shape \(95, 64\).*\(96, 64\)"):
        load(files.write_gguf(tmp_path / "b.gguf", tensors))


def test_every_truncation_of_a_file_is_an_error(tmp_path: Path):
    whole = files.write_llama_gguf(tmp_path / "m.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for size in [*range(0, 2000, 37), *range(2000, len(whole), 4999), len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            read_gguf(path)


HUGE = 2**63


def parts(**broken: Any) -> dict[str, Any]:
    return broken


LIES = {
    "magic": parts(magic=b"GGML"),
    "version": parts(version=1),
    "big-endian": parts(version=0x03000000),
    "many values": parts(num_values=HUGE),
    "many tensors": parts(num_tensors=2**40),
    "one value too many": parts(num_values=1),
    "long key": parts(num_values=1, values=struct.pack("<Q", HUGE) + b"a" * 64),
    "value type": parts(num_values=1, values=files.gguf_string("k") + struct.pack("<I", 99) + b"\0" * 64),
    "long string": parts(num_values=1, values=files.gguf_string("k") + struct.pack("<IQ", 8, HUGE) + b"\0" * 64),
    "key not utf-8": parts(num_values=1, values=struct.pack("<Q", 2) + b"\xff\xfe" + b"\0" * 64),
    "long array": parts(num_values=1, values=files.gguf_string("k") + struct.pack("<IIQ", 9, 4, HUGE) + b"\0" * 64),
    "long array of strings": parts(num_values=1, values=files.gguf_string("k") + struct.pack("<IIQ", 9, 8, 2**23) + b"\0" * 64),
    "nested array": parts(num_values=1, values=files.gguf_string("k") + struct.pack("<IIQ", 9, 9, 1) + b"\0" * 64),
    "key twice": parts(num_values=2, values=(files.gguf_string("k") + struct.pack("<II", 4, 1)) * 2),
    "alignment": parts(num_values=1, values=files.gguf_string("general.alignment") + struct.pack("<II", 4, 0)),
    "no dimensions": parts(num_tensors=1, tensors=files.tensor_info("t", []), data=b"\0" * 64),
    "many dimensions": parts(num_tensors=1, tensors=files.tensor_info("t", [1] * 9), data=b"\0" * 64),
    "zero dimension": parts(num_tensors=1, tensors=files.tensor_info("t", [0, 4]), data=b"\0" * 64),
    "huge dimensions": parts(num_tensors=1, tensors=files.tensor_info("t", [HUGE, HUGE]), data=b"\0" * 64),
    "product that wraps": parts(num_tensors=1, tensors=files.tensor_info("t", [2**32, 2**32]), data=b"\0" * 64),
    "type": parts(num_tensors=1, tensors=files.tensor_info("t", [4], kind=77), data=b"\0" * 64),
    "part of a block": parts(num_tensors=1, tensors=files.tensor_info("t", [16], kind=8), data=b"\0" * 64),
    "offset": parts(num_tensors=1, tensors=files.tensor_info("t", [4], offset=2**40), data=b"\0" * 64),
    "offset that wraps": parts(num_tensors=1, tensors=files.tensor_info("t", [4], offset=2**64 - 32), data=b"\0" * 64),
    "offset unaligned": parts(num_tensors=1, tensors=files.tensor_info("t", [4], offset=1), data=b"\0" * 64),
    "end": parts(num_tensors=1, tensors=files.tensor_info("t", [17]), data=b"\0" * 64),
    "overlap": parts(
        num_tensors=2, tensors=files.tensor_info("t", [16]) + files.tensor_info("u", [16], offset=32), data=b"\0" * 96
    ),
    "tensor twice": parts(
        num_tensors=2, tensors=files.tensor_info("t", [8]) + files.tensor_info("t", [8], offset=32), data=b"\0" * 64
    ),
}


def test_the_right_file_that_the_lies_differ_from(tmp_path: Path):
    """So that each lie below is refused for what it says, not for the way it is written."""
    info = files.tensor_info("t", [8]) + files.tensor_info("u", [4, 2], offset=32)
    value = files.gguf_string("k") + struct.pack("<II", 4, 7)
    path = tmp_path / "x.gguf"
    found = read_gguf(files.raw_gguf(path, values=value, num_values=1, tensors=info, num_tensors=2, data=b"\0" * 64))
    assert found.metadata == {"k": 7}
    assert {e.name: (e.shape, e.num_bytes) for e in found.tensors.values()} == {"t": ((8,), 32), "u": ((2, 4), 32)}


@pytest.mark.parametrize("lie", LIES)
def test_lying_headers_are_errors_that_name_the_file(lie: str, tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"lie\.gguf"):
        read_gguf(files.raw_gguf(tmp_path / "lie.gguf", **LIES[lie]))


@pytest.fixture(scope="module")
def small_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return files.write_llama_gguf(tmp_path_factory.mktemp("fuzz") / "whole.gguf")


@example([(1533, 2)])  # a vector in blocks
@settings(max_examples=300)
@given(st.lists(st.tuples(st.integers(0, 2600), st.integers(0, 255)), min_size=1, max_size=6))
def test_corrupt_headers_raise_checkpoint_errors_only(small_gguf: Path, changes: list[tuple[int, int]]):
    raw = bytearray(small_gguf.read_bytes())
    for position, value in changes:
        raw[position] = value
    path = small_gguf.with_name("corrupt.gguf")
    path.write_bytes(raw)
    with contextlib.suppress(CheckpointError):
        load(path)
