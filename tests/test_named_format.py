"""A value of --quantization that names what the file is already changes nothing; one that contradicts it is refused in words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from headrace.config import EngineConfig
from headrace.engine.named_format import FORMATS as NAMES
from headrace.engine.named_format import without_named_format
from headrace.engine.options import check_options
from headrace.engine.weight_sizes import weight_bytes
from headrace.errors import ParameterError
from headrace.model.checkpoint import MADE, resolve_checkpoint
from headrace.model.families import model_config_from_hf
from headrace.options import options_of
from quantized_checkpoints import FORMATS, write_quantized
from test_model_families import tokens
from test_quantized_formats import EVEN
from tiny_models import write_tiny

CHOICES = next(option.choices for option in options_of(EngineConfig) if option.name == "quantization")
AS_MADE: dict[str, Any] = {"device": "cpu", "enforce_eager": True}  # where fp8, int8 and int4 of floats are all possible
NAMED = {
    "fp8-block": "fp8", "fp8-tensor": "fp8", "fbgemm": "fp8 fbgemm_fp8", "ct-fp8-dynamic": "fp8 compressed-tensors", "ct-int8": "int8 compressed-tensors",
    "ct-pack4-asym": "int4 compressed-tensors", "ct-pack8-asym": "int8 compressed-tensors", "ct-mxfp4": "mxfp4 compressed-tensors",
    "ct-nvfp4": "compressed-tensors", "modelopt-fp8": "fp8 modelopt modelopt_fp8 modelopt_mixed",
    "modelopt-mxfp8": "fp8 modelopt modelopt_mxfp8 modelopt_mixed", "modelopt-nvfp4": "modelopt modelopt_fp4 modelopt_mixed",
    "modelopt-fp4-only": "modelopt modelopt_fp4 modelopt_mixed", "awq": "awq awq_marlin moe_wna16 int4", "awq-old": "awq awq_marlin moe_wna16 int4",
    "gptq": "gptq gptq_marlin moe_wna16 int4", "gptq-8": "gptq gptq_marlin moe_wna16 int8", "gptq-dynamic": "gptq gptq_marlin moe_wna16",
    "auto-round": "auto-round inc gptq gptq_marlin moe_wna16 int4", "auto-round-awq": "auto-round inc awq awq_marlin moe_wna16 int4",
    "auto-round-mxfp4": "mxfp4 auto-round inc", "quark-fp8-rows": "fp8 quark", "quark-mxfp4": "mxfp4 quark", "quark-nvfp4": "quark", "quark-int8": "int8 quark",
    "quark-uint4": "awq awq_marlin moe_wna16 int4 quark",
    "mxfp8": "fp8", "torchao-fp8": "fp8 torchao", "torchao-int8": "int8 torchao",
}  # fmt: skip


def asked(config: EngineConfig) -> EngineConfig:
    """As an engine does before it loads anything."""
    checkpoint = resolve_checkpoint(config)
    config = without_named_format(config, checkpoint)
    check_options(config, checkpoint, model_config_from_hf(checkpoint.config))
    return config


def test_capitals_are_as_good_in_python():
    assert EngineConfig(quantization="AWQ") == EngineConfig(quantization="awq")  # type: ignore[arg-type]


def test_every_choice_is_made_of_floats_or_names_a_file():
    assert set(CHOICES) == {"none", "bf16", *MADE, *NAMES}


@pytest.mark.parametrize("name", NAMED)
def test_a_value_that_names_what_the_file_is_changes_nothing_and_any_other_is_refused(name: str, tmp_path: Path):
    plain = EngineConfig(model=str(write_quantized(tmp_path / "model", FORMATS[name], **EVEN).path), **AS_MADE)
    for value in {*MADE, *NAMES}:
        config = replace(plain, quantization=value)
        if value in NAMED[name].split():
            assert asked(config) == plain
            continue
        method = NAMED[name].split()[-1] if name.startswith("ct-") else name.partition("-")[0].replace("fbgemm", "fbgemm_fp8").replace("auto", "auto-round")
        with pytest.raises(ParameterError, match=f"^quantization: got '{value}', allowed: none, or nothing for this model: .*{method}"):
            asked(config)


def test_of_a_gguf_file_the_name_alone_changes_nothing(tmp_path: Path):
    plain = EngineConfig(device="cpu")  # the one that comes along
    assert asked(replace(plain, quantization="gguf")) == plain
    for value in ("awq", "fp8", "int4"):
        with pytest.raises(ParameterError, match=f"^quantization: got '{value}', allowed: none, or nothing for this model: .*(gguf|Q4_1)"):
            asked(replace(plain, quantization=value))


def test_what_names_a_file_is_refused_for_one_of_floats(tmp_path: Path):
    plain = EngineConfig(model=str(write_tiny("qwen3", tmp_path / "model")), **AS_MADE)
    for value in NAMES:
        why = f"allowed: fp8, int8, int4 .*, or nothing for this model: {value} names a format of files, and this file holds floats"
        with pytest.raises(ParameterError, match=f"^quantization: got '{value}', {why}"):
            asked(replace(plain, quantization=value))
    for value in MADE:
        assert asked(replace(plain, quantization=value)).quantization == value


def test_dummy_weights_are_floats_in_whose_place_a_file_may_be_named(tmp_path: Path):
    plain = EngineConfig(model=str(write_quantized(tmp_path / "model", FORMATS["fp8-block"], **EVEN).path), load_format="dummy", **AS_MADE)
    assert asked(replace(plain, quantization="fp8")).quantization == "fp8"
    plain = replace(plain, model=str(write_quantized(tmp_path / "awq", FORMATS["awq"], **EVEN).path))
    assert asked(replace(plain, quantization="awq_marlin")) == plain
    assert asked(replace(plain, quantization="int8")).quantization == "int8"


@pytest.mark.parametrize(("name", "value"), [("fp8-block", "fp8"), ("awq", "awq_marlin")])
@pytest.mark.parametrize("eager", [False, True])
def test_an_engine_holds_the_same_and_says_the_same(name: str, value: str, eager: bool, tmp_path: Path):
    """The head of these files is one of floats, which fp8 would have made int8."""
    path, found = str(write_quantized(tmp_path / "model", FORMATS[name], **EVEN).path), []
    for quantization in (None, value):
        options: dict[str, Any] = {"device": "cpu", "max_model_len": 64, "num_kv_blocks": 32, "max_num_seqs": 4, "enforce_eager": eager}
        with LLM(path, quantization=quantization, **options) as llm:
            (output,) = llm.generate([tokens(9)], SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=1), use_tqdm=False)
            found.append((output.outputs[0].token_ids, output.outputs[0].cumulative_logprob, llm.engine.weights))
    assert found[0] == found[1]


def test_it_takes_as_much_as_without(tmp_path: Path):
    plain = EngineConfig(model=str(write_quantized(tmp_path / "model", FORMATS["fp8-block"], **EVEN).path), device="cpu")
    checkpoint = resolve_checkpoint(plain)
    for on_card in (False, True):
        assert weight_bytes(replace(plain, quantization="fp8"), checkpoint, on_card) == weight_bytes(plain, checkpoint, on_card)
