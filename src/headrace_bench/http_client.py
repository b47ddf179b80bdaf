"""A small HTTP/1.1 client for load: keep-alive, bodies handed on as they arrive with the time of the read.

It does what a benchmark needs and no more, so that a core of the client keeps up with far more streams than a server
sends: no redirects, no compression, no proxies.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import httptools

from headrace.errors import HeadraceError, ParameterError

Sink = Callable[[bytes, float], None]  # a piece of the body, the time (perf_counter) at which it was read


class TransportError(HeadraceError):
    """The connection could not be made or broke, or what came is not HTTP."""


class Connection(asyncio.Protocol):
    """One connection, one request at a time. The parser is llhttp, which calls the methods of the second part."""

    def __init__(self) -> None:
        self.reusable = False  # the last answer has come to its end, and the connection stays open
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[int] | None = None

    def request(self, data: bytes, sink: Sink) -> asyncio.Future[int]:
        """Send; the future is the status, once the whole body has come. The sink gets the bodies of 200s and of others."""
        assert self._transport is not None
        self._waiter = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._sink, self._complete, self.reusable = sink, False, False
        self._sized = self._until_close = False
        self._transport.write(data)
        return self._waiter

    def close(self) -> None:
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._waiter is None or self._waiter.done():  # nobody has asked
            self.close()
            return
        self._pieces: list[bytes] = []
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._fail("what came is not HTTP")
            return
        if self._pieces:
            self._sink(self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces), now)
        if self._complete:
            self._end()

    def connection_lost(self, error: Exception | None) -> None:
        self.reusable = False
        if self._until_close:
            self._end()
        self._fail(str(error) if error else "the server closed the connection")

    def _end(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(self._parser.get_status_code())

    def _fail(self, why: str) -> None:
        self.close()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(TransportError(why))

    # ------------------------------------------------------------------------------------------ called by the parser

    def on_message_begin(self) -> None:
        self._sized = False
        if self._complete:  # another answer, for which nobody has asked
            self.reusable = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self._sized |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self._until_close = not self._sized

    def on_body(self, data: bytes) -> None:
        self._pieces.append(data)

    def on_message_complete(self) -> None:
        self._until_close = False
        if not self._complete and self._parser.get_status_code() >= 200:  # before it may come 100 Continue and the like
            self._complete, self.reusable = True, self._parser.should_keep_alive()


class HttpClient:
    """Requests to one server over as many connections as are needed; idle ones are used again, the newest first."""

    def __init__(self, url: str, api_key: str | None = None, headers: dict[str, str] | None = None):
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ParameterError("--base-url", url, "an address such as http://127.0.0.1:8000")
        self.host, self.port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        self.base_path = parts.path.rstrip("/").removesuffix("/v1")
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        fields = {"Host": parts.netloc.rpartition("@")[2], "Accept": "*/*", **(headers or {})}
        if api_key:
            fields["Authorization"] = f"Bearer {api_key}"
        if any(c in f"{k}{v}" for k, v in fields.items() for c in "\r\n"):
            raise ParameterError("--header", fields, "no line breaks")
        self._fields = "".join(f"{k}: {v}\r\n" for k, v in fields.items())
        self._idle: list[Connection] = []

    async def send(self, method: str, path: str, body: bytes | None, sink: Sink) -> int:
        """The status. Raises TransportError. A connection that the server closed while it was idle is replaced."""
        head = f"{method} {self.base_path}{path} HTTP/1.1\r\n{self._fields}"
        if body is not None:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        data = head.encode() + b"\r\n" + (body or b"")
        connection = await self._connection()
        try:
            return await connection.request(data, sink)
        except BaseException:
            connection.close()  # also when cancelled: the server shall stop
            raise
        finally:
            if connection.reusable:
                self._idle.append(connection)

    async def json(self, path: str) -> tuple[int, Any]:
        """Status and decoded answer of a GET, None where that is not JSON."""
        pieces: list[bytes] = []
        status = await self.send("GET", path, None, lambda data, now: pieces.append(data))
        try:
            return status, json.loads(b"".join(pieces))
        except ValueError:
            return status, None

    async def _connection(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
        try:
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_connection(Connection, self.host, self.port, ssl=self._ssl)
            return connection
        except OSError as e:
            raise TransportError(f"{self.host}:{self.port} cannot be reached ({e.strerror or e})") from None

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()
