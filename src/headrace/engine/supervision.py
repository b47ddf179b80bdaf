"""When a core counts as dead, when there is no use in another one, and where the next one comes from."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from dataclasses import dataclass

import zmq.asyncio

from headrace.engine.core_process import CoreProcess
from headrace.errors import ParameterError


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisionConfig:
    """When a core counts as dead, and when to give up. Seconds."""

    heartbeat_timeout: float = 15.0  # without any sign of the process
    step_timeout: float = 300.0  # inside one step: longer than the longest prefill chunk on a slow machine
    max_restarts: int = 30  # within `restart_window`: one more ends the server
    restart_window: float = 60.0
    restart_backoff: float = 0.05  # before the second restart in a row without progress; doubles up to 5 s
    max_failed_starts: int = 3  # in a row, each before the model was loaded
    standby: bool = True  # keep a process with everything imported; costs its memory (about 200 MB, much of it shared)

    def __post_init__(self) -> None:
        for name in ("heartbeat_timeout", "step_timeout", "restart_window"):
            if not 1.0 <= getattr(self, name) <= 1e7:
                raise ParameterError(name, getattr(self, name), "seconds in [1, 1e7]")
        for name in ("max_restarts", "max_failed_starts"):
            if not 0 <= getattr(self, name) <= 10**6:
                raise ParameterError(name, getattr(self, name), "an integer in [0, 1000000]")

    def fault(self, core: CoreProcess) -> str | None:
        """What is wrong with a process that still lives."""
        silent = core.silence()
        if silent > self.heartbeat_timeout and (core.ready is not None or silent > 120.0):
            return f"no heartbeat for {silent:.0f} s"
        if core.busy_seconds > self.step_timeout:
            return f"one step takes {core.busy_seconds:.0f} s"
        return None


class Deaths:
    """The cores that have died: whether to start another, and after how long."""

    def __init__(self, limits: SupervisionConfig):
        self._limits = limits
        self._recent: deque[float] = deque()
        self._failed_starts = 0  # in a row
        self.backoff = 0.0

    def hopeless(self, core: CoreProcess, why: str, killed: bool, progressed: bool) -> str | None:
        """Count a death. Why there is no use in another try; None: there is, in `backoff` seconds."""
        limits, now = self._limits, time.monotonic()
        self._recent.append(now)
        while self._recent and self._recent[0] < now - limits.restart_window:
            self._recent.popleft()
        self._failed_starts = 0 if core.ready is not None else self._failed_starts + (not killed)
        self.backoff = 0.0 if progressed else min(5.0, 2 * self.backoff or limits.restart_backoff)
        if core.fatal is not None and core.fatal.permanent:
            return why
        if len(self._recent) > limits.max_restarts:
            return f"{len(self._recent)} deaths of the core within {limits.restart_window:g} s; the last: {why}"
        if self._failed_starts > 0 and self._failed_starts >= limits.max_failed_starts:
            return f"{self._failed_starts} starts in a row failed; the last: {why}"
        return None


class CoreSupply:
    """Processes for cores: a new one each time, or the standby that has imported everything."""

    def __init__(self, context: zmq.asyncio.Context, builder: str, log_level: str, traced: bool):
        self._arguments = (context, builder, log_level, traced)
        self._standby: asyncio.Task[CoreProcess] | None = None

    async def take(self) -> CoreProcess:
        if self._standby is not None:
            standby, self._standby = self._standby, None
            core = await standby
            if not core.exited:
                return core
            await core.kill()
        return await CoreProcess.spawn(*self._arguments)

    def prepare(self, delay: float) -> None:
        """Have a standby in `delay` seconds."""
        if self._standby is None:
            self._standby = asyncio.create_task(self._stand_by(delay))

    async def _stand_by(self, delay: float) -> CoreProcess:
        await asyncio.sleep(delay)
        return await CoreProcess.spawn(*self._arguments)

    async def close(self) -> None:
        if self._standby is not None:
            self._standby.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await (await self._standby).kill()
