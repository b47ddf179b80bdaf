"""What an adapter's files may say: all that would not be honoured is refused with the file and the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.config import EngineConfig
from headrace.errors import CheckpointError, ParameterError
from headrace.lora.format import check, examine
from headrace.lora.names import SALT, salted
from headrace.lora.targets import Size, modules_of
from headrace.model.families import model_config_from_hf
from tiny_models import write_shape

CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "init_lora_weights": True}
Q, DOWN = "base_model.model.model.layers.0.self_attn.q_proj", "base_model.model.model.layers.1.mlp.down_proj"
MODULES = {"layers.0.self_attn.q_proj": Size(32, 16), "layers.1.mlp.down_proj": Size(16, 48)}
SHAPES = {f"{Q}.lora_A.weight": (4, 16), f"{Q}.lora_B.weight": (32, 4), f"{DOWN}.lora_A.weight": (4, 48), f"{DOWN}.lora_B.weight": (16, 4)}


def checked(config: dict[str, Any], shapes=None, max_rank: int = 8):
    found = check({**CONFIG, **config}, SHAPES if shapes is None else shapes, MODULES, max_rank, Path("here"))
    return {name: (m.rank, m.scale) for name, m in found.items()}


EXPERTS = "base_model.model.model.layers.0.mlp.experts"
OF_EXPERTS = {
    "layers.0.mlp.experts.0.up_proj": Size(8, 16), "layers.0.experts.gate_up_proj": Size(16, 16, 3),
    "layers.0.experts.down_proj": Size(16, 8, 3),
}  # fmt: skip


def of_experts(shapes: dict[str, tuple[int, int]], **config: Any):
    shapes = {f"{EXPERTS}{name}.weight": shape for name, shape in shapes.items()}
    found = check({**CONFIG, **config}, shapes, OF_EXPERTS, 8, Path("here"))
    return {name: (m.rank, m.scale, m.experts) for name, m in found.items()}


BOTH = {".base_layer.lora_A": (12, 16), ".base_layer.lora_B": (16, 12), ".lora_A": (12, 8), ".lora_B": (16, 12)}
UP, DOWN_ALONE = {".lora_A": (6, 16), ".lora_B": (16, 6)}, {".lora_A": (12, 8), ".lora_B": (16, 12)}
ONE = {".0.up_proj.lora_A": (4, 16), ".0.up_proj.lora_B": (8, 4)}


def test_experts_all_together_and_one_by_one() -> None:
    """Ranks and scales by the parameters' names, with PEFT's own patterns; one parameter alone is what the config names."""
    first, second = "layers.0.experts.gate_up_proj", "layers.0.experts.down_proj"
    assert of_experts(BOTH) == {first: (4, 2.0, 3), second: (4, 2.0, 3)}
    config = {"target_parameters": ["experts.gate_up_proj"], "rank_pattern": {r".*\.gate_up_proj": 2}, "alpha_pattern": {"mlp.experts.gate_up_proj": 1}}
    assert of_experts(UP, **config) == {first: (2, 0.5, 3)}
    assert of_experts(DOWN_ALONE, target_parameters=["mlp.experts.down_proj"], use_rslora=True) == {second: (4, 4.0, 3)}
    assert of_experts(ONE) == {"layers.0.mlp.experts.0.up_proj": (4, 2.0, 0)}


@pytest.mark.parametrize(
    ("shapes", "config", "said"),
    [
        (DOWN_ALONE, {}, "target_parameters does not say whether it is of gate_up_proj or of down_proj"),
        (DOWN_ALONE, {"target_parameters": ["gate_up_proj", "down_proj"]}, "target_parameters does not say"),
        ({**BOTH, **ONE}, {}, "layer 0 has experts one by one and all together"),
        ({**BOTH, ".lora_A": (4, 8)}, {}, r"has shape \(4, 8\), this model asks for \(12, 8\)"),
        ({".7.up_proj.lora_A": (4, 16)}, {}, r"no such module; .*mlp.experts.N.up_proj"),
        ({".base_layer.lora_A": (12, 16)}, {}, "lora_B of model.layers.0.mlp.experts.gate_up_proj is missing"),
    ],
)  # fmt: skip
def test_experts_that_are_refused(shapes, config, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        of_experts(shapes, **config)


def of_ranks(q: int, down: int) -> dict[str, tuple[int, int]]:
    return dict(zip(SHAPES, [(q, 16), (32, q), (down, 48), (16, down)], strict=True))


@pytest.mark.parametrize(
    ("config", "ranks", "scales"),
    [
        ({}, (4, 4), (2.0, 2.0)),
        ({"use_rslora": True}, (4, 4), (4.0, 4.0)),
        ({"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.1.mlp.down_proj": 1}}, (2, 4), (4.0, 0.25)),
        ({"rank_pattern": {"proj": 2, "^layers.1.mlp.down_proj": 2, "0.self_attn.q_proj": 8}}, (8, 4), (1.0, 2.0)),
        ({"rank_pattern": {"^model.layers.1.mlp.down_proj": 2}, "init_lora_weights": "gaussian"}, (4, 2), (2.0, 4.0)),
    ],
)
def test_ranks_and_scales(config, ranks, scales) -> None:
    """A pattern is a whole name or its end behind a dot, the first that fits."""
    assert list(checked(config, of_ranks(*ranks)).values()) == list(zip(ranks, scales, strict=True))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"peft_type": "IA3"}, "peft_type = 'IA3': only 'LORA'"),
        ({"r": 0}, "r = 0: the rank"),
        ({"r": True}, "r = True: the rank"),
        ({"r": 9}, "rank 9 of .*: at most 8 here"),
        ({"lora_alpha": "8"}, "lora_alpha = '8'"),
        ({"lora_alpha": float("nan")}, "lora_alpha = nan"),
        ({"lora_alpha": 10**400}, "lora_alpha = 10000.*: it is a number within"),
        ({"alpha_pattern": {"q_proj": 1e308}}, "alpha_pattern"),
        ({"rank_pattern": {"(a+)+": 2}}, "rank_pattern"),
        ({"rank_pattern": [1]}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern"),
        ({"use_dora": True}, "use_dora: DoRA"),
        ({"use_qalora": True}, "use_qalora: it is not supported"),
        ({"lora_bias": True}, "lora_bias: biases"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save: whole modules"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices: rows of the embedding"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"target_parameters": ["mlp.gate.weight"]}, "target_parameters: 'mlp.gate.weight'"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights = 'pissa_niter_16': it changes the base weights"),
        ({"init_lora_weights": "olora"}, "changes the base"),
        ({"init_lora_weights": "new"}, "init_lora_weights = 'new': it is not known"),
    ],
)  # fmt: skip
def test_configurations_that_are_refused(config, said: str) -> None:
    with pytest.raises(CheckpointError, match=f"adapter_config.json: .*{said}"):
        checked(config)


@pytest.mark.parametrize(
    ("tensor", "shape", "said"),
    [
        (f"{Q}.lora_A.weight", (4, 17), r"has shape \(4, 17\), this model asks for \(4, 16\): is the adapter of a model of other sizes"),
        (f"{Q}.lora_B.weight", (32, 3), "its rank is to be 4"),
        (f"{Q}.lora_B.weight", None, "lora_B of model.layers.0.self_attn.q_proj is missing"),
        (f"{Q}.lora_A.default.weight", (4, 16), "is there twice"),
        (f"{Q}.lora_magnitude_vector", (32,), "DoRA"),
        (f"{Q}.lora_B.bias", (32,), "neither lora_A nor lora_B"),
        ("base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight", (4, 16), "this model has no such module; .* mlp.down_proj, self_attn.q_proj"),
        ("base_model.model.vision_tower.layers.0.self_attn.q_proj.lora_A.weight", (4, 16), "no such module"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", (4, 16), "embedding"),
        ("base_model.model.lm_head.lora_A.weight", (4, 16), "head"),
        ("base_model.model.model.layers.0.mlp.experts.3.up_proj.lora_A.weight", (4, 16), "need lora_experts"),
        ("base_model.model.model.layers.0.mlp.gate.lora_A.weight", (4, 16), "routers"),
    ],
)  # fmt: skip
def test_tensors_that_are_refused(tensor: str, shape, said: str) -> None:
    shapes = {**SHAPES, tensor: shape}
    with pytest.raises(CheckpointError, match=f"adapter_model.safetensors: .*{said}"):
        checked({}, {name: shape for name, shape in shapes.items() if shape is not None})


def test_files(tmp_path: Path) -> None:
    """What is missing is named; the content names a version, whatever the path is."""
    directory = tmp_path / "a"
    with pytest.raises(CheckpointError, match=r"a/adapter_config.json does not exist"):
        examine(directory, MODULES, 8)
    directory.mkdir()
    (directory / "adapter_config.json").write_text(json.dumps(CONFIG))
    (directory / "adapter_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"adapter_model.safetensors does not exist \(adapter_model.bin is pickled"):
        examine(directory, MODULES, 8)
    tensors = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    save_file(tensors, directory / "adapter_model.safetensors")
    first = examine(directory, MODULES, 8)
    other = tmp_path / "b"
    directory.rename(other)
    assert examine(other, MODULES, 8).digest == first.digest
    tensors = load_file(other / "adapter_model.safetensors")
    next(iter(tensors.values()))[0, 0] = 1.0
    save_file(tensors, other / "adapter_model.safetensors")
    assert examine(other, MODULES, 8).digest != first.digest
    save_file({name: tensor.long() for name, tensor in tensors.items()}, other / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="is of I64, not F32"):
        examine(other, MODULES, 8)
    (other / "adapter_model.safetensors").write_bytes(b"\x10" * 30)
    with pytest.raises(CheckpointError, match="truncated or not safetensors"):
        examine(other, MODULES, 8)
    (other / "adapter_config.json").write_bytes(b" " * (1 << 21))
    with pytest.raises(CheckpointError, match="at most 1048576 are read"):
        examine(other, MODULES, 8)


def test_modules_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    shape = json.loads((Path(write_shape(tmp_path)) / "config.json").read_text())
    modules = modules_of(model_config_from_hf(shape))
    assert len(modules) == 7 * shape["num_hidden_layers"]
    assert modules["layers.3.mlp.down_proj"] == Size(shape["hidden_size"], shape["intermediate_size"])
    fused = {**shape, "model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "head_dim": None, "pad_token_id": 0}
    assert {name.split(".", 2)[2] for name in modules_of(model_config_from_hf(fused))} == {
        "self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj",
    }  # fmt: skip


def test_caches_of_different_contents_never_meet() -> None:
    salts = {salted(salt, digest) for salt in ("", "a", "\0a", "a\0") for digest in ("", "1" * 32, "2" * 32)}
    assert len(salts) == 12
    with pytest.raises(ParameterError, match="cache_salt"):
        salted(f"{SALT}{'1' * 32}\0", "")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"lora": ("a",)}, "lora"), ({"lora": ("=x",)}, "lora"), ({"lora": ("a=x", "a=y")}, "lora"), ({"lora": {"a": ""}}, "lora"),
        ({"lora": tuple(f"{i}=x" for i in range(5))}, "lora"), ({"max_loras": 3}, "max_loras"), ({"max_lora_rank": 8}, "max_lora_rank"),
        ({"lora": {"a": "x"}, "max_lora_rank": 513}, "max_lora_rank"), ({"lora": "a=x"}, "lora"),
    ],
)  # fmt: skip
def test_options_that_are_refused(options, field: str) -> None:
    with pytest.raises(ParameterError) as error:
        EngineConfig(**options)
    assert error.value.field == field


def test_paths_by_name() -> None:
    assert EngineConfig(lora={"a": "x=y", "b": "z"}).adapter_paths() == {"a": "x=y", "b": "z"}
