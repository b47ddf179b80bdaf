"""The other ranks' processes as rank 0 holds them: started, told, watched, ended together.

A thread of its own starts them and waits for their ends, which the operating system tells it (pidfd). When one dies the
others are killed at once: they may wait inside a kernel for what never comes, deaf to anything else. If rank 0 dies the
system kills them (PR_SET_PDEATHSIG, which looks at the thread that started them: that is why one does which stays).
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.config import EngineConfig, environment_of_child, python_of_child
from headrace.errors import CapacityError, EngineDeadError, HeadraceError
from headrace.logs import settings
from headrace.model.shard import Shard
from headrace.tensor_parallel.messages import Begin, Built, End, FromRank, Here, LastWords, ToRank, to_wire
from headrace.tensor_parallel.ring import Writer, make_ring

if TYPE_CHECKING:
    import torch

    from headrace.tensor_parallel.groups import ProcessGroup

logger = logging.getLogger(__name__)
END_SECONDS = 5.0  # for the others to end by themselves
NEWS_SECONDS = 1.0  # after a failed collective, for the system to say that somebody has died
LOOPBACK = "127.0.0.1"
MOST_WORDS = 1 << 16  # bytes of a rank's message
SIGNALS = {number.value: number.name for number in signal.Signals}


class Death(msgspec.Struct, frozen=True):
    """Why there are no other ranks any more."""

    why: str
    killed: bool = False  # somebody ended one from outside
    refused: bool = False  # see LastWords

    def error(self) -> HeadraceError:
        return CapacityError(self.why) if self.refused else EngineDeadError(self.why)


class Ranks:
    """Raises EngineDeadError wherever one of them has died; CapacityError for what a rank refuses at the start."""

    def __init__(self, config: EngineConfig, builder: str):
        """Start them. `builder` names, as module:function, what makes a rank's runner (see tensor_parallel.process)."""
        others = config.tensor_parallel_size - 1
        self._settle: Callable[[], None] = lambda: None  # see ProcessGroup
        ring = make_ring(others)
        # where the groups of all ranks find each other
        self._meeting = socket.create_server((LOOPBACK, 0), backlog=others)
        self._encoder = msgspec.msgpack.Encoder(enc_hook=to_wire)
        self._processes = processes = _Processes(others, ring, builder)
        self._finish = weakref.finalize(self, _finish, processes)
        try:
            self._writer = Writer(ring, others, self.check)
            processes.start()
        finally:
            os.close(ring)  # it is mapped here, and open in the others
        logger.info("ranks 1 to %d are the processes %s", others, ", ".join(map(str, self.pids)))
        self.tell(Begin(config, self._meeting.getsockname()[1]))

    @property
    def pids(self) -> list[int]:
        return self._processes.pids

    def check(self) -> None:
        if (death := self._processes.death) is not None:
            self._settle()
            raise death.error()

    def tell(self, message: ToRank) -> None:
        """All ranks will do this, in the order in which they are told."""
        self.check()
        self._writer.send(self._encoder.encode(message))

    def wait_for(self, kind: type[Here | Built]) -> None:
        """Until all have said it."""
        self._processes.wait_for(kind)

    def join(self, device: torch.device) -> ProcessGroup:
        """Meet the others: the group of all ranks, of which this process is the first."""
        from headrace.tensor_parallel.cards import meet

        self.wait_for(Here)
        port = self._meeting.getsockname()[1]
        group = meet(Shard(0, 1 + len(self.pids)), device, port, self._meeting.detach())
        if device.type == "cuda":  # kernels wait for their peers for ever; a socket knows
            self.on_death(lambda death: group.abort())
        self._settle = group.settle
        return group

    def on_death(self, handler: Callable[[Death], None]) -> None:
        """Call `handler`, in a thread of ours, when one has died and all the others have been killed."""
        self._processes.on_death(handler)

    def explain(self, error: BaseException) -> BaseException:
        """The reason behind an error of rank 0's, which may be that another has died; otherwise the error itself."""
        if not isinstance(error, Exception):
            return error
        own = isinstance(error, HeadraceError) and not isinstance(error, EngineDeadError)
        death = self._processes.wait_for_death(0.0 if own else NEWS_SECONDS)
        return error if death is None else death.error()

    def give_up(self, error: BaseException) -> BaseException:
        """Rank 0 has failed in the middle of what it has told the others to do: nobody is of use any more. Returns what is
        to be raised."""
        reason = self.explain(error)
        if reason is error:
            echoes = ", ".join(f"rank {r}: {number}" for r, number in enumerate(self._writer.echoes(), 1))
            text = "rank 0 fails in message %d (the others have done %s); all ranks end"
            logger.error(text, self._writer.number, echoes, exc_info=error)
            self._processes.kill(Death(f"rank 0 failed in a step: {type(error).__name__}: {error}"))
        if self._processes.death is not None:
            self._settle()
        return reason

    def close(self) -> None:
        """Let them end, insist after a while; nothing of them is left."""
        if self._finish.alive and self._processes.is_ours:
            self._processes.closing = True
            with contextlib.suppress(HeadraceError):
                self.tell(End())
                self._processes.join(END_SECONDS)
        self._finish()


def _finish(processes: _Processes) -> None:
    if processes.is_ours:
        processes.kill(None)
        processes.join(END_SECONDS)


