"""Grammars that are wrong, too large, too slow or deadly end their own request, and nothing else."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import pytest

from engine_driver import Result, complete, make_core, run, take
from headrace.engine.messages import EngineRequest
from headrace.errors import ParameterError
from headrace.sampling.params import SamplingParams
from headrace.sampling.structured_outputs import StructuredOutputsParams
from headrace.structured_output import llguidance_backend, manager, trial
from headrace.structured_output.manager import StructuredOutput
from structured_driver import EOS, backend, compiled, encode
from test_structured_generation import check, constrained
from tiny_models import VOCAB, write_tiny

LOOPS = {
    "type": "string",
    "allOf": [{"pattern": f"(a|b)*{x}(a|b){{{n}}}"} for n, x in zip(range(10, 40), "ab" * 15, strict=True)],
}
OVERFLOWS = {"$ref": "#/$defs/d0", "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(5000)} | {"d5000": {}}}
EXPLODES: list[dict[str, Any]] = [
    {"json": OVERFLOWS},
    {"json": LOOPS},
    {"grammar": "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(8000)) + '\nr8000: "a"'},
    {"regex": "(a{1000}){1000}"},
    {"json": {"allOf": [{"anyOf": [{"type": "integer", "minimum": i + 10 * j} for i in range(8)]} for j in range(12)]}},
    {"json": {"type": "integer", "multipleOf": 999999937}},
]
WRONG: list[dict[str, Any]] = [
    {"regex": "("},
    {"regex": "a" * 10 + "(" * 9999},
    {"grammar": "start: nothing"},
    {"grammar": "\x00{]"},
    {"grammar": 'root ::= "a'},
    {"grammar": 'start: "<call>' + "what is forced " * 6 + '" %json {"$ref": "#"}'},
    {"json": {"type": "frob"}},
    {"json": {"$ref": "#"}},
    {"structural_tag": {"structures": []}},
    {"structural_tag": {"structures": [{"begin": "<a>", "end": "</a>"}], "triggers": ["<b"]}},
    {"structural_tag": {"structures": [{"begin": "<a>", "schema": {"not": {}}, "end": "</a>"}], "triggers": ["<a"]}},
]


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    core = make_core(str(write_tiny("llama", tmp_path_factory.mktemp("tiny"))), max_model_len=256, num_kv_blocks=512)
    run(core, [constrained("warm", {"regex": "a"})])
    yield core
    core.close()


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(trial, "SECONDS", 1)


def refusal(core, wish: dict[str, Any], name: str = "bad") -> tuple[str, str, str]:
    core.add(constrained(name, wish))
    while core.has_work:
        for news in core.step():
            assert news.id == name and news.finish_reason == "error" and not news.token_ids
            assert news.refused is not None
            return news.refused
    raise AssertionError("no answer")


@pytest.mark.parametrize("wish", WRONG, ids=lambda w: json.dumps(w)[:40])
def test_a_wrong_grammar_is_refused_with_its_reason(core, wish):
    field, _, allowed = refusal(core, wish)
    assert field == f"structured_outputs.{next(iter(wish))}"
    assert "(" in allowed


@pytest.mark.parametrize("wish", EXPLODES, ids=lambda w: json.dumps(w)[:40])
def test_an_explosion_is_refused_and_remembered(core, short, wish, monkeypatch):
    first = refusal(core, wish)
    monkeypatch.setattr(trial.Trial, "check", lambda *_: pytest.fail("tried again"))
    assert refusal(core, wish, "again") == first


@pytest.mark.parametrize("when", ["it waits", "it tries"])
def test_a_trial_that_somebody_else_kills_refuses_nothing(when, monkeypatch):
    """Whoever is out of memory, say: the next child tries, and no verdict on the grammar is kept."""
    tried = trial.Trial(backend().spec)
    try:
        tried.check(StructuredOutputsParams(regex="a"))
        first = tried._child
        assert first is not None
        if when == "it waits":
            first.kill()
            first.wait()
        else:
            write = trial.write_message
            monkeypatch.setattr(trial, "write_message", lambda pipe, message: first.kill() if pipe is first.stdin else write(pipe, message))
        tried.check(StructuredOutputsParams(regex="b"))
        assert tried._child is not first
        with pytest.raises(ParameterError, match="unclosed group"):
            tried.check(StructuredOutputsParams(regex="("))
    finally:
        tried.close()


def test_a_trial_that_takes_too_long_is_not_made_twice(monkeypatch):
    monkeypatch.setattr(trial, "WALL_SECONDS", 0.0)
    tried = trial.Trial(backend().spec)
    start, starts = tried._start, []
    monkeypatch.setattr(tried, "_start", lambda: (starts.append(1), start()))
    with pytest.raises(ParameterError, match="it takes longer"):
        tried.check(StructuredOutputsParams(json=LOOPS))
    assert starts == [1]


def test_neighbours_stream_on_while_a_grammar_is_tried(core, short):
    """From the step at which the bad one is added to its refusal, the others get a token at every step."""
    free = EngineRequest("free", [5, 6, 7], complete(SamplingParams(max_tokens=240, ignore_eos=True)), 1)
    wish = {"json": LOOPS | {"title": "not seen before"}}
    core.add(free)
    core.add(constrained("good", {"regex": "a{200}"}, max_tokens=220))
    core.add(constrained("bad", wish))
    results = {name: Result() for name in ("free", "good", "bad")}
    free_tokens = None
    while core.has_work:
        for news in core.step():
            take(results[news.id], news)
            if news.id == "bad":
                free_tokens = len(results["free"].ids)
    assert results["bad"].finish_reason == "error"
    assert results["free"].finish_reason == "length" and len(results["free"].ids) == 240
    assert results["good"].finish_reason == "stop"
    check({"regex": "a{200}"}, results["good"])
    assert free_tokens is not None and free_tokens > 50


def test_an_abort_while_a_grammar_is_tried(core, short):
    core.add(constrained("gone", {"json": LOOPS | {"title": "aborted"}}))
    core.step()
    core.abort("gone")
    assert [(news.id, news.finish_reason) for news in core.step()] == [("gone", "abort")]
    assert not core.has_work
    assert core.structured.compiling is False
    check({"regex": "ab"}, run(core, [constrained("next", {"regex": "ab"})])["next"])


def test_a_grammar_that_meets_a_limit_later_fails_its_request_alone(core, monkeypatch):
    """The parser's own limits act while the output grows: never unconstrained text, never a `stop` that is none."""
    wish = {"grammar": 'start: s\ns: s s s | "a" | s s'}
    monkeypatch.setattr(core.structured._backend, "_limits", limits(max_items_in_row=40))
    requests = [constrained("deep", wish, max_tokens=200, logit_bias={EOS: -50.0}), constrained("flat", {"regex": "b{50}"})]
    results = run(core, requests)
    assert results["deep"].finish_reason == "error"
    assert len(results["deep"].ids) > 1
    assert results["flat"].finish_reason == "stop"


