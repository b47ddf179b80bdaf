"""The two sockets between a process and one that it starts: their names lie in a directory that is gone once both know them."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
import time
from pathlib import Path

import zmq

from headrace.errors import HeadraceError

PREFIX = "headrace-"
STALE_SECONDS = 600.0
POLL_MS = 100


def places() -> list[str]:
    """Where the directory of the sockets may be: where temporary files go, or what nearly every system has beside."""
    found = []
    with contextlib.suppress(OSError):  # nothing can be written to, TMPDIR, /tmp and the current directory included
        found.append(tempfile.gettempdir())
    return list(dict.fromkeys([*found, "/tmp", "/var/tmp", "/dev/shm"]))


def addresses(home: Path) -> tuple[str, str]:
    return f"ipc://{home}/in", f"ipc://{home}/out"


def bind_pair(inbox: zmq.Socket, outbox: zmq.Socket | None = None) -> Path:
    """Bind both, or the one that there is, in a new directory that only this user can read; returns it.

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


def _bind_in(place: str, inbox: zmq.Socket, outbox: zmq.Socket | None) -> Path:
    home = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=place))  # mode 0700
    first, second = addresses(home)
    try:
        inbox.bind(first)
        try:
            if outbox is not None:
                outbox.bind(second)
        except BaseException:
            inbox.unbind(first)
            raise
    except BaseException:
        shutil.rmtree(home, ignore_errors=True)
        raise
    return home


def connect_pair(inbox: zmq.Socket, outbox: zmq.Socket | None, inbox_address: str, outbox_address: str, parent: int) -> None:
    """The other side: returns when they are connected and a first message has come. Nobody needs their names any more then, and
    the directory goes. Ends this process if its parent has died."""
    home = Path(inbox_address.removeprefix("ipc://")).parent
    inbox.connect(inbox_address)
    if outbox is not None:
        outbox.immediate = True  # it can be written to when there is a connection
        outbox.connect(outbox_address)
    while not inbox.poll(POLL_MS) or not (outbox is None or outbox.poll(POLL_MS, zmq.POLLOUT)):
        if os.getppid() != parent:
            shutil.rmtree(home, ignore_errors=True)
            os._exit(1)
    shutil.rmtree(home, ignore_errors=True)


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
