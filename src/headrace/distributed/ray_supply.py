"""Ray as a supply of cores: it places, starts and watches their hosts on a cluster's nodes. Tokens never travel through it.

A slot has one placement group, of one bundle: what a core needs is on one node, all ranks of it. In it lives one actor, a
CoreHost, whose processes are the slot's core and its standby. A core that dies is followed by another of the same host; when
the host is gone, or cannot be reached, the group is given up and another asked for.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Coroutine
from functools import partial
from typing import Any

import msgspec
import ray
import zmq.asyncio
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from headrace.distributed.core_host import CoreHost
from headrace.distributed.process import Door
from headrace.distributed.ray_cluster import cpus_of, what_is_missing
from headrace.distributed.remote_core import HostGoneError, RemoteCore
from headrace.engine.core_supply import StandbySupply
from headrace.engine.supervision import Core
from headrace.engine.wire import Place
from headrace.errors import HeadraceError

logger = logging.getLogger(__name__)
INTRODUCTION_SECONDS = 60.0  # for an actor to start in a group that has its place
LOOK_SECONDS = 0.1  # between looks whether a group has found its place
STILL_SECONDS = 30.0  # between lines of the log that say that it has not


class NodeHost(CoreHost):
    """The actor."""

    def __init__(self) -> None:
        super().__init__(ray.util.get_node_ip_address())


class RayHost:
    """A `remote_core.Host` in a placement group of its own."""

    def __init__(self, group: PlacementGroup, need: dict[str, float]):
        self._group, self._need = group, need
        self.place = Place()  # what a core here must know of its share
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        actor: Any = ray.remote(NodeHost)
        self._actor = actor.options(
            num_cpus=need["CPU"], num_gpus=need.get("GPU", 0), scheduling_strategy=strategy
        ).remote()  # fmt: skip

    async def introduce(self) -> str:
        """The address of its node, when it has been started there. Raises HeadraceError if the node is of no use."""
        try:
            address, version, free = await asyncio.wait_for(self._call("introduce"), INTRODUCTION_SECONDS)
        except HostGoneError as e:
            raise HeadraceError(f"a core's host cannot be started on its node: {e}") from None
        except TimeoutError:
            raise HeadraceError(f"a core's host did not start within {INTRODUCTION_SECONDS:g} s") from None
        if version != (here := sys.modules["headrace"].__version__):
            raise HeadraceError(f"the node {address} has Headrace {version}, and this front is {here}")
        if "GPU" not in self._need:  # others have their part of the node, now or later
            self.place = Place(memory=int(free * min(1.0, self._need["CPU"] / await asyncio.to_thread(cpus_of, address))))
        return address

    async def start(self, front_key: str, builder: str, log_level: str, log_format: str, traced: bool) -> tuple[int, Door]:
        return await self._call("start", front_key, builder, log_level, log_format, traced)

    async def wait(self, number: int) -> int:
        return await self._call("wait", number)

    async def kill(self, number: int) -> None:
        await self._call("kill", number)

    async def _call(self, method: str, *arguments: Any) -> Any:
        """A pending call is how the death of a host is seen: it fails within milliseconds."""
        try:
            return await asyncio.wrap_future(getattr(self._actor, method).remote(*arguments).future())
        except RayTaskError as e:
            raise HeadraceError(str(e.cause)) from None
        except RayActorError as e:
            lines = [line.strip() for line in str(e).splitlines() if line.strip()]
            raise HostGoneError(lines[-1] if lines else "no reason was given") from None

    async def leave(self) -> None:
        """End it and what it has started, and give its place back."""

        def work() -> None:
            ray.kill(self._actor)
            remove_placement_group(self._group)

        try:
            await asyncio.to_thread(work)
        except RayError as e:
            logger.warning("a place in the Ray cluster could not be given back: %s", e)


class RaySupply:
    """A `supervision.CoreSupply`. `need`: resources of the node that a core takes; `patience`: seconds to find such a node.

    Only the first place of a slot has to be found in time: one that had a core waits for as long as the cluster has no room.
    """

    def __init__(
        self, context: zmq.asyncio.Context, need: dict[str, float], patience: float, builder: str, log_level: str,
        log_format: str, traced: bool,
    ):  # fmt: skip
        self._context, self._need, self._patience = context, need, patience
        self._arguments = (builder, log_level, log_format, traced)
        self._standbys: dict[int, StandbySupply] = {}  # by slot, as all below
        self._hosts: dict[int, RayHost] = {}
        self._cores: dict[int, RemoteCore] = {}  # the last of each
        self._leaving: set[asyncio.Task[None]] = set()

    async def take(self, number: int) -> Core:
        last = self._cores.pop(number, None)
        if last is not None and last.unreachable:
            self._leave(number)
        core = await self._standby(number).take(number)
        assert isinstance(core, RemoteCore)
        self._cores[number] = core
        core.place = msgspec.structs.replace(self._hosts[number].place, name=f"core {number}")
        return core

    def prepare(self, number: int, delay: float) -> None:
        self._standby(number).prepare(number, delay)

    def release(self, number: int) -> None:
        self._cores.pop(number, None)
        self._leave(number)

    async def close(self) -> None:
        for number in {*self._hosts, *self._standbys}:
            self._leave(number)
        await asyncio.gather(*self._leaving)

    def _standby(self, number: int) -> StandbySupply:
        if number not in self._standbys:
            self._standbys[number] = StandbySupply(partial(self._spawn, number))
        return self._standbys[number]

    def _leave(self, number: int) -> None:
        """Give up a slot's place and what is in it, in the background."""
        standby, host = self._standbys.pop(number, None), self._hosts.pop(number, None)
        if standby is not None:
            self._later(standby.close())
        if host is not None:
            self._later(host.leave())

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _spawn(self, number: int) -> Core:
        placed = number in self._hosts
        while True:
            host = self._hosts.get(number) or await self._place(number, None if placed else self._patience)
            try:
                return await RemoteCore.start(self._context, host, *self._arguments)
            except HostGoneError as e:
                logger.warning("the place of core %d is gone (%s); looking for another", number, e)
                placed = True
                if self._hosts.get(number) is host:
                    self._later(self._hosts.pop(number).leave())

    async def _place(self, number: int, patience: float | None) -> RayHost:
        group = await asyncio.to_thread(placement_group, [self._need], strategy="STRICT_PACK")
        host = None
        try:
            await self._found(number, group, patience)
            host = RayHost(group, self._need)
            logger.info("core %d has its place on %s", number, await host.introduce())
        except BaseException:
            self._later(asyncio.to_thread(remove_placement_group, group) if host is None else host.leave())
            raise
        if (other := self._hosts.get(number)) is not None:  # of a start that was called off too late
            self._later(other.leave())
        self._hosts[number] = host
        return host

    async def _found(self, number: int, group: PlacementGroup, patience: float | None) -> None:
        began = told = time.monotonic()
        while (await asyncio.to_thread(placement_group_table, group)).get("state") != "CREATED":
            await asyncio.sleep(LOOK_SECONDS)
            now = time.monotonic()
            if patience is not None and now - began >= patience:
                raise HeadraceError(f"{await asyncio.to_thread(what_is_missing, self._need)}, for {patience:g} s")
            if now - told >= STILL_SECONDS:
                told = now
                logger.warning("core %d: %s; still waiting", number, await asyncio.to_thread(what_is_missing, self._need))
