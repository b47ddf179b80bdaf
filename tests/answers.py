"""What a server answers: events of streams, errors, metrics; and requests whose answers can be compared, streamed or whole."""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "water", "turns", "the", "wheel", "of", "the", "mill", "in", "Köln", "日本語", "🙂", "0123"]


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


def parse_metrics(text: str) -> dict[str, float]:
    """name{labels without the model's} -> value."""
    found = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[re.sub(r'engine="0",?|model_name="[^"]*",?', "", name).replace("{}", "").replace(",}", "}")] = float(value)
    return found


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


# ---------------------------------------------------------------- requests that can be sent again and again


@dataclass
class Ask:
    """Everything in it is decided: greedy or seeded."""

    path: str
    body: dict[str, Any]
    stream: bool


@dataclass
class Said:
    """What an answer said: one entry a choice."""

    texts: list[str] = field(default_factory=list)
    reasons: list[str | None] = field(default_factory=list)
    tokens: list[list[str]] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)
    num_tokens: int = 0

    def differs(self, other: Said) -> str | None:
        """In what two answers differ; logprobs may by 1e-3 (batches round differently)."""
        for name in ("texts", "reasons", "tokens", "num_tokens"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{name}: {mine!r} != {theirs!r}"
        for a, b in zip(self.logprobs, other.logprobs, strict=True):
            if len(a) != len(b) or any(not math.isclose(x, y, abs_tol=1e-3) for x, y in zip(a, b, strict=True)):
                return f"logprobs: {a} != {b}"
        return None


class Failed(Exception):
    """An answer that is no answer: a status, or an error in the stream."""

    def __init__(self, status: int, text: str):
        super().__init__(f"{status}: {text[:300]}")
        self.status = status


def random_ask(rng: random.Random, model: str, longest: int = 120) -> Ask:
    """A request with parameters of all kinds, greedy or seeded."""
    text = " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 20)))
    body: dict[str, Any] = {"model": model, "max_tokens": rng.randint(1, longest), "stop": None}
    if rng.random() < 0.5:
        body |= {"temperature": 0.0}
    else:
        body |= {"temperature": rng.choice([0.5, 1.0, 1.5]), "seed": rng.randrange(2**31), "top_p": rng.choice([1.0, 0.9])}
        body["top_k"] = rng.choice([0, 20])
    if rng.random() < 0.3:
        body |= {"presence_penalty": 0.5, "repetition_penalty": 1.2}
    if rng.random() < 0.4:
        body["stop"] = rng.choice([["wheel"], ["the", "zzz"], [" a", "\n"], "er"])
    if rng.random() < 0.5:
        body["ignore_eos"] = True
    stream, kind = rng.random() < 0.7, rng.random()
    if kind < 0.2:
        kept = {k: body[k] for k in ("model", "top_p") if k in body} | {"temperature": 0.0}
        return Ask("/v1/responses", {**kept, "input": text, "max_output_tokens": max(16, body["max_tokens"])}, stream)
    if rng.random() < 0.4:
        body["n"] = rng.randint(2, 4)
    logprobs = rng.random() < 0.4
    if kind < 0.55:
        if logprobs:
            body |= {"logprobs": True, "top_logprobs": rng.randint(0, 3)}
        return Ask("/v1/chat/completions", {**body, "messages": [{"role": "user", "content": text}]}, stream)
    if logprobs:
        body["logprobs"] = rng.randint(0, 3)
    return Ask("/v1/completions", {**body, "prompt": text}, stream)


async def ask(
    client: httpx.AsyncClient, what: Ask, *, on_event: Callable[[], Any] | None = None, pause: float = 0.0, leave_after: int = -1
) -> Said | None:
    """What the server says; None if the client left after so many events. `pause`: seconds between reads."""
    if not what.stream:
        response = await client.post(what.path, json=what.body)
        if response.status_code != 200:
            raise Failed(response.status_code, response.text)
        return said_whole(response.json())
    body = what.body | {"stream": True}
    if what.path != "/v1/responses":
        body["stream_options"] = {"include_usage": True}
    async with client.stream("POST", what.path, json=body) as response:
        if response.status_code != 200:
            raise Failed(response.status_code, (await response.aread()).decode())
        found: list[dict[str, Any]] = []
        async for event in events(response):
            found.append(event)
            if on_event is not None:
                on_event()
            if len(found) == leave_after:
                return None
            if pause:
                await asyncio.sleep(pause)
    return said_streamed(found)


async def events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON events of a stream; raises Failed at an error in it or when its end is missing."""
    last: dict[str, Any] | None = None
    async for line in response.aiter_lines():
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            return
        last = json.loads(line[6:])
        if last.get("error") is not None and "choices" not in last:
            raise Failed(200, json.dumps(last))
        yield last
    if last is None or not str(last.get("type", "")).startswith(("response.completed", "response.incomplete")):
        raise Failed(200, f"a stream without an end: {last}")


def said_whole(answer: dict[str, Any]) -> Said:
    if "output" in answer:  # of /v1/responses
        text = "".join(part["text"] for item in answer["output"] if item["type"] == "message" for part in item["content"])
        return Said([text], [answer["status"]], [[]], [[]], answer["usage"]["output_tokens"])
    choices = sorted(answer["choices"], key=lambda c: c["index"])
    texts = [c["text"] if "text" in c else c["message"]["content"] or "" for c in choices]
    return _said(texts, choices, answer["usage"]["completion_tokens"])


def said_streamed(found: list[dict[str, Any]]) -> Said:
    if "type" in found[-1]:
        said = said_whole(found[-1]["response"])
        text = "".join(e["delta"] for e in found if e["type"] == "response.output_text.delta")
        assert said.texts == [text], "the deltas are not the text"
        return said
    choices = joined(found)
    return _said([c["content"] for c in choices], choices, found[-1]["usage"]["completion_tokens"])


def _said(texts: list[str], choices: list[dict[str, Any]], num_tokens: int) -> Said:
    said = Said(texts, [c["finish_reason"] for c in choices], num_tokens=num_tokens)
    for found in (c.get("logprobs") or {} for c in choices):
        entries = found.get("content") or []
        said.tokens.append(found.get("tokens") or [e["token"] for e in entries])
        said.logprobs.append(found.get("token_logprobs") or [e["logprob"] for e in entries])
    return said
