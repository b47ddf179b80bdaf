"""A core in a process of this machine: started, fed, watched, ended. Nothing of it is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from signal import SIGKILL

import zmq
import zmq.asyncio

from headrace.engine.core_link import CoreLink
from headrace.engine.wire import Shutdown
from headrace.errors import HeadraceError

PREFIX = "headrace-"
STALE_SECONDS = 600.0


class CoreProcess(CoreLink):
    """A process that has imported everything and waits for its options, or runs an engine once it has got them."""

    def __init__(self, process: asyncio.subprocess.Process, inbox: zmq.asyncio.Socket, outbox: zmq.Socket, home: Path):
        super().__init__(inbox, outbox)
        self.process, self.home = process, home

    @classmethod
    async def spawn(
        cls, context: zmq.asyncio.Context, builder: str, log_level: str, log_format: str, traced: bool
    ) -> CoreProcess:
        """Start a process. It connects, removes the directory of the sockets and imports; `begin` gives it its task."""
        inbox, outbox = context.socket(zmq.PUSH), zmq.Context(context).socket(zmq.PULL)
        home = None
        try:
            for socket in (inbox, outbox):
                socket.set_hwm(0)
                socket.linger = 0
            home = bind_pair(inbox, outbox)
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "headrace.engine.process", *_addresses(home), str(os.getpid()), builder, log_level,
                log_format, str(int(traced)), stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,  # the terminal's Ctrl-C is for the parent: it drains first
            )  # fmt: skip
        except BaseException:
            inbox.close(linger=0)
            outbox.close(linger=0)
            if home is not None:
                shutil.rmtree(home, ignore_errors=True)
            raise
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


def places() -> list[str]:
    """Where the directory of the sockets may be: where temporary files go, or what nearly every system has beside."""
    found = []
    with contextlib.suppress(OSError):  # nothing can be written to, TMPDIR, /tmp and the current directory included
        found.append(tempfile.gettempdir())
    return list(dict.fromkeys([*found, "/tmp", "/var/tmp", "/dev/shm"]))


def _addresses(home: Path) -> tuple[str, str]:
    return f"ipc://{home}/in", f"ipc://{home}/out"


def bind_pair(inbox: zmq.Socket, outbox: zmq.Socket) -> Path:
    """Bind both in a new directory that only this user can read; returns it.

    A place does not do if its name is long (an address has 107 bytes), it is read-only or full, or its file system has no
    sockets. Raises HeadraceError when none does, OSError when the fault is not the place's.
    """
    problems = []
    for place in places():
        try:
            return _bind_in(place, inbox, outbox)
        except (OSError, zmq.ZMQError, ValueError) as e:  # ValueError: a name that is not UTF-8
            number = getattr(e, "errno", None)
            if number in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                raise OSError(number, os.strerror(number)) from None
            problems.append(f"{place} ({getattr(e, 'strerror', None) or e})")
    tried = ", ".join(problems)
    raise HeadraceError(f"no place for the sockets between the server and its engine (TMPDIR names one); tried {tried}")


def _bind_in(place: str, inbox: zmq.Socket, outbox: zmq.Socket) -> Path:
    home = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=place))  # mode 0700
    first, second = _addresses(home)
    try:
        inbox.bind(first)
        try:
            outbox.bind(second)
        except BaseException:
            inbox.unbind(first)
            raise
    except BaseException:
        shutil.rmtree(home, ignore_errors=True)
        raise
    return home


def remove_stale_directories() -> None:
    """Of processes that were killed before their core had connected and removed it itself."""
    found: list[Path] = []
    for place in places():
        with contextlib.suppress(OSError):
            found += Path(place).glob(f"{PREFIX}*-*")
    for path in found:
        pid = path.name.removeprefix(PREFIX).partition("-")[0]
        with contextlib.suppress(OSError):
            state = path.lstat()
            # a young one may belong to a process that another container sees under another number
            old = time.time() - state.st_mtime > STALE_SECONDS
            if pid.isdigit() and old and state.st_uid == os.getuid() and not _lives(int(pid)):
                shutil.rmtree(path, ignore_errors=True)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
