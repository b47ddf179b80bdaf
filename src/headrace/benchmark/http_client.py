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

from headrace.errors import HeadraceError, ParameterError

Sink = Callable[[bytes, float], None]  # a piece of the body, the time (perf_counter) at which it was read
_HEAD, _SIZE, _CHUNK, _CHUNK_END, _TRAILER, _LENGTH, _UNTIL_CLOSE, _DONE = range(8)
_MAX_HEAD = 65536


class TransportError(HeadraceError):
    """The connection could not be made or broke, or what came is not HTTP."""


class Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self.closed = False
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[int] | None = None
        self._state, self._rest, self._left = _DONE, b"", 0
        self._sink: Sink = lambda data, now: None
        self._status, self._keep_alive = 0, True

    def request(self, data: bytes, sink: Sink) -> asyncio.Future[int]:
        """Send; the future is the status, once the whole body has come. The sink gets the bodies of 200s and of others."""
        assert self._transport is not None and self._state == _DONE
        self._waiter = asyncio.get_running_loop().create_future()
        self._sink, self._state, self._status, self._keep_alive = sink, _HEAD, 0, True
        self._transport.write(data)
        return self._waiter

    def close(self) -> None:
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    @property
    def reusable(self) -> bool:
        return not self.closed and self._keep_alive and self._state == _DONE and not self._rest

    # ------------------------------------------------------------------------------------------- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._rest:
            data = self._rest + data
        try:
            at = self._parse(data, now)
        except (ValueError, IndexError):
            self._fail("what came is not HTTP")
            return
        self._rest = data[at:]

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        if self._state == _UNTIL_CLOSE:
            self._end()
        elif self._state != _DONE:
            self._fail(str(error) if error else "the server closed the connection")

    # ------------------------------------------------------------------------------------------------ the parser

    def _parse(self, data: bytes, now: float) -> int:
        """Take what is complete; returns how far."""
        at, pieces = 0, []
        while self._state != _DONE:
            if self._state == _CHUNK or self._state == _LENGTH:
                piece = data[at : at + self._left]
                at += len(piece)
                self._left -= len(piece)
                if piece:
                    pieces.append(piece)
                if self._left:
                    break
                self._state = _CHUNK_END if self._state == _CHUNK else _DONE
            elif self._state == _UNTIL_CLOSE:
                pieces.append(data[at:])
                at = len(data)
                break
            else:
                mark = b"\r\n\r\n" if self._state == _HEAD else b"\r\n"
                end = data.find(mark, at)
                if end < 0:
                    if len(data) - at > _MAX_HEAD:
                        raise ValueError
                    break
                line, at = data[at:end], end + len(mark)
                self._line(line)
        if pieces:
            self._sink(pieces[0] if len(pieces) == 1 else b"".join(pieces), now)
        if self._state == _DONE:
            self._end()
        return at

    def _line(self, line: bytes) -> None:
        if self._state == _HEAD:
            self._head(line)
        elif self._state == _SIZE:
            self._left = int(line.partition(b";")[0], 16)
            self._state = _CHUNK if self._left else _TRAILER
        elif self._state == _CHUNK_END:
            if line:
                raise ValueError
            self._state = _SIZE
        elif not line:  # the trailer's end
            self._state = _DONE

    def _head(self, head: bytes) -> None:
        first, *lines = head.split(b"\r\n")
        version, status = first.split(b" ", 2)[:2]
        if not version.startswith(b"HTTP/1"):
            raise ValueError
        headers = {k.strip().lower(): v.strip().lower() for k, _, v in (line.partition(b":") for line in lines)}
        if status.startswith(b"1"):
            return  # 100 Continue and the like: the real head follows
        self._status = int(status)
        self._keep_alive = headers.get(b"connection") != b"close" and version == b"HTTP/1.1"
        if b"chunked" in headers.get(b"transfer-encoding", b""):
            self._state = _SIZE
        elif b"content-length" in headers:
            self._left = int(headers[b"content-length"])
            self._state = _LENGTH if self._left else _DONE
        elif self._status in (204, 304):
            self._state = _DONE
        else:
            self._state, self._keep_alive = _UNTIL_CLOSE, False

    def _end(self) -> None:
        self._state = _DONE
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(self._status)

    def _fail(self, why: str) -> None:
        self._state, self._keep_alive = _DONE, False
        self.close()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(TransportError(why))


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

    async def json(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and decoded answer, None where that is not JSON."""
        pieces: list[bytes] = []
        encoded = None if body is None else json.dumps(body).encode()
        status = await self.send(method, path, encoded, lambda data, now: pieces.append(data))
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
