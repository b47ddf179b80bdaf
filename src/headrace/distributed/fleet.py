"""Cores that come and go: as many as the load asks for, and one after another for an update. One of the two at a time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Protocol

from headrace.distributed.autoscaler import Autoscaler, Demand, ScalingConfig
from headrace.engine.interface import CoreStatus, EngineStatus
from headrace.errors import HeadraceError, ParameterError

logger = logging.getLogger("headrace.server.fleet")  # below the server's, which tells what it does
TICK = 0.5  # seconds between looks at the load
PATIENCE = 30.0  # seconds without another try, when a core could not be added


class Cores(Protocol):
    """What EngineClient has for this."""

    @property
    def num_requests(self) -> int: ...

    def status(self) -> EngineStatus: ...

    def cores(self) -> list[CoreStatus]: ...

    async def add_core(self) -> int: ...

    async def retire_core(self, number: int, timeout: float) -> None: ...


class Fleet:
    """`scaling`: None leaves the number of cores as it is."""

    def __init__(self, client: Cores, scaling: ScalingConfig | None):
        self._client = client
        self._scaler = None if scaling is None else Autoscaler(scaling)
        self._adding: set[asyncio.Task[None]] = set()
        self._draining: dict[int, asyncio.Task[None]] = {}  # by core
        self._not_before = 0.0  # no core is added until then
        self._updating = asyncio.Lock()

    async def run(self) -> None:
        """Look after the number of cores until cancelled, which stops whatever has been begun."""
        try:
            while self._scaler is not None:
                await asyncio.sleep(TICK)
                if not self._updating.locked():
                    self.step(time.monotonic())
        finally:
            await self._stop()

    def step(self, now: float) -> None:
        status, cores = self._client.status(), self._client.cores()
        loaded = [core for core in cores if core.info is not None and not core.leaving]
        if self._scaler is None or status.draining or not status.alive or not loaded:
            return
        per_core = self._scaler.config.target_ongoing_requests or min(c.info.max_num_seqs for c in loaded if c.info is not None)
        demand = Demand(self._client.num_requests, per_core, sum(core.stats.kv_usage for core in loaded))
        there = status.num_cores
        wanted = self._scaler.wanted(now, there, demand)
        if wanted > there:
            self._more(wanted - there, now, demand)
        elif wanted < there:
            idlest = sorted((core for core in loaded if core.up), key=lambda core: core.load)
            for core in idlest[: there - wanted]:
                logger.info("core %d is taken away when it is done: %d of %d are enough", core.number, wanted, there)
                self._draining[core.number] = asyncio.create_task(self._retire(core.number))

    def _more(self, count: int, now: float, demand: Demand) -> None:
        """Those that are about to go stay, then new ones come."""
        for task in list(self._draining.values())[:count]:
            task.cancel()
            count -= 1
        if count and now >= self._not_before:
            logger.info("%d more cores: %d requests in flight", count, demand.requests)
            for _ in range(count):
                task = asyncio.create_task(self._add())
                self._adding.add(task)
                task.add_done_callback(self._adding.discard)

    async def _add(self) -> None:
        try:
            logger.info("core %d takes requests", await self._client.add_core())
        except HeadraceError as e:
            self._not_before = time.monotonic() + PATIENCE
            logger.error("a core could not be added: %s", e)

    async def _retire(self, number: int) -> None:
        try:
            await self._client.retire_core(number, float("inf"))
            logger.info("core %d has been taken away", number)
        except HeadraceError as e:  # it is gone already, or the last
            logger.warning("core %d could not be taken away: %s", number, e)
        finally:
            self._draining.pop(number, None)

    async def update(self, drain_timeout: float) -> int:
        """Replace every core by a new one: it comes first, then the old one drains; how many were replaced.

        What an old core has not done after `drain_timeout` seconds goes on in others. Raises HeadraceError if a new core cannot
        start: then the others stay as they are.
        """
        if self._updating.locked() or self._client.status().draining:
            raise HeadraceError("an update is under way already" if self._updating.locked() else "the server is about to end")
        async with self._updating:
            await self._stop()
            old = [core.number for core in self._client.cores() if core.info is not None and not core.leaving]
            for count, number in enumerate(old):
                try:
                    new = await self._client.add_core()
                except HeadraceError as e:
                    done = f"{count} of {len(old)} cores have been replaced"
                    raise HeadraceError(f"{done}, then a new one could not start: {e}") from None
                logger.info("core %d takes the place of core %d, which drains", new, number)
                with contextlib.suppress(ParameterError):  # it has been given up meanwhile
                    await self._client.retire_core(number, drain_timeout)
            return len(old)

    async def _stop(self) -> None:
        """End what has been begun: cores that were to go stay, those that were to come do not."""
        begun = [*self._adding, *self._draining.values()]
        for task in begun:
            task.cancel()
        await asyncio.gather(*begun, return_exceptions=True)
