"""Experts in the quantized formats that people download, and quantized when they are loaded: the numbers are the format's, and
the router's stay float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.compile_ahead.weights import weights_without_data
from headrace.config import EngineConfig
from headrace.model.checkpoint import resolve_checkpoint
from headrace.model.decoder_weights import MATRICES
from headrace.model.families import model_config_from_hf, weight_plan
from headrace.model.loader import load_model
from headrace.model.narrow import quantized
from headrace.model.shard import WHOLE, Shard
from headrace.model.weight import Weight, dequantized
from model_harness import Sequences
from quantized_checkpoints import FORMATS, Tiny, write_quantized
from test_model_families import assert_close, reference, tokens
from tiny_gemma4 import EXPERTS, SMALL
from tiny_models import write_tiny

CPU = torch.device("cpu")
SIZES = {
    "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "moe_intermediate_size": 128,
    "mlp_only_layers": [], "num_experts": 4,
}  # fmt: skip
LISTED = {"fp8-block": "modules_to_not_convert", "awq": "modules_to_not_convert", "ct-pack4-asym": "ignore"}
NAMES = ("experts_gate_up", "experts_down")


def more(path: Path, shard: Shard = WHOLE, **options: Any) -> dict[str, Any]:
    checkpoint = resolve_checkpoint(EngineConfig(model=str(path)))
    config = model_config_from_hf(checkpoint.config)
    return load_model(checkpoint, config, torch.bfloat16, CPU, shard=shard, **options).layers[0].more


def expected_of(tiny: Tiny) -> dict[str, Tensor]:
    specs = {spec.target: spec for spec in weight_plan(model_config_from_hf(tiny.config))}
    return {name: torch.cat([tiny.matrices[source] for source, _ in specs[f"layers.0.{name}"].sources]) for name in NAMES}


@pytest.mark.parametrize("inner", [128, 80])
@pytest.mark.parametrize("name", ["fp8-block", "fp8-tensor", "ct-int8", "ct-pack4-asym", "ct-nvfp4", "awq", "gptq", "quark-mxfp4", "quark-int4"])
def test_experts_are_the_formula_and_ranks_have_their_own(name: str, inner: int, tmp_path: Path):
    tiny = write_quantized(tmp_path / "model", FORMATS[name], "qwen3_moe", **SIZES | {"moe_intermediate_size": inner})
    if name in LISTED:  # as in the published files
        tiny.configure(FORMATS[name].config | {LISTED[name]: ["lm_head", "model.layers.0.mlp.gate"]})
    expected = expected_of(tiny)
    for narrow in (False, True):
        dtype = torch.float32 if narrow else torch.bfloat16
        found = more(tiny.path, narrow=narrow)
        for part in NAMES:
            assert torch.equal(dequantized(found[part], dtype), expected[part].to(dtype)), part
            assert (found[part].kind != "float") == narrow
        assert found["router"].data.dtype == torch.float32
        assert torch.equal(found["router"].data, tiny.matrices["model.layers.0.mlp.gate.weight"])
    for rank in range(2):
        own = more(tiny.path, Shard(rank, 2), narrow=True)
        for part in NAMES:
            assert torch.equal(dequantized(own[part], torch.float32), expected[part].chunk(2)[rank]), part


@pytest.mark.parametrize("name", [None, "fp8-block", "ct-fp8-dynamic", "ct-pack4-asym", "modelopt-nvfp4", "awq"])
def test_gemmas_experts_are_read_one_by_one_as_those_who_quantize_them_write_them(name: str | None, tmp_path: Path):
    """Its own files have all of a layer in two tensors."""
    path = write_tiny("gemma4", tmp_path / "floats", **EXPERTS | SMALL | {"hidden_size": 128, "moe_intermediate_size": 32})
    tensors, rng = load_file(path / "model.safetensors"), np.random.default_rng(0)
    config = json.loads((path / "config.json").read_text())
    stored = {key: tensor for key, tensor in tensors.items() if ".experts." not in key}
    for key in tensors.keys() - stored.keys():
        prefix, _, kind = key.rpartition(".")
        for e, expert in enumerate(tensors[key]):
            parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[kind]
            halves = [half.contiguous() for half in expert.chunk(len(parts))]
            for i, part in enumerate(parts):
                found = {"weight": halves[i]}
                if name is not None:
                    found, halves[i] = FORMATS[name].pack(rng, *halves[i].shape)
                stored |= {f"{prefix}.{e}.{part}.{suffix}": tensor for suffix, tensor in found.items()}
            expert.copy_(torch.cat(halves))
    save_file(tensors, path / "model.safetensors")
    (quantized := tmp_path / "quantized").mkdir()
    save_file(stored, quantized / "model.safetensors")
    (quantized / "config.json").write_text(json.dumps(config | ({"quantization_config": FORMATS[name].config} if name else {})))
    for shard in (WHOLE, Shard(1, 2)):
        wanted, found = more(path, shard), more(quantized, shard, narrow=True)
        assert wanted.keys() == found.keys()
        for part in NAMES:
            assert torch.equal(dequantized(found[part], torch.bfloat16), wanted[part].data), part
            assert (found[part].kind == "float") == (name is None)
    checkpoint = resolve_checkpoint(EngineConfig(model=str(quantized)))
    _, ahead = weights_without_data(checkpoint, model_config_from_hf(checkpoint.config), torch.bfloat16, None)
    assert [ahead.layers[0].more[part].kind for part in NAMES] == [more(quantized, narrow=True)[part].kind for part in NAMES]


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_experts_are_quantized_when_they_are_loaded(kind: str, load_format: str, tmp_path: Path):
    path = write_tiny("qwen3_moe", tmp_path / "model", **SIZES, num_hidden_layers=1)
    checkpoint = resolve_checkpoint(EngineConfig(model=str(path), load_format=load_format))
    config = model_config_from_hf(checkpoint.config)
    plain = load_model(checkpoint, config, torch.float32, CPU).layers[0].more
    for shard in (WHOLE, Shard(1, 2)):
        found = load_model(checkpoint, config, torch.float32, CPU, shard=shard, quantization=kind, narrow=True).layers[0].more
        for part in NAMES:
            wanted = dequantized(quantized(plain[part].data, kind), torch.float32)
            assert found[part].kind == kind
            assert torch.equal(dequantized(found[part], torch.float32), wanted if shard is WHOLE else wanted.chunk(2)[1]), part
        assert torch.equal(found["router"].data, plain["router"].data)


def test_a_router_that_a_file_holds_narrow_becomes_float32(tmp_path: Path):
    router = "model.layers.0.mlp.gate"
    tiny = write_quantized(tmp_path / "model", FORMATS["fp8-tensor-1"], "qwen3_moe", **SIZES)
    scale, data = torch.tensor(0.013), torch.randn(4, 128).to(torch.float8_e4m3fn)
    tiny.change(lambda tensors: tensors.update({f"{router}.weight": data, f"{router}.weight_scale": scale}))
    for narrow in (False, True):
        found = more(tiny.path, narrow=narrow)["router"]
        assert isinstance(found, Weight) and torch.equal(found.data, data.float() * scale)


@pytest.mark.parametrize("name", ["fp8-block", "awq"])
def test_logits_are_those_of_the_floats(name: str, tmp_path: Path):
    import transformers

    tiny = write_quantized(tmp_path / "model", FORMATS[name], "qwen3_moe", **SIZES, num_hidden_layers=2)
    floats = tmp_path / "floats"
    floats.mkdir()
    (floats / "config.json").write_text(json.dumps(tiny.config))
    save_file({n: t.contiguous() for n, t in tiny.matrices.items()}, floats / "model.safetensors", {"format": "pt"})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(floats, attn_implementation="eager").eval()
    checkpoint = resolve_checkpoint(EngineConfig(model=str(tiny.path)))
    config, ids = model_config_from_hf(tiny.config), tokens(40)
    for narrow in (False, True):
        weights = load_model(checkpoint, config, torch.float32, CPU, narrow=narrow)
        (logits,) = Sequences(config, weights, max_len=64).step([(0, ids)])
        assert_close(logits, reference(theirs, ids))


@pytest.mark.parametrize("how", ["floats", "fp8", "int4", "fp8-block"])
def test_what_is_compiled_ahead_is_what_is_loaded(how: str, tmp_path: Path):
    """A layer of each kind, dense or with experts, in the same forms without their numbers."""
    sizes = SIZES | {"num_hidden_layers": 4, "mlp_only_layers": [1, 2], "intermediate_size": 128}
    path = tmp_path / "model"
    if how == "fp8-block":
        write_quantized(path, FORMATS[how], "qwen3_moe", **sizes)
    else:
        write_tiny("qwen3_moe", path, **sizes)
    checkpoint, made = resolve_checkpoint(EngineConfig(model=str(path))), how if how in ("fp8", "int4") else None
    config = model_config_from_hf(checkpoint.config)
    loaded = load_model(checkpoint, config, torch.bfloat16, CPU, quantization=made, narrow=True).layers
    few, weights = weights_without_data(checkpoint, config, torch.bfloat16, made)
    assert few.experts is not None and few.num_layers == len(few.experts.layers) == 2
    for kept, whole in zip(weights.layers, (loaded[0], loaded[1]), strict=True):
        assert kept.more.keys() == whole.more.keys()
        pairs = [(getattr(kept, name), getattr(whole, name)) for name in MATRICES]
        for ahead, there in [*pairs, *((kept.more[name], whole.more[name]) for name in whole.more)]:
            assert (ahead.kind, ahead.group, ahead.scale_rows) == (there.kind, there.group, there.scale_rows)
            assert [(t.shape, t.dtype) for t in ahead.tensors] == [(t.shape, t.dtype) for t in there.tensors]