def limits(**changes: int):
    from llguidance import LLParserLimits

    return LLParserLimits(verbose_errors=False, **changes)


def test_the_error_says_what_the_limit_was(core, monkeypatch):
    monkeypatch.setattr(core.structured._backend, "_limits", limits(max_items_in_row=40))
    core.add(constrained("deep", {"grammar": 'start: s\ns: s s s | "b" | s s'}, logit_bias={EOS: -50.0}))
    errors = []
    while core.has_work:
        errors += [(news.error, news.stop_reason) for news in core.step() if news.error]
    assert len(errors) == 1 and "max is 40" in errors[0][0] and errors[0][1] == "structured_outputs"


def test_limits_that_leave_no_token_name_the_field(core, caplog):
    """Not the model's NaN, of which a server's operator is to hear."""
    a, b = encode("a")[0], encode("b")[0]
    wishes: list[tuple[str, int, dict[str, Any]]] = [
        ("allowed_token_ids", 0, {"structured_outputs": StructuredOutputsParams(regex="a+"), "allowed_token_ids": [b]}),
        ("bad_words", 2, {"allowed_token_ids": [a], "bad_word_ids": [[a, a, a], [b]]}),
        ("bad_words", 1, {"structured_outputs": StructuredOutputsParams(regex="a{9}"), "bad_word_ids": [[a, t] for t in range(3, VOCAB)], "min_tokens": 9}),
    ]
    for field, tokens, wish in wishes:
        core.add(EngineRequest("bad", [a, a], complete(SamplingParams(max_tokens=9, **wish), eos_token_ids=[EOS]), 1))
        news = [each for _ in range(30) if core.has_work for each in core.step()]
        assert (news[-1].finish_reason, news[-1].stop_reason) == ("error", field), news
        assert sum(len(each.token_ids) for each in news) == tokens and field in news[-1].error
        assert caplog.records[-1].levelname == "WARNING" and news[-1].error in caplog.text


