"""Quantized checkpoints: each format is its formula, to the bit; what cannot be read is said by name."""

from __future__ import annotations

import contextlib
import json
import logging
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from headrace import LLM, SamplingParams
from headrace.config import EngineConfig
from headrace.errors import CheckpointError, ParameterError
from headrace.model.checkpoint import resolve_checkpoint
from headrace.model.decoder_weights import DecoderWeights
from headrace.model.families import model_config_from_hf, weight_plan
from headrace.model.formats.quantized import quantization_of
from headrace.model.loader import load_model, with_quantized
from headrace.model.narrow_loader import pieces_of
from headrace.model.parts import parts_of, taken
from headrace.model.shard import WHOLE, Shard
from headrace.model.weight import Weight, dequantized
from model_harness import Sequences, in_usual_order
from quantized_checkpoints import (
    FORMATS,
    PER_ROW,
    Tiny,
    compressed,
    fp8,
    gptq,
    int8,
    mxfp8,
    nvfp4,
    of_torchao,
    packed,
    quark,
    renamed,
    torchao,
    write_quantized,
)
from test_model_config import NASTY
from test_model_families import assert_close, reference, tokens

CPU = torch.device("cpu")
# Rows of multiples of 128, and not; heads that a block of 128 rows ends in the middle of
EVEN = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32}
ODD = {"hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 24}


def load(path: Path, narrow: bool = False, shard: Shard = WHOLE, device: torch.device = CPU, **options) -> DecoderWeights:
    checkpoint = resolve_checkpoint(EngineConfig(model=str(path)))
    config = model_config_from_hf(checkpoint.config)
    return load_model(checkpoint, config, torch.float32, device, shard=shard, narrow=narrow, **options)


def weights_of(weights: DecoderWeights) -> dict[str, Weight]:
    named = {"lm_head": weights.lm_head}
    for i, layer in enumerate(weights.layers):
        named |= {f"layers.{i}.{f.name}": getattr(layer, f.name) for f in fields(layer)}
    return {name: weight for name, weight in named.items() if isinstance(weight, Weight)}


def floats_of(weights: DecoderWeights) -> dict[str, Tensor]:
    return {name: dequantized(weight, torch.float32) for name, weight in weights_of(weights).items()}


def expected_of(tiny: Tiny) -> dict[str, Tensor]:
    config = model_config_from_hf(tiny.config)
    plan = [spec for spec in weight_plan(config) if len(spec.shape) == 2 and spec.target != "embedding"]
    return {
        spec.target: torch.cat([in_usual_order(config, name, tiny.matrices[name]) for name, _ in spec.sources]) for spec in plan
    }


def check_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, matrix in expected.items():
        assert torch.equal(found[name], matrix), name


@pytest.mark.parametrize("head_dim", [32, 24])  # blocks of 128 rows end between heads, and in them
@pytest.mark.parametrize("name", ["fp8-block", "ct-int8", "ct-pack4-asym", "gptq-v2"])
def test_heads_whose_rotary_pairs_are_neighbours_are_put_in_order(name: str, head_dim: int, tmp_path: Path):
    tiny = write_quantized(tmp_path / "model", FORMATS[name], "glm4", **{**EVEN, "head_dim": head_dim, "partial_rotary_factor": 0.5})
    for narrow in (False, True):
        check_equal(floats_of(load(tiny.path, narrow)), expected_of(tiny))


@pytest.mark.parametrize("sizes", [EVEN, ODD], ids=["even", "odd"])
@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_the_formula_and_parts_of_them_their_parts(name: str, sizes: dict, tmp_path: Path):
    tiny = write_quantized(tmp_path / "model", FORMATS[name], **sizes)
    check_equal(floats_of(load(tiny.path)), expected_of(tiny))
    narrow = load(tiny.path, narrow=True)
    check_equal(floats_of(narrow), expected_of(tiny))
    kinds = {name: weight.kind for name, weight in weights_of(narrow).items()}
    assert kinds.pop("lm_head") == "float"
    assert set(kinds.values()) == {FORMATS[name].kinds[sizes is ODD]}
    if sizes is ODD:
        return
    config = model_config_from_hf(tiny.config)
    specs = {spec.target: spec for spec in weight_plan(config)}
    for rank in range(2):
        parts = {part.target: part for part in parts_of(list(specs.values()), config, Shard(rank, 2))}
        cut = {target: taken(matrix, specs[target], parts[target]) for target, matrix in expected_of(tiny).items()}
        check_equal(floats_of(load(tiny.path, narrow=True, shard=Shard(rank, 2))), cut)


@pytest.mark.parametrize("name", FORMATS)
def test_pieces_of_any_size_make_the_same_weights(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tiny = write_quantized(tmp_path / "model", FORMATS[name], hidden_size=128, intermediate_size=256, num_attention_heads=4)
    whole = weights_of(load(tiny.path, narrow=True))
    monkeypatch.setattr("headrace.model.narrow_loader._CPU_PIECE", 4096)
    for target, ours in weights_of(load(tiny.path, narrow=True)).items():
        theirs = whole[target]
        assert (ours.kind, ours.group, ours.scale_rows) == (theirs.kind, theirs.group, theirs.scale_rows), target
        assert torch.equal(dequantized(ours, torch.float32), dequantized(theirs, torch.float32)), target


def theirs_of(tiny: Tiny, tmp_path: Path) -> Any:
    """The model of Transformers with the matrices as floats."""
    config = transformers.AutoConfig.for_model(**tiny.config)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    model.load_state_dict(tiny.matrices)
    return model


@pytest.mark.parametrize(("name", "family"), [("fp8-block", "qwen3"), ("ct-pack4-asym", "qwen2"), ("awq", "llama"), ("gptq", "phi3"), ("ct-nvfp4", "gemma2"), ("fp8-tensor", "glm4"), ("awq", "nemotron"), ("ct-int8", "hunyuan_v1_dense")])
def test_logits_are_those_of_the_floats(name: str, family: str, tmp_path: Path):
    """Kept narrow, and decoded when it is read."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 2}
    tiny = write_quantized(tmp_path / "model", FORMATS[name], family, packer_of=packer_of_fused(name, family), **sizes)
    config, ids = model_config_from_hf(tiny.config), tokens(40)
    wanted = reference(theirs_of(tiny, tmp_path), ids)
    for narrow in (False, True):
        (logits,) = Sequences(config, load(tiny.path, narrow), max_len=64).step([(0, ids)])
        assert_close(logits, wanted)


def packer_of_fused(name: str, family: str):
    """Phi's own matrices are stacked in the file."""
    stacked = ("qkv_proj", "gate_up_proj", "o_proj", "down_proj")
    return (lambda module: FORMATS[name].pack) if family != "phi3" else lambda module: FORMATS[name].pack if module.endswith(stacked) else None


# ------------------------------------------------------------------------------------------------------- groups and ignore lists


def groups(*of: tuple[list[str], dict[str, Any]], ignore: list[str]) -> dict[str, Any]:
    made = {f"group_{i}": {"targets": targets, **config["config_groups"]["group_0"], "format": config["format"]} for i, (targets, config) in enumerate(of)}
    for (targets, _), group in zip(of, made.values(), strict=True):
        group["targets"] = targets
    return {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": made, "ignore": ignore}


PACK4 = compressed("pack-quantized", 4, strategy="group", group_size=32)
INT8 = compressed("int-quantized", 8, strategy="channel")
FP8 = compressed("float-quantized", 8, "float", strategy="tensor")


@pytest.mark.parametrize(("config", "packers", "kinds"), [
    (  # k and v are stacked with q
        groups((["Linear"], PACK4), (["re:.*k_proj$"], INT8), (["model.layers.0.mlp.down_proj"], FP8), ignore=["lm_head", r"re:.*\.o_proj"]),
        {"k_proj": int8(), "down_proj": fp8((0, 0)), "o_proj": None}, {"qkv": "int8", "o": "float", "gate_up": "int4", "down": "fp8"},
    ),
    (
        groups((["re:.*self_attn.*"], FP8), (["Linear"], PACK4), ignore=["model.layers.0.self_attn.v_proj", "lm_head"]),
        {"q_proj": fp8((0, 0)), "k_proj": fp8((0, 0)), "o_proj": fp8((0, 0)), "v_proj": None},
        {"qkv": "float", "o": "fp8", "gate_up": "int4", "down": "int4"},
    ),
    (
        groups((["re:.*q_proj"], FP8), (["re:.*(k|v)_proj"], INT8), (["re:.*mlp.gate_proj"], compressed("pack-quantized", 4, strategy="channel")),
               (["Linear"], PACK4), ignore=[]),
        {"q_proj": fp8((0, 0)), "k_proj": int8(), "v_proj": int8(), "gate_proj": packed()},
        {"qkv": "float", "o": "int4", "gate_up": "int4", "down": "int4"},
    ),
])  # fmt: skip
def test_matrices_of_different_formats_are_stacked_exactly(config, packers, kinds, tmp_path: Path):
    def packer_of(module: str):
        return packers.get(module.rpartition(".")[2], FORMATS["ct-pack4"].pack)

    tiny = write_quantized(tmp_path / "model", FORMATS["ct-pack4"], packer_of=packer_of, **EVEN)
    tiny.configure(config)
    narrow = load(tiny.path, narrow=True)
    check_equal(floats_of(narrow), expected_of(tiny))
    assert {name.rpartition(".")[2]: w.kind for name, w in weights_of(narrow).items()} == {**kinds, "lm_head": "float"}
    check_equal(floats_of(load(tiny.path)), expected_of(tiny))


def floats_beside(tiny: Tiny, path: Path) -> Path:
    """The same model in floats."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(tiny.config))
    save_file({name: tensor.contiguous() for name, tensor in tiny.matrices.items()}, path / "model.safetensors")
    return path


def check_same(found: DecoderWeights, wanted: DecoderWeights) -> None:
    """All that layers and the head have, also where these are experts or a delta net's."""
    pairs = [(found.lm_head, wanted.lm_head)]
    for ours, theirs in zip(found.layers, wanted.layers, strict=True):
        assert ours.more.keys() == theirs.more.keys()
        pairs += [(getattr(ours, f.name), getattr(theirs, f.name)) for f in fields(ours)] + [(ours.more[name], theirs.more[name]) for name in theirs.more]
    pairs = [pair for pair in pairs if isinstance(pair[1], Weight)]
    assert pairs
    for one, other in pairs:
        assert torch.equal(dequantized(one, torch.float32), other.data)


@pytest.mark.parametrize("name", ["fp8-block", "awq", "modelopt-nvfp4"])
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next", "qwen3_5_moe"])
def test_delta_nets_and_attention_with_a_gate_are_the_formula(family: str, name: str, tmp_path: Path):
    """Their rows lie by head in the file, and a head ends in the middle of a block of FP8."""
    tiny = write_quantized(tmp_path / "model", FORMATS[name], family, num_hidden_layers=3, hidden_size=128, linear_num_key_heads=2)
    floats = floats_beside(tiny, tmp_path / "floats")
    for shard in (WHOLE, Shard(0, 2), Shard(1, 2)):
        found = load(tiny.path, narrow=True, shard=shard)
        assert {layer.qkv.kind for layer in found.layers} == {FORMATS[name].kinds[0]}
        check_same(found, load(floats, shard=shard))


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
@pytest.mark.parametrize("name", ["awq", "gptq"])
def test_what_lies_scattered_is_read_once(name: str, family: str, tmp_path: Path):
    """However many heads it has: the rows of each are one part of what is made."""
    tiny = write_quantized(tmp_path / "model", FORMATS[name], family, num_hidden_layers=3, hidden_size=128)
    checkpoint = resolve_checkpoint(EngineConfig(model=str(tiny.path)))
    config = model_config_from_hf(checkpoint.config)
    plan = [spec for spec in weight_plan(config) if spec.target.rpartition(".")[2] in ("qkv", "o")]
    for shard in (WHOLE, Shard(1, 2)):
        pieces = list(pieces_of(parts_of(plan, config, shard), with_quantized(checkpoint, plan), limit=1))
        assert len(pieces) == len({piece.source.name for piece in pieces}) > 0


def of_images(tiny: Tiny, prefix: str) -> None:
    """The text part of a model that sees images, too: names begin with `prefix`."""
    tiny.change(lambda tensors: [tensors.update({prefix + name.removeprefix("model."): tensors.pop(name)}) for name in list(tensors) if name.startswith("model.")])
    tiny.config = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": tiny.config, "tie_word_embeddings": False}


@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
def test_matrices_of_several_kinds_are_each_named_by_modelopt(prefix: str, tmp_path: Path):
    """As in files of Qwen3.6 in NVFP4. Of what drafts and sees images it does not matter how it is quantized."""
    def packer_of(module: str):
        return fp8((0, 0), vector=True) if module.endswith("q_proj") else nvfp4(True) if module.endswith(("o_proj", "in_proj_z", "mlp.down_proj")) else None

    tiny = write_quantized(tmp_path / "model", FORMATS["modelopt-nvfp4"], "qwen3_5", packer_of=packer_of, num_hidden_layers=3)
    floats = floats_beside(tiny, tmp_path / "floats")
    if prefix != "model.":
        of_images(tiny, prefix)
    kinds = {"self_attn.q_proj": "FP8", "self_attn.o_proj": "NVFP4", "linear_attn": "W4A16_NVFP4", "mlp": "NVFP4"}
    layers = {f"{prefix}layers.{i}.{name}": {"quant_algo": kind, "group_size": 16} for i in range(3) for name, kind in kinds.items()}
    config = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head", "mtp*"]}
    more = {"mtp.layers.0.mlp": {"quant_algo": "FP8_BLOCK_SCALES"}, f"{prefix}embed_tokens": {"quant_algo": "UNQUANTIZED"}}
    tiny.configure({"producer": {"name": "modelopt"}, "quantization": config | {"quantized_layers": layers | more}})
    check_same(load(tiny.path, narrow=True), load(floats))
    layers[f"{prefix}layers.2.mlp"] = {"quant_algo": "W4A8_AWQ"}
    tiny.configure(config | {"quant_method": "modelopt", "quantized_layers": layers | more})
    with pytest.raises(CheckpointError, match=r"'model\.layers\.2\.mlp\.down_proj' is quantized by 'W4A8_AWQ', which is not supported: use the unquantized"):
        load(tiny.path)


def test_groups_may_mean_modules_as_the_file_of_a_model_that_sees_images_calls_them(tmp_path: Path):
    tiny = write_quantized(tmp_path / "model", FORMATS["ct-pack4"], "qwen3_5", packer_of=lambda m: int8() if m.endswith("_proj") and "self_attn" in m else None, num_hidden_layers=3)
    floats = floats_beside(tiny, tmp_path / "floats")
    of_images(tiny, "model.language_model.")
    tiny.configure(groups(([r"re:model\.language_model\.layers\.1\.self_attn.*"], INT8), (["Linear"], PACK4), ignore=["re:.*mlp.*"]))
    check_same(load(tiny.path, narrow=True), load(floats))
    tiny.configure(groups((["Linear"], INT8), ignore=[r"re:model\.language_model\.layers\.1\.self_attn.*"]))
    with pytest.raises(CheckpointError, match=r"by config.json 'model\.layers\.1\.self_attn\.q_proj' is among those that are not quantized"):
        load(tiny.path)


@pytest.mark.parametrize("of_attention", [{}, {"group_0": {"targets": ["Qwen3Attention"], "weights": None, "input_activations": {"num_bits": 8}}}])
def test_a_file_may_have_scales_of_the_cache_alone(of_attention: dict, tmp_path: Path):
    tiny = write_quantized(tmp_path / "model", FORMATS["ct-fp8-static"], packer_of=lambda module: None, **ODD)
    tiny.configure({**FORMATS["ct-fp8-static"].config, "config_groups": of_attention, "kv_cache_scheme": {"num_bits": 8, "type": "float"}})
    tiny.change(lambda tensors: tensors.update({"model.layers.0.self_attn.k_scale": torch.tensor(0.25)}))
    check_equal(floats_of(load(tiny.path)), expected_of(tiny))
    assert resolve_checkpoint(EngineConfig(model=str(tiny.path))).quantized_to() == []
    tiny.change(lambda tensors: tensors.update({f"{DOWN}.weight_scale": torch.tensor(0.25)}))
    with pytest.raises(CheckpointError, match=f"'{DOWN}' is in none of the groups that are"):
        load(tiny.path)


@pytest.mark.parametrize("method", ["compressed_tensors", "COMPRESSED-TENSORS"])
def test_a_method_may_be_spelled_otherwise(method: str, tmp_path: Path):
    tiny = write_quantized(tmp_path / "model", FORMATS["ct-int8"], **ODD)
    tiny.configure(FORMATS["ct-int8"].config | {"quant_method": method})
    check_equal(floats_of(load(tiny.path)), expected_of(tiny))


def test_a_head_and_an_embedding_may_be_quantized_and_gptq_modules_of_other_bits(tmp_path: Path):
    def packer_of(module: str):
        return gptq(8, 16) if module.endswith(("down_proj", "lm_head")) else gptq()

    tiny = write_quantized(tmp_path / "model", FORMATS["gptq"], packer_of=packer_of, **EVEN)
    head, matrix = gptq(8, 16)(np.random.default_rng(9), *tiny.matrices["lm_head.weight"].shape)
    tiny.matrices["lm_head.weight"] = matrix
    tiny.change(lambda t: (t.pop("lm_head.weight"), t.update({f"lm_head.{suffix}": part for suffix, part in head.items()})))
    tiny.configure({**FORMATS["gptq"].config, "lm_head": True, "dynamic": {"+:.*down.*": {"bits": 8, "group_size": 16}}})
    for size in (1, 4):
        ranks = [load(tiny.path, narrow=True, shard=Shard(rank, size)) for rank in range(size)]
        assert {weights.lm_head.kind for weights in ranks} == {"int8"}
        assert torch.equal(torch.cat([dequantized(w.lm_head, torch.float32) for w in ranks])[:512], matrix)
    check_equal(floats_of(load(tiny.path)), expected_of(tiny))
    assert not isinstance(load(tiny.path, narrow=True).embedding, Weight)


def test_old_gptq_files_have_biases_of_nothing(tmp_path: Path):
    tiny = write_quantized(tmp_path / "model", FORMATS["gptq"], **EVEN)
    name = "model.layers.0.mlp.down_proj.bias"
    tiny.change(lambda t: t.update({name: torch.zeros(128, dtype=torch.float16)}))
    check_equal(floats_of(load(tiny.path)), expected_of(tiny))
    tiny.change(lambda t: t[name].fill_(0.5))
    with pytest.raises(CheckpointError, match=re.escape(f"{name!r} is unexpected")):
        load(tiny.path)


@pytest.mark.parametrize(("name", "config", "packers", "kinds"), [
    (  # of Quark the first pattern counts
        "quark-mxfp4",
        quark({"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}, k_proj=None, o_proj=None,
              **{"self_attn*": {"dtype": "fp8_e4m3", "qscheme": "per_channel"}, "q_proj": {"dtype": "int8", "qscheme": "per_tensor"}}) | {"exclude": ["lm_head", "*.up_proj"]},
        {"q_proj": fp8((1, 0)), "v_proj": fp8((1, 0)), "k_proj": None, "o_proj": None, "up_proj": None}, {"qkv": "float", "o": "float", "gate_up": "float", "down": "fp4"},
    ),
    (
        "auto-round-mxfp4",
        {**FORMATS["auto-round-mxfp4"].config, "extra_config": {"model.layers.0.mlp.down_proj": {"bits": 8, "act_bits": 8}, "model.layers.0.self_attn.o_proj": {"bits": 16, "data_type": "fp"}}},
        {"down_proj": mxfp8, "o_proj": None}, {"qkv": "fp4", "o": "float", "gate_up": "fp4", "down": "fp8"},
    ),
    (  # of TorchAO names come before patterns, wherever they stand
        "torchao-int8",
        torchao("FqnToConfig", fqn_to_config={
            "_default": of_torchao("Int8WeightOnlyConfig"), "re:.*self_attn.*": of_torchao("Float8WeightOnlyConfig", granularity=PER_ROW),
            "model.layers.0.self_attn.v_proj": of_torchao("Int8WeightOnlyConfig"), "model.layers.0.mlp.down_proj": None, "lm_head": None,
        }),
        {name: renamed(fp8((1, 0)), weight="_weight_qdata", weight_scale="_weight_scale") for name in ("q_proj", "k_proj", "o_proj")} | {"down_proj": None},
        {"qkv": "float", "o": "fp8", "gate_up": "int8", "down": "float"},
    ),
])  # fmt: skip
def test_layers_of_their_own_are_named_by_quark_auto_round_and_torchao(name: str, config, packers, kinds, tmp_path: Path):
    tiny = write_quantized(tmp_path / "model", FORMATS[name], packer_of=lambda module: packers.get(module.rpartition(".")[2], FORMATS[name].pack), **EVEN)
    tiny.configure(config)
    narrow = load(tiny.path, narrow=True)
    check_equal(floats_of(narrow), expected_of(tiny))
    assert {name.rpartition(".")[2]: w.kind for name, w in weights_of(narrow).items()} == {**kinds, "lm_head": "float"}
    check_equal(floats_of(load(tiny.path)), expected_of(tiny))


def test_thousands_of_names_are_looked_up_as_one_list():
    names = {f"layers.{i}.mlp": of_torchao("Int8WeightOnlyConfig") for i in range(2000)}
    found = quantization_of({"quantization_config": torchao("FqnToConfig", fqn_to_config=names)})
    assert found is not None and len(found.groups) == 1
    assert found.scheme_of("layers.1999.mlp.down_proj") == found.groups[0][1] and found.scheme_of("layers.2000.mlp.down_proj") is None
    rows, whole = ({"dtype": "fp8_e4m3", "qscheme": scheme} for scheme in ("per_channel", "per_tensor"))
    found = quantization_of({"quantization_config": quark(rows, a=rows, b=whole, **{"a.b": rows}, c=None)})
    assert found is not None and [len(found.groups), found.scheme_of("x.b"), found.scheme_of("x.a.b")] == [3, found.groups[1][1], found.groups[1][1]]


def test_what_a_file_says_of_the_cache_is_accepted(tmp_path: Path):
    tiny = write_quantized(tmp_path / "model", FORMATS["ct-fp8-static"], **EVEN)
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    tiny.configure({**FORMATS["ct-fp8-static"].config, "kv_cache_scheme": scheme})
    names = [f"model.layers.0.self_attn.{name}" for name in ("k_scale", "v_scale", "k_proj.output_scale", "q_scale")]
    tiny.change(lambda tensors: tensors.update({name: torch.tensor(0.25) for name in names}))
    check_equal(floats_of(load(tiny.path)), expected_of(tiny))


# ---------------------------------------------------------------------------------------------------------------- what is refused


GPTQ, AWQ, ROUND, ROUND_FP4, QUARK_INT4 = (FORMATS[name].config for name in ("gptq", "awq", "auto-round", "auto-round-mxfp4", "quark-int4"))


def rotated(*places: str) -> dict[str, Any]:
    apply = [{"targets": ["re:.*o_proj$"], "location": place, "inverse": False, "ignore": []} for place in places]
    return {**PACK4, "transform_config": {"config_groups": {"R": {"type": "hadamard", "apply": apply, "head_dim": None, "randomize": False}}}}


@pytest.mark.parametrize("name", ["ct-pack4", "quark-mxfp4", "auto-round"])
def test_rotations_that_are_in_the_weights_are_read_as_they_are(name: str, tmp_path: Path):
    tiny = write_quantized(tmp_path / "model", FORMATS[name], **EVEN)
    quark_rotated = {"algo_config": [{"name": "rotation", "r1": True, "r2": True, "r3": False, "r4": False, "online_r1_rotation": False, "online_config": None}]}
    tiny.configure(rotated("weight_output", "weight_input") if name == "ct-pack4" else FORMATS[name].config | quark_rotated | {"rotation_config": None})
    check_equal(floats_of(load(tiny.path, narrow=True)), expected_of(tiny))


@pytest.mark.parametrize(("quantization", "message"), [
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes .* not supported: use the unquantized checkpoint with --quantization"),
    ({"quant_method": "mxfp4"}, "mxfp4 is of gpt-oss's experts only"),
    ({"quant_method": "aqlm"}, r"method 'aqlm' \(entries of codebooks\), which is not supported: use the unquantized"),
    ({"quant_method": "exl3", "bits": 3.0}, r"method 'exl3' \(ExLlama's own layout\), which is not supported: use"), ({"quant_method": "hqq"}, "method 'hqq', which is not supported"),
    ({"group_size": 64, "bits": 4, "mode": "affine"}, "MLX's layout is that of Apple's machines, which is not supported: use the unquantized"),
    ({"bits": 4}, "method None"), ({"quant_method": ["gptq"]}, "method"), ([4], "wanted an object"),
    ({**GPTQ, "bits": 3}, "gptq quantization: bits is 3, wanted 4 or 8: use"), ({**GPTQ, "bits": 2}, "bits is 2"),
    ({**GPTQ, "bits": True}, "bits is True"), ({**GPTQ, "bits": None}, "bits is None"), ({**GPTQ, "group_size": 0}, "group_size is 0"),
    ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"), ({**GPTQ, "is_marlin_format": True}, "is_marlin_format"),
    ({**AWQ, "version": "gemv"}, "version is 'gemv', wanted gemm"), ({**AWQ, "bits": 8}, "bits is 8, wanted 4"),
    ({**AWQ, "zero_point": 1}, "zero_point is 1"), ({**AWQ, "modules_to_not_convert": "lm_head"}, "modules_to_not_convert is 'lm_head'"),
    ({**FORMATS["fp8-block"].config, "weight_block_size": [128]}, "weight_block_size is .128., wanted .rows, columns."),
    ({**FORMATS["fp8-block"].config, "fmt": "e5m2"}, "fmt is 'e5m2'"),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo is 'W4A8_AWQ', wanted fp8 or .*nvfp4"),
    ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "quantized_layers is None, wanted an object"),
    ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": "NVFP4"}}, "quantized_layers.* a is 'NVFP4', wanted an object"),
    ({**ROUND, "data_type": "mx_int"}, "data_type is 'mx_int', wanted int or fp or mx_fp"), ({**ROUND, "packing_format": "auto_round"}, "packing_format is"),
    ({**ROUND, "packing_format": "auto_round:fake"}, "packing_format is 'auto_round:fake', wanted auto_round:auto_gptq"),
    ({**ROUND, "data_type": "mx_fp"}, "packing_format is None, wanted auto_round:llm_compressor: use"), ({**ROUND_FP4, "bits": 6}, "bits is 6, wanted 4 or 8"),
    ({**ROUND_FP4, "group_size": 16}, "group_size is 16, wanted 32"), ({**ROUND_FP4, "data_type": "nv_fp"}, "group_size is 32, wanted 16"),
    ({**ROUND_FP4, "extra_config": {"lm_head": 16}}, "extra_config quantization: lm_head is 16, wanted an object"),
    ({**ROUND_FP4, "extra_config": {"a.down_proj": {"bits": 4, "data_type": "int2"}}}, "a.down_proj quantization: data_type is 'int2'"),
    (quark({"dtype": "fp6_e2m3", "qscheme": "per_group"}), "quark global_quant_config weight quantization: dtype is 'fp6_e2m3', wanted fp8_e4m3 or int8 .*: use the unquantized"),
    (quark({"dtype": "int4", "qscheme": "per_channel"}), "qscheme is 'per_channel', wanted per_group"), (quark({"dtype": "int8", "qscheme": "per_group"}), "qscheme is 'per_group'"),
    (quark({"dtype": "fp8_e4m3", "qscheme": "per_channel", "ch_axis": 1}), "ch_axis is 1, wanted 0"), (quark("fp8"), "weight is 'fp8', wanted an object"),
    (quark({"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e5m3"}), "scale_format is 'e5m3', wanted e8m0"),
    (quark([{"dtype": "fp8_e4m3", "qscheme": "per_tensor"}, {"dtype": "int4", "qscheme": "per_channel"}]), "dtype is 'fp8_e4m3', wanted fp4"),
    (quark({"dtype": "fp8_e4m3", "qscheme": "per_tensor"}, down_proj={"dtype": "int3"}), r"layer_quant_config \*down_proj weight quantization: dtype is 'int3'"),
    ({**QUARK_INT4, "export": {"pack_method": "order"}}, "export quantization: pack_method is 'order', wanted reorder"), ({**QUARK_INT4, "export": None}, "export is None"),
    ({**QUARK_INT4, "export": {"weight_format": "fake_quantized"}}, "weight_format is 'fake_quantized'"),
    ({**ROUND_FP4, "rotation_config": {"algorithm": "hadamard"}}, "auto-round quantization: rotation_config is .*, wanted none: rotations of activations are not computed: use"),
    ({**ROUND, "spinquant_config": {"r1": True}}, "spinquant_config is"), ({**QUARK_INT4, "algo_config": {"name": "rotation", "r4": True}}, "algo_config is .*, wanted no rotations"),
    ({**QUARK_INT4, "algo_config": [{"name": "awq"}, {"name": "rotation", "online_r1_rotation": True}]}, "algo_config is .*, wanted no rotations"),
    ({**QUARK_INT4, "layer_type_quant_config": {"Linear": {}}}, "layer_type_quant_config"), ({**AWQ, "pack_method": "order"}, "pack_method is 'order'"),
    ({**ROUND, "backend": "auto_round:gptq:exllamav2"}, "backend is"), ({**ROUND, "bits": 2}, "bits is 2, wanted 4 or 8"),
    (torchao("Int4WeightOnlyConfig", group_size=128), "torchao quant_type default quantization: _type is 'Int4WeightOnlyConfig', wanted Float8WeightOnlyConfig or .*: use the unquantized"),
    (torchao("Int8WeightOnlyConfig", granularity=of_torchao("PerBlock", block_size=[1, 128])), "granularity quantization: _type is 'PerBlock', wanted pertensor or perrow"),
    (torchao("Int8WeightOnlyConfig", granularity=of_torchao("PerGroup", group_size=0)), "group_size is 0"), (torchao("Int8WeightOnlyConfig", granularity="row"), "granularity is 'row'"),
    (torchao("IntxWeightOnlyConfig", intx_packing_format={"_data": "OPAQUE_TORCHAO_AUTO"}), "_data is 'OPAQUE_TORCHAO_AUTO', wanted unpacked_to_int8"),
    (torchao("IntxWeightOnlyConfig", intx_packing_format={"_data": "unpacked_to_int8"}, weight_dtype={"_data": "int8"}, mapping_type={"_data": "SYMMETRIC_NO_CLIPPING_ERR"}), "mapping_type quantization: _data is"),
    ({"quant_method": "torchao", "quant_type": "int8_weight_only"}, "quant_type is 'int8_weight_only', wanted an object"),
    (torchao("FqnToConfig", fqn_to_config=[]), "fqn_to_config is"), (torchao("FqnToConfig", fqn_to_config={"a": "fp8"}), "fqn_to_config quantization: a is 'fp8'"),
    (compressed("pack-quantized", 4, strategy="group", group_size=128, actorder="group"), "actorder is 'group'"),
    (compressed("pack-quantized", 3, strategy="channel"), "num_bits is 3"), (compressed("marlin-24", 4), "format is 'marlin-24'"),
    (compressed("pack-quantized", 4, "float"), "type is 'float', wanted int"), (compressed("dense", 8), "format is 'dense'"),
    (compressed("int-quantized", 8, strategy="group"), "group_size is None"), (compressed("int-quantized", 8, strategy="block"), "block_structure"),
    ({**PACK4, "config_groups": []}, "config_groups"), ({**PACK4, "ignore": ["re:("]}, "ignore has 're:.', no pattern"),
    ({**PACK4, "ignore": [r"re:(\w+\.?)+!"]}, "takes too long"), ({**PACK4, "ignore": ["re:" + ".*a" * 9]}, "takes too long"),
    ({**PACK4, "ignore": ["re:" + "(o|.)" * 30 + "!"]}, "takes too long"), ({**PACK4, "ignore": ["re:(?x) (a|a) +!"]}, "takes too long"),
    (groups((["re:(?:.*)*!"], INT8), ignore=[]), "targets has 're:.*takes too long"),
    (compressed("mxfp4-pack-quantized", 4, "float", strategy="tensor"), "strategy is 'tensor', wanted group"),
    (compressed("nvfp4-pack-quantized", 4, "float", strategy="channel"), "strategy is 'channel', wanted group"),
    (compressed("pack-quantized", 4, strategy="block", block_structure=[128, 128]), "strategy is 'block', wanted tensor or channel or group"),
    ({**PACK4, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
    ({**PACK4, "transform_config": {"config_groups": {"u": {}}}}, "transform_config is .*, wanted none, or rotations of weights alone: use"),
    (rotated("weight_input", "input"), "transform_config is .{,120}wanted none, or rotations"), ({**PACK4, "transform_config": {"config_groups": 3}}, "config_groups is 3"),
])  # fmt: skip
def test_what_is_not_supported_says_why_and_what_instead(quantization, message: str):
    config = {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 9, "intermediate_size": 64}
    model_config_from_hf(config)
    with pytest.raises(CheckpointError, match=message):
        model_config_from_hf({**config, "quantization_config": quantization})


def test_older_files_of_mlx_say_so_elsewhere():
    with pytest.raises(CheckpointError, match="MLX's layout is that of Apple's machines"):
        quantization_of({"quantization": {"group_size": 64, "bits": 4}})
    assert quantization_of({"quantization": "none"}) is quantization_of({"quantization": {}}) is None


def test_integers_of_which_nothing_says_what_they_stand_for_are_no_floats(tmp_path: Path):
    tiny = write_quantized(tmp_path / "model", FORMATS["ct-int8"], **EVEN)
    tiny.change(lambda tensors: [tensors.pop(name) for name in list(tensors) if name.endswith("weight_scale")])
    (tiny.path / "config.json").write_text(json.dumps(tiny.config))
    with pytest.raises(CheckpointError, match=r"_proj.weight' holds integers \(I8\), and config.json has no quantization_config"):
        load(tiny.path)


@pytest.mark.parametrize("name", ["fp8-block", "ct-fp8-dynamic", "awq"])
def test_gpt_oss_is_read_in_mxfp4_alone(name: str):
    with pytest.raises(CheckpointError, match="and gpt-oss is read in mxfp4 alone: use the unquantized"):
        quantization_of({"model_type": "gpt_oss", "num_local_experts": 4, "quantization_config": FORMATS[name].config})


def places(config: Any, at: tuple = ()):
    """All paths into nested objects and lists."""
    items = config.items() if isinstance(config, dict) else enumerate(config) if isinstance(config, list) else ()
    for key, value in items:
        yield (*at, key)
        yield from places(value, (*at, key))


@pytest.mark.parametrize("name", [name for name in FORMATS if not FORMATS[name].beside])
def test_any_value_anywhere_in_a_config_is_taken_or_refused_by_name(name: str):
    for place in places(FORMATS[name].config):
        for value in NASTY:
            changed = json.loads(json.dumps(FORMATS[name].config))
            inside = changed
            for key in place[:-1]:
                inside = inside[key]
            inside[place[-1]] = value
            with contextlib.suppress(CheckpointError):
                found = quantization_of({"quantization_config": changed})
                if found is not None:
                    hash((found.scheme_of(DOWN), found.ignores(DOWN)))


@pytest.mark.parametrize(("file", "content"), [("quantize_config.json", {"fp16": True}), ("hf_quant_config.json", {"quantization": {"quant_algo": None}}), ("quant_config.json", {})])
def test_a_file_of_another_tool_says_nothing(file: str, content: dict, tmp_path: Path):
    tiny = write_quantized(tmp_path / "model", FORMATS["gptq"], packer_of=lambda module: None, **ODD)
    (tiny.path / "config.json").write_text(json.dumps(tiny.config))
    (tiny.path / file).write_text(json.dumps(content))
    check_equal(floats_of(load(tiny.path, narrow=True)), expected_of(tiny))


DOWN = "model.layers.0.mlp.down_proj"


def _set(name: str, value: Any):
    return lambda tensors: tensors.__setitem__(f"{DOWN}.{name}", value(tensors[f"{DOWN}.{name}"]))


def _fill(name: str, value: float):
    return lambda tensors: tensors[f"{DOWN}.{name}"].view(-1)[-1:].fill_(value)


@pytest.mark.parametrize(("name", "edit", "message"), [
    ("fp8-block", lambda t: t.pop(f"{DOWN}.weight_scale_inv"), f"'{DOWN}.weight_scale' is missing beside '{DOWN}.weight'"),
    ("fp8-block", lambda t: t.pop(f"{DOWN}.weight"), f"'{DOWN}.weight' is missing beside '{DOWN}.weight_scale_inv'"),
    ("fp8-block", _set("weight_scale_inv", lambda s: s[:, :1].clone()), f"'{DOWN}.weight_scale_inv' is F32 of shape \\(1, 1\\), .* \\(1, 2\\)"),
    ("fp8-block", _fill("weight_scale_inv", float("nan")), f"'{DOWN}.weight_scale_inv' holds scales that are not finite"),
    ("fp8-tensor", lambda t: t.update({f"{DOWN}.weight_scale": torch.tensor(float("inf"))}), f"'{DOWN}.weight_scale' holds scales that are not"),
    ("fp8-tensor", _set("weight_scale", lambda s: s.repeat(3)), f"'{DOWN}.weight_scale' is F32 of shape \\(3,\\)"),
    ("fbgemm", _set("weight", lambda w: w.float()), f"'{DOWN}.weight' is F32 of shape .* ask for F8_E4M3"),
    ("ct-int8", _set("weight", lambda w: w[:, :-1].clone()), f"'{DOWN}.weight' is I8 of shape \\(128, 255\\)"),
    ("ct-pack4-asym", lambda t: t.pop(f"{DOWN}.weight_zero_point"), f"'{DOWN}.weight_zero_point' is missing"),
    ("ct-pack4", _set("weight_packed", lambda w: w[:, ::2].clone()), f"'{DOWN}.weight_packed' is I32 of shape \\(128, 16\\), .*\\(128, 32\\)"),
    ("ct-pack4", lambda t: t.update({f"{DOWN}.weight_g_idx": torch.arange(256, dtype=torch.int32) % 8}), f"'{DOWN}.weight_g_idx' shuffles the columns"),
    ("ct-nvfp4", _fill("weight_global_scale", 0.0), f"'{DOWN}.weight_global_scale' holds scales"),
    ("ct-nvfp4", lambda t: t.pop(f"{DOWN}.weight_global_scale"), f"'{DOWN}.weight_global_scale' is missing"),
    ("ct-mxfp4", _set("weight_scale", lambda s: torch.full_like(s, 255)), f"'{DOWN}.weight_scale' holds scales"),
    ("ct-mxfp8", _set("weight_scale", lambda s: torch.full_like(s, 255)), f"'{DOWN}.weight_scale' holds scales"),
    ("awq", _set("qzeros", lambda z: z.t().contiguous()), f"'{DOWN}.qzeros' is I32 of shape"), ("awq", _fill("scales", float("nan")), f"'{DOWN}.scales'"),
    ("awq", _set("qweight", lambda w: w.float()), f"'{DOWN}.qweight' is F32"), ("awq", lambda t: t.pop(f"{DOWN}.scales"), f"'{DOWN}.scales' is missing"),
    ("quark-int4", _set("weight_zero_point", lambda z: z + 1), f"'{DOWN}.weight_zero_point' holds zero points, and by config.json there are none"),
    ("ct-int4-bytes", _fill("weight", 8), f"'{DOWN}.weight' holds numbers that do not fit into 4 bits"), ("ct-int4-bytes", _fill("weight", -9), "4 bits"),
    ("quark-int8", lambda t: t[f"{DOWN}.weight_zero_point"].fill_(1), f"'{DOWN}.weight_zero_point' holds zero points"),
    ("quark-uint4", _set("weight", lambda w: w.t().contiguous()), f"'{DOWN}.weight' is I32 of shape"), ("quark-mxfp4", lambda t: t.pop(f"{DOWN}.weight_scale"), "is missing"),
    ("gptq", _set("g_idx", lambda g: g.flip(0)), f"'{DOWN}.g_idx' shuffles the columns among the groups .*: use a version made without"),
    ("gptq", _set("qweight", lambda w: w[1:].clone()), f"'{DOWN}.qweight' is I32 of shape"),
    ("gptq-dynamic", _set("qweight", lambda w: w[::4].clone()), f"'{DOWN}.qweight' has 2 bits, and 4 and 8"),
    ("ct-fp8-dynamic", lambda t: t.update({f"{DOWN}.weight_more": torch.ones(1)}), f"'{DOWN}.weight_more' is unexpected"),
])  # fmt: skip
def test_a_broken_tensor_is_named(name: str, edit, message: str, tmp_path: Path):
    tiny = write_quantized(tmp_path / "model", FORMATS[name], **EVEN)
    tiny.change(edit)
    for narrow in (False, True):
        with pytest.raises(CheckpointError, match=message):
            load(tiny.path, narrow)


@pytest.mark.parametrize(("name", "key", "value", "message"), [
    ("fp8-block", "modules_to_not_convert", ["down_proj"], "'{DOWN}' is among those that are not quantized"),
    ("ct-pack4", "ignore", ["re:.*down.*"], "'{DOWN}' is among"), ("awq", "modules_to_not_convert", ["mlp"], "is among those"),
    ("ct-pack4", "config_groups", {"g": PACK4["config_groups"]["group_0"] | {"targets": ["re:.*attn.*"]}}, "is in none of the groups"),
])  # fmt: skip
def test_a_file_that_contradicts_its_lists_is_refused(name: str, key: str, value, message: str, tmp_path: Path):
    tiny = write_quantized(tmp_path / "model", FORMATS[name], **EVEN)
    tiny.configure({**FORMATS[name].config, key: value})
    with pytest.raises(CheckpointError, match=message.format(DOWN=DOWN)):
        load(tiny.path)


def test_no_list_is_needed_for_what_the_file_holds_as_floats(tmp_path: Path):
    tiny = write_quantized(tmp_path / "model", FORMATS["awq"], packer_of=lambda module: None if "self_attn" in module else FORMATS["awq"].pack, **EVEN)
    check_equal(floats_of(load(tiny.path)), expected_of(tiny))


# ------------------------------------------------------------------------------------------------------------------- engines


SMALL: dict[str, Any] = {"device": "cpu", "max_model_len": 64, "num_kv_blocks": 32, "max_num_seqs": 4}
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=1)


def test_an_engine_on_a_cpu_is_the_model_of_the_floats(tmp_path: Path, caplog):
    tiny = write_quantized(tmp_path / "model", FORMATS["awq"], **EVEN)
    with caplog.at_level(logging.INFO), LLM(str(tiny.path), **SMALL, kv_cache_dtype="float32") as llm:
        (output,) = llm.generate([tokens(9)], GREEDY, use_tqdm=False)
    assert any(("loaded on cpu" in r.message and "weights Q4_Z" in r.message) or "does not run" in r.message for r in caplog.records)
    model, ids = theirs_of(tiny, tmp_path), tokens(9)
    for token in output.outputs[0].token_ids:
        assert token == int(reference(model, ids)[-1].argmax())
        ids.append(token)
    for quantization in ("int8", "fp8"):
        with pytest.raises(ParameterError, match=r"quantized already \(awq\)"):
            LLM(str(tiny.path), **SMALL, quantization=quantization)
