"""POST /v1/responses/input_tokens: what it says is what the response's usage says, and nothing is generated for it."""

from __future__ import annotations

from typing import Any

import pytest

from answers import error_of
from fake_engine import FakeEngine
from server_driver import MODEL, Api
from test_api_openai_client import client_of
from test_api_tools_http import FLAT, make

PATH, COUNT = "/v1/responses", "/v1/responses/input_tokens"
HI = [{"role": "user", "content": "hi"}]
CALL = [{"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a": 1}'}, {"type": "function_call_output", "call_id": "1", "output": "two"}]
ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}
FORM = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}}
BODIES: list[dict[str, Any]] = [
    {"input": "hi"}, {"input": "漢字 😀"}, {"input": [*HI, *CALL]}, {"input": HI, "instructions": "Be brief."}, {"input": "hi", "tools": FLAT},
    {"input": "hi", "tools": [*FLAT, {**FLAT[0], "name": "g"}], "tool_choice": ALLOWED}, {"input": "hi", "tools": FLAT, "tool_choice": "none"},
    {"input": "hi", "reasoning": {"effort": "low"}, "text": FORM}, {"input": "hi" * 50, "truncate_prompt_tokens": 7, "max_output_tokens": 3},
    {"input": "hi", "stream": True, "store": False, "user": "u"},
]  # fmt: skip


@pytest.mark.parametrize("body", BODIES, ids=lambda body: "-".join(body))
def test_the_count_is_what_the_response_says(body):
    api = make("{}")
    api.engine.supports_structured = True
    first = api.ok(PATH, {"input": "ONE", "instructions": "FIRST"})
    for before in ({}, {"previous_response_id": first["id"]}):
        asked, num = {**body, **before}, len(api.engine.params)
        assert (answer := api.ok(COUNT, asked)) == {"object": "response.input_tokens", "input_tokens": answer["input_tokens"]}
        assert len(api.engine.params) == num and not api.engine.active
        assert answer["input_tokens"] == api.ok(PATH, {**asked, "stream": False})["usage"]["input_tokens"] == len(api.engine.prompts[-1])


def test_what_came_before_may_be_all_of_the_input():
    api = make("x")
    first = api.ok(PATH, {"input": "ONE", "instructions": "FIRST"})
    whole = [{"role": "user", "content": "ONE"}, first["output"][0]]
    expected = api.ok(COUNT, {"input": whole})
    for nothing in ({}, {"input": None}):
        assert api.ok(COUNT, {**nothing, "previous_response_id": first["id"]}) == expected
        assert error_of(api.post(COUNT, nothing))["param"] == "input"
    for method in ("GET", "DELETE"):
        assert api.request(method, COUNT).status_code == 404, "no response has this name"


def test_a_prompt_that_is_too_long_is_counted():
    api = Api(FakeEngine(max_model_len=64))
    counts = [api.ok(COUNT, {"input": "x" * n})["input_tokens"] for n in (10, 1010, 100_010)]
    assert counts[1] - counts[0] == 1000 and counts[2] - counts[1] == 99_000
    assert error_of(api.post(PATH, {"input": "x" * 1010}))["code"] == "context_length_exceeded"


@pytest.mark.parametrize(("body", "param"), [({"input": "hi", "conversation": "c"}, "conversation"), ({"input": "hi", "truncation": "auto"}, "truncation"),
    ({"input": "hi", "tool_choice": "required"}, "tool_choice"), ({"input": [{"type": "?"}]}, "input[0].type"), ({"input": []}, "input"),
    ({"input": "hi", "previous_response_id": "none"}, "previous_response_id"), ({"input": "hi", "model": "other"}, "model")])  # fmt: skip
def test_what_a_response_refuses_the_count_refuses(body, param):
    api = make("x")
    answers = [api.post(path, body) for path in (COUNT, PATH)]
    assert error_of(answers[0]) == error_of(answers[1]) and answers[0].status_code == answers[1].status_code
    assert error_of(answers[0])["param"] == param


async def test_with_the_official_client():
    async with client_of() as client:
        counted = await client.responses.input_tokens.count(model=MODEL, input="hi", tools=FLAT)
        response = await client.responses.create(model=MODEL, input="hi", tools=FLAT)
        assert counted.object == "response.input_tokens" and counted.input_tokens == response.usage.input_tokens > 0
