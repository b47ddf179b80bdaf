"""What a core says: from one of this machine through a plain socket, from another machine through a message queue.

The queue's own thread in each process would want a core of the CPU for every step, which a step on that CPU's cores has to wait
for. A socket takes one system call on each side. Messages are frames there: their length in four bytes, then what is in them.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from typing import Protocol

import zmq

LENGTH = 4  # bytes of it
AT_ONCE = 1 << 16  # bytes that are read
READABLE = int(zmq.POLLIN)


class Outbox(Protocol):
    """The client's end: reads without waiting."""

    ended: bool  # nothing more will come

    @property
    def closed(self) -> bool: ...
    def fileno(self) -> int: ...
    def take(self) -> bytes | None:
        """The next message; None: the loop says when there is one."""

    def close(self) -> None: ...


class QueueOutbox:
    """Of a core that may be anywhere. Read without zmq.asyncio, whose futures cost more than the messages."""

    ended = False

    def __init__(self, socket: zmq.Socket):
        self._socket = socket

    @property
    def closed(self) -> bool:
        return bool(self._socket.closed)

    def fileno(self) -> int:
        return self._socket.fileno()

    def take(self) -> bytes | None:
        if not int(self._socket.get(zmq.EVENTS)) & READABLE:
            return None
        return self._socket.recv(zmq.NOBLOCK)

    def close(self) -> None:
        self._socket.close(linger=0)


class PipeOutbox:
    """Of a core of this machine."""

    def __init__(self, pipe: socket.socket):
        pipe.setblocking(False)
        self._pipe = pipe
        self._room = memoryview(bytearray(AT_ONCE))
        self._data = bytearray()  # what has come of messages that are not whole, or not taken
        self._emptied = False  # the pipe, by the last reading
        self.ended = False

    @property
    def closed(self) -> bool:
        return self._pipe.fileno() < 0

    def fileno(self) -> int:
        return self._pipe.fileno()

    def take(self) -> bytes | None:
        while True:
            data = self._data
            if len(data) >= LENGTH and len(data) >= (end := LENGTH + int.from_bytes(data[:LENGTH], "little")):
                message = bytes(data[LENGTH:end])
                del data[:end]
                return message
            if self._emptied or self.ended:
                self._emptied = False
                return None
            self._fill()

    def _fill(self) -> None:
        try:
            count = self._pipe.recv_into(self._room)
        except BlockingIOError:
            self._emptied = True
            return
        except OSError:
            count = 0
        self.ended = not count
        self._emptied = count < AT_ONCE
        self._data += self._room[:count]

    def close(self) -> None:
        self._pipe.close()


class PipeInlet:
    """The core's end of it. What the socket does not take at once, while the client is busy otherwise, a thread sends."""

    def __init__(self, descriptor: int):
        os.set_inheritable(descriptor, False)
        self._pipe = socket.socket(fileno=descriptor)
        self._pipe.setblocking(False)
        self._lock = threading.Lock()
        self._waiting = bytearray()

    def send(self, message: bytes) -> None:
        """By any thread; never waits. To a client that is gone nothing is said: this process is about to end."""
        frame = len(message).to_bytes(LENGTH, "little") + message
        with self._lock:
            if self._waiting:
                self._waiting += frame
                return
            sent = self._sent(frame)
            if sent < len(frame):
                self._waiting += frame[sent:]
                threading.Thread(target=self._drain, daemon=True).start()

    def _sent(self, data: bytes | bytearray) -> int:
        try:
            return self._pipe.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)

    def _drain(self) -> None:
        while True:
            select.select([], [self._pipe], [])
            with self._lock:
                del self._waiting[: self._sent(self._waiting)]
                if not self._waiting:
                    return

    def close(self, seconds: float = 1.0) -> None:
        """Returns when all has been sent, or so late."""
        end = time.monotonic() + seconds
        while self._waiting and time.monotonic() < end:
            time.sleep(0.001)
