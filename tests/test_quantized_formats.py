"""Quantized checkpoints: each format is its formula, to the bit; what cannot be read is said by name."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headrace.config import EngineConfig
from headrace.model.checkpoint import resolve_checkpoint
from headrace.model.decoder import DecoderWeights
from headrace.model.families import model_config_from_hf, weight_plan
from headrace.model.loader import load_model
from headrace.model.parts import parts_of, taken
from headrace.model.shard import WHOLE, Shard
from headrace.model.weight import Weight, dequantized
from quantized_checkpoints import FORMATS, Tiny, write_quantized

CPU = torch.device("cpu")
# Rows of multiples of 128, and not; heads that a block of 128 rows ends in the middle of
EVEN = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32}
ODD = {"hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 24}


def load(path: Path, narrow: bool = False, shard: Shard = WHOLE, **options) -> DecoderWeights:
    checkpoint = resolve_checkpoint(EngineConfig(model=str(path)))
    config = model_config_from_hf(checkpoint.config)
    return load_model(checkpoint, config, torch.float32, CPU, shard=shard, narrow=narrow, **options)


def weights_of(weights: DecoderWeights) -> dict[str, Weight]:
    named = {"lm_head": weights.lm_head}
    for i, layer in enumerate(weights.layers):
        named |= {f"layers.{i}.{f.name}": getattr(layer, f.name) for f in fields(layer)}
    return {name: weight for name, weight in named.items() if isinstance(weight, Weight)}


def floats_of(weights: DecoderWeights) -> dict[str, Tensor]:
    return {name: dequantized(weight, torch.float32) for name, weight in weights_of(weights).items()}


def expected_of(tiny: Tiny) -> dict[str, Tensor]:
    plan = [spec for spec in weight_plan(model_config_from_hf(tiny.config)) if len(spec.shape) == 2 and spec.target != "embedding"]
    return {spec.target: torch.cat([tiny.matrices[name] for name, _ in spec.sources]) for spec in plan}


def check_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, matrix in expected.items():
        assert torch.equal(found[name], matrix), name


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
