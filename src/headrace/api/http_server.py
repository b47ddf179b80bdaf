"""The HTTP server under the application: uvicorn, with the options that all processes that serve share, and bounds on heads
and connections.

uvicorn waits for ever for a request that has begun, however slowly it comes and however long its head is. Bodies, and heads
that are whole, have their bounds in the application. Nor does it tell a request that its client has left when that has sent
another behind it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import select
import ssl
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.api.errors import ApiError, unavailable
from headrace.api.http_forms import PlainForms
from headrace.api.middleware import OPEN_PATHS, plain_path
from headrace.api.sse import DIRECT
from headrace.api.tls_door import TlsDoor

logger = logging.getLogger("headrace.server")
HEAD_SECONDS = 60.0  # for the head of a request to come
HEAD_BYTES = 1 << 20  # of one that is not whole yet
HEADS_BYTES = 64 << 20  # of all those together; beyond it a head may have
SMALL_HEAD = 64 << 10  # so many
FILES = 65_536  # that may be open at least, where the system lets a process have so many
BEYOND = 32  # connections beyond those that may be open: whether the server lives is answered there, and nothing else
FEW_FILES = 128  # with fewer than these the server says so
OTHER_FILES = 256  # that connections leave to the rest: a core that is to be started again, its sockets, what is read
QUIET_SECONDS = 10.0  # between lines of the log about connections that are refused
TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


def http_server(app: Starlette, log_level: str, tls: ssl.SSLContext | None) -> uvicorn.Server:
    """Not started. It leaves signals to its process, which drains first."""
    options = uvicorn.Config(
        app, log_config=None, log_level=log_level, access_log=False, lifespan="on", timeout_keep_alive=75, server_header=False
    )
    options.load()
    most = room_for_connections()
    bounds = {"most": most, "spare": max(2, min(BEYOND, most // 4)), "beyond": {}, "idle": {}}
    protocol: Any = options.http_protocol_class
    forms = (PlainForms,) if hasattr(protocol, "on_headers_complete") else ()  # httptools'
    kind: Any = type("HttpProtocol", (BoundedHeads, *forms, protocol), bounds)
    doors: dict[TlsDoor, None] = {}

    def behind_tls(**parts: Any) -> TlsDoor:
        assert tls is not None
        inner = kind(**parts)
        return TlsDoor(inner, tls, doors, inner.connections, most + 2 * BEYOND)

    options.http_protocol_class = kind if tls is None else behind_tls  # type: ignore[assignment]
    server = uvicorn.Server(options)
    server.capture_signals = contextlib.nullcontext  # type: ignore
    return server


def room_for_connections() -> int:
    """How many there may be at a time. Raises the bound of this process's open files as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < files:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
            soft = files
    files = FILES if soft == resource.RLIM_INFINITY else soft
    most = max(files - OTHER_FILES, files // 2)
    if files < FEW_FILES:
        told = "only %d files may be open (ulimit -n), and so %d connections: at least %d are wanted"
        logger.warning(told, files, most, 2 * OTHER_FILES)
    return most


def too_many_connections(most: int) -> ApiError:
    error = unavailable(f"{most} connections are open, and no more may be.", 5, "too_many_connections")
    error.headers["connection"] = "close"
    return error


def whole_answer(error: ApiError) -> bytes:
    """Where no request has come that it could answer."""
    body = error.body()
    headers = error.headers | {"content-type": "application/json", "content-length": str(len(body))}
    lines = ["HTTP/1.1 503 Service Unavailable", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


class Beyond:
    """The application on a connection of those that are too many: who asks whether the server lives must not hear that it does
    not, and all others do. Then it is closed."""

    def __init__(self, app: ASGIApp, most: int):
        self.app, self.most = app, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and plain_path(scope["path"]) not in OPEN_PATHS:
            await too_many_connections(self.most).response(scope)(scope, receive, send)
            return

        async def and_close(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        await self.app(scope, receive, and_close)


class BoundedHeads(asyncio.Protocol):
    """Before one of uvicorn's protocols; knows its `loop`, `transport`, all `connections` of the server, and `cycle`: the
    request at hand, or the last."""

    app: Any
    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    connections: set[Any]
    most: int  # connections
    spare: int  # connections beyond those
    beyond: dict[BoundedHeads, None]  # of the server: connections beyond those without a request yet, the oldest first
    idle: dict[BoundedHeads, None]  # of the server: connections that are kept between requests, the longest so first
    quiet_until = 0.0  # of the server
    heads = 0  # of the server: bytes of heads that are not whole yet
    cycle: Any
    timeout_keep_alive_task: asyncio.TimerHandle | None  # while it is kept
    _late: asyncio.TimerHandle | None = None  # while there is no request, or one has come in part
    _bytes = 0  # of that part
    _running: Any = None  # the request that is being answered; `cycle` may be one behind it

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.most and not self._finds_room():
            self.app = Beyond(self.app, self.most)
            self.beyond[self] = None
            self._tell_of_many()
            if len(self.beyond) > self.spare:
                next(iter(self.beyond))._refuse()
        self._late = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def _finds_room(self) -> bool:
        """Whether another connection could go, which was kept for nothing."""
        other = next((other for other in self.idle if other._is_silent()), None)
        if other is not None:
            del self.idle[other]
            other.transport.abort()  # under TLS the other side might say for long that it is not done
        return other is not None

    def _is_silent(self) -> bool:
        """Whether nothing is left to be sent, and no request has come that was not read yet: nobody would answer it."""
        unread = select.poll()
        unread.register(self.transport.get_extra_info("socket").fileno(), select.POLLIN)
        return not self.transport.get_write_buffer_size() and not unread.poll(0)

    def on_response_complete(self) -> None:
        super().on_response_complete()  # type: ignore[misc]
        if self.timeout_keep_alive_task is not None:
            self.idle[self] = None

    def _refuse(self) -> None:
        self._rest()
        self.transport.write(whole_answer(too_many_connections(self.most)))
        self.transport.close()

    def _tell_of_many(self) -> None:
        kind, now = type(self), self.loop.time()
        if now >= kind.quiet_until:
            kind.quiet_until = now + QUIET_SECONDS
            logger.warning("%d connections are open, and others are refused: ulimit -n bounds them", self.most)

    def data_received(self, data: bytes) -> None:
        self.idle.pop(self, None)
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._rest()
            return
        self._late = self._late or self.loop.call_later(HEAD_SECONDS, self._give_up)
        if self.cycle is None or not self.cycle.more_body:  # else it is a body that nobody wants any more
            self._bytes += len(data)
            type(self).heads += len(data)
        most = HEAD_BYTES if self.heads <= HEADS_BYTES else SMALL_HEAD
        if self._bytes > most and not self.transport.is_closing():
            self._rest()
            self.transport.write(TOO_LARGE)
            self.transport.close()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._running = cycle
        if hasattr(cycle, "chunked_encoding"):  # httptools'
            cycle.scope[DIRECT] = Chunks(cycle)
        super()._start_asgi_task(cycle, app)  # type: ignore[misc]

    def connection_lost(self, exc: Exception | None) -> None:
        if self._running is not None and self._running is not self.cycle:  # uvicorn tells the last one only
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)
        self.idle.pop(self, None)
        self._rest()

    def _rest(self) -> None:
        type(self).heads -= self._bytes
        self._bytes = 0
        self.beyond.pop(self, None)
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _give_up(self) -> None:
        self._late = None
        self.transport.close()


class Chunks:
    """Past the server's `send`, a coroutine with a dict for each part of a body: a `Direct` of one request of uvicorn's."""

    def __init__(self, cycle: Any):
        self._cycle = cycle

    def free(self) -> bool:
        cycle = self._cycle
        return bool(cycle.chunked_encoding) and not (cycle.disconnected or cycle.flow.write_paused)

    def write(self, data: bytes) -> None:
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
