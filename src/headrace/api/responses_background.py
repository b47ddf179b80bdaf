"""Responses that are made without the connection that asked for them (`background`): each is a stream into memory, where its
events stay if the request wants a stream, so that one can be left and taken up again.

    POST --admission, a place in the store--> task: the engine --events--> Recorder --> store
    GET ?stream=true&starting_after=N ----------------------------------------^ those after N, then as they come
"""

from __future__ import annotations

import asyncio
import logging
import time

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from headrace.api.context import ApiContext
from headrace.api.errors import ApiError, as_api_error, unsupported
from headrace.api.generation import Answer, Generation, StreamedAnswer, seconds_left
from headrace.api.lifeline import DeadlinePassed, Lifeline
from headrace.api.limits import Ticket
from headrace.api.response_store import ResponseStore, Stored
from headrace.api.sse import DIRECT, EventStream, named_event

logger = logging.getLogger(__name__)
ROOM = 16 * 2**10  # bytes for events that are taken of the store at a time
EVENT_BYTES = 64  # what an event takes beside its bytes
PART = 256  # events in one write


class Recorder:
    """A connection's place in a stream, which has a `Direct`, too. What it keeps is of the store's bytes; where these have no
    room for an event, none is kept any more."""

    def __init__(self, store: ResponseStore, stored: Stored, keep: bool):
        self.events: list[bytes] | None = [] if keep else None  # each at the place that its sequence_number says
        self.ended = False
        self._store, self._stored = store, stored
        self._held = self._left = 0  # bytes of the store; those of them that have no event yet
        self._news: asyncio.Event | None = None  # made when a reader waits

    def free(self) -> bool:
        return True

    async def send(self, message: Message) -> None:
        self.write(message.get("body", b""))

    def write(self, data: bytes) -> None:
        if self.events is None:
            return
        events = [event + b"\n\n" for event in data.split(b"\n\n")[:-1]]
        size, kept = len(data) + EVENT_BYTES * len(events), not self._stored.gone  # else its end is left, for who reads it
        if kept and size > self._left and not self._take(max(size, min(ROOM, self._store.max_bytes // 64))):
            self.drop()
        else:
            self._left -= size
            self.events += events
        self._tell()

    def drop(self) -> None:
        """Keep none any more."""
        self._store.grow(self._stored, -self._held)
        self.events, self._held, self._left = None, 0, 0
        self._tell()

    def _take(self, size: int) -> bool:
        if not self._store.grow(self._stored, size):
            return False
        self._held += size
        self._left += size
        return True

    def end(self) -> None:
        self.ended = True
        self._store.grow(self._stored, -self._left)
        self._tell()

    def _tell(self) -> None:
        if self._news is not None:
            self._news.set()
            self._news = None

    async def news(self) -> None:
        """Until there are more events, or there will be none."""
        if self._news is None:
            self._news = asyncio.Event()
        await self._news.wait()


class BackgroundAnswer(Answer):
    """An answer that can be made so."""

    status: str

    def queued(self) -> bytes:
        """What its stream begins with."""
        raise NotImplementedError


def in_background(generation: Generation, answer: BackgroundAnswer, stored: Stored, ticket: Ticket) -> Response:
    """Begin it: the response as it is in the beginning, or its stream."""
    ctx, request = answer.ctx, generation.request
    generation.line = Lifeline(_nothing, seconds_left(request))
    recorder = stored.recorder = Recorder(ctx.responses, stored, keep=bool(answer.body.stream))
    begun = answer.queued()
    recorder.write(begun)
    task = request.scope["state"]["beyond"] = asyncio.create_task(_make(generation, answer, recorder))
    ctx.tasks.add(task)

    def over(_: asyncio.Task[None]) -> None:
        ctx.tasks.discard(task)
        with ticket:
            ctx.responses.release(stored)
            recorder.end()

    task.add_done_callback(over)
    if answer.body.stream:
        return StreamedAnswer(Following(ctx, request, recorder, begun.count(b"\n\n"), begun))
    return Response(stored.document(), media_type="application/json")


async def _nothing() -> Message:
    """Of a connection that nobody closes."""
    await asyncio.get_running_loop().create_future()
    raise AssertionError


async def _make(generation: Generation, answer: BackgroundAnswer, recorder: Recorder) -> None:
    try:
        await StreamedAnswer(generation)({"type": "http", DIRECT: recorder}, _nothing, recorder.send)
    except Exception as error:
        known = as_api_error(error)
        if known.status == 500 and not isinstance(error, ApiError):
            logger.exception("the background response %s failed", answer.id)
        recorder.write(answer.failure(known))
    finally:
        seconds = time.monotonic() - generation.arrival
        logger.info("%s background %s %s %.3fs", generation.request.state.request_id, answer.id, answer.status, seconds)


class Following(Generation):
    """The events of a recorder from one on, and those to come, for one reader."""

    def __init__(self, ctx: ApiContext, request: Request, recorder: Recorder, begin: int, before: bytes = b""):
        """`before`: those before `begin`, for whoever asked for the response and must have them, kept or not: they have its
        id. The deadline that he gave is the response's."""
        super().__init__(ctx, request, Followed(ctx, None, ""))
        self.recorder, self.next, self.before = recorder, begin, before
        if before:
            self.line = Lifeline(request.receive, None)

    async def run(self, stream: EventStream | None) -> None:
        assert stream is not None and isinstance(self.answer, Followed)
        recorder = self.recorder
        if self.before:
            await stream.write(self.before)
        while (events := recorder.events) is not None:
            if part := events[self.next : self.next + PART]:
                self.next += len(part)
                await stream.write(b"".join(part))
            elif recorder.ended:
                self.answer.told = True
                return
            else:
                await recorder.news()
        raise ApiError(503, "The events of this response have no room any more: ask for its state.", code="events_not_kept")


class Followed(Answer):
    """What a reader is told beside the events, which say all the rest."""

    told = False  # all of them

    def closing(self) -> bytes:
        return b"" if self.told else self.failure(DeadlinePassed())

    def failure(self, error: ApiError) -> bytes:
        fields = {"type": "error", "code": error.code or "server_error", "message": error.message, "param": error.param}
        return named_event(b"error", msgspec.json.encode(fields))


def followed(ctx: ApiContext, request: Request, stored: Stored, begin: int) -> Response:
    """The stream of a response that is kept, from its event `begin` on. Raises ApiError where there is none."""
    recorder = stored.recorder
    if recorder is None or recorder.events is None:
        why = "its events are not kept: only those of a response that was asked for with background and stream are"
        raise unsupported("stream", why + ", as long as --responses-store-bytes has room for them")
    return StreamedAnswer(Following(ctx, request, recorder, begin))
