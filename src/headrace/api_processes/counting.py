"""Limits and metrics of one HTTP process among several: the server's process counts for all of them, and is asked."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection

from headrace.api.config import ServerConfig
from headrace.api.errors import ApiError
from headrace.api.limits import Limits, Ticket
from headrace.api_processes.wire import (
    Admit,
    Answer,
    Answered,
    Begun,
    Counted,
    Ended,
    Enter,
    Left,
    Page,
    PageWanted,
    Question,
    Refused,
    Returned,
    SampleEnded,
    StateWanted,
)
from headrace.engine.interface import AsyncEngine
from headrace.metrics.prometheus import SampleRecord, counted_path

Say = Callable[[Counted], None]


class Questions:
    """Those that wait for their answer."""

    def __init__(self, say: Say):
        self.say = say
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Answer]] = {}

    def new_number(self) -> int:
        return next(self._numbers)

    async def ask(self, question: Question) -> Answer:
        """Raises the ApiError of a refusal."""
        future = self._waiting[question.number] = asyncio.get_running_loop().create_future()
        try:
            self.say(question)
            answer = await future
        finally:
            del self._waiting[question.number]
        if isinstance(answer, Refused):
            raise ApiError(answer.status, answer.message, code=answer.code, headers=answer.headers)
        return answer

    def answered(self, answer: Answer) -> None:
        future = self._waiting.get(answer.number)
        if future is not None and not future.done():
            future.set_result(answer)


class RemoteTicket(Ticket):
    """An admission that the server's process has given, and that goes back to it."""

    def __init__(self, number: int, say: Say):
        self._number, self._say = number, say

    def started(self, num_tokens: int) -> None:
        self._say(Begun(self._number, num_tokens))

    def ended(self) -> None:
        self._say(Ended(self._number))

    def __exit__(self, *_: object) -> None:
        self._say(Returned(self._number))


class RemoteLimits(Limits):
    """Asks before it lets in. Whoever stops asking before the answer comes gives back what he may have got."""

    def __init__(self, engine: AsyncEngine, config: ServerConfig, questions: Questions):
        super().__init__(engine, config)
        self._questions = questions
        self._entered: dict[int, list[int]] = {}  # by key: the numbers of its requests

    async def ready(self) -> None:
        """Asks before it says that the model is being loaded: another process may have told a client that it is there."""
        status = self.engine.status()
        if status.alive and not status.loaded:
            await self._questions.ask(StateWanted(self._questions.new_number()))
        self.check_ready()

    async def admit(self, num_samples: int, num_tokens: int) -> Ticket:
        questions = self._questions
        number = questions.new_number()
        try:
            await questions.ask(Admit(number, num_samples, num_tokens))
        except asyncio.CancelledError:
            questions.say(Returned(number))
            raise
        return RemoteTicket(number, questions.say)

    async def enter(self, key: int) -> None:
        questions = self._questions
        number = questions.new_number()
        try:
            await questions.ask(Enter(number, key))
        except asyncio.CancelledError:
            questions.say(Left(number))
            raise
        self._entered.setdefault(key, []).append(number)

    def leave(self, key: int) -> None:
        self._questions.say(Left(self._entered[key].pop()))


class RemoteMetrics:
    """As PrometheusMetrics for the HTTP layer: counted and shown by the server's process."""

    def __init__(self, questions: Questions):
        self._questions = questions

    def sample_ended(self, record: SampleRecord) -> None:
        self._questions.say(SampleEnded(record))

    def answered(self, path: str, status: int, ignored: Collection[str] = ()) -> None:
        self._questions.say(Answered(counted_path(path), status, list(ignored)))

    async def page(self) -> tuple[bytes, str]:
        page = await self._questions.ask(PageWanted(self._questions.new_number()))
        assert isinstance(page, Page)
        return page.data, page.media_type