def test_a_grammar_whose_masks_take_ever_longer_fails_its_request_alone(core, monkeypatch):
    """Everybody waits for a step's masks. How many ways an ambiguous grammar has to an output grows with the output."""
    monkeypatch.setattr(llguidance_backend, "FREE_SECONDS", 0.1)
    monkeypatch.setattr(llguidance_backend, "TOKEN_SECONDS", 5e-4)
    wish = {"grammar": 'root ::= s\ns ::= s s | s s s | "a" | ""'}
    core.add(constrained("slow", wish, max_tokens=240, logit_bias={EOS: -50.0}))
    core.add(constrained("flat", {"regex": "b{150}"}, max_tokens=240))
    news = [each for _ in range(400) if core.has_work for each in core.step()]
    assert {each.id: each.finish_reason for each in news if each.finish_reason} == {"slow": "error", "flat": "stop"}
    assert sum(len(each.token_ids) for each in news if each.id == "slow") > 1
    assert "s to find what may come next" in next(each.error for each in news if each.error)


def test_no_answer_in_json_meets_the_limit_of_time():
    matcher, row = compiled(json_object=True), np.zeros(-(-VOCAB // 32), np.int32)
    ids = encode(json.dumps({f"k{i}": [i, {"the": "mill"}, None] for i in range(30)}))
    for token in ids:
        matcher.fill(row)
        assert matcher.accept([token])
    assert not matcher.failed and matcher._seconds < 0.1 * (llguidance_backend.FREE_SECONDS + llguidance_backend.TOKEN_SECONDS * len(ids))


def test_requests_are_bounded_before_they_are_compiled():
    deep: Any = {}
    for _ in range(70):
        deep = {"items": deep}
    for wish in (
        {"json": deep}, {"json": {"enum": ["x" * 300_000]}}, {"json": '{"type": "int'}, {"json": [1]}, {"json": {"maximum": 10**30}},
        {"json": {"const": "\ud800"}}, {"json": {"maximum": float("inf")}}, {"regex": ""}, {"regex": "\ud800"}, {"regex": 5},
        {"grammar": "x" * 300_000}, {"choice": []}, {"choice": ["a", 1]}, {"choice": [""]}, {"choice": ["a"] * 5000},
        {"choice": ["\ud800"]}, {"json_object": "yes"}, {"structural_tag": "nothing"}, {"json": {}, "regex": "a"}, {},
    ):  # fmt: skip
        with pytest.raises(ParameterError) as error:
            StructuredOutputsParams(**wish)
        assert error.value.field.startswith("structured_outputs")
        str(error.value)


def wait(structured: StructuredOutput) -> dict[Any, Any]:
    done: dict[Any, Any] = {}
    end = time.monotonic() + 60
    while structured.compiling and time.monotonic() < end:
        done |= dict(structured.compiled())
        time.sleep(0.001)
    return done


def test_the_cache_is_bounded_and_used(monkeypatch):
    compiled: list[str] = []

    class Counting:
        spec = backend().spec

        def compile(self, wish):
            compiled.append(wish.key())
            return backend().compile(wish)

    class Passing:
        def __init__(self, spec):
            pass

        def check(self, wish):
            pass

        def close(self):
            pass

    monkeypatch.setattr(manager, "Trial", Passing)
    monkeypatch.setattr(manager, "CACHE_BYTES", 5000)
    structured = StructuredOutput(lambda _: Counting(), VOCAB)
    wishes = [StructuredOutputsParams(regex="a" * 500 + str(i)) for i in range(12)]
    for wish in wishes:
        structured.compile(wish, wish.key(), [EOS])
        assert not isinstance(wait(structured)[wish.key()], Exception)
    assert len(compiled) == 12
    assert sum(map(len, structured._cache)) <= 5000
    structured.compile(wishes[-1], "last", [EOS])
    structured.compile(wishes[0], "first", [EOS])
    assert set(wait(structured)) == {"last", "first"}
    assert compiled[12:] == [wishes[0].key()]  # the last one was known, the first one had been dropped
    structured.compile(wishes[1], "a", [EOS])
    structured.compile(wishes[1], "b", [EOS])  # the same wish twice at a time is compiled once
    both = wait(structured)
    assert compiled[13:] == [wishes[1].key()] and both["a"] is not both["b"]
    structured.close()


def test_a_matcher_is_not_shared():
    first = backend().compile(StructuredOutputsParams(regex="ab"))
    second = first.fork()
    assert first.accept(encode("a"))
    assert second.accept(encode("ab")) and second.complete and not first.complete
    second.rollback(len(encode("ab")))
    assert second.accept(encode("ab"))
