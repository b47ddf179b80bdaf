"""Quantized safetensors in the native CPU step: what is packed is the file's formula, to the bit where a format can hold it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace import LLM, SamplingParams
from headrace.config import EngineConfig
from headrace.errors import CheckpointError
from headrace.model.checkpoint import resolve_checkpoint
from headrace.model.families import model_config_from_hf
from headrace.native.load import find_library
from headrace.native.precision import choose_precision, stored_encodings
from headrace.native.weights import Weights
from quality import logits_of
from quantized_checkpoints import FORMATS, Tiny, compressed, fp8, gptq, int8, write_quantized
from test_model_families import tokens
from test_quantized_formats import EVEN, FP8, ODD, PACK4, expected_of, groups

_step = pytest.importorskip("headrace.native._step", reason="no compiler: the native step was not built")
NATIVE = {  # what each is kept as
    "fp8-block": "F8", "fp8-tensor": "F8", "fp8-tensor-1": "F8", "fbgemm": "F8", "modelopt-fp8": "F8", "ct-fp8-dynamic": "F8",
    "ct-fp8-static": "F8", "ct-fp8-block": "F8", "ct-fp8-naive": "F8", "ct-int8": "Q8_0", "ct-int8-naive": "F16", "ct-pack4": "Q4_0",
    "ct-pack4-channel": "Q4_0", "ct-pack4-asym": "F16", "ct-pack8-asym": "F16", "ct-mxfp4": "Q8_0", "ct-nvfp4": "F16",
    "ct-mxfp8": "F8", "modelopt-mxfp8": "F8", "modelopt-fp8-rows": "F8", "modelopt-fp8-block": "F8", "modelopt-fp4-only": "F16", "modelopt-nvfp4": "F16", "awq": "Q4_Z", "awq-old": "F16", "gptq": "Q4_Z", "gptq-old": "Q4_Z", "gptq-v2": "Q4_Z", "gptq-8": "F16",
    "gptq-dynamic": "F16", "auto-round": "Q4_Z", "auto-round-awq": "Q4_Z", "auto-round-gptqmodel": "Q4_Z", "auto-round-mxfp4": "Q8_0", "auto-round-mxfp8": "F8",
    "auto-round-nvfp4": "F16", "auto-round-fp8": "F8", "auto-round-fp8-block": "F8", "quark-fp8": "F8", "quark-fp8-rows": "F8", "quark-fp8-block": "F8",
    "quark-mxfp4": "Q8_0", "quark-nvfp4": "F16", "quark-int8": "Q8_0", "quark-int8-asym": "F16", "quark-int4": "Q4_0", "quark-uint4": "Q4_Z",
    "quark-awq": "Q4_0", "modelopt-nvfp4-fp8": "Q8_0", "modelopt-mxfp4": "Q8_0", "modelopt-int8": "Q8_0", "sglang-mxfp8": "F8", "mxfp8": "F8",
    "sglang-int8": "Q8_0", "sglang-int8-block": "Q8_0", "torchao-fp8": "F8", "torchao-fp8-tensor": "F8", "torchao-int8": "Q8_0", "torchao-int8-group": "Q8_0", "torchao-intx": "Q4_Z",
    "ct-int4-bytes": "Q4_0", "ct-int4-bytes-asym": "Q4_Z", "ct-int4-bytes-block": "Q4_Z",
}  # fmt: skip
SMALL: dict[str, Any] = {"device": "cpu", "max_model_len": 128, "num_kv_blocks": 64, "max_num_seqs": 4}


class Held:
    """Stands for a native Model: keeps the rows that it is filled with."""

    def __init__(self, library: str):
        self.library = library
        self.parts: dict[tuple[int, Any], tuple[list[tuple[Any, int]], int]] = {}
        self.rows: dict[tuple[int, Any], dict[int, np.ndarray]] = {}

    def add_matrix(self, layer: int, name: Any, parts: list[tuple[Any, int]], inputs: int) -> None:
        self.parts[layer, name], self.rows[layer, name] = (parts, inputs), {}

    def fill(self, layer: int, name: Any, row: int, raw: np.ndarray) -> None:
        assert row not in self.rows[layer, name]
        self.rows[layer, name][row] = raw.copy()  # it may lie in the buffer that is read into

    def set_vector(self, *_: Any) -> None:
        pass

    def matrix(self, layer: int, name: str) -> Tensor:
        """As the step decodes what it has packed."""
        parts, inputs = self.parts[layer, _step.MatrixName[name]]
        rows = self.rows[layer, _step.MatrixName[name]]
        out = np.empty((sum(count for _, count in parts), inputs), np.float32)
        _step.packed_rows(self.library, parts, np.concatenate([rows[row].reshape(-1) for row in sorted(rows)]), out)
        return torch.from_numpy(out)


def packed_by(path: Path, **options: Any) -> tuple[Weights, Held]:
    config, library = EngineConfig(model=str(path), device="cpu", **options), find_library()
    checkpoint = resolve_checkpoint(config)
    precision = choose_precision(config, stored_encodings(checkpoint))
    weights = Weights(checkpoint, model_config_from_hf(checkpoint.config), precision, library)
    held = Held(str(library.path))
    weights.load(held, threads=2)
    return weights, held


def check(tiny: Tiny, held: Held, exact: bool) -> None:
    """The matrices are the formula's, or its numbers rounded to float16."""
    for target, wanted in expected_of(tiny).items():
        layer, name = (0, target.rpartition(".")[2].upper()) if target.startswith("layers") else (-1, "HEAD")
        wanted = wanted if exact or layer < 0 else wanted.half().float()
        assert torch.equal(held.matrix(layer, name), wanted), target


