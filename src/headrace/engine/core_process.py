"""Cores in processes of this machine: started, fed, watched, ended, nothing of them left behind; and one kept standing by."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from signal import SIGKILL
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from headrace.config import EngineConfig
from headrace.engine.wire import Fatal, FromCore, Heartbeat, Ready, Shutdown, ToCore, to_wire
from headrace.errors import HeadraceError

logger = logging.getLogger(__name__)
PREFIX = "headrace-"
STALE_SECONDS = 600.0
TURN_SECONDS = 0.002  # of reading messages, before everybody else in the event loop has a turn


class CoreProcess:
    """A process that has imported everything and waits for its options, or runs an engine once it has got them."""

    def __init__(self, process: asyncio.subprocess.Process, inbox: zmq.asyncio.Socket, outbox: zmq.Socket, home: Path):
        self.process, self.home = process, home
        self._inbox, self._outbox = inbox, outbox
        self._loop = asyncio.get_running_loop()
        self._handler: Callable[[Any], None] | None = None
        self._again = False  # reading goes on in the loop's next turn
        self.broken: asyncio.Future[None] = self._loop.create_future()  # gets what the handler raises
        self._encoder = msgspec.msgpack.Encoder(enc_hook=to_wire)
        self._decoder = msgspec.msgpack.Decoder(FromCore)
        self.last_sign = self._looked = time.monotonic()
        self.busy_seconds = 0.0
        self.ready: Ready | None = None
        self.fatal: Fatal | None = None

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
        core._inbox.send(b"")  # it knows by this that its sockets are connected
        return core

    @property
    def exited(self) -> bool:
        return self.process.returncode is not None

    @property
    def killed(self) -> bool:
        return self.process.returncode == -SIGKILL

    def begin(self, config: EngineConfig) -> None:
        self.last_sign = self._looked = time.monotonic()
        self._inbox.send(self._encoder.encode(config))

    def send(self, message: ToCore) -> None:
        with contextlib.suppress(zmq.ZMQError):  # a dying core: its death is handled where it is noticed
            self._inbox.send(self._encoder.encode(message))

    def listen(self, handler: Callable[[Any], None]) -> None:
        """From now on `handler` gets every message. Read without zmq.asyncio, whose futures cost more than the messages."""
        self._handler = handler
        self._loop.add_reader(self._outbox.fileno(), self._read)
        self._read()

    def _read(self) -> None:
        """Take what there is, until the others in the loop must have a turn: a core may say more than they can keep up with."""
        self._again = False
        end = time.perf_counter() + TURN_SECONDS
        try:
            while self._handler is not None:
                self._handler(self._noted(self._outbox.recv(zmq.NOBLOCK)))
                if time.perf_counter() > end:
                    self._read_again()
                    return
        except zmq.Again:
            pass
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
        if self._handler is not None:
            self._loop.remove_reader(self._outbox.fileno())
            self._handler = None
        if not self._outbox.closed:
            self._inbox.close(linger=0)
            self._outbox.close(linger=0)
        shutil.rmtree(self.home, ignore_errors=True)


class ProcessSupply:
    """Processes for cores: a new one each time, or the standby that has imported everything."""

    def __init__(self, context: zmq.asyncio.Context, builder: str, log_level: str, log_format: str, traced: bool):
        self._arguments = (context, builder, log_level, log_format, traced)
        self._standby: asyncio.Task[CoreProcess | None] | None = None

    async def take(self) -> CoreProcess:
        """Raises OSError or HeadraceError if the machine gives no process, or no place for its sockets."""
        if self._standby is not None:
            await asyncio.wait({self._standby})
            standby, self._standby = self._standby, None
            core = None if standby.cancelled() else standby.result()
            if core is not None and not core.exited:
                return core
            if core is not None:
                await core.kill()
        return await CoreProcess.spawn(*self._arguments)

    def prepare(self, delay: float) -> None:
        """Have a standby in `delay` seconds."""
        if self._standby is None:
            self._standby = asyncio.create_task(self._stand_by(delay))

    async def _stand_by(self, delay: float) -> CoreProcess | None:
        """None if there cannot be one: a restart takes longer then."""
        await asyncio.sleep(delay)
        try:
            return await CoreProcess.spawn(*self._arguments)
        except Exception as e:
            logger.warning("no process can stand by for a restart: %s", e)
            return None

    async def close(self) -> None:
        standby, self._standby = self._standby, None
        if standby is not None:
            standby.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                if core := await standby:
                    await core.kill()


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
