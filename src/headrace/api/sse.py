"""Streams, of events or of lines: one write per burst, signs of life in long silences, a slow reader holds back only itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from starlette.types import Scope, Send

DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"
EVENTS, LINES = b"text/event-stream", b"application/x-ndjson"  # what a stream may be made of
HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx: do not collect the stream
]
RAW_SEND = "headrace.send"  # scope key: the server's own send, for body parts that no middleware looks at
DIRECT = "headrace.direct"  # scope key: a Direct, where the server has one


def event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def named_event(name: bytes, data: bytes) -> bytes:
    return b"event: " + name + b"\ndata: " + data + b"\n\n"


class Direct(Protocol):
    """The way of the next part of a body that needs no waiting."""

    def free(self) -> bool:
        """Whether the reader takes it at once."""

    def write(self, data: bytes) -> None: ...


class EventStream:
    """The body of one streamed answer. The response starts with the first write, so what fails before it has a status.

    A write returns when the server has taken the bytes; while the reader is slow it does not return, so its caller
    takes no more from the engine. Bytes whose write was cancelled are kept and go first in the next one.
    """

    __slots__ = (
        "_direct", "_idle", "_pending", "_send", "_start", "_time", "blocked", "ending", "last", "media_type", "on_stuck",
        "silence", "started",
    )  # fmt: skip

    def __init__(
        self, scope: Scope, send: Send, on_stuck: Callable[[], None], silence: Callable[[], bytes] = lambda: COMMENT,
        media_type: bytes = EVENTS,
    ):  # fmt: skip
        self.media_type = media_type
        self._start, self._send = send, scope.get(RAW_SEND, send)
        self._direct: Direct | None = scope.get(DIRECT)
        self._idle: asyncio.Event | None = None  # made when a second writer has to wait
        self._pending: list[bytes] = []
        self._time = asyncio.get_running_loop().time
        self.started = False
        self.blocked = False  # a write waits for the reader
        self.ending = False  # the last bytes are on their way
        self.last = self._time()  # when bytes were last given to the reader, or taken by it
        self.on_stuck = on_stuck  # called when the reader has taken nothing for too long
        self.silence = silence  # what shows a reader in a long silence that there is a server

    async def write(self, data: bytes) -> None:
        if self.ending:
            return  # a sign of life that was due when the end came: all others have written
        self._pending.append(data)
        while self.blocked:
            await self._wait()
        if self._pending:  # else another writer has taken it along
            await self._flush(True)

    @property
    def free(self) -> bool:
        """Whether `write_now` may be called: the answer has begun, nobody writes, and the reader keeps up."""
        busy = self.blocked or self._pending or self.ending or not self.started
        return self._direct is not None and not busy and self._direct.free()

    def write_now(self, data: bytes) -> None:
        """As `write`, which would not wait."""
        assert self._direct is not None
        self._direct.write(data)
        self.last = self._time()

    async def keep_alive(self) -> None:
        if not self.ending and (sign := self.silence()):
            await self.write(sign)

    async def end(self, data: bytes) -> None:
        self.ending = True
        self._pending.append(data)
        while self.blocked:
            await self._wait()
        await self._flush(False)

    async def _wait(self) -> None:
        """Another writer is at it."""
        if self._idle is None:
            self._idle = asyncio.Event()
        await self._idle.wait()

    async def _flush(self, more: bool) -> None:
        parts = self._pending
        count = len(parts)
        data = parts[0] if count == 1 else b"".join(parts)
        self.blocked = True
        self.last = self._time()  # a silence before was the engine's
        try:
            if not self.started:
                self.started = True
                headers = [(b"content-type", self.media_type), *HEADERS]
                await self._start({"type": "http.response.start", "status": 200, "headers": headers})
            await self._send({"type": "http.response.body", "body": data, "more_body": more})
            del parts[:count]
        finally:
            self.blocked = False
            if self._idle is not None:
                self._idle.set()
                self._idle = None
        self.last = self._time()


class Ticker:
    """One task for all open streams: writes into long silences and finds stuck readers. Lives while there are any."""

    def __init__(self, interval: float, write_timeout: float):
        self.interval, self.write_timeout = interval, write_timeout
        self.streams: set[EventStream] = set()
        self._task: asyncio.Task[None] | None = None

    def add(self, stream: EventStream) -> None:
        self.streams.add(stream)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    def remove(self, stream: EventStream) -> None:
        self.streams.discard(stream)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        writes: set[asyncio.Task[None]] = set()
        while self.streams:
            await asyncio.sleep(min(self.interval, self.write_timeout, 4.0) / 4)
            now = loop.time()
            for stream in list(self.streams):
                silence = now - stream.last
                if stream.blocked:
                    if silence >= self.write_timeout:
                        stream.on_stuck()
                elif silence >= self.interval:
                    task = loop.create_task(stream.keep_alive())
                    writes.add(task)
                    task.add_done_callback(writes.discard)
