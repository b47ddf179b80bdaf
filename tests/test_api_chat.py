"""/v1/chat/completions without tools: order of chunks, streamed equals whole, logprobs, templates' switches."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from answers import error_of, joined
from fake_engine import IM_END, IM_START, FakeEngine, random_text
from headrace.sampling.params import SamplingParams
from server_driver import Api

PATH = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def api():
    return Api()


def prompt(text: str, role: str = "user") -> list[int]:
    ids = [IM_START, *f"{role}\n{text}".encode(), IM_END, 10]
    return [*ids, IM_START, *b"assistant\n"]


@settings(max_examples=60)
@given(
    text=st.text(max_size=8).filter(lambda s: "<" not in s), n=st.integers(1, 3), seed=st.integers(0, 1000),
    stop=st.sampled_from([None, "😀", ["b", "the x"]]), max_tokens=st.integers(1, 200),
    top=st.sampled_from([None, 0, 1, 5]),
)  # fmt: skip
def test_streamed_equals_whole(api, text, n, seed, stop, max_tokens, top):
    body = {
        "messages": [{"role": "user", "content": text}], "n": n, "seed": seed, "stop": stop,
        "max_completion_tokens": max_tokens, "return_token_ids": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    if top is not None:
        body |= {"logprobs": True, "top_logprobs": top}
    events = api.events(PATH, body)
    assert {e["object"] for e in events} == {"chat.completion.chunk"}
    usage = events.pop()
    assert usage["choices"] == [] and all("usage" not in e for e in events)
    streamed = joined(events)
    del body["stream_options"]
    whole = api.ok(PATH, body)
    assert whole["object"] == "chat.completion" and whole["usage"] == usage["usage"]
    assert whole["usage"]["prompt_tokens"] == len(prompt(text))
    for s, w in zip(streamed, whole["choices"], strict=True):
        assert w["message"] == {"role": "assistant", "content": s["content"], "refusal": None, "annotations": []}
        for name in ("index", "finish_reason", "token_ids"):
            assert s[name] == w[name]
        assert s["logprobs"] == w["logprobs"]
    assert sum(len(w["token_ids"]) for w in whole["choices"]) == whole["usage"]["completion_tokens"]
    assert [e["prompt_token_ids"] for e in events if "prompt_token_ids" in e] == [whole["prompt_token_ids"]] * n


def test_text_is_the_engines(api):
    whole = api.ok(PATH, {"messages": HI, "seed": 7, "n": 2})
    for i, choice in enumerate(whole["choices"]):
        params = SamplingParams(seed=7, sample_index=i)
        assert choice["message"]["content"] == random_text(prompt("hi"), params)
        assert choice["finish_reason"] == "stop" and choice["logprobs"] is None
    assert api.engine.params[-1].max_tokens == 4096 - len(prompt("hi"))  # absent: what fits
    assert "tool_calls" not in whole["choices"][0]["message"] and "system_fingerprint" not in whole


def test_the_stream_has_text_without_holes(api):
    events = api.events(PATH, {"messages": HI, "seed": 7, "stop": ["zzz"]})
    deltas = [e["choices"][0]["delta"] for e in events]
    assert deltas[0] == {"role": "assistant", "content": ""} and deltas[-1] == {}
    assert all(set(d) == {"content"} and d["content"] and "\ufffd" not in d["content"] for d in deltas[1:-1])
    assert [e["choices"][0]["finish_reason"] for e in events] == [None] * (len(events) - 1) + ["stop"]
    assert all(set(e["choices"][0]) == {"index", "delta", "finish_reason"} for e in events)


@pytest.mark.parametrize("top", [0, 1, 3])
def test_logprobs(api, top):
    body = {"messages": HI, "seed": 3, "logprobs": True, "top_logprobs": top}
    choice = api.ok(PATH, body)["choices"][0]
    content = choice["logprobs"]["content"]
    assert choice["logprobs"]["refusal"] is None
    data = bytes(b for entry in content[:-1] for b in entry["bytes"])  # the last is the end token
    assert data.decode() == choice["message"]["content"]
    for entry in content:
        tops = entry["top_logprobs"]
        assert len(tops) == top and entry["logprob"] <= 0
        assert [t["logprob"] for t in tops] == sorted((t["logprob"] for t in tops), reverse=True)
        if top:
            assert any(t["bytes"] == entry["bytes"] and t["logprob"] == entry["logprob"] for t in tops)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"), ({"messages": "hi"}, "messages"), ({"messages": [1]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"), ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"), ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [*HI, {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}]}, "messages[1].function_call"),
        ({"messages": [*HI, {"role": "assistant", "audio": {"id": "1"}}]}, "messages[1].audio"), ({"stream": True, "prompt_logprobs": 0}, "prompt_logprobs"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]}, "messages[0].content[0].type"),
        ({"top_logprobs": 2}, "top_logprobs"), ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 5}, "logprobs"), ({"tool_choice": "auto"}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"), ({"tools": [{"custom": {}}]}, "tools[0].custom.name"), ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]}, "tools[0].function.parameters.type"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": ["null", "array"]}}}]}, "tools[0].function.parameters.type"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"), ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"), ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"), ({"structured_outputs": {"rgx": "a"}}, "structured_outputs.rgx"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"), ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"guided_json": {}, "structured_outputs": {"regex": "a"}}, "structured_outputs"), ({"logits_processors": ["a.b"]}, "logits_processors"), ({"echo": True}, "echo"), ({"functions": []}, "functions"), ({"use_beam_search": True, "top_p": 0.5}, "top_p"),
        ({"n": 0}, "n"), ({"n": 1_000_000}, "n"), ({"temperature": 3}, "temperature"), ({"top_p": 0}, "top_p"), ({"seed": 2**63}, "seed"),
        ({"stop": ""}, "stop"), ({"stop": [""]}, "stop"), ({"stop": [1]}, "stop[0]"), ({"logit_bias": {"99999": 1}}, "logit_bias"), ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"), ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": 9999}, "max_tokens"), ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"), ({"max_completion_tokens": 9999}, "max_completion_tokens"),
        ({"stop_token_ids": [999]}, "stop_token_ids"), ({"priority": 1}, "priority"), ({"cache_salt": ""}, "cache_salt"), ({"model": 5}, "model"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"), ({"temperature": "hot"}, "temperature"), ({"stream": 1}, "stream"),
    ],
)  # fmt: skip
def test_refusals_name_the_field(api, body, param):
    before = len(api.engine.params)
    error = error_of(response := api.post(PATH, {"messages": HI, **body}))
    assert response.status_code == 400
    assert (error["param"] or "").startswith(param), error
    assert len(api.engine.params) == before, "something reached the engine"


@pytest.mark.parametrize(
    "body",
    [
        {"user": "u", "safety_identifier": "s", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "verbosity": "low"},
        {"prompt_cache_key": "k", "prediction": {"type": "content", "content": "x"}, "modalities": ["text"]},
        {"stop": [], "tools": [], "n": None, "logprobs": None, "stream": None, "tool_choice": None, "response_format": {"type": "text"}},
        {"temperature": 0, "n": 2}, {"top_k": 0}, {"top_k": -1}, {"use_beam_search": False, "length_penalty": 1.0}, {"tool_choice": "none"},
        {"max_tokens": 4, "max_completion_tokens": 5}, {"temperature": 0.0, "seed": -1}, {"cache_salt": "tenant", "priority": 0},
        {"logit_bias": {"5": 1.5}}, {"logit_bias": {}}, {"top_logprobs": 0}, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
        {"messages": [{"role": "system", "content": "s"}, *HI, {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}], "refusal": None},
                      {"role": "tool", "tool_call_id": "1", "content": "x"}]},
    ],
)  # fmt: skip
def test_accepted(api, body):
    assert api.ok(PATH, {"messages": HI, "max_tokens": 5, **body})["choices"]


def test_allowed_values_are_named(api):
    error = error_of(api.post(PATH, {"messages": HI, "reasoning_effort": "huge"}))
    assert "huge" in error["message"] and "high, low, max, medium, minimal" in error["message"]
    error = error_of(api.post(PATH, {"messages": HI, "thinking": {"type": "much"}}))
    assert error["param"] == "thinking.type" and error["message"].endswith("allowed: adaptive, auto, between_tools, disabled, enabled")
    error = error_of(api.post(PATH, {"messages": HI, "temperature": 3}))
    assert error["message"] == "temperature: got 3.0, allowed: a number in [0, 2]"


def test_parts_are_joined(api):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    api.ok(PATH, {"messages": [{"role": "user", "content": parts}]})
    assert api.engine.prompts[-1] == prompt("a\nb")


@pytest.mark.parametrize(
    ("body", "own", "continued"),
    [
        ({"continue_final_message": True}, {}, True), ({}, {"prefix": True}, True), ({}, {"partial": True}, True),  # other APIs' words
        ({}, {}, False), ({}, {"prefix": False}, False), ({"continue_final_message": False}, {"prefix": True}, False),
    ],
)  # fmt: skip
def test_continued_message(api, body, own, continued):
    messages = [*HI, {"role": "assistant", "content": "Well,", **own}]
    api.ok(PATH, {"messages": messages, **body})
    assert bytes(i for i in api.engine.prompts[-1] if i < 256).endswith(b"assistant\nWell,") == continued


def test_template_switches_reach_the_template():
    engine = FakeEngine()
    engine.tokenizer.chat_templates = {
        "default": "{{ messages[0].content }}|{{ enable_thinking }}|{{ reasoning_effort }}|"
        "{{ tools is none or tools[0].function.name }}"
    }
    api = Api(engine, tool_parser="hermes")
    tools = [{"type": "function", "function": {"name": "f"}}]
    for body, text in (
        ({"chat_template_kwargs": {"enable_thinking": False}}, "hi|False||True"),
        ({"reasoning_effort": "low"}, "hi|True|low|True"),
        ({"reasoning_effort": "none"}, "hi|False|none|True"),
        ({"tools": tools}, "hi|||f"),
        ({"tools": tools, "tool_choice": "none"}, "hi|||True"),
    ):
        api.ok(PATH, {"messages": HI, **body})
        assert bytes(engine.prompts[-1]).decode() == text


def test_no_template_is_a_400():
    engine = FakeEngine()
    engine.tokenizer.chat_templates = {}
    api = Api(engine)
    assert error_of(api.post(PATH, {"messages": HI}))["param"] == "messages"
    assert api.ok("/v1/completions", {"prompt": "hi"})["choices"]


def test_operators_template_wins():
    api = Api(chat_template="[{{ messages[0].content }}]")
    api.ok(PATH, {"messages": HI})
    assert bytes(api.engine.prompts[-1]) == b"[hi]"


def test_prompt_too_long():
    api = Api(FakeEngine(max_model_len=64))
    for length in (60, 100_000):
        error = error_of(api.post(PATH, {"messages": [{"role": "user", "content": "x" * length}]}))
        assert error["code"] == "context_length_exceeded" and error["param"] == "messages" and "64" in error["message"]
