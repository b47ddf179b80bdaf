"""Constrained requests in the engine: what a random model writes at temperature 2 obeys its grammar, whatever else runs."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_driver import BLOCK, Result, assert_all_same, assert_same, complete, make_core, make_requests, run
from headrace import LLM
from headrace.conversation.reasoned_grammar import answer_alone
from headrace.engine.messages import EngineRequest
from headrace.errors import ParameterError
from headrace.sampling.params import SamplingParams
from headrace.sampling.structured_outputs import StructuredOutputsParams
from structured_driver import EOS, compiled, decode, encode
from test_structured_schemas import TREE, schemas
from tiny_models import write_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_tiny("llama", tmp_path_factory.mktemp("tiny"), max_position_embeddings=512))


@pytest.fixture(scope="module")
def core(model):
    core = make_core(model, max_model_len=400, num_kv_blocks=512)
    yield core
    core.close()


def constrained(name: str, wish: dict[str, Any], *, seed: int = 0, **params: Any) -> EngineRequest:
    given = {"temperature": 2.0, "max_tokens": 200} | params
    wanted = SamplingParams(structured_outputs=StructuredOutputsParams(**wish), **given)
    return EngineRequest(name, encode(f"Say {name}: "), complete(wanted, eos_token_ids=[EOS]), seed)


def text_of(result: Result) -> str:
    ids = result.ids[:-1] if result.finish_reason == "stop" else result.ids
    return decode(ids)


def check(wish: dict[str, Any], result: Result) -> None:
    """`stop`: the text is one of the grammar's; `length`: the beginning of one."""
    matcher = compiled(**wish)
    assert result.finish_reason in ("stop", "length"), result
    assert matcher.accept(result.ids) and matcher.error is None
    if result.finish_reason == "length":
        return
    assert result.ids[-1] == EOS
    text = text_of(result)
    if "json" in wish:
        jsonschema.Draft202012Validator(wish["json"]).validate(json.loads(text))
    elif "json_object" in wish:
        assert isinstance(json.loads(text), dict)
    elif "regex" in wish:
        assert re.fullmatch(wish["regex"], text)
    elif "choice" in wish:
        assert text in wish["choice"]


@settings(max_examples=10, suppress_health_check=list(HealthCheck))
@given(wanted=st.lists(schemas(), min_size=8, max_size=8), seed=st.integers(0, 1000))
def test_what_random_schemas_bring_forth_is_valid(core, wanted, seed):
    requests = [constrained(f"r{i}", {"json": s}, seed=seed + i) for i, s in enumerate(wanted)]
    results = run(core, requests)
    for i, schema in enumerate(wanted):
        check({"json": schema}, results[f"r{i}"])
    # documents of these schemas are small: but for rare white space, 200 tokens are enough
    assert sum(r.finish_reason == "stop" for r in results.values()) >= len(wanted) // 2


WISHES: list[dict[str, Any]] = [
    {"json": {}},
    {"json": {"type": "integer"}},
    {"json": {"type": "number"}},
    {"json": {"type": "array", "items": {"type": "number"}, "maxItems": 3}},
    {"json": {"$ref": "#/$defs/tree", "$defs": {"tree": TREE}}},
    {"json": {"type": "object", "properties": {"é": {"const": "漢字😀"}}, "required": ["é"], "additionalProperties": False}},
    {"json_object": True},
    {"regex": r"(ab|cd){2,5}-\d{3}"},
    {"regex": "[äöü]{3,6}"},
    {"choice": ["yes", "no", "may be", 'a "quoted" one', "line\nbreak", "日本語 🙂", "a.b*c|d/e"]},
    {"grammar": 'start: "<" name ">" | "-" start\nname: /[a-z]{1,5}/'},
    {"grammar": 'root ::= "x" root | "y"'},
]


@pytest.mark.parametrize("seed", range(3))
def test_every_kind_together_with_unconstrained_requests(core, seed):
    """Neighbours neither disturb nor are disturbed: alone, each gives the same."""
    wanted = [constrained(f"w{i}", w, seed=seed, max_tokens=60, logprobs=0) for i, w in enumerate(WISHES)]
    plain = make_requests(seed, 6, core.vocab_size)
    mixed = [r for pair in zip(wanted, [*plain, *[None] * 6], strict=True) for r in pair if r is not None]
    together = run(core, mixed)
    for wish, request in zip(WISHES, wanted, strict=True):
        check(wish, together[request.id])
    for request in random.Random(seed).sample([*wanted, *plain], 6):
        assert_same(together[request.id], run(core, [request])[request.id], request.id)


