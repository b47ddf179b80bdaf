"""Integers written with a point, in every body: as without it, unless they are none or would not be exact."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect

from answers import error_of
from headrace.api import anthropic_input, generate, ollama_input, protocol, rerank, responses_input, service
from headrace.api.body import decode
from headrace.api.errors import ApiError
from headrace.api.whole_numbers import EXACT
from server_driver import Api

HI = [{"role": "user", "content": "hi"}]
KINDS: dict[type, dict[str, Any]] = {
    protocol.ChatRequest: {"messages": HI}, protocol.CompletionRequest: {"prompt": "x"}, responses_input.ResponsesRequest: {"input": "x"},
    generate.GenerateRequest: {"prompt": "x"}, anthropic_input.MessagesRequest: {"messages": HI}, ollama_input.ChatRequest: {},
    service.EmbeddingRequest: {"input": "x"}, service.DetokenizeRequest: {}, rerank.RerankRequest: {"query": "q", "documents": ["d"]},
}  # fmt: skip


def places(kind: inspect.Type, inside: str = "") -> list[tuple[str, bool]]:
    """(dotted path, is it a list) of all integers in a body of this type, nested ones too."""
    found: list[tuple[str, bool]] = []
    for member in kind.types if isinstance(kind, inspect.UnionType) else (kind,):
        if isinstance(member, inspect.IntType):
            found.append((inside, False))
        elif isinstance(member, inspect.ListType) and isinstance(member.item_type, inspect.IntType):
            found.append((inside, True))
        elif isinstance(member, inspect.StructType):
            for field in member.fields:
                found += places(field.type, f"{inside}.{field.encode_name}".lstrip("."))
    return found


PLACES = [(kind, *place) for kind in KINDS for place in places(inspect.type_info(kind))]
SPELT = {"{}.0": 1, "{}.000": 1, "{}e0": 1, "{}.0E0": 1, "{}e3": 1000}


def body(kind: type, path: str, number: str) -> bytes:
    *outer, last = path.split(".")
    text = f'{{"{last}": {number}' + (', "type": "enabled"}' if outer == ["thinking"] else "}")
    for name in reversed(outer):
        text = f'{{"{name}": {text}}}'
    others = {name: value for name, value in KINDS[kind].items() if name != (outer or [last])[0]}
    return (json.dumps(others)[:-1] + (", " if others else "") + text[1:]).encode()


def test_there_are_many():
    assert len(PLACES) > 60 and any("." in path for _, path, _ in PLACES) and any(many for *_, many in PLACES)


@settings(max_examples=150)
@given(place=st.sampled_from(PLACES), value=st.integers(-(10**6), 10**6), spelt=st.sampled_from(sorted(SPELT)), ignored=st.sampled_from([None, "a_foreign_field"]))
def test_a_whole_number_is_an_integer_however_it_is_spelt(place, value, spelt, ignored):
    kind, path, many = place
    around = "[3, {}]" if many else "{}"
    expected = decode(body(kind, path, around.format(value * SPELT[spelt])), kind)
    data, named = body(kind, path, around.format(spelt.format(value))), []
    if ignored:
        data = data[:-1] + f', "{ignored}": 1.0}}'.encode()
    assert decode(data, kind, named if ignored else None) == expected and named == [ignored] * bool(ignored)


@given(place=st.sampled_from(PLACES), value=st.sampled_from([0.5, -2.5, 1e-9, float(EXACT), -float(EXACT), 1e19, 1e300]))
def test_what_is_none_or_may_be_another_is_refused_by_name(place, value):
    kind, path, many = place
    with pytest.raises(ApiError) as refused:
        decode(body(kind, path, f"[{value!r}]" if many else repr(value)), kind)
    assert refused.value.param is not None and refused.value.param.removesuffix("[0]") == path and "float" in refused.value.message


def test_nothing_else_changes():
    body = {"messages": HI, "max_tokens": 5.0, "temperature": 1.0, "metadata": {"a": 1.0}, "logit_bias": {"5": 2.0}, "chat_template_kwargs": {"b": [2.0]}}
    read = decode(json.dumps(body).encode(), protocol.ChatRequest)
    assert repr((read.max_tokens, read.temperature, read.metadata, read.logit_bias)) == "(5, 1.0, {'a': 1.0}, {'5': 2.0})"
    assert repr(read.chat_template_kwargs) == "{'b': [2.0]}"
    for wrong in (True, "5", [5.0], {"a": 5.0}):
        with pytest.raises(ApiError):
            decode(msgspec.json.encode({"messages": HI, "max_tokens": wrong, "n": 1.0}), protocol.ChatRequest)
    for text in (b'{"prompt": "x", "n": 1.0, "n": 1.0}', b'{"prompt": "x", "n": 1.0, "max_tokens": NaN}', b'{"prompt": "x", "n": 1.0, "temperatur": 1}'):
        with pytest.raises(ApiError):
            decode(text, protocol.CompletionRequest, [])


def test_over_http():
    api = Api()
    for max_tokens in (3, 3.0):
        answer = api.ok("/v1/chat/completions", {"messages": HI, "max_tokens": max_tokens, "seed": 7.0, "top_logprobs": 2.0, "logprobs": True})
        assert answer["usage"]["completion_tokens"] <= 3
    first, second = api.engine.params
    assert first == second and type(second.max_tokens) is type(second.seed) is int
    error = error_of(api.post("/v1/chat/completions", {"messages": HI, "max_tokens": 3.5}))
    assert error["param"] == "max_tokens"
    assert error_of(api.post("/v1/chat/completions", {"messages": HI, "max_tokens": 0.0}))["param"] == "max_tokens"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
def test_token_ids(path):
    api, field = Api(), "prompt" if path == "/v1/completions" else "input"
    answers = [api.ok(path, {field: ids}) for ids in ([65, 66], [65.0, 66], [[65, 66]], [[65.0, 66.0]])]
    shown = [[choice["text"] for choice in a["choices"]] if field == "prompt" else a["data"] for a in answers]
    assert shown == shown[:1] * 4 and len({a["usage"]["prompt_tokens"] for a in answers}) == 1
    for wrong, place in (([65.5], "[0]"), ([[65.5]], "[0]"), ([True, 65.0], "[0]"), ([65.0, "a"], "[0]"), ([[65.0], "a"], "")):
        assert error_of(api.post(path, {field: wrong}))["param"] == field + place
