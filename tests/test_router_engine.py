"""The router behind the engine's client: what it knows is what each core's own index holds, through prompts, outputs and deaths."""

from __future__ import annotations

import pytest

from fake_core import FakeSupply
from headrace.cache.events import block_hashes
from headrace.distributed.kv_events import Published, Publisher
from headrace.distributed.router import Router
from headrace.sampling.checks import packed
from test_cache_events import paths
from test_engine_slots import Fleet
from test_router import cores_of


@pytest.fixture(scope="module")
def supply(model) -> FakeSupply:
    return FakeSupply(model, 3, kv_cache_events="tokens", num_kv_blocks=16)


def held(fleet: Fleet, number: int) -> set[int]:
    """Hashes of what is in a core's index, made from its tokens."""
    core = fleet.core(number)
    size = core.core.scheduler.limits.block_size
    return {block_hashes(packed(ids), size, salt)[-1] for salt, ids in paths(core.core.scheduler.tree)}


def agrees(fleet: Fleet, router: Router) -> None:
    router.index._expected.clear()  # guesses
    known = {number: set() for number in fleet.slots if fleet.core(number) is not None}
    for name in list(router.index._held):
        for core in cores_of(router.index, name):
            known[core].add(name)
    assert known == {number: held(fleet, number) for number in known}


async def test_it_knows_what_the_cores_hold(supply, tmp_path):
    publisher = Publisher(f"ipc://{tmp_path}/events")
    router = Router()
    fleet = await Fleet(supply, 3, balancer=Published(router, publisher)).start()
    await fleet.turns(1)  # their first words
    assert router.block_size == supply.config.block_size
    for round in range(4):
        for kind in range(5):
            await fleet.submit(kind)
        for _ in range(40):
            await fleet.turns(1)
            agrees(fleet, router)
        if round % 2:
            await fleet.die(round)
            agrees(fleet, router)
            await fleet.load(round)
            await fleet.turns(1)
            agrees(fleet, router)
    await fleet.client.close()
    publisher.close()


async def test_prompts_of_one_beginning_meet_on_one_core(supply):
    fleet = await Fleet(supply, 3, balancer=Router(prefix_weight=100.0)).start()
    await fleet.turns(1)
    for _ in range(3):
        await fleet.submit(3)
    where = [number for number in fleet.slots if fleet.core(number).inbox.messages]
    assert len(where) == 1, "three prompts, of which no core has stored any block yet, are together"
    await fleet.turns(40)
    await fleet.submit(3)
    assert [number for number in fleet.slots if fleet.core(number).inbox.messages] == where
    await fleet.die(where[0])
    await fleet.turns(60, *(set(fleet.slots) - set(where)))
    assert all(reader.done() for reader in fleet.readers) and len({tuple(tokens) for tokens in fleet.tokens}) == 1
    await fleet.client.close()


async def test_without_events_it_balances_by_load(model):
    fleet = await Fleet(FakeSupply(model, 3), 3, balancer=Router()).start()
    for _ in range(3):
        await fleet.submit(3)
    await fleet.turns(1)
    assert [len(fleet.on(number)) for number in fleet.slots] == [1, 1, 1]
    await fleet.client.close()