@pytest.mark.parametrize("sizes", [EVEN, ODD], ids=["even", "odd"])
@pytest.mark.parametrize("name", FORMATS)
def test_what_is_packed_is_the_formula(name: str, sizes: dict, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    tiny = write_quantized(tmp_path / "model", FORMATS[name], **sizes)
    weights, held = packed_by(tiny.path)
    assert set(weights.describe().split(", ")) == {NATIVE[name], "F32"}  # embedding and head are floats
    check(tiny, held, exact=NATIVE[name] != "F16")
    rounded = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert [("the weights of 7 matrices" in message) for message in rounded] == [True] * (NATIVE[name] == "F16")


@pytest.mark.parametrize("name", ["awq", "ct-nvfp4", "fp8-block"])
def test_floats_are_the_formula_in_float32(name: str, tmp_path: Path):
    tiny = write_quantized(tmp_path / "model", FORMATS[name], **EVEN)
    for options in ({"quantization": "none"}, {"dtype": "float32"}):
        weights, held = packed_by(tiny.path, **options)
        assert weights.describe() == "F32"
        check(tiny, held, exact=True)


@pytest.mark.parametrize(("bits", "v2", "kind"), [(4, False, "Q4_0"), (4, True, "Q4_0"), (8, False, "Q8_0"), (8, True, "Q8_0")])
def test_symmetric_gptq_needs_no_zero_points(bits: int, v2: bool, kind: str, tmp_path: Path):
    """Such files have them all the same, each of them the middle."""
    pack, middle = gptq(bits, v2=v2), 1 << (bits - 1)

    def symmetric(rng: np.random.Generator, rows: int, columns: int):
        tensors, matrix = pack(rng, rows, columns)
        zeros = tensors["qzeros"]
        stored = (zeros[..., None] >> torch.arange(0, 32, bits)) & ((1 << bits) - 1)
        shift = (stored + (not v2) - middle).flatten(1)[:, :rows].T.repeat_interleave(32, 1)[:, :columns]
        scales = tensors["scales"].float().T.repeat_interleave(32, 1)[:, :columns]
        tensors["qzeros"] = torch.full_like(zeros.view(torch.uint8), {4: 0x88, 8: 0x80}[bits] - (not v2) * {4: 0x11, 8: 1}[bits]).view(torch.int32)
        numbers = (matrix / scales).round() + shift  # (data - zero) + (zero - middle)
        return tensors, numbers * scales

    config = FORMATS["gptq"].config | {"bits": bits, "checkpoint_format": "gptq_v2" if v2 else "gptq"}
    tiny = write_quantized(tmp_path / "model", FORMATS["gptq"], packer_of=lambda _: symmetric, **EVEN)
    tiny.configure(config)
    weights, held = packed_by(tiny.path)
    assert weights.describe().startswith(kind) and "F16" not in weights.describe()
    check(tiny, held, exact=True)


def test_parts_of_different_formats_keep_their_own(tmp_path: Path):
    config = groups((["re:.*q_proj"], FP8), (["re:.*k_proj"], compressed("int-quantized", 8, strategy="channel")), (["Linear"], PACK4), ignore=["re:.*v_proj"])
    packers = {"q_proj": fp8((0, 0)), "k_proj": int8(), "v_proj": None}
    tiny = write_quantized(tmp_path / "model", FORMATS["ct-pack4"], packer_of=lambda module: packers.get(module.rpartition(".")[2], FORMATS["ct-pack4"].pack), **EVEN)
    tiny.configure(config)
    weights, held = packed_by(tiny.path)
    assert set(weights.describe().split(", ")) == {"F32", "F8", "Q8_0", "Q4_0"}
    check(tiny, held, exact=True)


def test_scales_that_are_no_float16_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    tiny = write_quantized(tmp_path / "model", FORMATS["ct-int8"], **EVEN)
    tiny.change(lambda tensors: tensors.update({name: t.float() * 1.0003 for name, t in tensors.items() if name.endswith("weight_scale")}))
    packed_by(tiny.path)
    assert any("the scales of 7 matrices are no float16 numbers" in record.message for record in caplog.records)
    tiny.change(lambda tensors: tensors.update({name: t * 1e8 for name, t in tensors.items() if name.endswith("weight_scale")}))
    with pytest.raises(CheckpointError, match=r"proj.weight' has numbers beyond those of float16: --quantization none"):
        packed_by(tiny.path)


def test_a_number_that_is_none_is_not_made_one(tmp_path: Path):
    tiny = write_quantized(tmp_path / "model", FORMATS["fp8-block"], **EVEN)
    tiny.change(lambda tensors: tensors["model.layers.0.mlp.down_proj.weight"].view(torch.uint8)[3, 40].fill_(0x7F))
    _, held = packed_by(tiny.path)
    found = held.matrix(0, "DOWN")
    assert found[3, 32:64].isnan().all() and found.isnan().sum() == 32


@pytest.mark.parametrize("name", ["awq", "fp8-block"])
def test_an_engine_gives_the_logits_of_the_floats_and_the_same_tokens_however_served(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    tiny = write_quantized(tmp_path / "model", FORMATS[name], "llama", **EVEN)
    ids = tokens(40)
    with LLM(str(tiny.path), **SMALL, enforce_eager=True) as llm:
        wanted = logits_of(llm, ids)
    with caplog.at_level(logging.INFO), LLM(str(tiny.path), **SMALL, kv_cache_dtype="float32") as llm:
        found = logits_of(llm, ids)
        assert (found - wanted).abs().max() < 1e-3 * wanted.abs().max()
        prompts = [ids[:n] for n in (3, 17, 33)]
        params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=1)
        together = llm.generate(prompts, params, use_tqdm=False)
        for prompt, output in zip(prompts, together, strict=True):
            llm.reset_prefix_cache()
            (alone,) = llm.generate([prompt], params, use_tqdm=False)
            assert alone.outputs[0].token_ids == output.outputs[0].token_ids
            assert alone.outputs[0].logprobs == output.outputs[0].logprobs
    assert any("runs in the native CPU step" in r.message and NATIVE[name] in r.message for r in caplog.records)