@pytest.mark.parametrize("alone", [True, False], ids=["json", "grammar"])
@pytest.mark.parametrize("schema", [{}, {"type": "integer"}, {"type": "number"}, {"type": "array"}], ids=json.dumps)
def test_numbers_and_white_space_come_to_an_end(core, schema, alone):
    """A model that wants nothing but digits, or nothing but white space, is let out of both, also where the answer is a part of a
    grammar, as beside tools and behind reasoning."""
    wish: dict[str, Any] = {"json": schema} if alone else {"grammar": answer_alone(schema)}
    for favourite in ("0123456789", " \n\t"):
        tokens = {t for t in range(core.vocab_size) if (text := decode([t])) and not text.strip(favourite)}
        requests = [
            constrained(f"n{seed}", wish, seed=seed, temperature=1.0, max_tokens=300,
                        logit_bias=dict.fromkeys(tokens, 12.0) | {EOS: 3.0})
            for seed in range(4)
        ]  # fmt: skip
        for result in run(core, requests).values():
            text = re.sub(r'"(\\.|[^"\\])*("|$)', '""', text_of(result))  # strings may hold both without end
            assert max(map(len, re.findall(r"\d+", text)), default=0) <= 64 + 8  # the longest token of digits
            assert max(map(len, re.findall(r"\s+", text)), default=0) <= 20
            check(wish, result)


def test_long_digits_that_the_grammar_wants_are_left_alone(core):
    wish = {"json": {"type": "string", "pattern": "^[0-9]{100}$"}}
    result = run(core, [constrained("digits", wish, max_tokens=250)])["digits"]
    assert result.finish_reason == "stop"
    check(wish, result)


SCHEDULES = {
    "together": {},
    "chunks of 3": {"max_num_batched_tokens": 3},
    "not asynchronous": {"async_scheduling": False},
    "no prefix cache": {"enable_prefix_caching": False},
    "two slots": {"max_num_seqs": 2},
    "tiny pool": {"num_kv_blocks": 12},
    "tiny pool, chunks of 5, not asynchronous": {"num_kv_blocks": 12, "max_num_batched_tokens": 5, "async_scheduling": False},
}


def mixed_requests() -> list[EngineRequest]:
    wanted = [constrained(f"w{i}", w, seed=i, max_tokens=30, logprobs=0, temperature=1.2) for i, w in enumerate(WISHES)]
    plain = make_requests(5, 5, 512)
    return [*wanted[:6], *plain, *wanted[6:]]


@pytest.fixture(scope="module")
def alone(model):
    core = make_core(model, enable_prefix_caching=False, async_scheduling=False)
    yield {r.id: run(core, [r])[r.id] for r in mixed_requests()}
    core.close()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_any_schedule_gives_the_same_tokens(model, alone, schedule):
    core = make_core(model, **SCHEDULES[schedule])
    if "tiny pool" in schedule:  # admission learns to expect short outputs, then long ones come: preemption all the time
        short = complete(SamplingParams(max_tokens=1))
        run(core, [EngineRequest(f"short {i}", [i], short, i) for i in range(150)])
    for _ in range(5):  # when a grammar has been compiled is chance, and so is who runs beside whom
        results = run(core, mixed_requests())
        assert_all_same(results, alone, f"{schedule}")
        if "tiny pool" not in schedule or core.scheduler.stats.num_preemptions:
            break
    if "tiny pool" in schedule:
        assert core.scheduler.stats.num_preemptions > 0, "the pool was meant to be too small"
    core.close()


def test_a_stream_that_was_cut_off_goes_on(core):
    for i, wish in enumerate(WISHES):
        request = constrained("r", wish, seed=i, max_tokens=30)
        whole = run(core, [request])["r"]
        for cut in (c for c in (1, 4, 9) if c < len(whole.ids)):
            rest = EngineRequest("r", request.prompt_ids, request.params, request.seed, output_ids=whole.ids[:cut])
            got = run(core, [rest])["r"]
            assert (whole.ids[:cut] + got.ids, got.finish_reason) == (whole.ids, whole.finish_reason)


