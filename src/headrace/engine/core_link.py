"""The two sockets between the client's event loop and a core, wherever it runs: messages, and the signs of life in them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from headrace.config import EngineConfig
from headrace.engine.news_pipe import Outbox
from headrace.engine.wire import Begin, Fatal, FromCore, Heartbeat, Place, Ready, ToCore, to_wire

TURN_SECONDS = 0.002  # of reading messages, before everybody else in the event loop has a turn


class CoreLink:
    """What all kinds of `supervision.Core` have in common. `inbox` is what the core reads, `outbox` what it writes."""

    def __init__(self, inbox: zmq.asyncio.Socket, outbox: Outbox):
        self._inbox, self._outbox = inbox, outbox
        self._loop = asyncio.get_running_loop()
        self._handler: Callable[[Any], None] | None = None
        self._again = False  # reading goes on in the loop's next turn
        self.broken: asyncio.Future[None] = self._loop.create_future()  # gets what the handler raises
        self._encoder = msgspec.msgpack.Encoder(enc_hook=to_wire)
        self._decoder = msgspec.msgpack.Decoder(FromCore)
        self.last_sign = self._looked = time.monotonic()
        self.busy_seconds = 0.0
        self.place = Place()
        self.ready: Ready | None = None
        self.fatal: Fatal | None = None

    def greet(self) -> None:
        """An empty message: it knows by this that its sockets are connected."""
        self._inbox.send(b"")

    def begin(self, config: EngineConfig) -> None:
        self.last_sign = self._looked = time.monotonic()
        self._inbox.send(self._encoder.encode(Begin(config, self.place)))

    def send(self, message: ToCore) -> None:
        with contextlib.suppress(zmq.ZMQError):  # a dying core: its death is handled where it is noticed
            self._inbox.send(self._encoder.encode(message))

    def listen(self, handler: Callable[[Any], None]) -> None:
        """From now on `handler` gets every message."""
        self._handler = handler
        self._loop.add_reader(self._outbox.fileno(), self._read)
        self._read()

    def _read(self) -> None:
        """Take what there is, until the others in the loop must have a turn: a core may say more than they can keep up with."""
        self._again = False
        end = time.perf_counter() + TURN_SECONDS
        try:
            while self._handler is not None and (data := self._outbox.take()) is not None:
                self._handler(self._noted(data))
                if time.perf_counter() > end:
                    return self._read_again()
            if self._outbox.ended:
                self._loop.remove_reader(self._outbox.fileno())
        except Exception as e:
            self._handler = None
            if not self.broken.done():
                self.broken.set_exception(e)

    def _read_again(self) -> None:
        if not self._again:
            self._again = True
            self._loop.call_soon(self._read)

    def _noted(self, data: bytes) -> Any:
        """The message; notes the signs of life in it."""
        message = self._decoder.decode(data)
        self.last_sign = time.monotonic()
        if isinstance(message, Heartbeat):
            self.busy_seconds = message.busy_seconds
        elif isinstance(message, Ready):
            self.ready = message
        elif isinstance(message, Fatal):
            self.fatal = message
        return message

    def silence(self) -> float:
        """Seconds since the last sign, as far as this process has been listening."""
        now = time.monotonic()
        if now - self._looked > 2.0:  # we were stopped or held up ourselves: what it said has not been read yet
            self.last_sign = now
        self._looked = now
        return now - self.last_sign

    def hang_up(self) -> None:
        """Close the sockets; what has not been read is lost."""
        self._handler = None
        if not self._outbox.closed:
            self._loop.remove_reader(self._outbox.fileno())
            self._inbox.close(linger=0)
            self._outbox.close()
