"""The embedded model answers on a card as on the CPU: real weights, real text."""

from __future__ import annotations

import pytest

from agreement import BF16_TOLERANCE, compare
from engine_driver import complete, make_core, run
from headrace import LLM, SamplingParams
from headrace.engine.messages import EngineRequest

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
SETTINGS = {"block_size": 64, "num_kv_blocks": 64, "max_model_len": 512}
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):",
    "Once upon a time, in a mill by the river,",
    "The headrace leads the water onto the wheel. " * 12,
]
FLOAT32_TOLERANCE = 1e-3  # of a row of logprobs, relative to its norm


@pytest.fixture(scope="module")
def card(smollm2):
    """The engine as a user gets it: bfloat16, graphs, every default but the size of its cache."""
    with LLM(smollm2, device=DEVICE, dtype="bfloat16", max_model_len=512, num_kv_blocks=256, max_num_seqs=16) as llm:
        yield llm


@pytest.fixture(scope="module")
def exact(smollm2, card):
    """Greedy requests and what the float32 engine on the CPU makes of them, with all logprobs."""
    params = complete(SamplingParams(temperature=0.0, max_tokens=16, logprobs=-1))
    requests = [EngineRequest(f"r{i}", card.tokenizer.encode(text), params, 0) for i, text in enumerate(PROMPTS)]
    return requests, run(make_core(smollm2, **SETTINGS), requests)


def test_float32_says_what_the_cpu_says(smollm2, exact):
    requests, want = exact
    for eager in (False, True):
        core = make_core(smollm2, device=DEVICE, enforce_eager=eager, **SETTINGS)
        seen = compare(run(core, requests), want, FLOAT32_TOLERANCE, f"eager {eager}")
        print(seen)
        assert not seen.problems, str(seen)
        assert seen.same >= len(requests) - 1, f"{seen}; a near-tie is rare in float32"


def test_bfloat16_is_near_the_cpu(smollm2, exact):
    requests, want = exact
    core = make_core(smollm2, device=DEVICE, dtype="bfloat16", **SETTINGS)
    seen = compare(run(core, requests), want, BF16_TOLERANCE)
    print(seen)
    assert not seen.problems, str(seen)


def test_it_knows_the_capital_of_france(card):
    greedy = SamplingParams(temperature=0.0, max_tokens=24)
    output = card.generate(PROMPTS[0], greedy, use_tqdm=False)[0].outputs[0]
    assert output.text.startswith(" Paris"), output.text
    message = {"role": "user", "content": "What is the capital of France? Answer in one word."}
    answer = card.chat([message], greedy, use_tqdm=False)[0].outputs[0]
    assert "Paris" in answer.text and answer.finish_reason == "stop", answer
    many = [[message]] * 16
    answers = {o.outputs[0].text for o in card.chat(many, greedy, use_tqdm=False)}
    assert all("Paris" in text for text in answers), answers
