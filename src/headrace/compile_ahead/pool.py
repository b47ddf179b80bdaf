"""Forks that compile what has been noted, each one kernel after another, as many as the machine has cores and memory for.

The fork of one process shares what it has imported. It takes numbers of jobs from a pipe that all read, and says in another
one what it takes and what is done. One that dies or hangs costs its kernel's time later, in the engine, and nothing else.
"""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from headrace.machine import available_memory, usable_cores
from headrace.parent import end_with_parent

JOB = struct.Struct("=i")
SAID = struct.Struct("=iib")  # who, which job, and what of it; written at once, so never mixed with another's
TAKEN, DONE, FAILED = range(3)
FORK_BYTES = 700 << 20  # what compiling one kernel takes at most beside what is shared
JOB_SECONDS = 120.0  # of one kernel: longer is a hang


class Tally(NamedTuple):
    done: int
    failed: int  # compilation refused them, or who compiled them died


def num_processes() -> int:
    """For this machine as it is now."""
    return max(1, min(usable_cores(), available_memory() // FORK_BYTES))


class Pool:
    """Runs `jobs` in forks of this process; `said` is told after each how many have ended. Use as a context manager: what is
    still running at the end is killed, and what it had begun to write in the `cache` goes."""

    def __init__(
        self, jobs: Sequence[Callable[[], None]], processes: int, cache: Path, said: Callable[[int], None] = lambda n: None,
        job_seconds: float = JOB_SECONDS,
    ):  # fmt: skip
        self._jobs, self._cache, self._said, self._seconds = jobs, cache, said, job_seconds
        self._processes = min(processes, len(jobs))
        self._to_do, self._give = os.pipe()
        self._news, self._tell = os.pipe()
        self._working: dict[int, tuple[int, float]] = {}  # process -> its job and since when; -1: none
        self._cut: list[int] = []  # who died or failed perhaps within a job
        self._open, self._failed, self._heard = set(range(len(jobs))), 0, time.monotonic()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        for process in list(self._working):
            self._kill(process)
        for end in (self._to_do, self._give, self._news, self._tell):
            os.close(end)
        for process in self._cut:  # not all: in a cache that machines share others have the same numbers
            for half in self._cache.glob(f"*/tmp.pid_{process}_*"):
                shutil.rmtree(half, ignore_errors=True)

    def run(self) -> Tally:
        """Until every job has ended, one way or another."""
        os.set_blocking(self._give, False)
        os.set_blocking(self._news, False)
        waiting = list(range(len(self._jobs)))
        with selectors.DefaultSelector() as selector:
            selector.register(self._news, selectors.EVENT_READ)
            while self._open and time.monotonic() - self._heard < self._seconds + 1.0:
                self._feed(waiting)
                while len(self._working) < min(self._processes, len(self._open)) and self._fork():
                    pass
                selector.select(0.2)
                self._read()
                self._bury()
        failed = self._failed + len(self._open)
        return Tally(len(self._jobs) - failed, failed)

    def _feed(self, waiting: list[int]) -> None:
        """As many numbers as the pipe takes."""
        try:
            while waiting:
                os.write(self._give, JOB.pack(waiting[0]))
                del waiting[0]
        except BlockingIOError:
            return

    def _read(self) -> None:
        """All that has been said."""
        try:
            while data := os.read(self._news, 64 * SAID.size):
                self._heard = time.monotonic()
                for process, job, what in SAID.iter_unpack(data):
                    self._working[process] = (job if what == TAKEN else -1, self._heard)
                    if what == FAILED:
                        self._cut.append(process)
                    if what != TAKEN:
                        self._ended(job, what == FAILED)
        except BlockingIOError:
            return

    def _ended(self, job: int, failed: bool) -> None:
        if job in self._open:
            self._open.discard(job)
            self._failed += failed
            self._said(len(self._jobs) - len(self._open))

    def _bury(self) -> None:
        """Those that have died, and those that hang, with their jobs."""
        for process, (job, since) in list(self._working.items()):
            if job >= 0 and time.monotonic() - since > self._seconds:
                self._kill(process)
            elif os.waitpid(process, os.WNOHANG)[0]:
                self._read()  # its last words
                job = self._gone(process)
            else:
                continue
            self._ended(job, failed=True)

    def _kill(self, process: int) -> None:
        """It, and the assembler or C compiler that it waits for."""
        self._gone(process)
        for send in (os.killpg, os.kill):
            try:
                send(process, signal.SIGKILL)
                break
            except ProcessLookupError:
                continue
        os.waitpid(process, 0)

    def _gone(self, process: int) -> int:
        """Its job; -1: none."""
        job = self._working.pop(process)[0]
        if job >= 0 or self._open:  # what it has taken last may not have been read
            self._cut.append(process)
        return job

    def _fork(self) -> bool:
        """Whether there is one more; where no more can be had, of processes or memory, fewer do."""
        parent = os.getpid()
        try:
            process = os.fork()
        except OSError:
            if not self._working:
                raise
            return False
        if process:
            self._working[process] = (-1, time.monotonic())
            return True
        try:
            os.setpgid(0, 0)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            end_with_parent()
            os.close(self._give)
            if os.getppid() == parent:
                self._work()
        finally:
            os._exit(0)

    def _work(self) -> None:
        me = os.getpid()
        while data := os.read(self._to_do, JOB.size):
            (job,) = JOB.unpack(data)
            os.write(self._tell, SAID.pack(me, job, TAKEN))
            try:
                self._jobs[job]()
                what = DONE
            except Exception:  # a kernel that this card cannot have is refused where it is needed, with its reason
                what = FAILED
            os.write(self._tell, SAID.pack(me, job, what))
