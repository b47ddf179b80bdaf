"""A connection before its TLS: asyncio shows a server's connections when hands have been shaken, and nobody counts them before.

So clients who only connect would take every file that the process may have open. Here each is counted from the start, and where
there are too many the oldest of those that have not shaken hands goes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import Sized
from typing import Any


class TlsDoor(asyncio.Protocol):
    """Stands where a connection's protocol would, until hands are shaken; then it is `inner`'s.

    `doors`: of the server, the oldest first; `inside`: its connections that are through. At most `most` of both are kept open.
    """

    def __init__(self, inner: Any, context: ssl.SSLContext, doors: dict[TlsDoor, None], inside: Sized, most: int):
        self._inner, self._context, self._doors, self._inside, self._most = inner, context, doors, inside, most
        self._shaking: asyncio.Task[None] | None = None

    def connection_made(self, transport: Any) -> None:
        """The connection goes from this transport, which knows no TLS, to another one. Nothing of it has been read."""
        try:
            connection = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        except OSError:  # no file is left even for that
            return
        finally:
            transport.abort()
        connection.setblocking(False)
        self._doors[self] = None
        if len(self._doors) + len(self._inside) > self._most:
            oldest = next(iter(self._doors))
            del self._doors[oldest]
            if oldest is self:
                connection.close()
                return
            assert oldest._shaking is not None
            oldest._shaking.cancel()
        self._shaking = asyncio.get_running_loop().create_task(self._shake(connection))

    async def _shake(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError, TimeoutError):  # no TLS, another one's certificate, or gone
            try:
                await loop.connect_accepted_socket(lambda: self._inner, connection, ssl=self._context)
            finally:
                self._doors.pop(self, None)
