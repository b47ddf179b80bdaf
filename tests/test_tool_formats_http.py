"""Calls and reasoning in a family's own format through each of the APIs: the scripted model writes, the client reads."""

from __future__ import annotations

import json

import pytest

from answers import joined
from fake_engine import TEMPLATE, FakeEngine
from server_driver import MODEL, Api

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}, "line": {"type": "integer"}}}
ARGUMENTS = {"path": "é \"a\"\n</parameter> 12", "line": 12}
WRITTEN = {
    "qwen3_coder": (
        "{# <tool_call> <function= <parameter= </think> #}",
        f"<think>\nHm.\n</think>\n\nI look.\n<tool_call>\n<function=read>\n<parameter=path>\n{ARGUMENTS['path']}\n</parameter>\n"
        "<parameter=line>\n12\n</parameter>\n</function>\n</tool_call>",
    ),
    "openai": (
        "{# <|channel|>analysis <|channel|>commentary #}",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        f"<|start|>assistant to=functions.read<|channel|>commentary <|constrain|>json<|message|>{json.dumps(ARGUMENTS)}",
    ),
}  # fmt: skip
FUNCTION = {"name": "read", "description": "d", "parameters": SCHEMA}


@pytest.fixture(params=sorted(WRITTEN))
def api(request) -> Api:
    signs, text = WRITTEN[request.param]
    engine = FakeEngine(script=lambda ids, params: text)
    engine.tokenizer.chat_templates = {"default": TEMPLATE + signs}
    return Api(engine)


def test_chat(api):
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [{"type": "function", "function": FUNCTION}]}
    choice = api.ok("/v1/chat/completions", body)["choices"][0]
    call = choice["message"]["tool_calls"][0]["function"]
    assert (choice["finish_reason"], choice["message"]["content"], choice["message"]["reasoning"]) == ("tool_calls", "I look.", "Hm.")
    assert (call["name"], json.loads(call["arguments"])) == ("read", ARGUMENTS)
    streamed = joined(api.events("/v1/chat/completions", body))[0]
    assert (streamed["content"], streamed["reasoning"], streamed["finish_reason"]) == ("I look.", "Hm.", "tool_calls")
    assert [(c["name"], c["arguments"]) for c in streamed["tool_calls"]] == [(call["name"], call["arguments"])]


def test_responses(api):
    body = {"input": "hi", "tools": [{"type": "function", **FUNCTION}]}
    reasoning, message, call = api.ok("/v1/responses", body)["output"]
    assert reasoning["content"][0]["text"] == "Hm." and message["content"][0]["text"] == "I look."
    assert (call["type"], call["name"], json.loads(call["arguments"])) == ("function_call", "read", ARGUMENTS)
    events = api.events("/v1/responses", body)
    deltas = [e["delta"] for e in events if e["type"] == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call["arguments"]


def test_anthropic(api):
    tools = [{"name": "read", "description": "d", "input_schema": SCHEMA}]
    body = {"model": MODEL, "max_tokens": 2000, "messages": [{"role": "user", "content": "hi"}], "tools": tools}
    answer = api.ok("/v1/messages", {**body, "thinking": {"type": "enabled", "budget_tokens": 1024}})
    thinking, text, call = answer["content"]
    assert (thinking["thinking"], text["text"], answer["stop_reason"]) == ("Hm.", "I look.", "tool_use")
    assert (call["name"], call["input"]) == ("read", ARGUMENTS)


def test_ollama(api):
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": False}
    answer = api.ok("/api/chat", {**body, "tools": [{"type": "function", "function": FUNCTION}]})
    message = answer["message"]
    assert (message["thinking"], message["content"]) == ("Hm.", "I look.")
    function = message["tool_calls"][0]["function"]
    assert (function["name"], function["arguments"]) == ("read", ARGUMENTS)
