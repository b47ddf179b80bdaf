"""Several cores behind one client: whichever dies, hangs, comes or goes, every stream gets its very tokens, from whatever cores."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_driver import complete
from fake_core import FakeCore, FakeSupply
from headrace.engine import process, supervision
from headrace.engine.client import EngineClient
from headrace.engine.messages import EngineRequest
from headrace.engine.slot import Slot
from headrace.engine.slots import LeastLoaded
from headrace.engine.wire import Fatal
from headrace.errors import EngineDeadError, HeadraceError, ParameterError
from headrace.sampling.params import SamplingParams

MOST = 4  # cores at once
LENGTH = 24  # tokens of output
KINDS = range(8)


def params(max_tokens: int = LENGTH) -> SamplingParams:
    return complete(SamplingParams(max_tokens=max_tokens, temperature=0.8, seed=3, ignore_eos=True), eos_token_ids=[2])


def prompt(kind: int) -> list[int]:
    return [5 + (kind * 7 + i) % 90 for i in range(6 + kind % 5)]


@pytest.fixture(scope="module")
def supply(model) -> FakeSupply:
    return FakeSupply(model, MOST)


@pytest.fixture(scope="module")
def alone(supply) -> Callable[[int], list[int]]:
    """What each kind of request gets when it has a core for itself."""
    known: dict[int, list[int]] = {}
    for kind in KINDS:
        core, known[kind] = supply.new(), []
        core.add(EngineRequest("alone", prompt(kind), params(), 3))
        while core.has_work:
            known[kind] += [token for news in core.step() for token in news.token_ids]
    return known.__getitem__


class Fleet:
    """A client, its readers, and cores that move when they are told to."""

    def __init__(self, supply: FakeSupply, cores: int = 2, **options):
        self.client: EngineClient = supply.client(cores, **options)
        self.readers: list[asyncio.Task[str]] = []
        self.tokens: list[list[int]] = []
        self.fatal: Callable[[FakeCore], bool] = lambda core: False  # a core dies of its next step

    @property
    def slots(self) -> dict[int, Slot]:
        return {slot.number: slot for slot in self.client._slots}

    def core(self, number: int) -> FakeCore | None:
        core = self.slots[number].core if number in self.slots else None
        return core if isinstance(core, FakeCore) and not core.exited else None

    async def load(self, number: int) -> None:
        """Its present or next core has loaded its model."""
        async with asyncio.timeout(20):
            while self.core(number) is None and number in self.slots and self.slots[number].dead is None:
                await asyncio.sleep(0.001)
        core = self.core(number)
        if core is not None and core.ready is None:
            core.load()
            await asyncio.sleep(0)

    async def start(self, *numbers: int) -> Fleet:
        await self.client.start()
        for number in numbers or self.slots:
            await self.load(number)
        return self

    async def submit(self, kind: int, max_tokens: int = LENGTH) -> int:
        number = len(self.readers)
        self.tokens.append([])
        self.readers.append(asyncio.create_task(self._read(number, kind, max_tokens)))
        await asyncio.sleep(0)
        return number

    async def _read(self, number: int, kind: int, max_tokens: int) -> str:
        try:
            async for news in self.client.generate(f"r{number}", prompt(kind), params(max_tokens)):
                self.tokens[number] += news.token_ids
                if news.finish_reason is not None:
                    return news.finish_reason
            raise AssertionError("no end")
        except HeadraceError as e:
            return type(e).__name__

    async def abort(self, which: int) -> None:
        if self.readers:
            await self.client.abort(f"r{which % len(self.readers)}")

    async def turns(self, count: int, *numbers: int) -> None:
        for _ in range(count):
            for number in numbers or list(self.slots):
                core = self.core(number)
                if core is not None and core.ready is not None:
                    if self.fatal(core):
                        core.process.exit(1)
                    else:
                        core.loop.turn()
            await asyncio.sleep(0)

    async def die(self, number: int, code: int = -9) -> None:
        """And the client knows of it."""
        slot, core = self.slots.get(number), self.core(number)
        if slot is not None and core is not None:
            core.process.exit(code)
            async with asyncio.timeout(20):
                while slot.core is core and slot.dead is None:
                    await asyncio.sleep(0)

    def on(self, number: int) -> set[int]:
        """The requests that a core has."""
        core = self.core(number)
        return set() if core is None else {int(name[1:]) for name in core.core.scheduler.live}

    async def finish(self) -> None:
        async with asyncio.timeout(60):
            while not all(reader.done() for reader in self.readers) or self.client._streams.leaving:
                for number in list(self.slots):
                    await self.load(number)
                await self.turns(1)
                for slot in self.slots.values():
                    slot.tick()
        await asyncio.gather(*self.readers, return_exceptions=True)

    def check_loads(self) -> None:
        """What is kept of them while requests come and go is what counting gives."""
        streams = self.client._streams.live.values()
        for number, slot in self.slots.items():
            assert slot.load == sum(s.load for s in streams if s.slot is slot)
            assert all((s.load <= s.request.params.max_tokens) == (s.num_in_core > 0) and s.load > 0 for s in streams if s.sent)
            assert (number in self.client._slots.loads) == (slot.ready and not slot.leaving and not slot.probation.active)
            assert self.client._slots.loads.get(number, slot.load) == slot.load

    def check_empty(self) -> None:
        client = self.client
        assert not client._streams.live and not client._streams.leaving and client._streams.waiting_tokens == 0
        assert not any(slot.probation.active or slot.load for slot in client._slots)
        assert not any(slot.probation._entered or slot.probation._free for slot in client._slots), "requests that are over"
        for number in self.slots:
            if (core := self.core(number)) is not None:
                assert not core.core.has_work and core.core.scheduler.kv_usage == 0.0


@pytest.fixture
async def fleet(supply) -> AsyncIterator[Fleet]:
    fleet = await Fleet(supply).start()
    yield fleet
    await fleet.client.close()


# ---------------------------------------------------------------- deaths


@pytest.mark.parametrize(("code", "before"), [(-9, 1), (-9, 6), (1, 6)])
async def test_streams_of_a_dead_core_go_on_in_another_at_once(fleet, alone, code, before):
    """Its successor has not even been started to load."""
    for kind in range(6):
        await fleet.submit(kind)
    assert len(fleet.on(0)) == len(fleet.on(1)) == 0 and fleet.slots[0].load and fleet.slots[1].load
    await fleet.turns(before)
    mine, others = fleet.on(0), fleet.on(1)
    assert len(mine) == len(others) == 3
    await fleet.die(0, code)
    assert {s.slot.number for s in fleet.client._streams.live.values()} == {1}
    await fleet.turns(120, 1)
    assert [fleet.tokens[i] for i in range(6)] == [alone(i) for i in range(6)]
    assert fleet.client.restarts == 1 and fleet.slots[1].restarts == 0 and fleet.core(0).ready is None
    fleet.check_empty()


async def test_streams_of_a_core_that_hangs_go_on_in_another(fleet, alone):
    for kind in range(2):
        await fleet.submit(kind)
    await fleet.turns(6)
    hanging = fleet.core(0)
    hanging.busy_seconds = 1e9
    async with asyncio.timeout(20):
        while fleet.slots[0].core is hanging:
            await asyncio.sleep(0.01)
    await fleet.turns(60, 1)
    assert [fleet.tokens[i] for i in range(2)] == [alone(i) for i in range(2)]
    assert fleet.slots[1].restarts == 0


@pytest.mark.parametrize("first", [0, 1])
async def test_when_all_are_dead_whichever_comes_first_takes_the_streams(fleet, alone, first):
    for kind in range(4):
        await fleet.submit(kind)
    await fleet.turns(6)
    await fleet.die(0)
    await fleet.turns(6, 1)  # those that came are proven there
    await fleet.die(1)
    await fleet.submit(4)
    await fleet.load(first)
    await fleet.turns(120, first)
    assert [fleet.tokens[i] for i in range(5)] == [alone(i) for i in range(5)]
    assert fleet.core(1 - first).ready is None


async def test_suspects_wait_for_the_successor_and_nobody_else_waits(fleet, alone):
    """Three had just begun when their core died by itself; they are tried there, alone, while the other core serves."""
    for kind in range(6):
        await fleet.submit(kind)
    await fleet.turns(2)
    suspects = fleet.on(0)
    await fleet.die(0, 1)
    late = await fleet.submit(6)
    await fleet.turns(120, 1)
    served = set(range(7)) - suspects
    assert late in served and all(fleet.readers[i].done() for i in served) and not any(fleet.readers[i].done() for i in suspects)
    await fleet.load(0)
    await fleet.turns(1, 0)
    assert len(fleet.on(0)) == 1
    await fleet.finish()
    assert fleet.tokens == [alone(i) for i in range(7)]
    assert fleet.slots[1].restarts == 0 and fleet.client.num_poisonous == 0


@pytest.mark.parametrize("at", [0, 2, 9])
async def test_a_poisonous_request_is_found_and_only_it_fails(fleet, alone, at):
    """Its core dies when it is about to get its token number `at`. One that was proven by then takes another core along."""
    for kind in range(6):
        await fleet.submit(kind)
    bad = await fleet.submit(7)

    def fatal(core: FakeCore) -> bool:
        request = core.core.scheduler.live.get(f"r{bad}")
        return request is not None and len(request.output_ids) >= at

    fleet.fatal = fatal
    await fleet.finish()
    assert fleet.readers[bad].result() == "error" and fleet.client.num_poisonous == 1
    assert fleet.tokens[:6] == [alone(i) for i in range(6)]
    assert [slot.restarts for slot in fleet.slots.values() if slot.restarts == 0] == ([] if at > 4 else [0])
    assert fleet.client.restarts <= 3
    fleet.check_empty()


async def test_one_that_moved_is_not_blamed_for_the_death_of_its_next_core(fleet, alone):
    """All cores fail at once, for a reason of their own, while one request is there."""
    await fleet.submit(0)
    await fleet.turns(6)
    first = 0 if fleet.on(0) else 1
    await fleet.die(first, 1)
    await fleet.turns(1)
    await fleet.die(1 - first, 1)
    await fleet.finish()
    assert fleet.tokens == [alone(0)] and fleet.client.num_poisonous == 0


# ---------------------------------------------------------------- where requests go


async def test_requests_go_where_the_least_is_outstanding(supply):
    fleet = await Fleet(supply, 3).start()
    for kind in range(9):
        await fleet.submit(kind, max_tokens=LENGTH)
    await fleet.turns(1)
    assert [len(fleet.on(number)) for number in range(3)] == [3, 3, 3]
    await fleet.finish()
    await fleet.client.close()


async def test_a_balancer_hears_of_cores_and_chooses_among_those_that_are_open(supply):
    told = []

    class Last(LeastLoaded):
        def added(self, core):
            told.append(("added", core))

        def removed(self, core):
            told.append(("removed", core))

        def choose(self, prompt_ids, cache_salt, loads):
            told.append(("choose", cache_salt, sorted(loads), list(prompt_ids)))
            return max(loads)

    fleet = await Fleet(supply, 3, balancer=Last()).start()
    reader = asyncio.create_task(anext(fleet.client.generate("a", prompt(1), params(), cache_salt="salt")))
    await asyncio.sleep(0)
    await fleet.turns(6)
    assert told == [("added", 0), ("added", 1), ("added", 2), ("choose", "salt", [0, 1, 2], prompt(1))] and reader.done()
    await fleet.die(2)
    assert told[4] == ("removed", 2) and (len(told) == 5 or told[5][2] == [0, 1])
    await fleet.load(2)
    assert told[-1] == ("added", 2)
    await fleet.client.close()


# ---------------------------------------------------------------- who starts, comes and goes


async def test_it_is_ready_when_one_core_is(supply, alone):
    fleet = await Fleet(supply, 3).start(1)
    info = await asyncio.wait_for(fleet.client.wait_loaded(), 20)
    status = fleet.client.status()
    assert info.max_model_len == fleet.client.max_model_len == 64
    assert status.loaded and status.alive and status.progressing and status.num_cores == 3
    assert [core.up for core in fleet.client.cores()] == [False, True, False]
    await fleet.submit(0)
    await fleet.turns(40, 1)
    assert fleet.tokens == [alone(0)]
    await fleet.client.close()


async def test_a_request_may_be_as_long_as_fits_into_every_core(fleet):
    """One's card had less memory left: its context is shorter, and any stream may have to go there."""
    slot = fleet.slots[1]
    slot.info = msgspec.structs.replace(slot.info, max_model_len=40)
    assert fleet.client.max_model_len == 40


