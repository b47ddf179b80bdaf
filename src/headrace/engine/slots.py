"""All cores of an engine: which of them a request goes to, where it goes on when its core is no more, who comes and goes.

    request -- balancer --> slot 0   a core, and after its death the next
                            slot 1   another

When a core dies, those of its streams that nothing is held against go to other cores at once; suspects wait for its successor
and are tried there, alone (`engine.probation`). Where no other core is open, all wait for whichever is the first.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import reduce
from typing import Protocol

import msgspec

from headrace.cache.events import BlockEvents
from headrace.config import EngineConfig
from headrace.engine.interface import Balancer, CoreStatus
from headrace.engine.slot import Slot
from headrace.engine.stats import CoreStats
from headrace.engine.streams import Stream, Streams
from headrace.engine.supervision import CoreSupply, SupervisionConfig
from headrace.engine.wire import LoadAdapter, News, UnloadAdapter, Watch
from headrace.errors import EngineDeadError, ParameterError
from headrace.lora.version import Version

logger = logging.getLogger(__name__)


class Owner(Protocol):
    """Who has the cores for what they do; called in the event loop."""

    def take(self, slot: Slot, news: News) -> None: ...

    def loaded(self, slot: Slot) -> None:
        """A core serves; told of each."""

    def lost(self, slot: Slot, why: str) -> None:
        """A core died."""

    def gave_up(self, why: str) -> None:
        """There is no core any more, nor will there be."""


class Slots:
    """By number: a new one gets the lowest that is free. The slots' `Keeper`."""

    def __init__(
        self, config: EngineConfig, limits: SupervisionConfig, supply: CoreSupply, balancer: Balancer | None,
        streams: Streams, owner: Owner,
    ):  # fmt: skip
        self.config, self.limits, self.supply = replace(config, data_parallel_size=1), limits, supply
        self.loads: dict[int, int] = {}
        self.num_poisonous = 0
        self._balancer: Balancer = balancer or LeastLoaded()
        self._streams, self._owner = streams, owner
        self._slots: dict[int, Slot] = {}
        self._removals: set[asyncio.Task[None]] = set()
        self._past: dict[int, tuple[CoreStats, int]] = {}  # counters and restarts of numbers that have no slot now
        for _ in range(config.data_parallel_size):
            self._new(at_start=True)

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots.values())

    @property
    def num_staying(self) -> int:
        """That have a core or will have another, and are not about to go."""
        return sum(slot.stays for slot in self)

    # ---------------------------------------------------------------- coming and going

    def start(self) -> None:
        for slot in self:
            slot.supervisor.start()

    async def settled(self) -> None:
        """Until each has been ready once, or has been given up."""
        await asyncio.gather(*(slot.settled.wait() for slot in self))

    async def stop(self) -> None:
        """Supervise no longer; no core is touched."""
        await asyncio.gather(*(slot.supervisor.stop() for slot in self))
        for slot in self:
            if not slot.settled.is_set():  # somebody may wait for it
                slot.dead = slot.dead or "the engine is being closed"
                slot.settled.set()

    async def end(self, grace: float) -> None:
        """After `stop`: end all cores, which have `grace` seconds to do so by themselves."""
        await asyncio.gather(*self._removals, *(slot.supervisor.end(grace) for slot in self))
        await self.supply.close()

    async def add(self) -> int:
        """The number of one more, when it takes requests. Raises EngineDeadError with the reason if it cannot start."""
        slot = self._new()
        slot.supervisor.start()
        try:
            await slot.settled.wait()
            if slot.dead is not None:
                raise EngineDeadError(slot.dead)
        except BaseException:
            await self._remove(slot, 0.0)
            raise
        return slot.number

    async def retire(self, number: int, timeout: float = math.inf) -> None:
        """Give a core nothing new, and end it when what it has is done; what is not after `timeout` seconds goes to others.

        Cancelled while it waits, the core takes requests again, as it does when the last of the others is given up: that
        raises EngineDeadError. Raises ParameterError unless it is one of several that stay.
        """
        staying = [slot.number for slot in self if slot.stays]
        if number not in staying or len(staying) < 2:
            allowed = f"one of {', '.join(map(str, staying))}" if len(staying) > 1 else "none: no other would take its requests"
            raise ParameterError("core", number, allowed)
        slot = self._slots[number]
        slot.leave()
        try:
            end = time.monotonic() + timeout
            while slot.leaving and slot.dead is None and self._streams.of(slot) and time.monotonic() < end:
                await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            slot.leave(False)
            raise
        if not slot.leaving:
            raise EngineDeadError(f"core {number} stays: all others have been given up")
        slot.ending = True
        removal = asyncio.create_task(self._remove(slot, 2.0))  # whoever waits for it no longer: nothing stays half done
        self._removals.add(removal)
        removal.add_done_callback(self._removals.discard)
        await asyncio.shield(removal)

    def _new(self, at_start: bool = False) -> Slot:
        for slot in [slot for slot in self if slot.dead is not None]:
            self._drop(slot)
        number = next(n for n in itertools.count() if n not in self._slots)
        past, restarts = self._past.pop(number, (CoreStats(), 0))
        self._slots[number] = slot = Slot(number, self, past, restarts, at_start)
        return slot

    async def _remove(self, slot: Slot, grace: float) -> None:
        slot.leave()
        slot.ending = True
        await slot.supervisor.stop()
        await slot.supervisor.end(grace)
        slot.died()
        slot.dead = slot.dead or "it was retired"
        self._drop(slot)
        self._empty(slot)

    def _drop(self, slot: Slot) -> None:
        if self._slots.get(slot.number) is slot:
            del self._slots[slot.number]
            self._past[slot.number] = slot.past, slot.restarts
            self.supply.release(slot.number)

    # ---------------------------------------------------------------- where streams go

    def submit(self, stream: Stream) -> None:
        """To the core that the balancer chooses, or, while none takes any, to the first that does."""
        loads = self.loads
        if loads:
            number, request = next(iter(loads)), stream.request
            if len(loads) > 1:
                number = self._balancer.choose(request.prompt_ids, request.cache_salt, loads)
            self._slots[number].send(stream)

    def _move(self, streams: Iterable[Stream]) -> None:
        """To other cores, or whichever comes next."""
        for stream in streams:
            stream.detach()
            try:
                self.submit(stream)
            except Exception as e:  # what cannot be sent is its own reader's affair
                logger.exception("request %s cannot be sent to a core", stream.request.id)
                self._streams.fail(stream, f"{type(e).__name__}: {e}")

    def _empty(self, slot: Slot) -> None:
        """It has no core, and will have none."""
        self._streams.core_gone(slot)
        mine = self._streams.of(slot)
        for stream in mine:
            stream.interrupted = True
        self._move(mine)

    # ---------------------------------------------------------------- told by the slots

    def took(self, slot: Slot, news: News) -> None:
        if news.blocks is not None:
            self._balancer.blocks(slot.number, news.blocks)
        self._owner.take(slot, news)

    def began(self, slot: Slot) -> None:
        self._balancer.added(slot.number)
        self._owner.loaded(slot)

    def opened(self, slot: Slot) -> None:
        for other in self:
            if not other.ready:  # its streams need not wait for its next core
                self._move(other.probation.release())
        self._move(self._streams.of(None))

    def closed(self, slot: Slot) -> None:
        self.loads.pop(slot.number, None)
        self._balancer.removed(slot.number)
        for stream in self._streams.of(slot):
            stream.load = 0

    def lost(self, slot: Slot, why: str, killed: bool) -> None:
        mine, leaving = self._streams.of(slot), self._streams.leaving_of(slot)
        logger.error("engine core %d died (%s); starting another, %d requests go on", slot.number, why, len(mine))
        self._owner.lost(slot, why)
        culprit = slot.probation.after_death([*mine, *leaving], killed)
        self._streams.core_gone(slot)
        for stream in mine:
            stream.interrupted = stream.interrupted or bool(stream.deaths or stream.kills)
        if culprit is not None:
            self.num_poisonous += 1
            name = culprit.request.id
            logger.error("request %s: cores died %d times on it; failing it", name, culprit.deaths + culprit.kills)
            self._streams.fail(culprit, "this request ends the engine")
        if self.loads:
            self._move(slot.probation.release())

    def ended(self, slot: Slot, why: str) -> None:
        self._owner.lost(slot, why)
        others = [one for one in self if one.dead is None and not one.ending]
        if not others or (slot.at_start and slot.info is None):  # a mistake that all make
            self._owner.gave_up(why)
            return
        logger.error("engine core %d is given up (%s); %d others go on", slot.number, why, len(others))
        if not self.num_staying:
            for other in others:
                other.leave(False)
        self._empty(slot)

    # ---------------------------------------------------------------- what they do and have done

    def watch(self, number: int, on: bool) -> None:
        """Have a core show what it does, from a snapshot on; a core that is not there, or loads, is not asked."""
        slot = self._slots.get(number)
        if slot is not None and slot.ready and slot.core is not None:
            slot.core.send(Watch(on))

    def load_adapter(self, version: Version) -> None:
        """Tell those that serve; who comes later is told when it begins."""
        self._tell(LoadAdapter(version))

    def unload_adapter(self, digest: str) -> None:
        self._tell(UnloadAdapter(digest))

    def _tell(self, message: LoadAdapter | UnloadAdapter) -> None:
        for slot in self:
            if slot.ready and slot.core is not None:
                slot.core.send(message)

    def adapter_states(self) -> list[dict[str, str]]:
        return [slot.stats.adapters for slot in self if slot.ready]

    @property
    def restarts(self) -> int:
        return sum(slot.restarts for slot in self) + sum(restarts for _, restarts in self._past.values())

    def counters(self) -> CoreStats:
        """Sums over all cores, and the mean share of their caches that is in use. Counters never go back, whoever goes."""
        now, usage = [slot.counters() for slot in self], [slot.stats.kv_usage for slot in self if slot.ready]
        found = reduce(lambda past, one: one.added_to(past), [*(past for past, _ in self._past.values()), *now])
        return msgspec.structs.replace(
            found, running=sum(one.running for one in now), waiting=sum(one.waiting for one in now),
            kv_usage=sum(usage) / max(1, len(usage)),
        )  # fmt: skip

    def statuses(self) -> list[CoreStatus]:
        return [CoreStatus(s.number, s.progressing, s.leaving, s.load, s.restarts, s.counters(), s.info) for s in self]


class LeastLoaded:
    """A `Balancer` that looks at nothing else."""

    def added(self, core: int) -> None:
        pass

    def removed(self, core: int) -> None:
        pass

    def blocks(self, core: int, events: BlockEvents) -> None:
        pass

    def choose(self, prompt_ids: object, cache_salt: str, loads: Mapping[int, int]) -> int:
        return min(loads, key=loads.__getitem__)
