"""Requests in flight as their client holds them."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec

from headrace.engine.messages import EngineOutput, EngineRequest


class Stream:
    """A request in flight: what is needed to send it again, and the news that its reader has not taken yet."""

    __slots__ = (
        "_reader", "arrival", "deaths", "ended", "first", "interrupted", "kills", "last", "news", "num_cached", "num_in_core",
        "request", "sent",
    )  # fmt: skip

    def __init__(self, request: EngineRequest):
        self.request = request
        self.interrupted = False  # by a death of the core: the core's times are then not the whole
        self.news: EngineOutput | None = None  # merged: a slow reader costs one entry, bounded by max_tokens
        self._reader: asyncio.Future[None] | None = None
        self.arrival = time.monotonic()
        self.first = self.last = 0.0  # time.monotonic() of the first and the latest tokens; 0: none yet
        self.ended = False
        self.num_cached = 0
        self.sent = False  # to the present core
        self.num_in_core = 0  # tokens got since then
        # cores that ended by themselves or hung, and that somebody killed, in a row; but for the first, it was unproven at each
        self.deaths = self.kills = 0

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
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def next(self) -> EngineOutput:
        if self.news is None:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        news, self.news = self.news, None
        assert news is not None
        return news


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
