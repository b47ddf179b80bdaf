"""Requests in flight as their client holds them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec

from headrace.engine.messages import EngineOutput, EngineRequest
from headrace.errors import ParameterError

Taker = Callable[[EngineOutput], bool]


class Stream:
    """A request in flight: what is needed to send it again, and the news that its reader has not taken yet.

    `taker`: see `AsyncEngine.generate`; `offers`: of all that have one.
    """

    __slots__ = (
        "_offered", "_offers", "_reader", "_taker", "arrival", "deaths", "ended", "first", "interrupted", "kills", "last",
        "load", "news", "num_cached", "num_in_core", "request", "sent", "slot",
    )  # fmt: skip

    def __init__(self, request: EngineRequest, offers: Offers, taker: Taker | None = None):
        self.request = request
        self._offers, self._taker = offers, taker
        self._offered = False  # the taker is about to be asked
        self.interrupted = False  # by a death of the core: the core's times are then not the whole
        self.news: EngineOutput | None = None  # merged: a slow reader costs one entry, bounded by max_tokens
        self._reader: asyncio.Future[None] | None = None
        self.arrival = time.monotonic()
        self.first = self.last = 0.0  # time.monotonic() of the first and the latest tokens; 0: none yet
        self.ended = False
        self.num_cached = 0
        self.slot: Any = None  # the engine.slot.Slot whose core has it, or will try it; None: any may have it
        self.load = 0  # tokens that it counts for there
        self.sent = False  # to the present core
        self.num_in_core = 0  # tokens got since then
        # cores that ended by themselves or hung, and that somebody killed, in a row; but for the first, it was unproven at each
        self.deaths = self.kills = 0

    def detach(self) -> None:
        """No core has it; whichever gets it begins anew."""
        self.slot, self.load, self.sent, self.num_in_core = None, 0, False, 0

    def push(self, news: EngineOutput) -> None:
        request = self.request
        if request.output_ids:
            news.num_cached_tokens = self.num_cached  # not what it found when it was sent again
        else:
            self.num_cached = news.num_cached_tokens
        request.output_ids += news.token_ids
        self.num_in_core += len(news.token_ids)
        if news.prompt_logprobs is not None:  # delivered: not to be computed again
            request.params = msgspec.structs.replace(request.params, prompt_logprobs=None)
        self.news = news if self.news is None else merged(self.news, news)
        self._wake()

    def push_token(self, token: int) -> None:
        """As `push` of one more token and nothing else."""
        self.request.output_ids.append(token)
        self.num_in_core += 1
        if self.news is None:
            self.news = EngineOutput(self.request.id, [token])
            self.news.num_cached_tokens = self.num_cached
        else:
            self.news.token_ids.append(token)
        self._wake()

    def _wake(self) -> None:
        reader = self._reader
        if reader is None or reader.done() or self._offered:
            return
        if self._taker is None:
            reader.set_result(None)
        else:
            self._offered = True
            self._offers.add(self)

    def offer(self) -> None:
        """News to the taker while the reader waits, and to the reader what that leaves, and what the taker raises."""
        self._offered = False
        reader, news, taker = self._reader, self.news, self._taker
        if reader is None or reader.done() or news is None:
            return
        try:
            if news.finish_reason is None and taker is not None and taker(news):
                self.news = None
            else:
                reader.set_result(None)
        except Exception as error:
            reader.set_exception(error)

    async def next(self) -> EngineOutput:
        if self.news is None:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        news, self.news = self.news, None
        assert news is not None
        return news


class Offers:
    """Streams whose takers are to be asked: all of a turn of the event loop together, when it has read what there is."""

    def __init__(self) -> None:
        self._due: list[Stream] = []

    def add(self, stream: Stream) -> None:
        if not self._due:
            asyncio.get_running_loop().call_soon(self._make)
        self._due.append(stream)

    def _make(self) -> None:
        due, self._due = self._due, []
        for stream in due:
            stream.offer()


class Streams:
    """All that live, by id, and those that have been aborted and that a core still has. `ended` is told once of each."""

    def __init__(self, ended: Callable[[Stream, EngineOutput, float], None]):
        self._ended = ended
        self._offers = Offers()
        self.live: dict[str, Stream] = {}
        self.leaving: dict[str, Stream] = {}
        self.waiting_tokens = 0  # prompts of those without any output

    def __len__(self) -> int:
        return len(self.live)

    def add(self, request: EngineRequest, taker: Taker | None = None) -> Stream:
        if request.id in self.live or request.id in self.leaving:
            raise ParameterError("request_id", request.id, "an id that no live request has")
        stream = self.live[request.id] = Stream(request, self._offers, taker)
        self.waiting_tokens += len(request.prompt_ids)
        return stream

    def of(self, slot: object) -> list[Stream]:
        """Those of a slot; of None those that any may have."""
        return [stream for stream in self.live.values() if stream.slot is slot]

    def leaving_of(self, slot: object) -> list[Stream]:
        return [stream for stream in self.leaving.values() if stream.slot is slot]

    def with_adapter(self, digest: str) -> bool:
        """Whether somebody has it."""
        return any(s.request.params.lora == digest for of in (self.live, self.leaving) for s in of.values())

    def end(self, stream: Stream) -> None:
        stream.ended = True
        del self.live[stream.request.id]
        if stream.load:
            stream.slot.left(stream)
        if not stream.request.output_ids:
            self.waiting_tokens -= len(stream.request.prompt_ids)

    def fail(self, stream: Stream, why: str) -> None:
        news = EngineOutput(stream.request.id, finish_reason="error", error=why)
        self.end(stream)
        stream.push(news)
        self._ended(stream, news, time.monotonic())

    def forget(self, stream: Stream) -> None:
        """Nobody waits for this any more."""
        slot = stream.slot
        self.end(stream)
        if slot is not None and slot.abort(stream):
            self.leaving[stream.request.id] = stream  # until the core says that it has let go
        else:
            self._gone(stream)
        if slot is not None:
            slot.tick()

    def core_gone(self, slot: object) -> None:
        """And with it what it had not let go of."""
        for stream in self.leaving_of(slot):
            self._gone(self.leaving.pop(stream.request.id))

    def _gone(self, stream: Stream) -> None:
        """Aborted, and there is no core that could say so."""
        self._ended(stream, EngineOutput(stream.request.id, finish_reason="abort"), time.monotonic())


def merged(a: EngineOutput, b: EngineOutput) -> EngineOutput:
    """Two pieces of news of one request as one. The lists of `a` are extended, not copied: it is not to be used again."""
    b.token_ids = _joined(a.token_ids, b.token_ids)
    b.logprobs = _joined(a.logprobs, b.logprobs)
    if b.prompt_logprobs is None:
        b.prompt_logprobs = a.prompt_logprobs
    return b


def _joined(a: Any, b: Any) -> Any:
    if not a or not b:
        return a or b
    a += b
    return a
