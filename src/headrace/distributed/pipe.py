"""Both ways between two processes of one machine, each bounded: what is said in one turn of the event loop is one message.

A reader that takes nothing fills two queues of sockets, and nothing else: then the pipe is `full`, and whoever has much to say
waits for `room`. What must be said all the same (answers to what the other side has asked) is kept until there is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from headrace.engine.socket_pair import connect_pair
from headrace.engine.wire import from_wire, to_wire

QUEUE = 64  # messages in each end's queue
RETRY_SECONDS = 0.01  # between looks whether a full pipe has room again
TURN_SECONDS = 0.002  # of reading messages, before everybody else in the event loop has a turn
WORDS_SECONDS = 1.0  # for the last words of a process that has ended by itself
LISTENED = 0.5  # seconds of silence that one look can tell at most


async def last_words(code: int | None, said: Callable[[], bool]) -> None:
    """Of a process that has ended with this code: what it says last may come after its end. `said`: whether it has come."""
    end = time.monotonic() + WORDS_SECONDS
    while (code or 0) > 0 and not said() and time.monotonic() < end:
        await asyncio.sleep(0.02)


class Pipe:
    """One end. `kinds`: the union of what comes; `handler` gets each of it, and what it raises ends the reading."""

    def __init__(self, inbox: zmq.Socket, outbox: zmq.Socket, kinds: Any, handler: Callable[[Any], None]):
        self._inbox, self._outbox, self._handler = inbox, outbox, handler
        self._loop = asyncio.get_running_loop()
        self._encoder = msgspec.msgpack.Encoder(enc_hook=to_wire)
        self._decoder = msgspec.msgpack.Decoder(list[kinds], dec_hook=from_wire)
        self._said: list[msgspec.Raw] = []
        self._due = self._again = self._closed = False
        self._rest: bytes | None = None  # a message for which there was no room
        self._roomy = asyncio.Event()
        self._looked, self._silent, self._spoken_to = time.monotonic(), 0.0, False
        self.broken: asyncio.Future[None] = self._loop.create_future()  # gets what the handler raises
        self._loop.add_reader(inbox.fileno(), self._read)
        self._loop.call_soon(self._read)

    @property
    def full(self) -> bool:
        return self._rest is not None

    async def room(self) -> None:
        while self._rest is not None:
            await self._roomy.wait()

    def silence(self) -> float:
        """Seconds without a word from the other end, as far as this process has listened. To be asked a few times a second."""
        now = time.monotonic()
        listened = min(now - self._looked, LISTENED)  # more, and we were stopped or held up: its words have not been read yet
        self._silent = 0.0 if self._spoken_to else self._silent + listened
        self._looked, self._spoken_to = now, False
        return self._silent

    def say(self, message: Any) -> None:
        """Raises what msgspec raises for a message that cannot travel."""
        self._said.append(msgspec.Raw(self._encoder.encode(message)))
        if not self._due:
            self._due = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Send now what has been said."""
        self._due = False
        if self._closed or not self._said or self._rest is not None:
            return
        data, self._said = self._encoder.encode(self._said), []
        self._send(data)

    def _send(self, data: bytes) -> None:
        try:
            self._outbox.send(data, zmq.NOBLOCK)
        except zmq.Again:
            self._rest = data
            self._roomy.clear()
            self._loop.call_later(RETRY_SECONDS, self._retry)
        except zmq.ZMQError:  # the other end dies: that is handled where it is noticed
            pass

    def _retry(self) -> None:
        data, self._rest = self._rest, None
        if data is None or self._closed:
            return
        self._send(data)
        if self._rest is None:
            self._roomy.set()
            self.flush()

    def _read(self) -> None:
        self._again = False
        end = time.perf_counter() + TURN_SECONDS
        try:
            while not self._closed:
                messages = self._decoder.decode(self._inbox.recv(zmq.NOBLOCK))
                self._spoken_to = True
                for message in messages:
                    self._handler(message)
                if time.perf_counter() > end:
                    if not self._again:
                        self._again = True
                        self._loop.call_soon(self._read)
                    return
        except zmq.Again:
            pass
        except Exception as e:
            if not self.broken.done():
                self.broken.set_exception(e)

    def close(self, linger: float = 0.0) -> None:
        """`linger`: seconds for what has been said and not been taken yet."""
        if self._closed:
            return
        self.flush()
        self._closed = True
        self._rest = None
        self._roomy.set()
        self._loop.remove_reader(self._inbox.fileno())
        self._inbox.close(linger=0)
        self._outbox.close(linger=int(1000 * linger))
        self.broken.cancel()


def bounded(context: zmq.Context, kind: int) -> zmq.Socket:
    socket = context.socket(kind)
    socket.set_hwm(QUEUE)
    socket.linger = 0
    return socket


def connect(context: zmq.Context, inbox_address: str, outbox_address: str, parent: int) -> tuple[zmq.Socket, zmq.Socket]:
    """A child's two sockets, connected; a first message waits. Ends this process if its parent has died."""
    inbox, outbox = bounded(context, zmq.PULL), bounded(context, zmq.PUSH)
    connect_pair(inbox, outbox, inbox_address, outbox_address, parent)
    return inbox, outbox