async def test_a_mistake_in_the_options_ends_all_at_once(supply):
    fleet = Fleet(supply, 3)
    await fleet.client.start()
    await fleet.load(0)
    fleet.core(1).fatal = Fatal("no such card", True)
    await fleet.die(1, 2)
    with pytest.raises(EngineDeadError, match="no such card"):
        await asyncio.wait_for(fleet.client.wait_loaded(), 20)
    assert fleet.client.gave_up_with == ["no such card"] and not fleet.client.status().alive
    await fleet.client.close()


async def test_a_core_that_is_given_up_leaves_the_others_alone(supply, alone):
    fleet = await Fleet(supply, 2, max_restarts=1).start()
    for kind in range(4):
        await fleet.submit(kind)
    await fleet.turns(6)
    for _ in range(2):
        await fleet.load(0)
        await fleet.die(0)
    status = fleet.client.status()
    assert status.alive and status.progressing and status.num_cores == 1 and not fleet.client.gave_up_with
    await fleet.turns(120, 1)
    assert fleet.tokens == [alone(i) for i in range(4)]
    for _ in range(2):
        await fleet.load(1)
        await fleet.die(1)
    assert len(fleet.client.gave_up_with) == 1 and not fleet.client.status().alive
    await fleet.client.close()


async def test_a_core_whose_load_is_always_killed_is_given_up_and_the_others_go_on(supply, alone, monkeypatch):
    monkeypatch.setattr(supervision, "SPAWN_BACKOFF", 0.001)
    fleet = await Fleet(supply, 2).start()
    for kind in range(4):
        await fleet.submit(kind)
    await fleet.turns(6)
    for _ in range(4):  # one that had served, and three that load
        async with asyncio.timeout(20):
            while fleet.core(0) is None:
                await asyncio.sleep(0.001)
        await fleet.die(0, -9)
    assert fleet.client.status().num_cores == 1 and not fleet.client.gave_up_with
    await fleet.turns(120, 1)
    assert fleet.tokens == [alone(i) for i in range(4)]
    await fleet.client.close()


