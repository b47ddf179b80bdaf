"""Faults of the machine for `soak.py`: a wall clock that jumps, a disk that is full, a server that is stopped for a while.

The clock: a library that is loaded before libc gives the wall clock an offset, which stands in a file; the monotonic clock
stays what it is, as on a machine whose clock is set. The disk: a file system of a few MB where the process may mount one, else
/dev/full.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from chaos import Chaos

JUMPS = (-86_400 * 400, -3600, -5, -0.5, 0, 0.5, 5, 3600, 86_400 * 400)  # seconds from what is right
CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

static const double *offset;
static int (*real)(clockid_t, struct timespec *);

__attribute__((constructor)) static void begin(void) {
  const char *path = getenv("SOAK_CLOCK");
  int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
  if (file >= 0) {
    void *at = mmap(0, sizeof *offset, PROT_READ, MAP_SHARED, file, 0);
    offset = at == MAP_FAILED ? 0 : at;
  }
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  int failed = real ? real(clock, now) : -1;
  if (!failed && offset && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
    long long ns = now->tv_sec * 1000000000LL + now->tv_nsec + (long long)(*(volatile const double *)offset * 1e9);
    now->tv_sec = ns / 1000000000LL;
    now->tv_nsec = ns % 1000000000LL;
  }
  return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec exact;
  int failed = clock_gettime(CLOCK_REALTIME, &exact);
  now->tv_sec = exact.tv_sec;
  now->tv_usec = exact.tv_nsec / 1000;
  return failed;
}

time_t time(time_t *at) {
  struct timespec exact;
  clock_gettime(CLOCK_REALTIME, &exact);
  if (at) *at = exact.tv_sec;
  return exact.tv_sec;
}
"""


class Clock:
    """The wall clock of processes that are started while it is `loaded`. Raises OSError or CalledProcessError without a C
    compiler."""

    def __init__(self, folder: Path):
        source, self.library, self.file = folder / "clock.c", folder / "clock.so", folder / "clock.offset"
        source.write_text(CLOCK)
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(self.library), str(source), "-ldl"], check=True)
        self.set(0.0)

    def set(self, offset: float) -> None:
        with open(self.file, "r+b" if self.file.exists() else "w+b") as file:
            file.write(struct.pack("d", offset))

    @contextlib.contextmanager
    def loaded(self) -> Iterator[None]:
        os.environ.update(LD_PRELOAD=str(self.library), SOAK_CLOCK=str(self.file))
        try:
            yield
        finally:
            del os.environ["LD_PRELOAD"], os.environ["SOAK_CLOCK"]

    async def jump(self, chaos: Chaos) -> None:
        while True:
            await asyncio.sleep(chaos.random.uniform(1, 5))
            self.set(chaos.random.choice(JUMPS))
            chaos.report.counts["clock jump"] += 1


async def stall(chaos: Chaos) -> None:
    """The HTTP process and client of the cores stands still, now and then for longer than a core may be silent."""
    while True:
        await asyncio.sleep(chaos.random.uniform(10, 30))
        chaos.report.counts["server stopped"] += 1
        os.kill(chaos.server.process.pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(chaos.random.choice((0.2, 1, 7)))
        finally:
            os.kill(chaos.server.process.pid, signal.SIGCONT)


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int = 4) -> Iterator[str]:
    """A path on a disk that is soon full."""
    folder.mkdir()
    mounted = shutil.which("mount") is not None and not subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "soak", str(folder)], capture_output=True
    ).returncode
    try:
        yield str(folder / "trace.json") if mounted else "/dev/full"
    finally:
        if mounted:
            subprocess.run(["umount", str(folder)], check=True)
