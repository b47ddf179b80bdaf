"""A core on any machine as its front holds it: a `supervision.Core` over TCP, encrypted and authenticated by ZMQ's CURVE.

Its end is seen in three ways, whichever comes first: its host says so, the connection is lost, or it says nothing any more.
A connection that was lost is never made again: what was under way in it is not known to have arrived, and a stream goes on
in another core at the token after the last that did arrive.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from signal import SIGKILL
from typing import Protocol

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from headrace.distributed.pipe import last_words
from headrace.distributed.process import Door
from headrace.engine.core_link import CoreLink
from headrace.engine.news_pipe import QueueOutbox
from headrace.engine.wire import Shutdown

HOST_SECONDS = 1.0  # for the host, which may be busy, to say how the process ended, when the connection is lost
KILL_SECONDS = 5.0  # for the host to end it
ENDS = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
ENDS |= zmq.EVENT_HANDSHAKE_FAILED_AUTH

READABLE = int(zmq.POLLIN)


class Host(Protocol):
    """As `core_host.CoreHost`, wherever that is. When it is gone, or cannot be reached, its methods raise HostGoneError."""

    def start(
        self, front_key: str, builder: str, log_level: str, log_format: str, traced: bool
    ) -> Awaitable[tuple[int, Door]]: ...

    def wait(self, number: int) -> Awaitable[int]: ...

    def kill(self, number: int) -> Awaitable[None]: ...


class HostGoneError(Exception):
    """The place where a core ran is no more, or is not to be reached."""


class RemoteCore(CoreLink):
    """One process of a host, connected to."""

    def __init__(self, context: zmq.asyncio.Context, host: Host, number: int, door: Door, keys: tuple[bytes, bytes]):
        plain = zmq.Context(context)
        inbox, outbox = context.socket(zmq.PUSH), plain.socket(zmq.PULL)
        super().__init__(inbox, QueueOutbox(outbox))
        self._sockets = inbox, outbox
        self._host, self._number = host, number
        self._where = door.inbox.removeprefix("tcp://").rpartition(":")[0]
        self.unreachable = False  # nobody knows whether it lives: its host had better be given up
        self._lost = self._loop.create_future()
        self._monitors: list[zmq.Socket] = []
        for socket, address in ((inbox, door.inbox), (outbox, door.outbox)):
            monitor = plain.socket(zmq.PAIR)
            self._monitors.append(monitor)
            there = f"inproc://headrace-connection-{socket.fileno()}"
            socket.monitor(there, ENDS)
            monitor.connect(there)
            self._loop.add_reader(monitor.fileno(), self._look)
            socket.set_hwm(0)
            socket.linger = 0
            socket.reconnect_ivl = -1
            socket.ipv6 = "[" in address
            socket.curve_serverkey = door.public_key.encode()
            socket.curve_publickey, socket.curve_secretkey = keys
            socket.connect(address)
        self._ended = self._loop.create_task(self._watch())
        self._look()

    @classmethod
    async def start(
        cls, context: zmq.asyncio.Context, host: Host, builder: str, log_level: str, log_format: str, traced: bool
    ) -> RemoteCore:
        """Raises HeadraceError if the machine gives no process, HostGoneError if there is no such machine any more."""
        keys = zmq.curve_keypair()
        number, door = await host.start(keys[0].decode(), builder, log_level, log_format, traced)
        core = cls(context, host, number, Door(*door), keys)
        core.greet()
        return core

    async def _watch(self) -> int | None:
        """The exit code; None: the host is gone, and with it all that it had started."""
        try:
            return await self._host.wait(self._number)
        except HostGoneError:
            return None

    def _look(self) -> None:
        """What the monitors of the connections have to say."""
        for monitor in self._monitors:
            while int(monitor.get(zmq.EVENTS)) & READABLE:
                recv_monitor_message(monitor)  # every kind that is asked for is an end
                if not self._lost.done():
                    self._lost.set_result(None)

    @property
    def exited(self) -> bool:
        return self._ended.done() or self._lost.done()

    @property
    def killed(self) -> bool:
        """A host that is gone and a cut connection are nobody's request's fault either."""
        return self.exited and self._code in (None, -SIGKILL)

    @property
    def _code(self) -> int | None:
        """The exit code, as far as it is known."""
        return self._ended.result() if self._ended.done() and not self._ended.cancelled() else None

    async def wait(self) -> str:
        """Until it has ended or cannot be reached any more; returns why."""
        await asyncio.wait({self._ended, self._lost}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait({self._ended}, timeout=HOST_SECONDS)
        await asyncio.sleep(0.05)  # what it has said until then
        await last_words(self._code, self._has_said)
        self._read()
        return f"{self._why()}, on {self._where}"

    def _has_said(self) -> bool:
        self._read()
        return self.fatal is not None

    def _why(self) -> str:
        if self.fatal is not None:
            return self.fatal.error
        if not self._ended.done():
            return "the connection to it was lost"
        code = self._ended.result()
        return "its host is gone" if code is None else f"exit code {code}"

    async def end(self, grace: float) -> None:
        """Ask it to end, insist after `grace` seconds."""
        if grace > 0 and self.ready is not None and not self.exited:
            self.send(Shutdown())
            await asyncio.wait({self._ended}, timeout=grace)
        await self.kill()

    async def kill(self) -> None:
        """What cannot be reached is not waited for."""
        if not self._ended.done():
            self._killing = self._loop.create_task(self._kill())
            await asyncio.wait({self._killing}, timeout=0.0 if self._lost.done() else KILL_SECONDS)
            self.unreachable = not self._killing.done()
        self._ended.cancel()
        self.hang_up()

    async def _kill(self) -> None:
        with contextlib.suppress(HostGoneError):
            await self._host.kill(self._number)

    def hang_up(self) -> None:
        for socket, monitor in zip(self._sockets, self._monitors, strict=False):
            self._loop.remove_reader(monitor.fileno())
            socket.disable_monitor()
            monitor.close(linger=0)
        self._monitors = []
        super().hang_up()
