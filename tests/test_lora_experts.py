"""Adapters of the experts that tokens choose, as PEFT itself makes, saves and runs them: one by one and all together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters import write_adapter
from headrace import LLM, SamplingParams
from headrace.errors import CapacityError, CheckpointError, ParameterError
from headrace.lora import room
from test_lora_model import logits
from test_model_families import tokens
from tiny_models import write_tiny

peft = pytest.importorskip("peft")
import transformers  # noqa: E402

BOTH = ["experts.gate_up_proj", "experts.down_proj"]
ATTENTION = ["q_proj", "o_proj"]
PROMPT = tokens(19, seed=4)


@dataclass
class Case:
    base: str
    adapter: str
    logits: torch.Tensor  # of the prompt, then of 6 tokens more
    text: list[int]  # those tokens


def say(model: Any, count: int = 6) -> tuple[torch.Tensor, list[int]]:
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        for _ in range(count + 1):
            rows = model(input_ids=ids).logits[0].float()
            ids = torch.cat((ids, rows[-1:].argmax(1, keepdim=True)), 1)
    return rows, ids[0, len(PROMPT) : -1].tolist()


def case_of(family: str, path: Path, one_by_one: bool, **config: Any) -> Case:
    more = {"mlp_only_layers": []} if family == "qwen3_moe" and one_by_one else {}  # PEFT takes their modules for experts'
    base = str(write_tiny(family, path / "base", num_hidden_layers=2, **more))
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    if one_by_one:  # as PEFT saved it where an expert was a module; PEFT puts them together when it loads them
        made = write_adapter(path / "adapter", base, experts=True, **config)
        model = peft.PeftModel.from_pretrained(model, made)
    else:
        torch.manual_seed(3)
        wanted = peft.LoraConfig(target_modules=ATTENTION, init_lora_weights=False, **config)
        model = peft.get_peft_model(model, wanted)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.normal_(0, 0.5 / math.sqrt(parameter.shape[1]) if "lora_A" in name else 0.3)
        model.save_pretrained(path / "adapter")
    return Case(base, str(path / "adapter"), *say(model.eval()))


CASES: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", False, {"r": 4, "lora_alpha": 8, "target_parameters": BOTH, "rank_pattern": {"experts.gate_up_proj": 3}, "use_rslora": True}),
    "gpt_oss": ("gpt_oss", False, {"r": 3, "lora_alpha": 5, "target_parameters": BOTH, "alpha_pattern": {"experts.down_proj": 2}}),
    "olmoe, down alone": ("olmoe", False, {"r": 4, "lora_alpha": 8, "target_parameters": BOTH[1:]}),
    "mixtral, one by one": ("mixtral", True, {"targets": ("q_proj", "w1", "w2", "w3"), "size": 0.3}),
    "qwen3_moe, one by one": ("qwen3_moe", True, {"targets": ("o_proj", "gate_proj", "up_proj", "down_proj"), "size": 0.3}),
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, Case]:
    return {name: case_of(f, tmp_path_factory.mktemp("case"), way, **config) for name, (f, way, config) in CASES.items()}


@pytest.mark.parametrize("name", CASES)
def test_what_peft_says(name: str, made: dict[str, Case]) -> None:
    """A prompt in chunks, then decodes."""
    case = made[name]
    steps = [PROMPT[:11], PROMPT[11:], *([token] for token in case.text)]
    found = logits(case.base, [([(0, step)], None) for step in steps], [case.adapter])
    torch.testing.assert_close(found, case.logits, atol=1e-4 * case.logits.abs().max().item(), rtol=0)
    plain = logits(case.base, [([(0, PROMPT)], None)])
    assert (found[: len(PROMPT)] - plain).abs().max() > 0.05 * plain.abs().max()


OPTIONS = {"device": "cpu", "dtype": "float32", "enforce_eager": True, "max_model_len": 64, "max_num_seqs": 4, "block_size": 4}


def test_beside_each_other(made: dict[str, Case], tmp_path: Path) -> None:
    """In one batch with the model itself and an adapter in the other form: PEFT's text, and for all what each says alone."""
    case = made["qwen3_moe"]
    other = write_adapter(tmp_path / "other", case.base, experts=True, r=7, seed=5)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    names = ["all", None, "each", "all"]
    with LLM(case.base, **OPTIONS, lora={"all": case.adapter, "each": other}, lora_experts=True) as llm:
        prompts = [{"prompt_token_ids": PROMPT}] * 3 + [{"prompt_token_ids": PROMPT[:7]}]
        found = [list(r.outputs[0].token_ids) for r in llm.generate(prompts, params, use_tqdm=False, lora=names)]
        for prompt, name, text in zip(prompts, names, found, strict=True):
            assert list(llm.generate([prompt], params, use_tqdm=False, lora=name)[0].outputs[0].token_ids) == text
    assert found[0] == case.text and found[0] != found[1] != found[2]


def test_places_are_asked_for_and_have_room(made: dict[str, Case], tmp_path: Path, monkeypatch) -> None:
    case, options = made["gpt_oss"], {**OPTIONS, "skip_tokenizer_init": True}
    with pytest.raises(CheckpointError, match=r"experts.base_layer.lora_A.weight': adapters of experts need lora_experts"):
        LLM(case.base, **options, lora={"a": case.adapter})
    with pytest.raises(ParameterError, match=r"lora_experts.*without lora"):
        LLM(case.base, **options, lora_experts=True)
    dense = str(write_tiny("llama", tmp_path / "dense", num_hidden_layers=1))
    with pytest.raises(ParameterError, match=r"lora_experts.*no experts"):
        LLM(dense, **options, lora_dir=str(tmp_path), lora_experts=True)
    monkeypatch.setattr(room, "available_memory", lambda: 1 << 20)
    with pytest.raises(CapacityError, match=r"max_loras = 4 adapters of max_lora_rank = 16, of experts too .* take 0.00 GiB"):
        LLM(case.base, **options, lora_dir=str(tmp_path), lora_experts=True)
    with LLM(case.base, **options, lora_dir=str(tmp_path)):  # without experts they fit
        pass
