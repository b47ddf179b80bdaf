"""`use_beam_search` over HTTP: what the search finds is what is answered, whole or streamed; what it cannot do is refused."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from answers import error_of
from fake_engine import EOS, IM_END, FakeEngine, fake_logprobs
from headrace import LLM
from headrace.beam_search import BeamSearch, BeamSearchParams
from headrace.engine.messages import EngineRequest
from server_driver import Api
from tiny_models import write_tiny

PROMPT = list(b"once upon")


@pytest.fixture
def api():
    return Api(FakeEngine(bursts=1))


def searched(engine: FakeEngine, prompt: list[int], max_tokens: int, **params: Any):
    """The search driven by hand over what the fake engine says."""
    search = BeamSearch(prompt, BeamSearchParams(max_tokens=max_tokens, **params), [EOS, IM_END])
    while not search.done:
        found = []
        for ids in search.prompts():
            entry = fake_logprobs(engine.sample(ids, search.step_params())[0][0], search.num_candidates)
            found.append((entry.ids[1:], entry.logprobs[1:]))
        search.advance(found)
    return search.results()


def shown(engine: FakeEngine, result) -> str:
    return engine.tokenizer.decode(result.token_ids[:-1] if result.finish_reason == "stop" else result.token_ids)


def test_completions_answer_with_the_best_sequences(api):
    body = {"prompt": PROMPT, "use_beam_search": True, "n": 2, "best_of": 4, "max_tokens": 6, "length_penalty": 0.5}
    answer = api.ok("/v1/completions", {**body, "return_token_ids": True})
    want = searched(api.engine, PROMPT, 6, beam_width=4, num_return_sequences=2, length_penalty=0.5)
    assert [c["token_ids"] for c in answer["choices"]] == [r.token_ids for r in want]
    assert [c["text"] for c in answer["choices"]] == [shown(api.engine, r) for r in want]
    assert [c["finish_reason"] for c in answer["choices"]] == [r.finish_reason for r in want]
    assert answer["usage"]["prompt_tokens"] == len(PROMPT)
    assert answer["usage"]["completion_tokens"] == sum(len(r.token_ids) for r in want)
    assert not api.engine.active and not api.engine.aborted


def test_several_prompts_and_echo(api):
    body = {"prompt": [PROMPT, list(b"twice")], "use_beam_search": True, "n": 3, "max_tokens": 4, "echo": True}
    answer = api.ok("/v1/completions", body)
    texts = []
    for prompt in body["prompt"]:
        results = searched(api.engine, prompt, 4, beam_width=3)
        texts += [bytes(prompt).decode() + shown(api.engine, r) for r in results]
    assert [c["text"] for c in answer["choices"]] == texts
    assert [c["index"] for c in answer["choices"]] == list(range(6))


def test_chat_streams_the_same(api):
    body = {"messages": [{"role": "user", "content": "hi"}], "use_beam_search": True, "n": 2, "max_tokens": 5}
    whole = api.ok("/v1/chat/completions", body)
    streamed = {0: "", 1: ""}
    for event in api.events("/v1/chat/completions", body):
        for choice in event["choices"]:
            streamed[choice["index"]] += choice["delta"].get("content") or ""
    assert [c["message"]["content"] for c in whole["choices"]] == list(streamed.values())
    prompt = api.engine.prompts[0]
    want = searched(api.engine, prompt, 5, beam_width=2)
    assert list(streamed.values()) == [shown(api.engine, r) for r in want]


def test_ignore_eos(api):
    body = {"prompt": PROMPT, "use_beam_search": True, "n": 2, "max_tokens": 6, "ignore_eos": True, "return_token_ids": True}
    answer = api.ok("/v1/completions", body)
    want = searched(api.engine, PROMPT, 6, beam_width=2, ignore_eos=True)
    assert [c["token_ids"] for c in answer["choices"]] == [r.token_ids for r in want]
    assert {c["finish_reason"] for c in answer["choices"]} == {"length"}


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"temperature": 0.7}, "temperature"), ({"top_k": 5}, "top_k"), ({"stop": ["x"]}, "stop"), ({"logprobs": 1}, "logprobs"),
        ({"min_tokens": 2}, "min_tokens"), ({"best_of": 1, "n": 2}, "best_of"), ({"best_of": 60}, "best_of"),
        ({"best_of": 40}, "best_of"), ({"length_penalty": 1000}, "length_penalty"), ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"), ({"max_tokens": 0, "echo": True}, "max_tokens"),
        ({"use_beam_search": False, "length_penalty": 2.0}, "length_penalty"), ({"use_beam_search": 3}, "use_beam_search"),
        ({"early_stopping": "always"}, "early_stopping"), ({"early_stopping": 1}, "early_stopping"),
        ({"use_beam_search": False, "early_stopping": True}, "early_stopping"), ({"prompt_logprobs": 0}, "prompt_logprobs"), ({"logprobs": 0}, "logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"), ({"stop_token_ids": [1]}, "stop_token_ids"),
        ({"bad_words": ["x"]}, "bad_words"), ({"min_p": 1}, "min_p"), ({"top_p": 0.5}, "top_p"), ({"presence_penalty": 1}, "presence_penalty"),
        ({"frequency_penalty": 1}, "frequency_penalty"), ({"include_stop_str_in_output": True}, "include_stop_str_in_output"), ({"logit_bias": {"1": 1}}, "logit_bias"), ({"allowed_token_ids": [1]}, "allowed_token_ids"),
    ],
)  # fmt: skip
def test_what_a_search_cannot_do_is_refused(api, extra, param):
    response = api.post("/v1/completions", {"prompt": PROMPT, "use_beam_search": True, "max_tokens": 4, **extra})
    assert response.status_code == 400, response.text[:500]
    assert error_of(response)["param"].startswith(param), response.text[:500]
    assert not api.engine.params, "something reached the engine"


@pytest.mark.parametrize(
    "extra",
    [
        {"temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "seed": 5},
        {"top_k": -1, "logit_bias": {}, "bad_words": [], "min_tokens": 0, "stop": [], "stop_token_ids": [], "include_stop_str_in_output": False},
    ],
)  # fmt: skip
def test_neutral_values_are_taken(api, extra):
    assert api.ok("/v1/completions", {"prompt": PROMPT, "use_beam_search": True, "max_tokens": 3, **extra})["choices"]


def test_early_stopping_is_named_with_its_values(api):
    response = api.post("/v1/completions", {"prompt": PROMPT, "use_beam_search": True, "early_stopping": "always"})
    assert "'always'" in error_of(response)["message"] and 'true, false or "never"' in error_of(response)["message"]


class ModelEngine(FakeEngine):
    """The core of an LLM behind the HTTP layer; one request after the other."""

    def __init__(self, llm: LLM, eos: tuple[int, ...]):
        super().__init__(tokenizer=llm.get_tokenizer())  # type: ignore[arg-type]
        self.core = llm.engine.core
        self.model_config = replace(self.model_config, vocab_size=llm.inputs.vocab_size, eos_token_ids=eos)

    async def generate(self, request_id, prompt_ids, params, *, priority=0, cache_salt="", taker=None):
        self.core.add(EngineRequest(request_id, prompt_ids, params, 0, cache_salt=cache_salt))
        while self.core.has_work:
            for news in self.core.step():
                yield news


@pytest.fixture(scope="module")
def llms(tmp_path_factory):
    path = write_tiny("llama", tmp_path_factory.mktemp("tiny"), initializer_range=0.05)
    options = {"device": "cpu", "dtype": "float32", "max_num_seqs": 16, "num_kv_blocks": 256, "block_size": 4}
    with LLM(str(path), **options) as plain, LLM(str(path), **options, speculative_method="ngram") as drafting:
        yield plain, drafting


@pytest.mark.parametrize("served", [0, 1], ids=["plain", "with drafts"])
def test_answers_are_those_of_the_offline_search(llms, served):
    """In every way to stop, in a model whose beams end; the ways differ in at least one case."""
    llm, prompt = llms[0], [7, 19, 300, 41]
    llm.inputs.eos_token_ids = []
    [found] = llm.beam_search([prompt], BeamSearchParams(beam_width=4, max_tokens=8))
    tokens = [t for s in found.sequences for t in s.token_ids]
    eos = llm.inputs.eos_token_ids = (max(set(tokens), key=tokens.count),)
    api = Api(ModelEngine(llms[served], eos))
    seen = set()
    for early, penalty in itertools.product((None, False, True, "never"), (None, 1.5, -0.5)):
        given = {k: v for k, v in (("early_stopping", early), ("length_penalty", penalty)) if v is not None}
        [want] = llm.beam_search([prompt], BeamSearchParams(beam_width=3, max_tokens=20, num_return_sequences=2, **given))
        body = {"prompt": prompt, "use_beam_search": True, "n": 2, "best_of": 3, "max_tokens": 20, "return_token_ids": True}
        choices = api.ok("/v1/completions", {**body, **given})["choices"]
        assert [c["token_ids"] for c in choices] == [s.token_ids for s in want.sequences]
        assert [c["text"] for c in choices] == [s.text for s in want.sequences]
        assert [c["finish_reason"] for c in choices] == [s.finish_reason for s in want.sequences]
        seen.add((penalty, *(tuple(s.token_ids) for s in want.sequences)))
    assert len(seen) > 3, "early_stopping makes no difference here"


def test_an_engine_that_fails_is_an_error(api):
    api.engine.fail = lambda n: "error"
    response = api.post("/v1/completions", {"prompt": PROMPT, "use_beam_search": True, "n": 2, "max_tokens": 3})
    assert response.status_code == 500
    assert not api.engine.active


def test_the_fan_out_counts_beams():
    api = Api(FakeEngine(), max_samples=10)
    body = {"prompt": [PROMPT] * 3, "use_beam_search": True, "n": 1, "max_tokens": 2}
    assert api.post("/v1/completions", {**body, "best_of": 3}).status_code == 200
    response = api.post("/v1/completions", {**body, "best_of": 4})
    assert (response.status_code, error_of(response)["param"]) == (400, "n")
