"""Requests in forms that uvicorn's fast protocol (httptools') gets wrong: offers of another protocol, and HTTP/1.0."""

from __future__ import annotations

import sys
from typing import Any

import httptools

OF_AN_OFFER = (b"upgrade", b"http2-settings")  # headers, and what `Connection` calls them


class PlainForms:
    """Before uvicorn's protocol of httptools.

    `Upgrade: h2c` is an offer (Java's client and `curl --http2` make it) that may be left alone. But httptools takes all that
    follows such a head for the other protocol, the request's body too: so the head is read again without the offer.
    """

    parser: Any
    headers: list[tuple[bytes, bytes]]
    url: bytes
    _data: bytes  # that the parser has
    _offer = False  # of the request at hand

    def data_received(self, data: bytes) -> None:
        self._data = data
        super().data_received(data)  # type: ignore[misc]

    def on_headers_complete(self) -> None:
        self._offer = self.parser.should_upgrade() and self._get_upgrade() is not None and not self._should_upgrade()  # type: ignore
        if not self._offer:
            super().on_headers_complete()  # type: ignore[misc]

    def on_message_complete(self) -> None:
        if not self._offer:
            super().on_message_complete()  # type: ignore[misc]

    def _unsupported_upgrade_warning(self) -> None:
        """While the parser's exception is handled, which says where it has stopped."""
        stopped = sys.exc_info()[1]
        if not self._offer or not isinstance(stopped, httptools.HttpParserUpgrade):
            return
        head = [self.parser.get_method() + b" " + self.url + b" HTTP/" + self.parser.get_http_version().encode()]
        for name, value in self.headers:
            if name == b"connection":
                value = b",".join(word for word in value.split(b",") if word.strip().lower() not in OF_AN_OFFER)
            if name not in OF_AN_OFFER:
                head.append(name + b": " + value)
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"\r\n".join([*head, b"", self._data[stopped.args[0] :]]))

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        if cycle.scope["http_version"] != "1.1":  # it knows no chunks: what has no length ends with the connection
            cycle.chunked_encoding, cycle.expected_content_length = False, AnyLength()
        super()._start_asgi_task(cycle, app)  # type: ignore[misc]


class AnyLength:
    """As the number of bytes that are still to be sent: never too few, never too many."""

    def __lt__(self, count: int) -> bool:
        return False

    def __sub__(self, count: int) -> AnyLength:
        return self

    def __ne__(self, count: object) -> bool:
        return False
