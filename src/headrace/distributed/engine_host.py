"""Runs the requests of another process in this one's engine: the other end of a RemoteEngine.

What a request gets in one turn of the engine travels with what the others of that process get. A reader that does not keep up
holds up nobody: while its pipe is full nothing more is taken from its streams, and the engine merges their news, which each
request's `max_tokens` bounds. When the reader dies all that it has asked for is aborted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from functools import partial

from headrace.distributed.pipe import Pipe
from headrace.distributed.remote_wire import Cancel, Failed, Submit, ToEngine, Tokens
from headrace.engine.interface import AsyncEngine
from headrace.engine.messages import EngineOutput
from headrace.errors import HeadraceError

logger = logging.getLogger(__name__)


class EngineHost:
    """`prefix`: begins the ids that this reader's requests have in the engine."""

    def __init__(self, engine: AsyncEngine, pipe: Pipe, prefix: str = ""):
        self.engine, self.pipe, self.prefix = engine, pipe, prefix
        self._runs: dict[int, asyncio.Task[None]] = {}
        self._tokens = Tokens([], [], [])
        self._due = False

    @property
    def num_requests(self) -> int:
        return len(self._runs)

    def heard(self, message: ToEngine) -> None:
        if isinstance(message, Cancel):
            if (task := self._runs.get(message.number)) is not None:
                task.cancel()
        else:
            task = self._runs[message.number] = asyncio.create_task(self._run(message))
            task.add_done_callback(partial(self._ended, message.number))  # a task cancelled at once never runs

    def close(self) -> None:
        """Nobody reads any more."""
        for task in self._runs.values():
            task.cancel()

    async def _run(self, asked: Submit) -> None:
        try:
            await (self._generate(asked) if asked.pooling is None else self._embed(asked))
        except Exception as error:
            if not isinstance(error, HeadraceError):
                logger.exception("request %s%s failed", self.prefix, asked.id)
            self._tell()  # what it had before
            self.pipe.say(Failed.of(asked.number, error))

    def _ended(self, number: int, _: asyncio.Task[None]) -> None:
        del self._runs[number]

    async def _generate(self, asked: Submit) -> None:
        number, told_in = asked.number, None  # the message with its last news: in one, tokens come before news
        assert asked.params is not None

        def add(news: EngineOutput) -> None:
            nonlocal told_in
            if told_in is not None and told_in is not self._tokens and _is_plain(news):
                self._tokens.numbers += [number] * len(news.token_ids)
                self._tokens.tokens += news.token_ids
            else:
                told_in, news.id = self._tokens, ""
                self._tokens.news.append((number, news))
            if not self._due:
                self._due = True
                asyncio.get_running_loop().call_soon(self._tell)

        def take(news: EngineOutput) -> bool:
            if self.pipe.full:
                return False
            add(news)
            return True

        outputs = self.engine.generate(
            self.prefix + asked.id, asked.prompt_ids, asked.params, priority=asked.priority, cache_salt=asked.cache_salt,
            taker=take,
        )  # fmt: skip
        async with contextlib.aclosing(outputs):
            async for news in outputs:
                add(news)
                if self.pipe.full:
                    await self.pipe.room()

    async def _embed(self, asked: Submit) -> None:
        assert asked.pooling is not None
        vector = await self.engine.embed(
            self.prefix + asked.id, asked.prompt_ids, asked.pooling, priority=asked.priority, cache_salt=asked.cache_salt
        )
        self.pipe.say(Tokens([], [], [(asked.number, EngineOutput("", finish_reason="stop", embedding=vector))]))

    def _tell(self) -> None:
        self._due = False
        tokens = self._tokens
        if tokens.numbers or tokens.news:
            self._tokens = Tokens([], [], [])
            self.pipe.say(tokens)
            self.pipe.flush()


def _is_plain(news: EngineOutput) -> bool:
    """Tokens and nothing else that their reader does not know from the first news."""
    return news.finish_reason is None and news.logprobs is None and news.prompt_logprobs is None and news.embedding is None
