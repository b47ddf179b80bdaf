"""The server under test: request bodies out, token times in."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace.errors import HeadraceError
from headrace_bench.http_client import HttpClient, TransportError

ENDPOINTS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


class BenchmarkError(HeadraceError):
    """The server cannot be measured in this way."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One request: a text, or the token ids, and how many tokens to generate."""

    prompt: str | list[int]
    output_len: int


@dataclass(slots=True)
class Measured:
    """One request as the client saw it. Times in seconds; `start` is perf_counter's."""

    start: float = 0.0
    queue_time: float = 0.0  # waited in the client for --max-concurrency
    ttft: float = 0.0
    gaps: list[float] = field(default_factory=list)  # between events with tokens, from the first one on
    counts: list[int] = field(default_factory=list)  # tokens of each event, the first too; empty where events do not tell
    latency: float = 0.0  # to the last token
    prompt_tokens: int = 0  # these two by the server's usage
    output_tokens: int = 0
    text: list[str] = field(default_factory=list)
    error: str = ""

    @property
    def success(self) -> bool:
        return not self.error

    @property
    def tpot(self) -> float:
        """Seconds per token after the first; 0 where there is no second."""
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0

    @property
    def tokens_per_event(self) -> list[int]:
        """Told by the events, or else the usage's total in as equal parts as can be."""
        events = len(self.gaps) + 1
        if len(self.counts) == events:
            return self.counts
        total = self.output_tokens or events
        return [total * (i + 1) // events - total * i // events for i in range(events)]

    @property
    def itls(self) -> list[float]:
        """Seconds between tokens, one for each that came after the first event.

        n tokens in an event g seconds after the one before count as n gaps of g / n. (`vllm bench serve` counts one of g:
        there a server looks slower the more tokens it puts into an event.)
        """
        if not self.counts and self.output_tokens == len(self.gaps) + 2:  # one an event, and an end token without text
            return [*self.gaps, self.latency - self.ttft - sum(self.gaps)]
        found: list[float] = []
        waited = 0.0
        for gap, tokens in zip(self.gaps, self.tokens_per_event[1:], strict=True):
            waited += gap
            if tokens:
                found += [waited / tokens] * tokens
                waited = 0.0
        return found


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: msgspec.Raw | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw | None = None


class StreamReader:
    """The sink of one streamed answer: fills a Measured."""

    _decode = msgspec.json.Decoder(_Event).decode

    def __init__(self, measured: Measured):
        self.measured = measured
        self.body = b""  # of an answer that is not a stream
        self.finished = False
        self._rest = b""
        self._last = 0.0  # time of the last event with tokens
        self._new, self._told = 0, 0  # tokens that events have told of and no event in `counts` holds; all that were told

    def __call__(self, data: bytes, now: float) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                if not line.startswith(b"[DONE]", 6):
                    self._event(line[5:], now)
            elif not self._last and len(self.body) < 10_000:
                self.body += line + b"\n"

    def _event(self, data: bytes, now: float) -> None:
        try:
            event = self._decode(data)
        except msgspec.DecodeError:
            self.measured.error = self.measured.error or f"an event that is not understood: {data[:200]!r}"
            return
        if event.error is not None:
            self.measured.error = bytes(event.error)[:500].decode("utf-8", "replace")
        if event.usage is not None:
            self.measured.prompt_tokens = event.usage.prompt_tokens
            self.measured.output_tokens = event.usage.completion_tokens
            if event.choices:  # usage so far
                self._new = event.usage.completion_tokens - self._told
        for choice in event.choices:
            self._choice(choice, event.usage is None, now)

    def _choice(self, choice: _Choice, count_ids: bool, now: float) -> None:
        delta = choice.delta
        if count_ids and choice.token_ids:
            self._new += len(choice.token_ids)
        text = choice.text if delta is None else delta.content or delta.reasoning or delta.reasoning_content
        if text or (delta is not None and delta.tool_calls is not None):
            self._piece(now)
            self.measured.text.append(text or "")
        if choice.finish_reason is not None:
            self.finished = True
            if not self.measured.ttft or (self._told and self._new):
                self._piece(now)  # tokens without any text
            self.measured.latency = now - self.measured.start

    def _piece(self, now: float) -> None:
        m = self.measured
        if m.ttft:
            m.gaps.append(now - self._last)
        else:
            m.ttft = now - m.start
        if self._new or self._told:
            m.counts.append(self._new)
            self._told += self._new
            self._new = 0
        self._last = now


class Target:
    """A server, a model on it, one of its endpoints, and what every request's body holds besides the prompt."""

    def __init__(self, client: HttpClient, model: str, endpoint: str, extra_body: dict[str, Any], timeout: float):
        self.client, self.model, self.endpoint, self.timeout = client, model, endpoint, timeout
        self._path = ENDPOINTS[endpoint]
        self._common = {"model": model, "stream": True, "stream_options": {"include_usage": True}, **extra_body}

    def body(self, plan: Plan) -> bytes:
        if self.endpoint == "chat":
            messages = [{"role": "user", "content": plan.prompt}]
            return msgspec.json.encode({**self._common, "messages": messages, "max_completion_tokens": plan.output_len})
        return msgspec.json.encode({**self._common, "prompt": plan.prompt, "max_tokens": plan.output_len})

    async def send(self, plan: Plan, arrival: float | None = None) -> Measured:
        """Run one request to its end. Failures are in the result, not raised."""
        body = self.body(plan)
        measured = Measured(start=time.perf_counter())
        if arrival is not None:
            measured.queue_time = max(0.0, measured.start - arrival)
        reader = StreamReader(measured)
        try:
            async with asyncio.timeout(self.timeout):
                status = await self.client.send("POST", self._path, body, reader)
        except TransportError as e:
            measured.error = str(e)
        except TimeoutError:
            measured.error = f"no end within {self.timeout:g} s"
        else:
            if status != 200:
                shown = (reader.body + reader._rest)[:500].decode("utf-8", "replace").strip()
                measured.error = f"HTTP {status}: {shown}"
            elif not reader.finished:
                measured.error = measured.error or "the stream ended without a finish_reason"
        if measured.success and not measured.output_tokens:  # no usage was sent: count the pieces
            measured.output_tokens = sum(measured.counts) or len(measured.gaps) + 1
        return measured

    async def largest_token_id(self) -> int | None:
        """A power of two below which the server takes token ids as prompt; None: it takes none."""
        if self.endpoint != "completions":
            return None
        limit = 1 << 15
        while limit >= 64:
            if (await self.send(Plan([limit - 1] * 2, 1))).success:
                return limit
            limit //= 2
        return None

    async def check(self) -> None:
        """One small request. Raises BenchmarkError with what the server says."""
        measured = await self.send(Plan("Hello", 2))
        if not measured.success:
            raise BenchmarkError(f"a first small request failed: {measured.error}")


async def first_model(client: HttpClient) -> str:
    status, answer = await client.json("/v1/models")
    try:
        return str(answer["data"][0]["id"])
    except (LookupError, TypeError):
        raise BenchmarkError(f"GET /v1/models does not list a model (HTTP {status}); name one with --model") from None
