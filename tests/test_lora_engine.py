"""Adapters beside each other and beside the base model: each says what a checkpoint says that it was merged into."""

from __future__ import annotations

import pytest

from adapters import merged, write_adapter
from headrace import LLM, SamplingParams
from headrace.errors import ParameterError
from tiny_models import write_tiny

OPTIONS = {"device": "cpu", "dtype": "float32", "enforce_eager": True, "max_model_len": 96, "max_num_seqs": 8, "block_size": 4}
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
PROMPTS = ["The quick brown fox", "Where the water ends", "the mill", "A headrace leads the water onto the wheel of the mill."]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> str:
    return str(write_tiny("qwen2", tmp_path_factory.mktemp("base"), num_hidden_layers=2))


@pytest.fixture(scope="module")
def adapters(base: str, tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("adapters")
    patterns = {"rank_pattern": {"q_proj": 6, "layers.1.mlp.down_proj": 2}, "alpha_pattern": {"mlp.up_proj": 3}}
    return {
        "all": write_adapter(root / "all", base),
        "some": write_adapter(
            root / "some", base, targets=("v_proj", "down_proj"), seed=1, use_rslora=True, layers=(1,), size=2.0
        ),
        "ranks": write_adapter(root / "ranks", base, seed=2, **patterns),
    }


def say(llm: LLM, prompts: list[str], **more) -> list[list[int]]:
    return [list(r.outputs[0].token_ids) for r in llm.generate(prompts, GREEDY, use_tqdm=False, **more)]


@pytest.fixture(scope="module")
def wanted(base: str, adapters: dict[str, str], tmp_path_factory) -> dict[str, list[list[int]]]:
    """What each says to all prompts, the base under the name None."""
    found = {}
    for name, path in {None: None, **adapters}.items():
        model = base if path is None else merged(tmp_path_factory.mktemp("merged") / "model", base, path)
        with LLM(model, **OPTIONS) as llm:
            found[name] = say(llm, PROMPTS)
    assert len({str(said) for said in found.values()}) == 4  # otherwise this shows nothing
    return found


@pytest.fixture(scope="module")
def llm(base: str, adapters: dict[str, str]):
    with LLM(base, lora=adapters, max_num_batched_tokens=7, debug_checks=True, **OPTIONS) as llm:
        yield llm


def test_together_as_each_alone(llm: LLM, wanted) -> None:
    """In chunks, with prefix hits from the second round on, which are of nobody else's."""
    names = list(wanted)
    for _ in range(2):
        for prompt in range(len(PROMPTS)):
            assert say(llm, [PROMPTS[prompt]] * 4, lora=names) == [wanted[name][prompt] for name in names]
    assert say(llm, PROMPTS, lora="ranks") == wanted["ranks"]
    assert llm.engine.core.scheduler.stats.prefix_hit_tokens > 0


def test_an_unknown_name_is_refused(llm: LLM) -> None:
    with pytest.raises(ParameterError, match="lora: got 'other', allowed: one of all, ranks, some"):
        llm.generate("x", GREEDY, lora="other")
    with pytest.raises(ParameterError, match="one for each of the 1 prompts"):
        llm.generate("x", GREEDY, lora=["all", "all"])
