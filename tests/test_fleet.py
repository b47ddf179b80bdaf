"""Cores that come and go by load and for an update, over cores that do nothing: whatever happens, nobody is cut off."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace

import pytest

from headrace.distributed.autoscaler import ScalingConfig
from headrace.distributed.fleet import Fleet
from headrace.errors import EngineDeadError, HeadraceError, ParameterError


class FakeCores:
    """As EngineClient, as far as a Fleet is concerned. A core that drains does so until `drained` is set."""

    def __init__(self, count: int):
        self.there = dict.fromkeys(range(count), False)  # by number: whether it is leaving
        self.num_requests = 0
        self.room = 100
        self.draining = False
        self.drained = asyncio.Event()
        self.least = count

    def status(self):
        self.least = min(self.least, self.staying)
        return SimpleNamespace(draining=self.draining, alive=True, num_cores=self.staying)

    @property
    def staying(self) -> int:
        return sum(not leaving for leaving in self.there.values())

    def cores(self):
        info, stats = SimpleNamespace(max_num_seqs=4), SimpleNamespace(kv_usage=0.0)
        return [SimpleNamespace(number=n, up=True, leaving=gone, load=n, stats=stats, info=info) for n, gone in self.there.items()]

    async def add_core(self) -> int:
        await asyncio.sleep(0)
        if len(self.there) >= self.room:
            raise EngineDeadError("no room")
        number = max(self.there) + 1
        self.there[number] = False
        return number

    async def retire_core(self, number: int, timeout: float) -> None:
        if self.there.get(number, True) or self.staying < 2:
            raise ParameterError("core", number, "another")
        self.there[number] = True
        try:
            await self.drained.wait()
        except asyncio.CancelledError:
            self.there[number] = False
            raise
        del self.there[number]


def scaled(cores: FakeCores, most: int = 4) -> Fleet:
    return Fleet(cores, ScalingConfig(min_replicas=1, max_replicas=most, upscale_delay=0.0, downscale_delay=0.0))


async def turns(count: int = 8) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_the_load_decides_and_a_core_that_was_to_go_stays_when_it_comes_back():
    cores = FakeCores(1)
    fleet = scaled(cores)
    cores.num_requests = 12
    fleet.step(0.0)
    await turns()
    assert cores.staying == 3
    cores.num_requests = 1
    fleet.step(1.0)
    await turns()
    assert cores.staying == 1 and list(cores.there.values()) == [True, True, False]  # the idlest go first
    cores.num_requests = 9  # before they are done
    fleet.step(2.0)
    await turns()
    assert cores.staying == 3 and len(cores.there) == 3
    cores.num_requests = 0
    cores.drained.set()
    fleet.step(3.0)
    await turns()
    assert len(cores.there) == 1


async def test_no_room_is_tried_again_later_and_not_at_once():
    cores = FakeCores(1)
    cores.room, cores.num_requests = 1, 100
    fleet = scaled(cores)
    for now in range(3):
        fleet.step(float(now))
        await turns()
    assert not fleet._adding and fleet._not_before > 0 and cores.staying == 1
    cores.room = 4
    fleet.step(fleet._not_before)
    await turns()
    assert cores.staying == 4


async def test_an_update_replaces_all_and_never_has_fewer():
    cores = FakeCores(3)
    cores.drained.set()
    fleet = Fleet(cores, None)
    assert await fleet.update(1.0) == 3 and list(cores.there) == [3, 4, 5] and cores.least == 3


async def test_an_update_that_finds_no_room_leaves_the_rest_and_says_so():
    cores = FakeCores(3)
    cores.room = 3
    fleet = Fleet(cores, None)
    with pytest.raises(HeadraceError, match="0 of 3 cores have been replaced, then a new one could not start: no room"):
        await fleet.update(1.0)
    assert cores.staying == 3
    cores.draining = True
    with pytest.raises(HeadraceError, match="about to end"):
        await fleet.update(1.0)


async def test_one_update_at_a_time_and_none_outlives_the_server():
    cores = FakeCores(2)
    fleet = Fleet(cores, None)
    first = asyncio.create_task(fleet.update(1.0))
    await turns()
    with pytest.raises(HeadraceError, match="under way"):
        await fleet.update(1.0)
    first.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await first
    assert cores.staying == 3
