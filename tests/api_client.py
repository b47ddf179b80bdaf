"""The HTTP application over a fake engine, called without a network; and what streams say."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx

from fake_engine import FakeEngine
from headrace.api.app import create_app
from headrace.api.config import ServerConfig

MODEL = "fake/model"


class Api:
    """One application in one event loop; every call runs to its end."""

    def __init__(self, engine: FakeEngine | None = None, **options: Any):
        self.engine = engine or FakeEngine()
        self.app = create_app(self.engine, ServerConfig(**options))  # type: ignore[arg-type]
        self.runner = asyncio.Runner()

    def close(self) -> None:
        self.runner.close()

    def request(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        async def call() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=30) as client:
                return await client.request(method, path, **kwargs)

        return self.runner.run(call())

    def post(self, path: str, body: Any, **kwargs: Any) -> httpx.Response:
        if isinstance(body, dict):
            body = {"model": MODEL, **body}
        return self.request("POST", path, json=body, **kwargs)

    def ok(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = self.post(path, body)
        assert response.status_code == 200, response.text
        return response.json()

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The events of a stream; it must be well formed and, but for /v1/responses, end with [DONE]."""
        response = self.post(path, {**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "text/event-stream"
        events = parse_events(response.text)
        if path != "/v1/responses":
            assert events.pop() is None
        return events  # type: ignore[return-value]


def parse_events(text: str) -> list[dict[str, Any] | None]:
    """None stands for [DONE]."""
    assert text.endswith("\n\n")
    found: list[dict[str, Any] | None] = []
    for frame in text[:-2].split("\n\n"):
        lines = [line for line in frame.split("\n") if not line.startswith(":")]
        if not lines:
            continue
        fields = dict(line.split(": ", 1) for line in lines)
        data = fields.pop("data")
        value = None if data == "[DONE]" else json.loads(data)
        if "event" in fields:
            assert value is not None and value["type"] == fields.pop("event")
        assert not fields
        found.append(value)
    return found


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error object of a 4xx or 5xx, which must have the one shape."""
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    assert isinstance(error["type"], str)
    assert error["param"] is None or isinstance(error["param"], str)
    assert error["code"] is None or isinstance(error["code"], str)
    return error


def joined(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices of a completions or chat stream, put together as their whole answer shows them.

    Checks the order on the way: in chat the role first, exactly one finish reason for each choice, and it comes last.
    """
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        assert event["id"] == events[0]["id"] and event["created"] == events[0]["created"]
        for piece in event["choices"]:
            chat = "delta" in piece
            c = choices.get(piece["index"])
            if c is None:
                c = choices[piece["index"]] = {"index": piece["index"], "finish_reason": None, "logprobs": None}
                if chat:
                    assert piece["delta"] == {"role": "assistant", "content": ""}
            assert c["finish_reason"] is None, "something came after the finish reason"
            _join_text(c, piece["delta"] if chat else {"content": piece["text"]})
            for name in ("finish_reason", "stop_reason"):
                c[name] = piece.get(name, c.get(name))
            if piece.get("logprobs"):
                c["logprobs"] = c["logprobs"] or {}
                for name, values in piece["logprobs"].items():
                    c["logprobs"][name] = values if values is None else c["logprobs"].get(name, []) + values
            c["token_ids"] = c.get("token_ids", []) + piece.get("token_ids", [])
    assert all(c["finish_reason"] for c in choices.values())
    return [choices[i] for i in sorted(choices)]


def _join_text(choice: dict[str, Any], delta: dict[str, Any]) -> None:
    for name in ("content", "reasoning"):
        choice[name] = choice.get(name, "") + (delta.get(name) or "")
    calls = choice.setdefault("tool_calls", [])
    for call in delta.get("tool_calls", ()):
        if call["index"] == len(calls):
            assert call["id"] and call["type"] == "function" and call["function"]["arguments"] == ""
            calls.append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
        calls[call["index"]]["arguments"] += call["function"]["arguments"]
