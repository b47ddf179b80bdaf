"""Drafts under a grammar: what is forced is drafted, what the grammar forbids is not, and the output stays the same."""

from __future__ import annotations

import random

import pytest
import torch

from drafting import Guesser, capture_nothing, drafting_core
from engine_driver import Result, assert_same, complete, make_core, run
from headrace.engine.messages import EngineRequest
from headrace.sampling.params import SamplingParams
from headrace.structured_output.params import StructuredOutputsParams
from structured_driver import EOS, encode
from tiny_models import write_tiny

SCHEMA = {
    "type": "object", "additionalProperties": False, "required": ["temperature_in_celsius", "description", "kind"],
    "properties": {
        "temperature_in_celsius": {"type": "integer"}, "description": {"type": "string", "maxLength": 9},
        "kind": {"enum": ["precipitation", "precipice"]},
    },
}  # fmt: skip
WISHES = [{"json": SCHEMA}, {"regex": "(abc|abd){3,9}x"}, {"choice": ["The quick brown fox", "The quick red fox"]}, {"json_object": True}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_tiny("llama", tmp_path_factory.mktemp("tiny"), max_position_embeddings=512))


def mixed() -> list[EngineRequest]:
    """Constrained and free requests, greedy and not, with edits of the logits besides."""
    requests = []
    for i in range(14):
        wish = StructuredOutputsParams(**WISHES[i % 5]) if i % 5 < len(WISHES) else None
        params = SamplingParams(
            temperature=[0.0, 1.0, 2.0][i % 3], max_tokens=60, min_tokens=[0, 7][i % 2], logprobs=1, structured_outputs=wish,
            repetition_penalty=[1.0, 1.2][i % 4 == 3], frequency_penalty=[0.0, 0.3][i % 3 == 2],
        )  # fmt: skip
        requests.append(EngineRequest(f"r{i}", encode(f"Say {i}: "), complete(params, eos_token_ids=[EOS]), 50 + i))
    return requests


@pytest.fixture(scope="module")
def alone(model) -> dict[str, Result]:
    core = make_core(model, max_model_len=200, enable_prefix_caching=False, async_scheduling=False)
    found = {r.id: run(core, [r])[r.id] for r in mixed()}
    core.close()
    return found


@pytest.mark.parametrize("options", [
    {}, {"num_kv_blocks": 30, "overlap": True}, {"max_num_batched_tokens": 9, "num_kv_blocks": 64, "overlap": True}, {"async_scheduling": False, "speculative_max_rows": 10},
])  # fmt: skip
@pytest.mark.parametrize("p_right", [None, 0.7, 1.0])
def test_constrained_output_is_the_same(model, alone, options, p_right):
    core = drafting_core(model, max_model_len=200, **options)
    if p_right is not None:
        core.speculator.proposer = Guesser({name: r.ids for name, r in alone.items()}, core.vocab_size, p_right)
    results = run(core, mixed())
    for name, want in alone.items():
        assert_same(results[name], want, name)
    assert core.speculator.stats.num_accepted_tokens > 50
    core.close()


def test_a_draft_model_leaves_constrained_requests_to_the_grammar(model, alone):
    core = drafting_core(model, overlap=True, max_model_len=200, speculative_method="draft_model", speculative_model=model)
    results = run(core, mixed())
    for name, want in alone.items():
        assert_same(results[name], want, name)
    core.close()


@pytest.mark.parametrize("p_right", [None, 0.7])
def test_masks_of_drafts_in_captured_steps(model, alone, p_right):
    """The graph ends with the logits; masks, one for each draft, and the verification follow it."""
    core = drafting_core(model, overlap=True, max_model_len=200)
    if p_right is not None:
        core.speculator.proposer = Guesser({name: r.ids for name, r in alone.items()}, core.vocab_size, p_right)
    graphs = capture_nothing(core)
    masked: list[int] = []
    masks = core.structured.masks
    core.structured.masks = lambda rows: masked.append(sum(len(drafts) for _, _, drafts in rows)) or masks(rows)
    results = run(core, mixed())
    for name, want in alone.items():
        assert_same(results[name], want, name)
    assert graphs.replays > 20 and sum(masked) > 20
    core.close()


def test_what_a_grammar_forces_is_taken_at_once(model):
    """One of two long words: after its first different letter all is known."""
    wish = StructuredOutputsParams(choice=["x" * 60 + "y", "z"])
    params = complete(SamplingParams(structured_outputs=wish, temperature=0.0, max_tokens=100, logit_bias={encode("z")[0]: -100.0}), eos_token_ids=[EOS])
    request = EngineRequest("a", encode("Say: "), params, 1)
    plain = make_core(model)
    want = run(plain, [request])["a"]
    core = make_core(model, speculative_method="ngram", prompt_lookup_min=64, prompt_lookup_max=64, speculative_max_rows=64)
    assert_same(run(core, [request])["a"], want)
    stats = core.speculator.stats
    assert stats.num_accepted_tokens > 0.7 * len(want.ids) and stats.num_accepted_tokens == stats.num_draft_tokens
    assert core.steps < 0.5 * plain.steps
    for each in (plain, core):
        each.close()


def test_user_processors_see_no_guesses(model):
    """A function of the user may count its calls: it is asked once for each token, with and without speculation."""
    calls: list[list[int]] = []

    def processor(ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        calls.append(list(ids))
        return logits + torch.tensor(random.Random(len(ids)).choices([0.0, 3.0], k=len(logits)))

    params = complete(SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logits_processors=[processor]))
    want = run(make_core(model), [EngineRequest("a", [1, 2, 1, 2, 1], params, 1)])["a"]
    seen, calls = calls, []
    core = drafting_core(model, Guesser({"a": want.ids}, 512, 1.0), overlap=True)
    assert_same(run(core, [EngineRequest("a", [1, 2, 1, 2, 1], params, 1)])["a"], want)
    assert calls == seen
