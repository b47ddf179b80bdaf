"""Keeps a core running: when one counts as dead, when there is no use in another, where the next comes from."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from headrace.config import EngineConfig
from headrace.engine.wire import Fatal, FromCore, Ready, ToCore
from headrace.errors import HeadraceError
from headrace.options import check, option

logger = logging.getLogger(__name__)
BUILDER = "headrace.engine.build:build_engine"  # module:function that makes the engine in a core's process
SPAWN_BACKOFF = 1.0  # seconds: what a machine lacks for a new process it does not get back in milliseconds
KILLED_EARLY = "before its model was loaded: the kernel's OOM killer, perhaps"  # of a core that somebody else ended


class Core(Protocol):
    """One incarnation of a core, wherever it runs."""

    ready: Ready | None  # None: it has not loaded its model yet
    fatal: Fatal | None  # its last words
    busy_seconds: float  # how long it had been inside one step when it was last heard of
    broken: asyncio.Future[None]  # gets what the reading of its messages raises

    @property
    def exited(self) -> bool: ...

    @property
    def killed(self) -> bool:
        """Whether it was ended by somebody else, not by what it did."""

    def begin(self, config: EngineConfig) -> None:
        """Give it its task."""

    def send(self, message: ToCore) -> None:
        """Never fails: that a core is dying is noticed elsewhere."""

    def listen(self, handler: Callable[[Any], None]) -> None:
        """From now on `handler` gets every message."""

    def silence(self) -> float:
        """Seconds since the last sign of life."""

    async def wait(self) -> str:
        """Until it has ended; returns why it did."""

    async def end(self, grace: float) -> None:
        """Ask it to end, insist after `grace` seconds. Nothing of it is left behind."""

    async def kill(self) -> None:
        """End it at once. Nothing of it is left behind."""


class CoreSupply(Protocol):
    """Where cores come from."""

    async def take(self, number: int) -> Core:
        """One for the slot of this number.

        Raises OSError or HeadraceError if there is none to be had; whatever it raises later, it is asked again.
        """

    def prepare(self, number: int, delay: float) -> None:
        """Have another at hand for this slot in `delay` seconds, if this supply can."""

    def release(self, number: int) -> None:
        """The slot of this number is no more, and its core has ended."""

    async def close(self) -> None:
        """All cores have ended; nothing of what was prepared is left behind."""


_operation = partial(option, group="operation")
_seconds = partial(_operation, low=1.0, high=1e7, unit="SECONDS")


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisionConfig:
    """When a core counts as dead, and when to give up. Seconds."""

    heartbeat_timeout: float = _seconds(15.0, "of silence: the core is restarted")
    # longer than the longest prefill chunk on a slow machine
    step_timeout: float = _seconds(300.0, "inside one step: the core is restarted")
    max_restarts: int = _operation(30, "deaths of the engine core in a minute before giving up", 0, 10**6)
    restart_window: float = option(60.0, "", 1.0, 1e7)  # of `max_restarts`
    restart_backoff: float = 0.05  # before the second restart in a row without progress; doubles up to 5 s
    max_failed_starts: int = option(3, "", 0, 10**6)  # in a row, each before the model was loaded, whoever ended it
    standby: bool = _operation(  # it costs its memory: about 200 MB, much of it shared
        True, "keep a second process with everything imported, so that a restart takes as long as loading the weights"
    )

    def __post_init__(self) -> None:
        check(self)

    def fault(self, core: Core) -> str | None:
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
        self.loaded = False  # once: what fails later is none of the options' mistakes
        self.backoff = 0.0

    def hopeless(self, core: Core, why: str, killed: bool, progressed: bool) -> str | None:
        """Count a death. Why there is no use in another try; None: there is, in `backoff` seconds."""
        early = core.ready is None
        self.loaded = self.loaded or not early
        self._failed_starts = self._failed_starts + 1 if early else 0
        self.backoff = 0.0 if progressed else min(5.0, 2 * self.backoff or self._limits.restart_backoff)
        permanent = core.fatal is not None and core.fatal.permanent
        if permanent and not self.loaded:
            return why
        if permanent or (early and killed):  # for want of memory, or of a file: what the machine has had, or may get
            self.backoff = max(SPAWN_BACKOFF, self.backoff)
        return self._too_many(why)

    def stillborn(self, why: str) -> str | None:
        """The same for a process that could not even be started."""
        self._failed_starts += 1
        self.backoff = min(5.0, max(SPAWN_BACKOFF, 2 * self.backoff))
        return self._too_many(why)

    def _too_many(self, why: str) -> str | None:
        limits, now = self._limits, time.monotonic()
        self._recent.append(now)
        while self._recent and self._recent[0] < now - limits.restart_window:
            self._recent.popleft()
        if len(self._recent) > limits.max_restarts:
            return f"{len(self._recent)} deaths of the core within {limits.restart_window:g} s; the last: {why}"
        if self._failed_starts > 0 and self._failed_starts >= limits.max_failed_starts:
            return f"{self._failed_starts} starts in a row failed; the last: {why}"
        return None


class Owner(Protocol):
    """Who is told what becomes of the cores; called in the event loop."""

    def heard(self, message: FromCore) -> None:
        """The present core says something."""

    def tick(self) -> None:
        """Called a few times a second while a core lives."""

    def died(self) -> bool:
        """The present core is no more. Returns whether it had made any progress."""

    def goes_on(self, why: str, killed: bool) -> None:
        """There will be another; `killed`: somebody else ended the last one."""

    def gave_up(self, why: str) -> None:
        """There will be none any more."""


class Supervisor:
    """Runs one core after another for as long as there is use in it. Its end is never silent: `gave_up` is told of it."""

    def __init__(self, config: EngineConfig, limits: SupervisionConfig, supply: CoreSupply, owner: Owner, number: int = 0):
        self.config, self.limits, self.supply, self.owner, self.number = config, limits, supply, owner, number
        self.core: Core | None = None
        self._restarted = self._closing = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Supervise no longer; the core, if there is one, is not touched."""
        self._closing = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def end(self, grace: float) -> None:
        """End the core, after `stop`; it has `grace` seconds to do so by itself. The supply is others' too."""
        if self.core is not None:
            await self.core.end(grace)
            self.core = None

    def prepare_standby(self, delay: float) -> None:
        if self.limits.standby:
            self.supply.prepare(self.number, delay)

    async def _run(self) -> None:
        reason = "its supervision was cancelled"
        try:
            reason = await self._keep_running()
        except Exception as e:
            logger.exception("the supervision of the engine failed")
            reason = f"its supervision failed: {type(e).__name__}: {e}"
        finally:
            if not self._closing:
                self.owner.gave_up(reason)
                await self._bury()

    async def _keep_running(self) -> str:
        """Until there is no use in another core; returns why."""
        deaths = Deaths(self.limits)
        while True:
            try:
                core = await self._take()
            except Exception as e:  # no memory, no process, no file descriptor, no room for the sockets
                await self._bury()
                known = isinstance(e, HeadraceError)
                why = str(e) if known else f"no process can be started for it: {type(e).__name__}: {e}"
                hopeless = why if known and not deaths.loaded else deaths.stillborn(why)
                if hopeless is None:
                    logger.error("%s; trying again in %g s", why, deaths.backoff)
            else:
                why = await self._serve(core)
                killed = core.killed  # by somebody else: we have not yet
                if killed and core.ready is None:
                    why = f"{why}, {KILLED_EARLY}"
                await self._bury()
                hopeless = deaths.hopeless(core, why, killed, self.owner.died())
                if hopeless is None:
                    self._restarted = True
                    self.owner.goes_on(why, killed)
            if hopeless is not None:
                return hopeless
            await asyncio.sleep(deaths.backoff)

    async def _take(self) -> Core:
        self.core = core = await self.supply.take(self.number)
        core.begin(self.config)
        if self._restarted:  # the next death may be near
            self.prepare_standby(0.0)
        return core

    async def _bury(self) -> None:
        if self.core is not None:
            await self.core.kill()
            self.core = None

    async def _serve(self, core: Core) -> str:
        """Take what the core says until it dies; returns why it did."""
        core.listen(self.owner.heard)
        exited = asyncio.create_task(core.wait())
        signs: list[asyncio.Future[Any]] = [core.broken, exited]
        try:
            while True:
                await asyncio.wait(signs, timeout=0.25, return_when=asyncio.FIRST_COMPLETED)
                if exited.done():
                    return exited.result()
                if core.broken.done():
                    return f"a message that was not understood ({core.broken.exception()!r})"
                if fault := self.limits.fault(core):
                    return fault
                self.owner.tick()
        finally:
            exited.cancel()
