"""Which of several models are in memory: random schedules of requests, loads and failures under a virtual clock, and each race."""

from __future__ import annotations

import asyncio
import contextlib
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import EngineClosedError
from headrace.several_models.switch import MOST_RETRY, RETRY, Entry, LoadFailedError, State, Switch, TooManyWaitError
from virtual_clock import Loop


class FakeRuntime:
    """Takes `seconds` to load; `fails`: how many of its next loads fail."""

    def __init__(self, seconds: float = 1.0, fails: int = 0):
        self.seconds, self.fails = seconds, fails
        self.entry: Entry | None = None
        self.log: list[str] = []
        self.there = False

    async def load(self) -> None:
        assert not self.there
        self.there = True
        self.log.append("load")
        try:
            await asyncio.sleep(self.seconds)
            if self.fails:
                self.fails -= 1
                raise RuntimeError("no such file")
        except BaseException:
            self.there = False
            self.log.append("failed")
            raise

    async def unload(self) -> None:
        assert self.there and self.entry is not None
        assert not self.entry.users or self.log[-1] == "ending", "it is answering"
        self.log.append("unload")
        await asyncio.sleep(self.seconds / 2)
        self.there = False


def models(*sizes: int, budget: int = 10, seconds: float = 1.0, **options) -> tuple[Switch, list[Entry]]:
    """a, b, c ... of these sizes; `pinned` and `keep_alive` are of each by its name."""
    pinned, keep = options.pop("pinned", ""), options.pop("keep_alive", {})
    entries = []
    for name, size in zip("abcdefgh", sizes, strict=False):
        runtime = FakeRuntime(seconds)
        entries.append(Entry(name, size, runtime, name in pinned, keep.get(name, math.inf)))
        runtime.entry = entries[-1]
    return Switch(entries, budget, **options), entries


async def use(switch: Switch, entry: Entry, seconds: float = 0.0) -> None:
    await switch.enter(entry)
    with switch.entered(entry):
        await asyncio.sleep(seconds)


def now() -> float:
    return asyncio.get_running_loop().time()


def run(work) -> None:
    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(work)


def states(entries: list[Entry]) -> str:
    return " ".join(f"{entry.name}:{entry.state}" for entry in entries)


# ---------------------------------------------------------------- what is loaded, what goes


def test_the_least_recently_used_goes_and_only_when_its_room_is_needed():
    async def check():
        switch, (a, b, c) = models(4, 4, 4)
        await use(switch, a)
        await use(switch, b)
        await use(switch, a)  # b is older now
        assert [e.state for e in (a, b, c)] == [State.LOADED, State.LOADED, State.UNLOADED]
        await use(switch, c)
        assert [e.state for e in (a, b, c)] == [State.LOADED, State.UNLOADED, State.LOADED]
        assert a.runtime.log == ["load"] and b.runtime.log == ["load", "unload"]
        await switch.close()
        assert [e.state for e in (a, b, c)] == [State.UNLOADED] * 3 and switch.held == 0

    run(check())


def test_requests_that_come_together_wait_for_one_load_and_leave_it_there():
    async def check():
        switch, (a,) = models(4)
        await asyncio.gather(*(use(switch, a, 3.0) for _ in range(20)))
        assert a.runtime.log == ["load"] and a.loads == 1 and a.users == 0 and now() == 4.0
        await switch.close()

    run(check())


def test_a_model_that_answers_is_never_unloaded_and_others_wait_for_it():
    async def check():
        switch, (a, b) = models(8, 8)
        long = asyncio.create_task(use(switch, a, 100.0))
        await asyncio.sleep(2)
        await use(switch, b)
        assert long.done() and now() == 101.0 + 0.5 + 1.0
        await switch.close()

    run(check())


def test_one_that_is_never_idle_takes_nothing_new_after_a_while_and_gets_its_turn_again():
    """Overlapping requests for `a` for ever: without that, `b` would never come."""

    async def check():
        switch, (a, b) = models(8, 8, patience=10.0)
        served: list[float] = []

        async def one() -> None:
            await use(switch, a, 3.0)
            served.append(now())

        async def traffic(group: asyncio.TaskGroup) -> None:
            for _ in range(60):
                group.create_task(one())
                await asyncio.sleep(1)

        async with asyncio.TaskGroup() as group:
            group.create_task(traffic(group))
            await asyncio.sleep(5)
            began = now()
            await use(switch, b)
            assert 10.0 <= now() - began <= 10.0 + 3.0 + 0.5 + 1.0
        assert len(served) == 60, "and all of a's have been answered in the end"
        assert a.runtime.log == ["load", "unload", "load"]
        await switch.close()

    run(check())


def test_nobody_overtakes_a_large_model_that_waits_for_room():
    async def check():
        switch, (a, b, c) = models(6, 9, 3)
        order: list[str] = []

        async def ask(entry: Entry, seconds: float) -> None:
            await switch.enter(entry)
            with switch.entered(entry):
                order.append(entry.name)
                await asyncio.sleep(seconds)

        first = asyncio.create_task(ask(a, 30.0))
        await asyncio.sleep(2)
        large = asyncio.create_task(ask(b, 1.0))
        await asyncio.sleep(1)
        small = asyncio.create_task(ask(c, 1.0))  # would fit now
        await asyncio.gather(first, large, small)
        assert order == ["a", "b", "c"]
        await switch.close()

    run(check())


