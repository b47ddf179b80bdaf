"""A core in a process of this machine: started, fed, watched, ended. Nothing of it is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
from pathlib import Path
from signal import SIGKILL
from typing import NamedTuple

import zmq
import zmq.asyncio

from headrace.config import environment_of_child, python_of_child
from headrace.engine.core_link import CoreLink
from headrace.engine.news_pipe import Outbox, PipeOutbox
from headrace.engine.socket_pair import addresses, bind_pair
from headrace.engine.wire import Shutdown


class EarlyCore(NamedTuple):
    """A process that was started before there was a client, and in which context its sockets are."""

    context: zmq.asyncio.Context
    core: CoreProcess


class CoreProcess(CoreLink):
    """A process that has imported everything and waits for its options, or runs an engine once it has got them."""

    def __init__(self, process: asyncio.subprocess.Process, inbox: zmq.asyncio.Socket, outbox: Outbox, home: Path):
        super().__init__(inbox, outbox)
        self.process, self.home = process, home

    @classmethod
    async def spawn(
        cls, context: zmq.asyncio.Context, builder: str, log_level: str, log_format: str, traced: bool, device: str = "",
        standby: bool = False,
    ) -> CoreProcess:  # fmt: skip
        """Start a process. It imports, connects and removes the directory of the socket; `begin` gives it its task. `device`:
        the one that this will name, if that is soon. `standby`: it may never get one, and imports without haste."""
        inbox, home = context.socket(zmq.PUSH), None
        ours, theirs = socket.socketpair()
        outbox = PipeOutbox(ours)
        try:
            inbox.set_hwm(0)
            inbox.linger = 0
            home = bind_pair(inbox)
            process = await asyncio.create_subprocess_exec(
                *python_of_child("-m", "headrace.engine.process", addresses(home)[0], theirs.fileno(), os.getpid()),
                builder, log_level, log_format, str(int(traced)), str(int(standby)), device,
                env=environment_of_child(), stdin=asyncio.subprocess.DEVNULL, pass_fds=(theirs.fileno(),),
                start_new_session=True,  # the terminal's Ctrl-C is for the parent: it drains first
            )  # fmt: skip
        except BaseException:
            inbox.close(linger=0)
            outbox.close()
            if home is not None:
                shutil.rmtree(home, ignore_errors=True)
            raise
        finally:
            theirs.close()
        core = cls(process, inbox, outbox, home)
        core.greet()
        return core

    @property
    def exited(self) -> bool:
        return self.process.returncode is not None

    @property
    def killed(self) -> bool:
        return self.process.returncode == -SIGKILL

    async def wait(self) -> str:
        """Until it has ended; returns why it did."""
        code = await self.process.wait()
        await asyncio.sleep(0.05)  # its last words
        return self.fatal.error if self.fatal else f"exit code {code}"

    async def end(self, grace: float) -> None:
        """Ask it to end, insist after `grace` seconds."""
        if grace > 0 and self.ready is not None and not self.exited:
            self.send(Shutdown())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.process.wait(), grace)
        await self.kill()

    async def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()
        self.hang_up()
        shutil.rmtree(self.home, ignore_errors=True)
