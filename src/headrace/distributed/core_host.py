"""What starts, watches and ends the processes of cores on the machine where it lives; its caller may be on another one."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys

import msgspec

from headrace.config import environment_of_child, python_of_child
from headrace.distributed.process import Door
from headrace.errors import HeadraceError
from headrace.machine import available_memory

REMEMBERED = 8  # processes that have ended, and may still be asked about
DOOR_SECONDS = 60.0  # for a process to listen: it has imported next to nothing by then


class CoreHost:
    """Its processes end with it. Arguments and results are plain values: calls may come through anything."""

    def __init__(self, address: str):
        self._address = address  # of this machine, where the cores listen
        self._processes: dict[int, asyncio.subprocess.Process] = {}  # those that live, and the last that did
        self._numbers = itertools.count()

    async def introduce(self) -> tuple[str, str, int]:
        """The machine's address, Headrace's version there, and the bytes of memory that are free."""
        return self._address, sys.modules["headrace"].__version__, available_memory()

    async def start(self, front_key: str, builder: str, log_level: str, log_format: str, traced: bool) -> tuple[int, Door]:
        """Start a process that lets in the owner of this key alone; its number here, and its door."""
        process = await asyncio.create_subprocess_exec(
            *python_of_child("-m", "headrace.distributed.process", self._address, os.getpid(), builder, log_level, log_format),
            str(int(traced)), env=environment_of_child(), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
        for ended in [n for n, p in self._processes.items() if p.returncode is not None][:-REMEMBERED]:
            del self._processes[ended]
        number = next(self._numbers)
        self._processes[number] = process
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(front_key.encode() + b"\n")
            process.stdin.close()
            line = await asyncio.wait_for(process.stdout.readline(), DOOR_SECONDS)
            return number, msgspec.json.decode(line, type=Door)
        except BaseException as e:
            await self.kill(number)
            if isinstance(e, TimeoutError | OSError | msgspec.DecodeError):
                raise HeadraceError(f"a core on {self._address} does not listen: exit code {process.returncode}") from None
            raise

    async def wait(self, number: int) -> int:
        """The exit code, when the process has ended."""
        return await self._processes[number].wait()

    async def kill(self, number: int) -> None:
        process = self._processes[number]
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