def test_nothing_is_unloaded_for_what_would_not_fit_anyway():
    """`a` is idle and goes only when with it there is enough: `b` answers."""

    async def check():
        switch, (a, b, c) = models(3, 6, 9)
        await use(switch, a)
        busy = asyncio.create_task(use(switch, b, 20.0))
        await asyncio.sleep(2)
        waiting = asyncio.create_task(use(switch, c))
        await asyncio.sleep(5)
        assert a.state is State.LOADED
        await asyncio.gather(busy, waiting)
        assert a.state is State.UNLOADED and c.state is State.LOADED
        await switch.close()

    run(check())


def test_pinned_models_are_loaded_at_the_start_stay_and_are_tried_again_when_they_fail():
    async def check():
        switch, (a, b, c) = models(4, 5, 5, pinned="a", keep_alive={"a": 1.0})
        a.runtime.fails = 2
        switch.start()
        await asyncio.sleep(1.5)
        assert a.state is State.FAILED and a.error == "no such file"
        await asyncio.sleep(RETRY + 2 * RETRY + 2)
        assert a.state is State.LOADED and a.runtime.log == ["load", "failed", "load", "failed", "load"]
        await use(switch, b)
        await asyncio.sleep(100)
        await use(switch, c)
        assert a.state is State.LOADED and b.state is State.UNLOADED
        await switch.close()

    run(check())


def test_idle_models_go_after_their_time_and_what_a_request_says_of_it_holds_until_then():
    async def check():
        switch, (a, _) = models(4, 4, keep_alive={"a": 60.0})
        await use(switch, a)
        await asyncio.sleep(50)
        await use(switch, a)  # the time begins again
        await asyncio.sleep(59.5)
        assert a.state is State.LOADED
        await asyncio.sleep(2)
        assert a.state is State.UNLOADED
        for seconds, left in ((0.0, State.UNLOADED), (5.0, State.LOADED), (math.inf, State.LOADED)):
            await switch.enter(a)
            switch.keep(a, seconds)
            await asyncio.sleep(1)
            assert a.state is State.LOADED, "it is in use"
            switch.leave(a)
            await asyncio.sleep(2)
            assert a.state is left
        await asyncio.sleep(1000)
        assert a.state is State.LOADED, "for ever"
        await switch.close()

    run(check())


# ---------------------------------------------------------------- failures


def test_a_load_that_fails_is_told_to_those_who_wait_for_it_and_tried_again_later():
    async def check():
        switch, (a, b) = models(8, 8)
        a.runtime.fails = 1
        found = await asyncio.gather(*(use(switch, a) for _ in range(3)), return_exceptions=True)
        assert [str(e) for e in found] == ["the model a could not be loaded: no such file"] * 3
        with pytest.raises(LoadFailedError) as soon:
            await use(switch, a)
        assert 0 < soon.value.seconds <= RETRY and a.runtime.log == ["load", "failed"], "not at every request"
        await use(switch, b)  # its room is free
        await asyncio.sleep(RETRY)
        await use(switch, a)
        assert a.state is State.LOADED and a.error is None and a.failures == 0
        await switch.close()

    run(check())


def test_tries_of_a_load_that_always_fails_become_rare():
    async def check():
        switch, (a,) = models(8)
        a.runtime.fails = 1000
        pauses = []
        for _ in range(8):
            with pytest.raises(LoadFailedError) as error:
                await use(switch, a)
            pauses.append(error.value.seconds)
            await asyncio.sleep(error.value.seconds)
        assert pauses == [5, 10, 20, 40, *[MOST_RETRY] * 4]

    run(check())


def test_an_engine_that_ends_for_good_is_cleared_away_and_another_is_tried_later():
    async def check():
        switch, (a, b) = models(5, 5)
        user = asyncio.create_task(use(switch, a, 2.0))
        other = asyncio.create_task(use(switch, b, 50.0))
        await asyncio.sleep(1.5)
        a.runtime.log.append("ending")
        switch.died(a, "30 deaths in a minute")
        with pytest.raises(LoadFailedError, match="30 deaths"):
            await use(switch, a)
        await asyncio.sleep(1)
        assert a.state is State.FAILED and switch.held == 5 and b.state is State.LOADED
        await user
        await asyncio.sleep(RETRY)
        await use(switch, a)
        assert a.state is State.LOADED
        await other
        await switch.close()

    run(check())


