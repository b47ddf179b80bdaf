"""The page's feed where several processes serve HTTP: cores show themselves to the server's process, a viewer is at another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from headrace.api.errors import ApiError
from headrace.api.glass_hub import GlassHub, TooManyViewersError, Viewer
from headrace.api_processes.counting import Questions
from headrace.api_processes.wire import Granted, Look, LookAway, More, Refused, Shown, TokensShown, TokensWanted
from headrace.distributed.pipe import Pipe


class RemoteViewer:
    """A viewer of the server's process: it is asked for more only when its reader has taken what there was."""

    def __init__(self, number: int, questions: Questions):
        self._number, self._questions = number, questions

    async def next(self) -> bytes:
        shown = await self._questions.ask(More(self._questions.new_number(), self._number))
        assert isinstance(shown, Shown)
        return shown.data


class RemoteGlass:
    """A `Glass` whose hub is in the server's process."""

    def __init__(self, questions: Questions):
        self._questions = questions

    @asynccontextmanager
    async def look(self, core: int) -> AsyncIterator[RemoteViewer]:
        number = self._questions.new_number()
        try:
            await self._questions.ask(Look(number, core))
        except ApiError as e:
            raise TooManyViewersError(e.message) from None
        except asyncio.CancelledError:
            self._questions.say(LookAway(number))
            raise
        try:
            yield RemoteViewer(number, self._questions)
        finally:
            self._questions.say(LookAway(number))

    async def token_ids(self, request_id: str, start: int, stop: int) -> list[int] | None:
        shown = await self._questions.ask(TokensWanted(self._questions.new_number(), request_id, start, stop))
        assert isinstance(shown, TokensShown)
        return shown.ids


class GlassDesk:
    """The other end: the viewers of one HTTP process."""

    def __init__(self, hub: GlassHub, pipe: Pipe):
        self._hub, self._pipe = hub, pipe
        self._viewers: dict[int, Viewer] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}  # by viewer: waits for more

    def heard(self, message: Look | More | LookAway | TokensWanted) -> None:
        if isinstance(message, Look):
            self._pipe.say(self._look(message))
        elif isinstance(message, More):
            self._more(message)
        elif isinstance(message, LookAway):
            self._away(message.number)
        else:
            ids = self._hub.known_ids(message.request_id, message.start, message.stop)
            self._pipe.say(TokensShown(message.number, ids))

    def _look(self, question: Look) -> Granted | Refused:
        try:
            self._viewers[question.number] = self._hub.open(question.core)
        except TooManyViewersError as e:
            return Refused(question.number, 429, str(e), "too_many_viewers", {})
        return Granted(question.number)

    def _more(self, question: More) -> None:
        viewer = self._viewers.get(question.viewer)
        if viewer is None:
            self._pipe.say(Shown(question.number, b""))
        else:
            self._tasks[question.viewer] = asyncio.create_task(self._show(question.number, viewer))

    async def _show(self, number: int, viewer: Viewer) -> None:
        self._pipe.say(Shown(number, await viewer.next()))

    def _away(self, number: int) -> None:
        if (task := self._tasks.pop(number, None)) is not None:
            task.cancel()
        if (viewer := self._viewers.pop(number, None)) is not None:
            self._hub.close(viewer)

    def close(self) -> None:
        for number in list(self._viewers):
            self._away(number)
