"""Keeps several HTTP processes running on one port, in the process that has the engine's client.

    clients --- port --- process 0: HTTP, text, tokenizer ---\\
               (each has a listening socket of its own)       >--- ipc --- this process: limits, metrics, client --- core
    clients --- port --- process 1: HTTP, text, tokenizer ---/

The sockets of the port belong to this process too: the kernel spreads connections over them by hash, and those that wait at a
process that dies are taken by the next one. It dies alone: its streams are aborted, the others go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from headrace.api.glass_hub import GlassHub
from headrace.api.limits import Limits
from headrace.api_processes.desk import Desk
from headrace.api_processes.wire import Alive, Cut, Fatal, FromChild, Start, Stop, Up
from headrace.config import environment_of_child, python_of_child
from headrace.distributed.pipe import Pipe, bounded, last_words
from headrace.distributed.remote_wire import EngineState
from headrace.engine.client import EngineClient
from headrace.engine.socket_pair import bind_pair
from headrace.metrics.prometheus import PrometheusMetrics

logger = logging.getLogger(__name__)
STATE_SECONDS = 0.1  # between looks whether the engine has become ready, drains or has given up
SIGN_SECONDS = 0.5  # between words to each process, whatever there is to say
LOOK_SECONDS = 0.25  # between looks at the signs of life
START_SECONDS = 120.0  # a process that starts may be silent for so long
MAX_FAILED_STARTS = 3  # in a row
RESTART_WINDOW = 60.0
CUT_SECONDS = 0.5  # to end after a Cut


class ApiProcess:
    """One incarnation of an HTTP process as its parent holds it. Nothing of it is left behind."""

    def __init__(self, process: asyncio.subprocess.Process, home: Path):
        self.process, self.home = process, home
        self.pipe: Pipe
        self.desk: Desk
        self.up = False
        self.fatal: str | None = None

    def heard(self, message: Any) -> None:
        if isinstance(message, Alive):
            pass
        elif isinstance(message, Up):
            self.up = True
        elif isinstance(message, Fatal):
            self.fatal = message.error
        else:
            self.desk.heard(message)

    async def end(self, timeout: float) -> str:
        """Wait until it has ended or is to be ended; returns why. `timeout`: of silence."""
        exited = asyncio.create_task(self.process.wait())
        signs: list[asyncio.Future[Any]] = [exited, self.pipe.broken]
        try:
            while True:
                await asyncio.wait(signs, timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if exited.done():
                    code = exited.result()
                    await last_words(code, lambda: self.fatal is not None)
                    return self.fatal or (f"signal {-code}" if code < 0 else f"exit code {code}")
                if self.pipe.broken.done():
                    return f"a message that was not understood ({self.pipe.broken.exception()!r})"
                if (silent := self.pipe.silence()) > (timeout if self.up else START_SECONDS):
                    return f"no sign of life for {silent:.0f} s"
        finally:
            exited.cancel()

    async def kill(self) -> None:
        self.desk.close()
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()
        self.pipe.close()
        shutil.rmtree(self.home, ignore_errors=True)


class ApiProcesses:
    """Runs and ends like uvicorn's Server: `serve`, `should_exit`, `force_exit`. One process for each socket it is given.

    `start`: the first message of a process, but for the engine's state. `give_up` is told why there is no use in one more.
    """

    def __init__(
        self, engine: EngineClient, metrics: PrometheusMetrics, start: Start, log_format: str, max_restarts: int,
        give_up: Callable[[str], None], glass: GlassHub | None = None,
    ):  # fmt: skip
        self._engine, self._metrics, self._start, self._log_format = engine, metrics, start, log_format
        self._max_restarts, self._give_up, self._glass = max_restarts, give_up, glass
        self._limits = Limits(engine, start.server)
        self._context = zmq.Context()
        self._running: dict[int, ApiProcess] = {}
        self._sockets: list[socket.socket] = []
        self._deaths: deque[float] = deque()  # when, of all processes, within RESTART_WINDOW
        self._stopping = self._cutting = False

    async def serve(self, sockets: list[socket.socket]) -> None:
        """Until all have ended, which they do when they are told to."""
        self._sockets = sockets
        telling = asyncio.create_task(self._tell_state())
        keepers = [asyncio.create_task(self._keep(i, s)) for i, s in enumerate(sockets)]
        try:
            works: list[asyncio.Future[Any]] = [telling, asyncio.gather(*keepers)]
            await asyncio.wait(works, return_when=asyncio.FIRST_COMPLETED)
            for work in works:
                if work.done():
                    work.result()
        finally:
            for task in (telling, *keepers):
                task.cancel()
            await asyncio.gather(telling, *keepers, return_exceptions=True)
            await asyncio.gather(*[child.kill() for child in self._running.values()])
            self._context.destroy(linger=0)

    @property
    def should_exit(self) -> bool:
        return self._stopping

    @should_exit.setter
    def should_exit(self, value: bool) -> None:
        """Close the port; what is being answered is finished."""
        self._stopping = value
        for listener in self._sockets:
            listener.close()
        for child in self._running.values():
            if child.up:
                child.pipe.say(Stop())
            else:
                child.process.kill()

    @property
    def force_exit(self) -> bool:
        return self._cutting

    @force_exit.setter
    def force_exit(self, value: bool) -> None:
        """End now."""
        self._stopping = self._cutting = value
        for child in self._running.values():
            child.pipe.say(Cut())
            asyncio.get_running_loop().call_later(CUT_SECONDS, _kill, child.process)

    async def _keep(self, index: int, listener: socket.socket) -> None:
        """Run one process after another, until they are to end or there is no use in one more."""
        failed, hopeless = 0, None
        while not self._stopping and hopeless is None:
            child = None
            try:
                child = self._running[index] = await self._spawn(index, listener)
                why = await child.end(self._start.timeout)
            except Exception as e:  # no memory, no process, no file descriptor, no room for the sockets
                why = str(e) or type(e).__name__
            lived, lost = child is not None and child.up, 0
            if child is not None:
                lost = child.desk.host.num_requests
                await child.kill()
                del self._running[index]
            if self._stopping:
                return
            failed = 0 if lived else failed + 1
            hopeless = self._hopeless(index, failed, why)
            if hopeless is None:
                self._metrics.http_restarts += 1
                logger.error("HTTP process %d has ended (%s); starting another, %d requests are lost", index, why, lost)
                await asyncio.sleep(0.1 * failed)
        if hopeless is not None:
            self._give_up(hopeless)

    def _hopeless(self, index: int, failed: int, why: str) -> str | None:
        now = time.monotonic()
        self._deaths.append(now)
        while self._deaths[0] < now - RESTART_WINDOW:
            self._deaths.popleft()
        if failed >= MAX_FAILED_STARTS:
            return f"HTTP process {index}: {failed} starts in a row failed; the last: {why}"
        if len(self._deaths) > self._max_restarts:
            return f"{len(self._deaths)} deaths of HTTP processes within {RESTART_WINDOW:g} s; the last: {why}"
        return None

    async def _spawn(self, index: int, listener: socket.socket) -> ApiProcess:
        towards, back = bounded(self._context, zmq.PUSH), bounded(self._context, zmq.PULL)
        home = None
        try:
            home = bind_pair(towards, back)
            process = await asyncio.create_subprocess_exec(
                *python_of_child("-m", "headrace.api_processes.process", f"ipc://{home}/in", f"ipc://{home}/out", os.getpid()),
                str(listener.fileno()), f"http {index}", self._start.log_level, self._log_format,
                env=environment_of_child(), stdin=asyncio.subprocess.DEVNULL, pass_fds=(listener.fileno(),),
                start_new_session=True,  # the terminal's Ctrl-C is for the parent: it drains first
            )  # fmt: skip
        except BaseException:
            towards.close(linger=0)
            back.close(linger=0)
            if home is not None:
                shutil.rmtree(home, ignore_errors=True)
            raise
        child = ApiProcess(process, home)
        child.pipe = Pipe(back, towards, FromChild, child.heard)
        child.desk = Desk(self._engine, self._limits, self._metrics, child.pipe, f"{index}.", self._glass)
        child.pipe.say(msgspec.structs.replace(self._start, state=EngineState.of(self._engine)))
        if self._stopping:
            process.kill()
        return child

    async def _tell_state(self) -> None:
        """At once what requests are refused by, the rest every now and then, which is also this process's sign of life."""
        flags, due = None, 0.0
        loaded = asyncio.gather(self._engine.wait_loaded(), return_exceptions=True)  # not seen a moment later than by others
        while True:
            status, now = self._engine.status(), time.monotonic()
            found = status.loaded, status.alive, status.draining, status.progressing
            if found != flags or now >= due:
                flags, due = found, now + SIGN_SECONDS
                state = EngineState.of(self._engine)
                for child in self._running.values():
                    if not child.pipe.full:
                        child.pipe.say(state)
            await (asyncio.sleep(STATE_SECONDS) if loaded.done() else asyncio.wait({loaded}, timeout=STATE_SECONDS))


def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)
