"""Configurations and adapters that are wrong in any way: a clear error before anything is loaded, or what they say is done."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from headrace.errors import CheckpointError
from headrace.lora.format import examine
from headrace.lora.pool import AdapterPool
from headrace.lora.targets import modules_of
from headrace.model.families import model_config_from_hf, weight_plan
from headrace.model.shard import WHOLE, Shard, sizes_of
from tiny_gemma4 import EXPERTS, SMALL
from tiny_models import _COMMON, TINY

ROPES = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
BASES: dict[str, dict[str, Any]] = {
    kind: {**_COMMON, "architectures": [], "model_type": kind, **TINY[family][1], **more}
    for kind, family, more in [
        ("qwen3_moe", "qwen3_moe", {}), ("gpt_oss", "gpt_oss", {}), ("deepseek_v3", "deepseek_v3", {}), ("qwen3_next", "qwen3_next", {}),
        ("qwen3_5_text", "qwen3_5", {}), ("gemma4_text", "gemma4", {**EXPERTS, **SMALL, "rope_parameters": ROPES}),
    ]
}  # fmt: skip
values = st.sampled_from([
    None, True, 0, -1, 1, 2, 3, 16, 33, 2**24, 2**40, 10**400, 0.5, -0.5, 1e-300, 1e300, float("nan"), float("inf"), "", "x", [], [0],
    ["x"], [None], {}, {"a": 1}, {"rope_type": "yarn"}, {"rope_type": [0]},
]).map(copy.deepcopy)  # fmt: skip  # a second change may be inside of the first one's


def changed(data, config: dict[str, Any]) -> None:
    """Somewhere, in place: in objects and lists within it too."""
    key = data.draw(st.sampled_from(sorted(config)))
    inner = config[key]
    if isinstance(inner, dict) and inner and data.draw(st.booleans()):
        changed(data, inner)
    elif isinstance(inner, list) and inner and data.draw(st.booleans()):
        inner[data.draw(st.integers(0, len(inner) - 1))] = data.draw(values)
    else:
        config[key] = data.draw(values)


@given(kind=st.sampled_from(sorted(BASES)), data=st.data())
def test_any_config_is_refused_or_can_be_asked_everything(kind, data):
    config = copy.deepcopy(BASES[kind])
    for _ in range(data.draw(st.integers(1, 2))):
        changed(data, config)
    try:
        model = model_config_from_hf(config)
    except CheckpointError:
        return
    for size in sizes_of(model)[:2]:
        assert Shard(0, size).config(model).kv_shapes
    if model.num_layers <= 16:
        assert weight_plan(model)
        assert modules_of(model)


@pytest.mark.parametrize("kind", sorted(BASES))
def test_fields_of_any_size_are_answered_at_once(kind):
    for name in {"num_attention_heads", "linear_num_key_heads", "linear_num_value_heads"} & BASES[kind].keys():
        with pytest.raises(CheckpointError, match=name):
            model_config_from_hf({**BASES[kind], name: 2**40})
    with pytest.raises(CheckpointError, match="max_position_embeddings"):
        model_config_from_hf({**BASES[kind], "rope_parameters": None, "rope_scaling": None, "max_position_embeddings": 2**40})


def test_layers_that_are_rotated_alike_have_heads_alike():
    config = {**BASES["gemma4_text"], "per_layer_config": {"5": {"head_dim": 12}}}
    with pytest.raises(CheckpointError, match="head_dim of layer 5 is 12, wanted 16"):
        model_config_from_hf(config)


def adapter(path: Path, data: bytes) -> Path:
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    (path / "adapter_model.safetensors").write_bytes(data)
    return path


@pytest.fixture(scope="module")
def model():
    return model_config_from_hf(BASES["qwen3_moe"])


def test_whatever_an_adapters_file_holds_is_refused_by_name_or_loaded(model, tmp_path):
    modules = modules_of(model)
    name = next(iter(modules))
    rows, columns = modules[name].outputs, modules[name].inputs
    tensors = {f"{name}.lora_A.weight": torch.ones(2, columns), f"{name}.lora_B.weight": torch.ones(rows, 2)}
    whole = save(tensors)
    pool = AdapterPool(model, WHOLE, 1, 2, 8, torch.float32, torch.device("cpu"))
    assert pool.read(examine(adapter(tmp_path, whole), modules, 2)).matrices
    for length in {*range(0, len(whole), 97), len(whole) - 1}:
        with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors"):
            examine(adapter(tmp_path, whole[:length]), modules, 2)
    with pytest.raises(CheckpointError, match="not fully covered"):
        examine(adapter(tmp_path, whole + b"x"), modules, 2)
    with pytest.raises(CheckpointError, match="File name too long"):
        examine(tmp_path / ("x" * 5000), modules, 2)
    tensors[f"{name}.lora_B.weight"][-1, 1] = float("nan")
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"lora_B\.weight' holds what is no finite number"):
        pool.read(examine(tmp_path, modules, 2))
