"""What Copilot in VS Code, Continue and Open WebUI ask a server one after the other, and what they read of its answers."""

from __future__ import annotations

import json

import pytest

from coding_agents import TEMPLATE
from fake_engine import FakeEngine
from server_driver import MODEL, Api

CALL = '<tool_call>\n{"name": "read_file", "arguments": {"filePath": "/a.py"}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"filePath": {"type": "string"}, "startLine": {"type": "number"}}, "required": ["filePath"]}
TOOL = {"type": "function", "function": {"name": "read_file", "description": "Reads a file", "parameters": SCHEMA}}
NO_PARAMETERS = {"type": "function", "function": {"name": "get_errors", "description": "Errors", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture
def api() -> Api:
    engine = FakeEngine(script=lambda ids, params: CALL if b"tools" in bytes(i for i in ids if i < 256) else "Well.", max_model_len=32768)
    engine.tokenizer.chat_templates = {"default": TEMPLATE}
    return Api(engine)


def get(api: Api, path: str):
    response = api.request("GET", path)
    assert response.status_code == 200, response.text
    return response.json()


def lines(api: Api, path: str, body: dict) -> list[dict]:
    response = api.post(path, body)
    assert response.status_code == 200, response.text
    return [json.loads(line) for line in response.text.splitlines()]


def test_copilot(api):
    """By Ollama's API it finds models, by OpenAI's it asks them."""
    assert tuple(map(int, get(api, "/api/version")["version"].split("."))) >= (0, 6, 4)
    [model] = get(api, "/api/tags")["models"]
    about = api.ok("/api/show", {"model": model["model"]})
    assert "tools" in about["capabilities"]
    family = about["model_info"]["general.architecture"]
    assert about["model_info"][f"{family}.context_length"] == 32768 and about["model_info"]["general.basename"]
    history = [
        {"role": "system", "content": "You are an expert AI programming assistant."},
        {"role": "user", "content": [{"type": "text", "text": "<context>\nThe current date is November 29, 2026.\n</context>"}, {"type": "text", "text": "Fix it"}]},
    ]  # fmt: skip
    body = {
        "model": model["model"], "messages": history, "temperature": 0, "top_p": 1, "max_tokens": 4096, "n": 1, "stream": True,
        "stream_options": {"include_usage": True}, "tools": [TOOL, NO_PARAMETERS], "intent": False, "snippy": {"enabled": False},
    }  # fmt: skip
    events = api.events("/v1/chat/completions", body)
    [call] = [c for e in events for choice in e["choices"] for c in choice["delta"].get("tool_calls", ()) if c.get("id")]
    arguments = "".join(c["function"].get("arguments", "") for e in events for ch in e["choices"] for c in ch["delta"].get("tool_calls", ()))
    assert json.loads(arguments) == {"filePath": "/a.py"} and events[-1]["usage"]["completion_tokens"]
    history += [
        {"role": "assistant", "content": "", "tool_calls": [{"id": call["id"], "type": "function", "function": {"name": "read_file", "arguments": arguments}}]},
        {"role": "tool", "tool_call_id": call["id"], "content": [{"type": "text", "text": "x = 1"}]},
    ]  # fmt: skip
    assert api.events("/v1/chat/completions", {**body, "messages": history})


def test_continue(api):
    """All by Ollama's API: chat with tools, completion of code from a raw prompt, embeddings of files."""
    about = api.ok("/api/show", {"name": MODEL})
    assert ".Suffix" not in (about.get("template") or ""), "it would ask for infilling"
    family = about["model_info"]["general.architecture"]
    options = {
        "temperature": 0.5, "top_p": 0.9, "num_predict": 2048, "num_ctx": about["model_info"][f"{family}.context_length"], "stop": ["<|im_end|>"],
        "num_thread": 4, "use_mmap": True, "num_gpu": 1,
    }  # fmt: skip
    common = {"model": MODEL, "options": options, "keep_alive": 1800, "stream": True}
    history = [{"role": "system", "content": "<important_rules>\n</important_rules>"}, {"role": "user", "content": "Fix it"}]
    pieces = lines(api, "/api/chat", {**common, "messages": history, "tools": [TOOL]})
    [call] = [c for piece in pieces for c in piece["message"].get("tool_calls", ())]
    assert call["function"]["arguments"] == {"filePath": "/a.py"} and pieces[-1]["done"]
    history += [{"role": "assistant", "content": "", "tool_calls": [{"function": call["function"]}]}, {"role": "tool", "content": "x = 1", "tool_name": "read_file"}]
    assert lines(api, "/api/chat", {**common, "messages": history, "tools": [TOOL]})[-1]["done"]
    fill = "<fim_prefix>def f(:<fim_suffix>\n<fim_middle>"
    short = {**options, "num_predict": 256, "stop": ["<fim_prefix>", "<fim_suffix>", "\n\n"], "temperature": 0.01}
    assert lines(api, "/api/generate", {**common, "prompt": fill, "raw": True, "options": short})[-1]["done"]
    assert len(api.ok("/api/embed", {"model": MODEL, "input": ["def f():", "x = 1"]})["embeddings"]) == 2


def test_open_webui(api):
    """Models by either API, a chat, and its questions beside it: a title, tags, what to ask next."""
    assert get(api, "/api/version")["version"] and get(api, "/api/tags")["models"] and get(api, "/api/ps")["models"]
    assert [m["id"] for m in get(api, "/v1/models")["data"]] == [MODEL]
    history = [{"role": "user", "content": "hello"}]
    pieces = lines(api, "/api/chat", {"model": MODEL, "messages": history, "options": {}, "stream": True, "format": None, "keep_alive": None})
    assert "".join(p["message"]["content"] for p in pieces) == "Well." and pieces[-1]["eval_count"]
    body = {"model": MODEL, "messages": history, "stream": True, "stream_options": {"include_usage": True}, "chat_id": "1", "session_id": "2", "id": "3"}
    events = api.events("/v1/chat/completions", body)
    assert "".join(c["delta"].get("content") or "" for e in events for c in e["choices"]) == "Well."
    title = {"messages": [{"role": "user", "content": "### Task:\nGenerate a title"}], "stream": False, "max_completion_tokens": 1000, "metadata": {"task": "title_generation"}}
    assert api.ok("/v1/chat/completions", title)["choices"][0]["message"]["content"] == "Well."