async def test_cores_come_and_go_under_load(fleet, alone, monkeypatch):
    monkeypatch.setattr(process, "STATS_SECONDS", -1.0)  # with every turn
    for kind in range(4):
        await fleet.submit(kind)
    await fleet.turns(3)
    adding = asyncio.create_task(fleet.client.add_core())
    await asyncio.sleep(0)
    await fleet.load(2)
    assert await adding == 2 and fleet.client.status().num_cores == 3
    await fleet.submit(4)
    await fleet.turns(1)
    assert fleet.on(2) == {4}
    retiring = asyncio.create_task(fleet.client.retire_core(0))
    await asyncio.sleep(0)
    assert fleet.client.status().num_cores == 2 and fleet.client.cores()[0].leaving
    mine = fleet.on(0)
    assert mine and await fleet.submit(5) == 5
    await fleet.turns(1)
    assert fleet.on(0) == mine
    while 0 in fleet.slots:
        steps, own = fleet.client.counters().steps, fleet.slots[0].counters().steps
        await fleet.turns(1)
        await asyncio.sleep(0.001)
    await retiring
    assert list(fleet.slots) == [1, 2] and fleet.client.counters().steps >= steps > own >= LENGTH and fleet.client.restarts == 0
    adding = asyncio.create_task(fleet.client.add_core())
    await asyncio.sleep(0)
    await fleet.load(0)
    assert await adding == 0, "the lowest number that is free"
    assert fleet.slots[0].counters().steps == own, "what this number has done before"
    await fleet.finish()
    assert fleet.tokens == [alone(i) for i in range(6)]