def test_an_output_that_does_not_fit_its_grammar_is_refused(core):
    request = constrained("r", {"regex": "a+"})
    request.output_ids = encode("b")
    result = run(core, [request])["r"]
    assert (result.finish_reason, result.ids) == ("error", [])


def test_min_tokens_yields_where_the_grammar_is_at_its_end(core):
    """Before min_tokens the end is not taken if there is a choice, and taken if there is none."""
    choice = run(core, [constrained(f"c{i}", {"choice": ["yes", "no"]}, min_tokens=20, seed=i) for i in range(4)])
    for result in choice.values():
        assert result.finish_reason == "stop"
        check({"choice": ["yes", "no"]}, result)
    free = run(core, [constrained(f"f{i}", {"regex": "a*"}, min_tokens=9, seed=i) for i in range(4)])
    for result in free.values():
        assert len(result.ids) >= 9
        check({"regex": "a*"}, result)


def test_stop_tokens_and_bans_act_within_the_grammar(core):
    a, b = encode("a")[0], encode("b")[0]
    stopped = run(core, [constrained("s", {"regex": "[ab]{30}"}, stop_token_ids=[b], seed=3)])["s"]
    assert (stopped.finish_reason, stopped.stop_reason, stopped.ids[-1]) == ("stop", b, b)
    banned = run(core, [constrained("b", {"regex": "[ab]{10}"}, allowed_token_ids=[a, EOS])])["b"]
    assert text_of(banned) == "a" * 10
    nothing = run(core, [constrained("n", {"regex": "[ab]{10}"}, allowed_token_ids=[encode("z")[0], EOS])])["n"]
    assert nothing.finish_reason == "error"


def test_user_processors_come_after_the_mask(core):
    b = encode("b")[0]

    def prefer(ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits[b] += 100.0
        logits[encode("z")[0]] += 1000.0
        return logits

    result = run(core, [constrained("p", {"regex": "[abc]{5}"}, logits_processors=[prefer])])["p"]
    assert text_of(result) == "bbbbb"


def test_the_prefix_cache_serves_constrained_requests(core):
    prompt = encode("The quick brown fox jumps over the lazy dog. " * 3)
    params = constrained("x", {"regex": "[a-z]{12}"}, temperature=0.0).params
    cold, warm = (run(core, [EngineRequest("x", prompt, params, 1)])["x"] for _ in range(2))
    assert warm.cached >= (len(prompt) - 1) // BLOCK * BLOCK > cold.cached
    assert warm.ids == cold.ids


def test_samples_and_stop_strings_through_the_offline_api(model):
    """n samples follow the grammar each for itself; a stop string ends one in the middle of it; a bad grammar is raised."""
    options = {"device": "cpu", "dtype": "float32", "max_num_seqs": 8, "num_kv_blocks": 128, "block_size": BLOCK}
    with LLM(model, max_model_len=200, debug_checks=True, **options) as llm:
        wish = StructuredOutputsParams(regex="[abc]{6}")
        params = SamplingParams(n=5, temperature=2.0, max_tokens=50, structured_outputs=wish, seed=7)
        texts = [o.text for o in llm.generate("x", params, use_tqdm=False)[0].outputs]
        assert all(re.fullmatch("[abc]{6}", t) for t in texts) and len(set(texts)) > 1
        stopped = llm.generate(
            "x", SamplingParams(temperature=2.0, max_tokens=50, structured_outputs=wish, seed=7, n=5, stop="b")
        )
        for whole, output in zip(texts, stopped[0].outputs, strict=True):
            assert output.text == whole.split("b")[0]
            assert output.stop_reason == ("b" if "b" in whole else None)
        with pytest.raises(ParameterError, match="unclosed group"):
            llm.generate(["x", "y"], SamplingParams(structured_outputs=StructuredOutputsParams(regex="(")))
        assert llm.generate("x", SamplingParams(max_tokens=2), use_tqdm=False)[0].finished
