"""Asks a server and gives back what an answer says, in one form whether it was streamed or whole, so that runs can be compared."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "water", "turns", "the", "wheel", "of", "the", "mill", "in", "Köln", "日本語", "🙂", "0123"]
CONTEXT = 256


@dataclass
class Ask:
    """A request that can be sent again and again; everything in it is decided."""

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
        keep = ("temperature", "seed", "top_p")
        return Ask(
            "/v1/responses",
            {"model": model, "input": text, "max_output_tokens": max(16, body["max_tokens"])}
            | {k: body[k] for k in keep if k in body and k != "seed"}
            | {"temperature": 0.0},
            stream,
        )
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


async def events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON events of a stream; raises Failed at an error in it or when its end is missing."""
    last: dict[str, Any] | None = None
    async for line in response.aiter_lines():
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            return
        last = json.loads(line[6:])
        if "error" in last and last["error"] is not None and "choices" not in last:
            raise Failed(200, json.dumps(last))
        yield last
    if last is None or not str(last.get("type", "")).startswith(("response.completed", "response.incomplete")):
        raise Failed(200, f"a stream without an end: {last}")


async def ask(
    client: httpx.AsyncClient, what: Ask, *, on_event: Callable[[], Any] | None = None, pause: float = 0.0, leave_after: int = -1
) -> Said | None:
    """What the server says; None if the client left after so many events. `pause`: seconds between reads."""
    body = dict(what.body)
    if not what.stream:
        response = await client.post(what.path, json=body)
        if response.status_code != 200:
            raise Failed(response.status_code, response.text)
        return said_whole(what, response.json())
    body["stream"] = True
    if what.path != "/v1/responses":
        body["stream_options"] = {"include_usage": True}
    async with client.stream("POST", what.path, json=body) as response:
        if response.status_code != 200:
            raise Failed(response.status_code, (await response.aread()).decode())
        found, count = [], 0
        async for event in events(response):
            found.append(event)
            count += 1
            if on_event is not None:
                on_event()
            if count == leave_after:
                return None
            if pause:
                await asyncio.sleep(pause)
    return said_streamed(what, found)


def said_whole(what: Ask, answer: dict[str, Any]) -> Said:
    if what.path == "/v1/responses":
        return _said_response(answer)
    said = Said(num_tokens=answer["usage"]["completion_tokens"])
    for choice in sorted(answer["choices"], key=lambda c: c["index"]):
        said.texts.append(choice["text"] if "text" in choice else choice["message"]["content"] or "")
        said.reasons.append(choice["finish_reason"])
        tokens, logprobs = _logprobs(choice.get("logprobs"))
        said.tokens.append(tokens)
        said.logprobs.append(logprobs)
    return said


def said_streamed(what: Ask, found: list[dict[str, Any]]) -> Said:
    if what.path == "/v1/responses":
        text = "".join(e["delta"] for e in found if e["type"] == "response.output_text.delta")
        said = _said_response(found[-1]["response"])
        assert said.texts == [text], "the deltas are not the text"
        return said
    choices: dict[int, list[Any]] = {}
    said = Said()
    for event in found:
        if event.get("usage"):
            said.num_tokens = event["usage"]["completion_tokens"]
        for piece in event["choices"]:
            c = choices.setdefault(piece["index"], ["", None, [], []])
            assert c[1] is None, "something came after the finish reason"
            c[0] += (piece["text"] if "text" in piece else piece["delta"].get("content")) or ""
            c[1] = piece["finish_reason"]
            tokens, logprobs = _logprobs(piece.get("logprobs"))
            c[2] += tokens
            c[3] += logprobs
    for _, c in sorted(choices.items()):
        for target, value in zip((said.texts, said.reasons, said.tokens, said.logprobs), c, strict=True):
            target.append(value)
    return said


def _said_response(answer: dict[str, Any]) -> Said:
    text = "".join(part["text"] for item in answer["output"] if item["type"] == "message" for part in item["content"])
    return Said([text], [answer["status"]], [[]], [[]], answer["usage"]["output_tokens"])


def _logprobs(found: dict[str, Any] | None) -> tuple[list[str], list[float]]:
    if not found:
        return [], []
    if "token_logprobs" in found:
        return found["tokens"], found["token_logprobs"]
    entries = found.get("content") or []
    return [e["token"] for e in entries], [e["logprob"] for e in entries]