async def test_what_a_core_has_not_done_in_time_goes_to_others(fleet, alone):
    for kind in range(4):
        await fleet.submit(kind)
    await fleet.turns(6)
    await fleet.client.retire_core(1, timeout=0.0)
    await fleet.turns(120)
    assert fleet.tokens == [alone(i) for i in range(4)] and list(fleet.slots) == [0]
    fleet.check_empty()


async def test_who_was_to_go_stays_when_nobody_else_is_left(supply, alone):
    fleet = await Fleet(supply, 2, max_restarts=0).start()
    for kind in range(4):
        await fleet.submit(kind)
    await fleet.turns(6)
    retiring = asyncio.create_task(fleet.client.retire_core(0))
    await asyncio.sleep(0)
    await fleet.die(1)
    with pytest.raises(EngineDeadError, match="core 0 stays"):
        await asyncio.wait_for(retiring, 20)
    await fleet.submit(4)
    await fleet.turns(120)
    assert fleet.tokens == [alone(i) for i in range(5)] and fleet.client.status().num_cores == 1
    await fleet.client.close()


async def test_a_retirement_that_is_called_off_changes_nothing(fleet):
    await fleet.submit(0)
    await fleet.turns(1)
    number = 0 if fleet.on(0) else 1
    retiring = asyncio.create_task(fleet.client.retire_core(number))
    await asyncio.sleep(0)
    assert number not in fleet.client._slots.loads
    retiring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await retiring
    assert number in fleet.client._slots.loads and fleet.client.status().num_cores == 2
    await fleet.finish()


