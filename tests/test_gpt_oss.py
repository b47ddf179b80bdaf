"""gpt-oss: experts in MXFP4 as its files have them, whole, in parts of ranks and made up; what is wrong with a file is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine_driver import assert_all_same, make_core, make_requests, run
from headrace.compile_ahead.weights import weights_without_data
from headrace.config import EngineConfig
from headrace.conversation.answer import AnswerFormat
from headrace.conversation.template import ChatTemplate
from headrace.conversation.tool_prompt import spoken_format
from headrace.errors import CheckpointError, ParameterError
from headrace.model.checkpoint import resolve_checkpoint
from headrace.model.decoder_weights import DecoderWeights
from headrace.model.families import model_config_from_hf
from headrace.model.loader import load_model
from headrace.model.shard import WHOLE, Shard, sizes_of
from headrace.model.tokenizer import Tokenizer
from headrace.model.weight import Weight, dequantized
from quantized_checkpoints import E2M1
from rank_threads import ranked_core
from test_loader_gguf_families import assert_same_model, convert
from test_tool_formats import GPT_OSS
from tiny_models import VOCAB, write_tiny

CPU = torch.device("cpu")
CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]}
MATRICES = ("experts_gate_up", "experts_down")


def quantized(tensors: dict[str, Tensor], seed: int = 0) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Experts drawn anew, in MXFP4; and the same numbers as floats, in the layout of files that are not quantized."""
    rng, table = np.random.default_rng(seed), np.array(E2M1, np.float32)
    narrow, wide = dict(tensors), dict(tensors)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        count, columns, rows = narrow.pop(name).shape
        codes = rng.integers(0, 16, (count, rows, columns), dtype=np.uint8)
        scales = rng.integers(121, 124, (count, rows, columns // 32), dtype=np.uint8)
        pairs = codes.reshape(count, rows, columns // 32, 16, 2)
        narrow[f"{name}_blocks"] = torch.from_numpy(pairs[..., 0] | pairs[..., 1] << 4)
        narrow[f"{name}_scales"] = torch.from_numpy(scales)
        values = table[codes] * np.repeat(2.0 ** (scales.astype(np.float32) - 127), 32, 2)
        wide[name] = torch.from_numpy(np.ascontiguousarray(values.transpose(0, 2, 1)))
    return narrow, wide


def write_pair(root: Path, **overrides: Any) -> tuple[Path, Path]:
    """A checkpoint in MXFP4 and the same in floats."""
    floats, narrow = write_tiny("gpt_oss", root / "floats", **overrides), root / "mxfp4"
    narrow.mkdir()
    for file in floats.iterdir():
        (narrow / file.name).write_bytes(file.read_bytes())
    tensors = quantized(load_file(floats / "model.safetensors"))
    for path, held in zip((narrow, floats), tensors, strict=True):
        save_file(held, path / "model.safetensors")
    config = json.loads((floats / "config.json").read_text())
    (narrow / "config.json").write_text(json.dumps(config | {"quantization_config": CONFIG}))
    return narrow, floats


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Path, Path]:
    """160 and 64 inputs: neither is a multiple of what is packed together."""
    return write_pair(tmp_path_factory.mktemp("pair"), hidden_size=160, num_hidden_layers=2)


def load(path: Path, shard: Shard = WHOLE, **options) -> DecoderWeights:
    kind = options.pop("load_format", "auto")
    checkpoint = resolve_checkpoint(EngineConfig(model=str(path), load_format=kind))
    return load_model(checkpoint, model_config_from_hf(checkpoint.config), torch.float32, CPU, shard=shard, **options)


def test_a_file_of_mxfp4_holds_what_one_of_floats_does(pair):
    narrow, floats = (load(path, narrow=True) for path in pair)
    for mine, theirs in zip(narrow.layers, floats.layers, strict=True):
        for name, columns in zip(MATRICES, (160, 64), strict=True):
            held, want = mine.more[name], theirs.more[name].data
            assert (held.kind, held.group, held.shape) == ("fp4", 32, (len(want), -(-columns // 128) * 128))
            found = dequantized(held, torch.float32)
            assert torch.equal(found[:, :columns], want) and not found[:, columns:].any()
        assert torch.equal(mine.more["sinks"], theirs.more["sinks"])
    for options in ({}, {"narrow": True, "quantization": "none"}):
        for mine, theirs in zip(load(pair[0], **options).layers, floats.layers, strict=True):
            assert all(torch.equal(mine.more[name].data, theirs.more[name].data) for name in MATRICES)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_have_whole_experts_and_the_sinks_of_their_heads(pair, size):
    whole, parts = load(pair[0], narrow=True), [load(pair[0], Shard(rank, size), narrow=True) for rank in range(size)]
    for i, layer in enumerate(whole.layers):
        own = [part.layers[i].more for part in parts]
        for name in MATRICES:
            for of in ("data", "scales"):
                assert torch.equal(torch.cat([getattr(more[name], of) for more in own]), getattr(layer.more[name], of))
        for name in ("sinks", "experts_gate_up_bias", "experts_down_bias"):
            assert torch.equal(torch.cat([more[name] for more in own]), layer.more[name])
        assert all(torch.equal(more["router"].data, layer.more["router"].data) for more in own)


def test_experts_of_floats_are_quantized_like_other_matrices(pair):
    found = load(pair[1], narrow=True, quantization="int8")
    for mine, theirs in zip(found.layers, load(pair[1]).layers, strict=True):
        for name in MATRICES:
            want = theirs.more[name].data
            assert mine.more[name].kind == "int8"
            error = (dequantized(mine.more[name], torch.float32) - want).abs()
            assert (error <= want.abs().amax(1, keepdim=True) / 253).all()


def test_a_made_up_model_is_in_mxfp4_too(pair, tmp_path):
    config = json.loads((pair[0] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    narrow, wide = (load(tmp_path, load_format="dummy", narrow=kept) for kept in (True, False))
    parts = [load(tmp_path, Shard(rank, 2), load_format="dummy", narrow=True) for rank in range(2)]
    for i, (mine, theirs) in enumerate(zip(narrow.layers, wide.layers, strict=True)):
        for name in MATRICES:
            held, want = mine.more[name], theirs.more[name].data
            assert held.kind == "fp4" and torch.equal(dequantized(held, torch.float32)[:, : want.shape[1]], want)
            assert 0.01 < want.std() < 0.05
            assert torch.equal(torch.cat([part.layers[i].more[name].data for part in parts]), held.data)
    checkpoint = resolve_checkpoint(EngineConfig(model=str(tmp_path), load_format="dummy"))
    _, ahead = weights_without_data(checkpoint, model_config_from_hf(config), torch.float32, None)
    for form, layer in zip(ahead.layers, narrow.layers, strict=True):  # what kernels are compiled for ahead
        held = {name: Weight.of(value) for name, value in layer.more.items()}
        for name, value in ((name, Weight.of(value)) for name, value in form.more.items()):
            assert [(t.shape, t.dtype) for t in value.tensors] == [(t.shape, t.dtype) for t in held[name].tensors], name
            assert (value.kind, value.group) == (held[name].kind, held[name].group)


def test_every_schedule_and_any_ranks_give_the_tokens_of_the_floats(pair):
    requests = make_requests(3, 6, VOCAB)
    want = run(make_core(str(pair[1])), requests)
    for options in ({}, {"max_num_batched_tokens": 7, "num_kv_blocks": 12}):
        assert_all_same(run(make_core(str(pair[0]), **options), requests), want, f"{options}", tolerance=1e-4)
    with ranked_core(str(pair[0]), 2) as core:
        assert_all_same(run(core, requests), want, "two ranks", tolerance=1e-4)


def test_a_folder_speaks_harmony_by_its_template(pair, tmp_path):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((pair[0] / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text(GPT_OSS)  # as published, beside a tokenizer_config.json
    tokenizer = Tokenizer.from_checkpoint(resolve_checkpoint(EngineConfig(model=str(tmp_path), load_format="dummy")))
    spoken = spoken_format(ChatTemplate.from_tokenizer(tokenizer))
    assert AnswerFormat.choose(tokenizer.chat_template, "auto", spoken) == AnswerFormat("openai_gptoss", "openai")


def apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As the converter has them: gate and up in tensors of their own, all as [experts, out, in]."""
    found = {}
    for name, tensor in tensors.items():
        name, suffix = (name.removesuffix("_bias"), ".bias") if name.endswith("_bias") else (name, ".weight")
        tensor = tensor.mT if ".experts." in name and suffix == ".weight" else tensor
        if name.endswith("gate_up_proj"):
            for part, of in enumerate(("gate_proj", "up_proj")):
                halves = tensor[:, part::2]
                found[name.replace("gate_up_proj", of) + suffix] = halves.contiguous()
        else:
            found[name + suffix * (".experts." in name or name.endswith("sinks"))] = tensor.contiguous()
    return found


def describe(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_sliding_window(config.sliding_window)
    writer.add_rope_scaling_yarn_beta_fast(config.rope_parameters["beta_fast"])
    writer.add_rope_scaling_yarn_beta_slow(config.rope_parameters["beta_slow"])


def in_mxfp4(name: str, data: np.ndarray) -> tuple[np.ndarray, gguf.GGMLQuantizationType | None]:
    kind = gguf.GGMLQuantizationType.MXFP4
    return (gguf.quants.quantize(data, kind), kind) if name.endswith("exps.weight") else (data, None)


def test_a_gguf_is_the_checkpoint_that_it_was_made_from(tmp_path):
    source = write_tiny("gpt_oss", tmp_path / "hf", swiglu_limit=7.0, num_hidden_layers=2)
    assert_same_model(source, convert("gpt_oss", source, tmp_path / "m.gguf", apart, describe), family="gpt_oss_apart")


def test_a_gguf_of_mxfp4_holds_what_the_file_does(pair, tmp_path):
    path = convert("gpt_oss", pair[1], tmp_path / "m.gguf", apart, describe, in_mxfp4)
    narrow, floats, want = load(path, narrow=True), load(path), load(pair[1])
    for mine, theirs, expected in zip(narrow.layers, floats.layers, want.layers, strict=True):
        for name, columns in zip(MATRICES, (160, 64), strict=True):
            assert mine.more[name].kind == "fp4"
            assert torch.equal(dequantized(mine.more[name], torch.float32)[:, :columns], expected.more[name].data)
            assert torch.equal(theirs.more[name].data, expected.more[name].data)


BLOCKS, SCALES = (f"model.layers.1.mlp.experts.gate_up_proj_{part}" for part in ("blocks", "scales"))


@pytest.mark.parametrize("change, message", [
    (lambda t: t.pop(SCALES), f"'{SCALES}' is missing beside '{BLOCKS}'"),
    (lambda t: t.pop(BLOCKS), f"'{BLOCKS}' is missing beside '{SCALES}'"),
    (lambda t: (t.pop(BLOCKS), t.pop(SCALES)), r"'model.layers.1.mlp.experts.gate_up_proj\[0\]' is missing"),
    (lambda t: t.update({BLOCKS: t[BLOCKS][:, :-2].clone()}), rf"'{BLOCKS}' is U8 of shape .*asks for U8 \(8, 128, 5, 16\)"),
    (lambda t: t.update({SCALES: t[SCALES].float()}), rf"'{SCALES}' is F32 of shape .*asks for U8/F8_E8M0 \(8, 128, 5\)"),
    (lambda t: t[SCALES][7, 3].fill_(255), r"gate_up_proj_scales' holds scales that are not finite"),
    (lambda t: t.pop("model.layers.1.self_attn.sinks"), "'model.layers.1.self_attn.sinks' is missing"),
])  # fmt: skip
def test_a_broken_file_says_what_is_wrong(pair, tmp_path, change, message):
    tensors = load_file(pair[0] / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((pair[0] / "config.json").read_text())
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


@pytest.mark.parametrize("change, message", [
    (lambda t: t.mT.contiguous(), r"gate_up_proj' has experts of shape \(128, 160\), the config asks for \(160, 128\)"),
    (lambda t: t[:7].clone(), "gate_up_proj' has 7 experts, the config 8"),
])  # fmt: skip
def test_experts_of_floats_of_another_shape_are_refused(pair, tmp_path, change, message):
    tensors = load_file(pair[1] / "model.safetensors")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    tensors[name] = change(tensors[name])
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((pair[1] / "config.json").read_text())
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_what_the_config_cannot_mean_is_refused(pair):
    config = json.loads((pair[0] / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"swiglu_alpha is 1\.5, and 1\.702 alone"):
        model_config_from_hf(config | {"swiglu_alpha": 1.5})
    assert sizes_of(model_config_from_hf(config)) == [1, 2, 4]
    with pytest.raises(ParameterError, match=r"tensor_parallel_size: got 3, .*8 experts"):
        Shard(0, 3).config(model_config_from_hf(config))
    missing = {k: v for k, v in config.items() if k not in ("rope_parameters", "rope_scaling", "swiglu_limit")}
    silent = model_config_from_hf(missing)
    assert silent.rope.kind == "yarn" and silent.rope.param("truncate") is False and silent.rope.param("factor") == 32.0
    assert silent.experts is not None and silent.experts.clamp == 7.0