class _Processes:
    """What the thread knows. It holds no engine, so that one which is dropped without `close` ends its ranks."""

    def __init__(self, others: int, ring: int, builder: str):
        self.death: Death | None = None
        self.closing = False
        self._owner = os.getpid()
        self._changed = threading.Condition()
        self._said: dict[type, int] = {Here: 0, Built: 0}
        self._words: dict[int, LastWords] = {}
        self._handler: Callable[[Death], None] | None = None
        self._started: list[subprocess.Popen] = []
        arguments = (others, ring, builder)
        self._thread = threading.Thread(target=self._run, args=arguments, daemon=True, name="headrace-ranks")
        self._begun = threading.Event()
        self._failed: BaseException | None = None

    @property
    def is_ours(self) -> bool:
        """A fork of the process has nothing to end."""
        return os.getpid() == self._owner

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._started]

    def start(self) -> None:
        """Raises OSError where the machine gives no process."""
        self._thread.start()
        self._begun.wait()
        if self._failed is not None:
            raise self._failed

    def wait_for(self, kind: type) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.death is not None or self._said[kind] == len(self._started))
            if self.death is not None:
                raise self.death.error()

    def wait_for_death(self, seconds: float) -> Death | None:
        with self._changed:
            self._changed.wait_for(lambda: self.death is not None, seconds)
            return self.death

    def on_death(self, handler: Callable[[Death], None]) -> None:
        with self._changed:
            self._handler, death = handler, self.death
        if death is not None:
            handler(death)

    def kill(self, death: Death | None) -> None:
        """All of them, now. None: nobody is to hear of it."""
        with self._changed:
            first = self.death is None and death is not None and not self.closing
            self.closing = self.closing or death is None
            self.death = self.death or death or Death("the engine has been closed")
            self._changed.notify_all()
            handler = self._handler
        for process in self._started:
            process.kill()
        if first and handler is not None and death is not None:
            handler(death)

    def join(self, seconds: float) -> None:
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(seconds)

    # ---------------------------------------------------------------- the thread

    def _run(self, others: int, ring: int, builder: str) -> None:
        ears: list[socket.socket] = []
        try:
            try:
                for rank in range(1, 1 + others):
                    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                    ears.append(ours)
                    with theirs:
                        self._started.append(_spawn(rank, 1 + others, ring, theirs.fileno(), builder))
                watched = _Watched(self._started, ears)
            except BaseException as e:
                self._failed = e
                for process in self._started:
                    process.kill()
                    process.wait()
                return
            finally:
                self._begun.set()
            if self.closing:  # meanwhile
                self.kill(None)
            watched.run(self._heard, self._ended)
        except Exception as e:
            logger.exception("the watch over the ranks fails")
            self.kill(Death(f"the watch over the ranks failed: {type(e).__name__}: {e}"))
        finally:
            for ear in ears:
                ear.close()

    def _heard(self, rank: int, message: FromRank) -> None:
        with self._changed:
            if isinstance(message, LastWords):
                self._words[rank] = message
            else:
                self._said[type(message)] += 1
            self._changed.notify_all()

    def _ended(self, rank: int) -> None:
        """The system says so. A rank fails, too, where another was killed, and may be heard of first: that one is named."""
        self._started[rank - 1].wait()
        if self.closing or self.death is not None:
            return
        killed = [other for other, process in enumerate(self._started, 1) if (process.poll() or 0) < 0]
        rank = rank if rank in killed else next(iter(killed), rank)
        process, words = self._started[rank - 1], self._words.get(rank)
        code = process.wait()
        how = f"was killed by {SIGNALS.get(-code, -code)}" if code < 0 else f"ended with exit code {code}"
        why = f"rank {rank} of tensor_parallel_size {1 + len(self._started)} (process {process.pid}) "
        death = Death(why + (f"ended: {words.error}" if words else how), code == -signal.SIGKILL, bool(words and words.refused))
        if not death.refused:
            logger.error("%s; all ranks end", death.why)
        self.kill(death)


class _Watched:
    """Waits for words and ends of processes."""

    def __init__(self, processes: list[subprocess.Popen], ears: list[socket.socket]):
        self._ears = {ear.fileno(): (rank, ear) for rank, ear in enumerate(ears, 1)}
        self._ends: dict[int, int] = {}
        self._poll = select.poll()
        for ear in ears:
            ear.setblocking(False)
        for rank, process in enumerate(processes, 1):
            self._ends[os.pidfd_open(process.pid)] = rank
        for descriptor in (*self._ends, *self._ears):
            self._poll.register(descriptor, select.POLLIN)
        self._decoder = msgspec.msgpack.Decoder(FromRank)

    def run(self, heard: Callable[[int, Any], None], ended: Callable[[int], None]) -> None:
        """Until all have ended."""
        while self._ends:
            ready = [descriptor for descriptor, _ in self._poll.poll()]
            for descriptor in sorted(ready, key=lambda d: d in self._ends):  # last words come first
                if descriptor in self._ends:
                    self._poll.unregister(descriptor)
                    os.close(descriptor)
                    ended(self._ends.pop(descriptor))
                else:
                    self._read(descriptor, heard)

    def _read(self, descriptor: int, heard: Callable[[int, Any], None]) -> None:
        """All that a rank has said."""
        rank, ear = self._ears[descriptor]
        with contextlib.suppress(BlockingIOError):
            while data := ear.recv(MOST_WORDS):
                heard(rank, self._decoder.decode(data))
            self._poll.unregister(descriptor)  # closed: its end is told by the other descriptor


def _spawn(rank: int, size: int, ring: int, mouth: int, builder: str) -> subprocess.Popen:
    """A process of the same Python and modules, away from the terminal: its Ctrl-C is for rank 0."""
    part, level, form = settings()
    arguments = (rank, size, os.getpid(), ring, mouth, builder, f"{part} rank {rank}".lstrip(), level, form)
    return subprocess.Popen(
        python_of_child("-m", "headrace.tensor_parallel.process", *arguments),
        env=environment_of_child(), pass_fds=(ring, mouth), stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