async def test_who_must_stay_is_not_retired_and_who_cannot_come_is_told(fleet):
    with pytest.raises(ParameterError, match="core: got 7, allowed: one of 0, 1"):
        await fleet.client.retire_core(7)
    await fleet.client.retire_core(1)
    with pytest.raises(ParameterError, match="no other would take its requests"):
        await fleet.client.retire_core(0)
    for number in range(1, MOST):
        adding = asyncio.create_task(fleet.client.add_core())
        await asyncio.sleep(0)
        await fleet.load(number)
        assert await adding == number
    with pytest.raises(EngineDeadError, match=f"no place for core {MOST}"):
        await fleet.client.add_core()
    assert len(fleet.slots) == fleet.client.status().num_cores == MOST


async def test_who_waits_for_a_core_while_all_ends_is_told(supply):
    fleet = await Fleet(supply).start()
    adding = asyncio.create_task(fleet.client.add_core())
    await asyncio.sleep(0)
    await fleet.client.close()
    with pytest.raises(EngineDeadError, match="being closed"):
        await asyncio.wait_for(adding, 20)


async def test_drain_waits_for_the_streams_of_all(fleet, alone):
    for kind in range(4):
        await fleet.submit(kind)
    await fleet.turns(3)
    draining = asyncio.create_task(fleet.client.drain(30))
    await asyncio.sleep(0)
    assert fleet.client.status().draining and not draining.done()
    await fleet.finish()
    await draining
    assert fleet.tokens == [alone(i) for i in range(4)]


# ---------------------------------------------------------------- whatever happens

OPERATIONS = st.one_of(
    st.tuples(st.just("submit"), st.integers(0, 7), st.integers(1, LENGTH)),
    st.tuples(st.just("abort"), st.integers(0, 9)),
    st.tuples(st.just("turns"), st.integers(1, 6)),
    st.tuples(st.just("turns"), st.integers(1, 6), st.integers(0, 2)),
    st.tuples(st.just("die"), st.integers(0, 2), st.sampled_from([-9, 1])),
    st.tuples(st.just("load"), st.integers(0, 2)),
    st.tuples(st.just("retire"), st.integers(0, 2)),
    st.tuples(st.just("add")),
)


@settings(max_examples=40)
@given(operations=st.lists(OPERATIONS, max_size=25))
async def test_whatever_happens_everybody_gets_his_tokens_and_nothing_stays(supply, alone, operations):
    fleet = await Fleet(supply, 3).start()
    adding: list[asyncio.Task[int]] = []
    aborted: set[int] = set()
    deaths = 0
    for what, *more in operations:
        if what == "retire":
            if len(fleet.client._slots.loads) > 1 and more[0] in fleet.client._slots.loads:
                await fleet.client.retire_core(more[0], timeout=0.0)
        elif what == "add":
            if len(fleet.slots) < MOST:
                adding.append(asyncio.create_task(fleet.client.add_core()))
                await asyncio.sleep(0)
        elif what == "die" and more[1] == 1 and deaths:
            continue  # one death of its own accord: two could put the blame on an innocent
        else:
            if what == "abort" and fleet.readers:
                aborted.add(more[0] % len(fleet.readers))
            deaths += what == "die" and more[1] == 1
            await getattr(fleet, what)(*more)
        fleet.check_loads()
    await fleet.finish()
    for number in list(fleet.slots):
        await fleet.load(number)
    await asyncio.gather(*adding)
    for number, reader in enumerate(fleet.readers):
        kind = [more[0] for what, *more in operations if what == "submit"][number]
        if number not in aborted:
            assert reader.result() == "length", number
        assert fleet.tokens[number] == alone(kind)[: len(fleet.tokens[number])]
    assert fleet.client.num_poisonous == 0
    fleet.check_empty()
    await fleet.client.close()
