"""Narrow weights between file and product: cut and stacked without a change, made of floats, and the blocks of GGUF as they are."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given
from torch import Tensor

import loader_files as files
from headrace import LLM, SamplingParams
from headrace.config import EngineConfig
from headrace.errors import CheckpointError, ParameterError
from headrace.model.checkpoint import resolve_checkpoint
from headrace.model.families import model_config_from_hf
from headrace.model.formats.quantized_gguf import gguf_source
from headrace.model.formats.tensor_file import Encoding, TensorEntry
from headrace.model.loader import load_model
from headrace.model.narrow import columns_of, compact, fitted, of_e2m1, of_integers, quantized, rows_of, stacked
from headrace.model.narrow_loader import load_matrices
from headrace.model.shard import WHOLE, Shard
from headrace.model.weight import Weight, dequantized, pack_int4, unpack_int4
from headrace.model.weight_names import WeightSpec
from quantized_checkpoints import FORMATS, write_quantized
from test_quantized_formats import check_equal, floats_of, load, weights_of
from tiny_models import write_eagle, write_shape, write_tiny

CPU = torch.device("cpu")


def floats(weight: Weight) -> Tensor:
    return dequantized(weight, torch.float32)


@st.composite
def weights(draw, columns: int | None = None) -> Weight:
    """Of any kind, groups and shape that a reader gives."""
    seed = draw(st.integers(0, 2**31))
    rng = torch.Generator().manual_seed(seed)
    rows = draw(st.integers(1, 300))
    columns = columns or draw(st.sampled_from([16, 40, 96, 128, 200, 256, 384]))
    kind = draw(st.sampled_from(["float", "fp8", "block", "int8", "int4", "fp4"]))
    group = draw(st.sampled_from([0, 16, 32, 48, 64, 100, 128, 256]))
    count = -(-columns // group) if group else 1
    data = torch.randn((rows, columns), generator=rng)
    if kind == "float":
        return Weight(data)
    if kind == "block":
        scales = torch.rand((-(-rows // 128), -(-columns // 128)), generator=rng)
        return fitted(Weight(data.to(torch.float8_e4m3fn), scales, None, "fp8", 128, 128))
    scales = torch.rand((rows, count), generator=rng)
    zeros = torch.randint(0, 16, scales.shape, generator=rng).float() if kind.startswith("int") and draw(st.booleans()) else None
    if kind == "fp8":
        return fitted(Weight(data.to(torch.float8_e4m3fn), scales, None, "fp8", group))
    numbers = torch.randint(0, 16, (rows, columns), generator=rng).to(torch.uint8)
    if kind == "int8":
        return fitted(Weight((numbers * 16).view(torch.int8), scales, zeros, "int8", group))
    return fitted(of_integers(numbers, scales, zeros, group) if kind == "int4" else of_e2m1(numbers, scales, group))


def check_form(weight: Weight) -> None:
    """What kernels rely on."""
    rows, columns = weight.shape
    if weight.kind == "float":
        return
    assert weight.group in ((16, 32, 64, 128) if weight.kind in ("int4", "fp4") else (0, 16, 32, 64, 128))
    assert weight.kind not in ("int4", "fp4") or columns % 128 == 0
    assert weight.scale_rows == 1 or (weight.kind, weight.scale_rows, weight.group) == ("fp8", 128, 128)
    shape = (-(-rows // weight.scale_rows), -(-columns // weight.group) if weight.group else 1)
    assert weight.scales is not None and weight.scales.shape == shape
    assert weight.zeros is None or weight.zeros.shape == shape


@given(weights(), st.data())
def test_a_cut_is_the_cut_of_the_floats(weight: Weight, data):
    check_form(weight)
    whole, (rows, columns) = floats(weight), weight.shape
    first = data.draw(st.integers(0, rows - 1))
    of_rows = range(first, data.draw(st.integers(first + 1, rows)))
    start = data.draw(st.sampled_from([0, 8, 16, 64, 128]).filter(lambda n: n < columns))
    of_columns = range(start, data.draw(st.sampled_from([start + 1, (start + columns) // 2 + 1, columns])))
    assert torch.equal(floats(rows_of(weight, of_rows)), whole[first : of_rows.stop])
    cut = columns_of(rows_of(weight, of_rows), of_columns)
    check_form(cut)
    assert torch.equal(floats(cut), whole[first : of_rows.stop, start : of_columns.stop])


@given(st.data())
def test_a_stack_is_the_stack_of_the_floats_and_compact_its_copy(data):
    columns = data.draw(st.sampled_from([96, 128, 256]))
    parts = data.draw(st.lists(weights(columns), min_size=1, max_size=4))
    whole = stacked(parts, torch.float32)
    expected = torch.cat([floats(part) for part in parts])
    check_form(whole)
    assert torch.equal(floats(whole), expected)
    small = compact(whole, len(expected) + 5)
    check_form(small)
    assert torch.equal(floats(small)[:-5], expected) and not floats(small)[-5:].any()
    assert all(t.is_contiguous() for t in small.tensors)
    if {part.kind for part in parts} <= {"int4", "int8", "fp4"}:
        assert whole.kind == (parts[0].kind if len({part.kind for part in parts}) == 1 else "int8")


def test_packed_numbers_come_back():
    numbers = torch.randint(0, 16, (5, 384), dtype=torch.uint8)
    assert torch.equal(unpack_int4(pack_int4(numbers)), numbers)


# ------------------------------------------------------------------------------------------------------------ of floats


@pytest.mark.parametrize("columns", [128, 300, 64])
@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_quantized_floats_are_within_half_a_step(kind: str, columns: int):
    torch.manual_seed(0)
    rows = torch.randn(40, columns)
    rows[1], rows[2], rows[3] = 0.0, 1e-7 * rows[2], rows[3].abs() + 3
    rows[4, 5], rows[5] = 1e6, 1e-30
    weight = fitted(quantized(rows, kind))
    assert weight.kind == ("int8" if kind == "int4" and columns % 128 else kind)
    found, wide = floats(weight), 128 if kind == "int4" else columns
    assert not found[1].any(), "zero stays zero"
    for run, kept in zip(rows.split(wide, 1), found.split(wide, 1), strict=True):
        low, high = run.amin(1, keepdim=True).clamp(max=0), run.amax(1, keepdim=True).clamp(min=0)
        largest = torch.maximum(-low, high)
        bound = {
            "int8": largest / 127 * 0.5001, "fp8": run.abs() / 16 + largest / 448 / 512,
            "int4": (high - low) / 15 * 1.001 + 2**-24,  # the zero point is rounded, too
        }[kind]  # fmt: skip
        assert ((kept - run).abs() <= bound + 1e-35).all()
    assert torch.equal(floats(compact(weight, 40)), found)


def test_scales_of_int4_take_two_bytes_and_whole_zeros_one():
    kept = compact(fitted(quantized(torch.randn(64, 256) * 0.02, "int4")), 64)
    assert kept.scales is not None and kept.scales.dtype == torch.float16
    assert kept.zeros is not None and kept.zeros.dtype == torch.uint8


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_a_model_is_quantized_alike_by_one_rank_and_by_several_and_when_it_is_random(kind: str, tmp_path: Path):
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 1}
    path = write_tiny("qwen3", tmp_path / "model", **sizes)
    (tmp_path / "shape").mkdir()
    dummy = Path(write_shape(tmp_path / "shape", **sizes, vocab_size=200, tie_word_embeddings=False))
    for model, options in ((path, {}), (dummy, {"load_format": "dummy"})):
        checkpoint = resolve_checkpoint(EngineConfig(model=str(model), **options))
        config = model_config_from_hf(checkpoint.config)

        def read(shard: Shard = WHOLE, narrow: bool = True, quantization: str | None = kind, of=(checkpoint, config)):
            return load_model(*of, torch.float32, CPU, shard=shard, narrow=narrow, quantization=quantization)

        plain, whole = floats_of(read(quantization=None)), read()
        layer = whole.layers[0]
        assert [w.kind for w in (layer.qkv, layer.o, layer.gate_up, layer.down, whole.lm_head)] == [kind] * 4 + ["int8"]
        assert torch.equal(floats(whole.lm_head), floats(quantized(plain["lm_head"], "int8")))
        assert torch.equal(floats(layer.qkv), floats(quantized(plain["layers.0.qkv"], kind)))
        check_equal(floats_of(read(narrow=False)), floats_of(whole))
        assert not any(torch.equal(plain[f"layers.0.{name}"], floats(getattr(layer, name))) for name in ("qkv", "o", "gate_up", "down"))
        ranks = [read(Shard(rank, 2)).layers[0] for rank in range(2)]
        assert torch.equal(torch.cat([floats(r.o) for r in ranks], 1), floats(layer.o))
        assert torch.equal(torch.cat([floats(r.down) for r in ranks], 1), floats(layer.down))
        gates = [floats(r.gate_up).chunk(2) for r in ranks]
        assert torch.equal(torch.cat([g[0] for g in gates] + [g[1] for g in gates]), floats(layer.gate_up))
        assert whole.num_bytes < sum(t.nbytes for t in plain.values()), "what the memory plan counts"


def test_floats_that_are_not_finite_are_named(tmp_path: Path):
    from safetensors.torch import load_file, save_file

    path = write_tiny("llama", tmp_path / "model", num_hidden_layers=1)
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.0.self_attn.o_proj.weight"][3, 4] = float("nan")
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"'model.layers.0.self_attn.o_proj.weight' holds scales that are not finite"):
        load(path, quantization="int8")


def test_an_engine_quantizes_in_plain_torch(tmp_path: Path, caplog):
    path = str(write_tiny("llama", tmp_path / "model"))
    options = {"device": "cpu", "max_model_len": 64, "num_kv_blocks": 32, "enforce_eager": True}
    params, said = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=1), {}
    for kind in (None, "int8", "int4", "fp8"):
        with LLM(path, quantization=kind, **options) as llm:
            (output,) = llm.generate([[5, 6, 7, 8]], params, use_tqdm=False)
            said[kind] = [next(iter(at.values())).logprob for at in output.outputs[0].logprobs]
    assert len({tuple(v) for v in said.values()}) == 4
    assert abs(said["int8"][0] - said[None][0]) < abs(said["int4"][0] - said[None][0]) < 1


def test_quantized_targets_and_drafts(tmp_path: Path):
    """What is asked of the target's weights cannot be asked of a draft's that are narrow, and is not; a head of floats reads the
    hidden states of any target, and a quantized one is refused."""
    floats_, awq = write_tiny("llama", tmp_path / "floats"), write_quantized(tmp_path / "awq", FORMATS["awq"], "llama", num_hidden_layers=3).path
    draft = write_quantized(tmp_path / "draft", FORMATS["gptq"], "llama", intermediate_size=64).path
    (tmp_path / "head").mkdir()
    head, params = write_eagle(tmp_path / "head", str(awq)), SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    by_model = {"speculative_method": "draft_model", "speculative_model": str(draft)}
    by_head = {"speculative_method": "eagle3", "speculative_model": head}

    def answer(target: Path, **options) -> list[int]:
        with LLM(str(target), device="cpu", max_model_len=64, num_kv_blocks=32, **options) as llm:
            assert options.get("speculative_model") is None or llm.engine.core.runner.drafter is not None
            return llm.generate([[5, 6, 7, 8]], params, use_tqdm=False)[0].outputs[0].token_ids

    int8 = {"quantization": "int8", "enforce_eager": True}
    assert answer(floats_, **int8, **by_model) == answer(floats_, **int8)
    assert answer(floats_, **by_model) == answer(floats_)  # in the native step, where there is one; the draft in torch
    alone = answer(awq)
    assert answer(awq, **by_model) == answer(awq, **by_head) == alone
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    (tmp_path / "head" / "config.json").write_text(json.dumps(config | {"quantization_config": FORMATS["awq"].config}))
    with pytest.raises(ParameterError, match=r"speculative_model: got .*a head of floats"):
        answer(awq, **by_head)


# ------------------------------------------------------------------------------------------------------------------- GGUF


def blocks(name: str, rows: int, columns: int, seed: int = 3) -> np.ndarray:
    """Random bytes with scales that a file may have."""
    size, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    raw = np.random.default_rng(seed).integers(0, 256, (rows * columns // size, num_bytes), dtype=np.uint8)
    if name == "MXFP4":  # a byte that is an exponent
        raw[:, 0] = 112 + raw[:, 0] % 14
        return raw.reshape(rows, -1)
    halves = {"Q6_K": [208]}.get(name, [0, 2] if name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else [0])
    for place in halves:
        values = np.random.default_rng(seed + place).uniform(-0.02, 0.02, len(raw)).astype(np.float16)
        raw[:, place : place + 2] = values.view(np.uint8).reshape(-1, 2)
    raw[3, halves[0] : halves[0] + 2] = 0  # a scale of nothing
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("head_dim", [0, 8])
@pytest.mark.parametrize(("name", "kind", "group"), [
    ("Q4_0", "int4", 32), ("Q4_1", "int4", 32), ("Q5_0", "int8", 32), ("Q5_1", "int8", 32), ("Q8_0", "int8", 32), ("IQ4_NL", "int8", 32),
    ("Q4_K", "int4", 32), ("Q5_K", "int8", 32), ("Q6_K", "int8", 16), ("MXFP4", "fp4", 32),
])  # fmt: skip
def test_blocks_of_gguf_stay_narrow(name: str, kind: str, group: int, head_dim: int, tmp_path: Path, monkeypatch):
    """In pieces, from the third head on; as the package decodes them: to the bit where there is no minimum, which is rounded."""
    monkeypatch.setattr("headrace.model.narrow_loader._CPU_PIECE", 2000)
    raw = blocks(name, 48, 512)
    (tmp_path / "x").write_bytes(raw.tobytes())
    size, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    entry = TensorEntry("x", (48, 512), Encoding(name, size, num_bytes), tmp_path / "x", 0, raw.nbytes, head_dim)
    source = gguf_source(entry)
    assert source is not None
    spec = WeightSpec("o", (48, 512), (("x", 48),))
    (weight,) = load_matrices([spec], {"x": source}, torch.float32, CPU, True).values()
    expected = torch.from_numpy(gguf.quants.dequantize(raw, GGMLQuantizationType[name]).astype(np.float32))
    if head_dim:
        expected = expected.view(6, head_dim // 2, 2, 512).transpose(1, 2).reshape(48, 512)
    assert (weight.kind, weight.group) == (kind, group) and weight.scales is not None
    assert weight.scales.dtype == (torch.float32 if name.endswith("K") else torch.bfloat16 if kind == "fp4" else torch.float16)
    check_form(weight)
    if name in ("Q4_0", "Q5_0", "Q8_0", "Q6_K", "IQ4_NL", "MXFP4"):
        assert torch.equal(floats(weight), expected)
    torch.testing.assert_close(floats(weight), expected, rtol=0, atol=4e-7 * float(expected.abs().max()))


@pytest.mark.parametrize("broken", [0x7C, 0xFE], ids=["infinite", "not a number"])
def test_scales_of_blocks_are_finite(broken: int, tmp_path: Path):
    raw = blocks("Q4_K", 4, 256)
    raw[2, 3] = broken
    (tmp_path / "x").write_bytes(raw.tobytes())
    entry = TensorEntry("blk.0.x", (4, 256), Encoding("Q4_K", 256, 144), tmp_path / "x", 0, raw.nbytes)
    with pytest.raises(CheckpointError, match=r"'blk.0.x' holds scales that are not finite"):
        load_matrices([WeightSpec("o", (4, 256), (("x", 4),))], {"x": gguf_source(entry)}, torch.float32, CPU, True)


def test_a_gguf_model_of_several_encodings_is_the_same_narrow_and_decoded(tmp_path: Path):
    """Q4_0, Q8_0 and floats in one matrix; interleaved heads; another order of rows would show."""
    encodings = {"attn_q": "Q4_0", "attn_k": "Q8_0", "attn_v": "Q8_0", "ffn_gate": "Q8_0", "ffn_up": "Q8_0", "ffn_down": "Q4_0", "token_embd": "Q8_0"}
    stored, kinds = {}, {}
    for name, tensor in files.llama_tensors().items():
        tensor = files.interleave(tensor) if "attn_q." in name or "attn_k." in name else tensor
        if (encoding := encodings.get(name.split(".")[-2])) is not None:
            kinds[name] = GGMLQuantizationType[encoding]
            tensor = gguf.quants.quantize(tensor, kinds[name])
        stored[name] = tensor
    path = files.write_gguf(tmp_path / "m.gguf", stored, kinds=kinds)
    decoded, narrow = load(path), load(path, narrow=True)
    check_equal(floats_of(narrow), floats_of(decoded))
    held = {name: weight.kind for name, weight in weights_of(narrow).items() if name.startswith("layers.0")}
    assert held == {"layers.0.qkv": "int8", "layers.0.o": "float", "layers.0.gate_up": "int8", "layers.0.down": "int8"}
    assert narrow.num_bytes < decoded.num_bytes
    check_equal(floats_of(load(path, narrow=True, quantization="none")), floats_of(decoded))
    assert {w.kind for w in weights_of(load(path, narrow=True, quantization="none")).values()} == {"float"}
    for rank in range(2):
        check_equal(floats_of(load(path, narrow=True, shard=Shard(rank, 2))), floats_of(load(path, shard=Shard(rank, 2))))