def test_so_many_may_wait_and_who_leaves_makes_room():
    async def check():
        switch, (a, b) = models(8, 8, max_waiting=3)
        waiting = [asyncio.create_task(use(switch, e)) for e in (a, b, a)]
        await asyncio.sleep(0.1)
        with pytest.raises(TooManyWaitError, match="3 requests wait"):
            await use(switch, b)
        waiting[0].cancel()
        await asyncio.sleep(0.1)
        waiting.append(asyncio.create_task(use(switch, b)))
        await asyncio.gather(*waiting, return_exceptions=True)
        assert [task.cancelled() for task in waiting] == [True, False, False, False] and switch.num_waiting == 0
        assert not any(e.users for e in (a, b))
        await switch.close()

    run(check())


# ---------------------------------------------------------------- races


def test_a_request_for_a_model_that_is_going_waits_until_it_is_gone_and_back():
    async def check():
        switch, (a, b) = models(8, 8)
        await use(switch, a)
        first = asyncio.create_task(use(switch, b, 1.0))
        await asyncio.sleep(0.1)
        assert a.state is State.UNLOADING
        await use(switch, a)
        assert first.done() and a.runtime.log == ["load", "unload", "load"]
        await switch.close()

    run(check())


@pytest.mark.parametrize("just_now", [False, True])
def test_who_waits_for_a_load_may_go_while_it_runs_or_when_his_turn_has_just_come(just_now):
    async def check():
        switch, (a,) = models(8)
        task = asyncio.create_task(use(switch, a, 50.0))
        if just_now:  # cancelled before the turn, given in the same round of the loop, is taken
            load = a.runtime.load

            async def load_and_cancel() -> None:
                await load()
                asyncio.get_running_loop().call_soon(task.cancel)

            a.runtime.load = load_and_cancel
        else:
            await asyncio.sleep(0.5)
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(2)
        assert task.cancelled() and a.users == 0 and a.state is State.LOADED, "the load goes on: it has been paid for"
        switch.keep(a, 0.0)
        await asyncio.sleep(1)
        assert a.state is State.UNLOADED

    run(check())


def test_the_server_ends_during_a_load_with_others_waiting_and_one_answering():
    async def check():
        switch, (a, b, c) = models(5, 5, 5)
        answering = asyncio.create_task(use(switch, a, 100.0))
        await asyncio.sleep(2)
        waiting = [asyncio.create_task(use(switch, e)) for e in (b, b, c)]
        await asyncio.sleep(0.5)
        assert b.state is State.LOADING
        switch.stop()
        found = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(e, EngineClosedError) for e in found) and not answering.done()
        with pytest.raises(EngineClosedError):
            await use(switch, a)
        a.runtime.log.append("ending")
        await switch.close()
        assert not any(e.runtime.there for e in (a, b, c)) and b.runtime.log == ["load", "failed"]
        answering.cancel()

    run(check())


# ---------------------------------------------------------------- all of it

REQUEST = st.tuples(
    st.integers(0, 3),  # the model
    st.floats(0, 40),  # when it comes
    st.floats(0, 30),  # how long it is answered
    st.one_of(st.none(), st.floats(0, 60)),  # when its client leaves
    st.one_of(st.none(), st.floats(0, 10)),  # what it says of keeping the model
)


@settings(max_examples=120)
@given(
    st.lists(st.integers(1, 7), min_size=4, max_size=4),
    st.lists(REQUEST, max_size=25),
    st.lists(st.integers(0, 2), min_size=4, max_size=4),
    st.sampled_from([1.0, 10.0, 1000.0]),
    st.booleans(),
)
def test_whatever_comes_when_the_budget_holds_and_everybody_is_answered(sizes, requests, fails, patience, pinned):
    async def check():
        switch, entries = models(*sizes, pinned="a" if pinned and max(sizes[1:]) + sizes[0] <= 10 else "", patience=patience)
        for entry, count in zip(entries, fails, strict=True):
            entry.runtime.fails = count
        ends: list[str] = []
        switch.start()

        async def one(number: int, begin: float, seconds: float, leaves: float | None, keep: float | None) -> None:
            await asyncio.sleep(begin)
            entry = entries[number]
            try:
                async with asyncio.timeout(leaves):
                    await switch.enter(entry)
                    with switch.entered(entry):
                        assert entry.state is State.LOADED
                        if keep is not None:
                            switch.keep(entry, keep)
                        await asyncio.sleep(seconds)
                        assert entry.state is State.LOADED, "nobody unloads what answers"
                ends.append("answered")
            except (TimeoutError, LoadFailedError) as e:
                ends.append(type(e).__name__)

        async def watch() -> None:
            while True:
                assert switch.held <= 10, states(entries)
                for entry in entries:
                    assert entry.runtime.there == entry.holds or entry.state is State.LOADING, states(entries)
                await asyncio.sleep(0.25)

        watching = asyncio.create_task(watch())
        await asyncio.gather(*(one(*request) for request in requests))
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
        assert len(ends) == len(requests)
        if not any(fails) and all(leaves is None for *_, leaves, _ in requests):
            assert ends.count("answered") == len(requests)
        assert switch.num_waiting == 0 and not any(entry.users for entry in entries)
        await switch.close()
        assert switch.held == 0 and not any(entry.runtime.there for entry in entries)

    run(check())
