"""The engine's client and the supervision of its core: whatever happens, everybody is answered, once, and nothing stays behind."""

from __future__ import annotations

import asyncio
import errno
import importlib
import os
import sys
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace

import msgspec
import pytest
import zmq.asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_driver import complete
from fake_core import FakeCore, FakeSupply, Inbox, Process
from headrace.config import EngineConfig
from headrace.engine import core_link, process, socket_pair, standing_by, supervision
from headrace.engine.client import EngineClient
from headrace.engine.core_process import CoreProcess
from headrace.engine.core_supply import StandbySupply
from headrace.engine.messages import EngineOutput, EngineRequest
from headrace.engine.news_pipe import QueueOutbox
from headrace.engine.placement import PlacedSupply, Placement
from headrace.engine.process import CoreLoop
from headrace.engine.socket_pair import PREFIX
from headrace.engine.streams import Stream
from headrace.engine.wire import Fatal, Heartbeat, News
from headrace.errors import EngineClosedError, EngineDeadError, HeadraceError, ParameterError
from headrace.sampling.params import SamplingParams
from headrace.sampling.structured_outputs import StructuredOutputsParams
from server_driver import SRC

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
KINDS = {
    "plain": {"ignore_eos": True},
    "scored": {"prompt_logprobs": 1, "logprobs": 2},
    "constrained": {"structured_outputs": StructuredOutputsParams(regex="[ab]{3,9}")},
    "odd": {"structured_outputs": StructuredOutputsParams(regex="a{40}")},
    "foreign": {"logit_bias": {10**6: 1.0}},  # the core refuses it
}


@pytest.fixture(scope="module")
def supply(model) -> FakeSupply:
    return FakeSupply(model)


class Witness:
    """An observer that counts the ends of each request."""

    def __init__(self):
        self.ends: dict[str, int] = {}

    def tokens(self, stream: Stream, count: int, now: float) -> None:
        assert stream.request.id not in self.ends, "tokens after the end"

    def ended(self, stream: Stream, news: EngineOutput, now: float) -> None:
        self.ends[stream.request.id] = self.ends.get(stream.request.id, 0) + 1

    def steps(self, steps) -> None:
        pass


class Play:
    """A client with readers, and a core that moves when it is told to."""

    def __init__(self, supply: FakeSupply, client: EngineClient):
        self.supply, self.client, self.witness = supply, client, Witness()
        client.observers.append(self.witness)
        self.readers: list[asyncio.Task[str]] = []
        self.tokens: dict[str, list[int]] = {}  # that each reader has got

    @property
    def core(self) -> FakeCore | None:
        core = next(iter(self.client._slots)).core
        return core if isinstance(core, FakeCore) and not core.exited else None

    async def submit(self, kind: str, max_tokens: int) -> None:
        name = f"r{len(self.readers)}"
        self.readers.append(asyncio.create_task(self._read(name, kind, max_tokens)))
        await asyncio.sleep(0)

    async def _read(self, name: str, kind: str, max_tokens: int) -> str:
        try:
            if kind == "embedding":
                await self.client.embed(name, PROMPT, "mean", cache_salt="a")
                return "stop"
            params = complete(SamplingParams(max_tokens=max_tokens, seed=1, **KINDS[kind]), eos_token_ids=[2])
            async for news in self.client.generate(name, PROMPT, params):
                self.tokens.setdefault(name, []).extend(news.token_ids)
                if news.finish_reason is not None:
                    return news.finish_reason
            raise AssertionError("no end")
        except HeadraceError as e:
            return type(e).__name__

    async def abort(self, which: int, by_closing: bool) -> None:
        if self.readers:
            number = which % len(self.readers)
            if by_closing:
                self.readers[number].cancel()
            else:
                await self.client.abort(f"r{number}")
            await asyncio.sleep(0)

    async def read(self) -> None:
        """A reader that has got tokens."""
        await self.submit("plain", 50)
        await self.turns(5)

    async def turns(self, count: int) -> None:
        for _ in range(count):
            if self.core is not None and self.core.ready is not None:
                self.core.loop.turn()
            await asyncio.sleep(0)

    async def next_core(self) -> None:
        async with asyncio.timeout(20):
            while self.core is None and self.client.dead is None:
                await asyncio.sleep(0.001)
        if self.core is not None and self.core.ready is None:
            self.core.load()

    async def die(self, code: int) -> None:
        if self.core is not None:
            self.core.process.exit(code)

    def compiled(self) -> None:
        if self.core is not None:
            self.core.core.structured.finish()

    async def finish(self) -> None:
        """Until all readers have ended and the core has nothing to do; after a death the next one knows that nobody waits."""
        slots, streams = self.client._slots, self.client._streams
        async with asyncio.timeout(60):
            while not all(r.done() for r in self.readers) or streams.leaving or any(s.probation.active for s in slots):
                await self.next_core()
                self.compiled()
                await self.turns(1)
                next(iter(self.client._slots)).tick()
        await asyncio.gather(*self.readers, return_exceptions=True)

    def check_empty(self) -> None:
        """Nothing of any request is left in any table, and each was told of once (but what a dead engine took in at no time)."""
        client = self.client
        assert not client._streams.live and not client._streams.leaving and client._streams.waiting_tokens == 0
        assert not any(slot.probation.active or slot.load for slot in client._slots)
        assert self.witness.ends == {f"r{i}": 1 for i in range(len(self.readers))} or (client.dead and not self.witness.ends)
        if self.core is None:
            return
        core = self.core.core
        grammars, speculator = core.structured, core.speculator
        assert not core.has_work and not core._outputs.prompts.logprobs and not core._outputs.prompts.pooled and not core._news
        assert not grammars._matchers and not grammars.waiting
        for table in (speculator._rates, speculator._drafts, speculator._forced, speculator._free, speculator._broken):
            assert not table
        assert core.scheduler.num_running == core.scheduler.num_waiting == 0 and core.scheduler.kv_usage == 0.0


@pytest.fixture
async def play(supply) -> AsyncIterator[Play]:
    """A client whose core is ready."""
    play = Play(supply, supply.client())
    await play.client.start()
    await play.next_core()
    yield play
    supply.failures = []
    await play.client.close()


async def test_all_counters_are_there_with_the_last_answer(play):
    """Not only when statistics are due: who reads them after his answer sees what it took."""
    for count in (1, 2):
        await play.submit("plain", 3)
        while not play.readers[-1].done():
            await play.turns(1)
        core, counted = play.core.core, play.client.counters()
        assert counted.steps == core.steps >= 3 * count and play.client.status().num_running == 0


OPERATIONS = st.one_of(
    st.tuples(st.just("submit"), st.sampled_from([*KINDS, "embedding"]), st.integers(1, 12)),
    st.tuples(st.just("abort"), st.integers(0, 9), st.booleans()),
    st.tuples(st.just("turns"), st.integers(1, 6)),
    st.tuples(st.just("compiled")),
    st.tuples(st.just("next_core")),
)


@settings(max_examples=40)
@given(operations=st.lists(OPERATIONS, max_size=25), deaths=st.lists(st.tuples(st.integers(0, 25), st.sampled_from([1, -9])), max_size=2))
async def test_whatever_happens_everybody_is_answered_once_and_nothing_stays(supply, operations, deaths):
    play = Play(supply, supply.client())
    await play.client.start()
    await play.next_core()
    for number, (what, *more) in enumerate(operations):
        for at, code in deaths:
            if at == number:
                await play.die(code)
        done = getattr(play, what)(*more)
        if done is not None:
            await done
    await play.finish()
    play.check_empty()
    await play.client.close()


async def test_an_abort_while_the_grammar_is_compiled_is_answered(play):
    await play.submit("constrained", 5)
    await play.turns(2)
    await play.abort(0, by_closing=True)
    assert "r0" in play.client._streams.leaving
    with pytest.raises(ParameterError):  # its end would be taken for the end of this one
        await anext(play.client.generate("r0", PROMPT, complete(SamplingParams())))
    await play.turns(2)
    play.check_empty()


async def test_a_spawn_that_fails_once_is_tried_again(play, supply, monkeypatch):
    monkeypatch.setattr(supervision, "SPAWN_BACKOFF", 0.001)
    await play.read()
    supply.failures = [OSError(errno.EAGAIN, "Resource temporarily unavailable"), MemoryError()]
    await play.die(1)
    await play.finish()
    assert play.readers[0].result() == "length" and not supply.failures
    play.check_empty()


@pytest.mark.parametrize(
    "failure", [OSError(errno.EMFILE, "Too many open files"), MemoryError(), HeadraceError("no place"), asyncio.CancelledError()]
)  # fmt: skip
@pytest.mark.parametrize("loaded", [False, True])
async def test_no_exception_ends_the_supervision_silently(supply, monkeypatch, failure, loaded):
    monkeypatch.setattr(supervision, "SPAWN_BACKOFF", 0.001)
    supply.failures = [] if loaded else [failure] * 10
    play = Play(supply, supply.client())
    await play.client.start()
    if loaded:
        await play.next_core()
        await play.read()
        supply.failures = [failure] * 10
        await play.die(1)
    else:
        await play.submit("plain", 5)
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(play.client.wait_loaded(), 20)
    supply_left = supply.failures
    assert await asyncio.wait_for(play.readers[0], 20) == "EngineDeadError"
    with pytest.raises(EngineDeadError):
        await anext(play.client.generate("late", PROMPT, complete(SamplingParams())))
    assert not play.client.status().alive and not play.client.status().progressing
    assert len(play.client.gave_up_with) == 1 and play.client.gave_up_with[0] == play.client.dead
    assert isinstance(failure, asyncio.CancelledError) or str(failure) in play.client.dead
    mistake = isinstance(failure, HeadraceError) and not loaded  # then nobody has seen it work
    assert len(supply_left) == (9 if mistake or isinstance(failure, asyncio.CancelledError) else 7)  # it did not try for ever
    play.check_empty()
    supply.failures = []
    await play.client.close()


async def test_a_bug_in_the_supervision_itself_is_told(play, monkeypatch):
    """Whatever the exception and wherever it comes from: streams are told, and so is whoever asks."""
    await play.read()
    monkeypatch.setattr(play.client._slots, "lost", lambda slot, why, killed: 1 // 0)
    await play.die(1)
    assert await asyncio.wait_for(play.readers[0], 20) == "EngineDeadError"
    assert "ZeroDivisionError" in play.client.dead and play.client.gave_up_with == [play.client.dead]
    play.check_empty()


async def test_closing_says_so_and_a_dead_engine_stays_dead(play):
    await play.read()
    await play.client.close()
    assert await play.readers[0] == "EngineClosedError"
    with pytest.raises(EngineClosedError):
        await anext(play.client.generate("late", PROMPT, complete(SamplingParams())))
    assert not play.client.gave_up_with
    play.check_empty()


async def test_an_observer_that_fails_disturbs_nobody(play):
    class Broken(Witness):
        def tokens(self, *_):
            raise ValueError("a full disk")

    play.client.observers.insert(0, Broken())
    await play.submit("plain", 5)
    await play.finish()
    assert play.readers[0].result() == "length" and play.client.restarts == 0
    play.check_empty()


async def test_a_standby_that_cannot_be_started_costs_nothing():
    """Its error was stored in its task and came out at the next death."""
    calls = []

    async def spawn():
        calls.append(1)
        if len(calls) == 1:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return "a core"

    supply = StandbySupply(spawn)
    supply.prepare(0, 0.0)
    await asyncio.sleep(0)
    assert await supply.take(0) == "a core" and len(calls) == 2
    supply.prepare(0, 0.0)
    assert supply._standby is not None
    supply._standby.cancel()
    assert await supply.take(0) == "a core"
    await supply.close()


def add(core, name: str, **params) -> None:
    core.add(EngineRequest(name, PROMPT, complete(SamplingParams(max_tokens=6, seed=1, **params), eos_token_ids=[2]), 1))


async def test_a_second_request_of_one_id_is_refused_and_leaves_the_first_alone(supply):
    """Whatever the first is doing: it waits for its grammar, waits for a slot, or runs under its grammar."""
    core = (await supply.take(0)).core
    wish = KINDS["odd"]
    add(core, "a", **wish)
    for second in ({}, wish):
        with pytest.raises(ParameterError, match="request_id"):
            add(core, "a", **second)
    core.structured.finish()
    core.step()
    matcher = core.structured.matcher("a")
    for second in ({}, wish, {"structured_outputs": StructuredOutputsParams(regex="b")}):
        with pytest.raises(ParameterError, match="request_id"):
            add(core, "a", **second)
    assert matcher is not None and core.structured.matcher("a") is matcher
    news = []
    while core.has_work:
        news += core.step()
    assert sum(len(n.token_ids) for n in news) == 6 and [n.finish_reason for n in news if n.finish_reason] == ["length"]


async def test_idle_work_that_fails_is_left_out_and_the_core_goes_on(supply, monkeypatch, caplog):
    """A graph that cannot be captured, for want of memory or because its kernel does not compile: nobody had asked for it."""
    core = (await supply.take(0)).core
    planned = ["a graph", "another"]

    def idle() -> bool:
        if planned:
            raise RuntimeError("CUDA out of memory")
        return False

    monkeypatch.setattr(core.runner, "idle", idle)
    monkeypatch.setattr(core.runner, "leave_preparations", planned.clear)
    assert core.idle() is False and not planned and "out of memory" in caplog.text
    assert core.idle() is False and caplog.text.count("Traceback") == 1
    add(core, "a")
    while core.has_work:
        core.step()


async def test_embeddings_of_two_salts_share_no_prefix(play):
    hits = []
    for salt in ("", "", "a", "a", "b"):
        before = play.core.core.scheduler.stats.prefix_hit_tokens
        reader = asyncio.create_task(play.client.embed(f"e{len(hits)}", PROMPT * 3, "last", cache_salt=salt))
        async with asyncio.timeout(20):
            while not reader.done():
                await play.turns(1)
        hits.append(play.core.core.scheduler.stats.prefix_hit_tokens - before > 0)
    assert hits == [False, True, False, True, False]


# ---------------------------------------------------------------- news, turns and counters


@pytest.mark.parametrize("death", [None, 1, 6])
async def test_readers_get_the_tokens_of_the_core_whenever_it_dies(play, supply, death):
    core = (await supply.take(0)).core
    add(core, "alone", ignore_eos=True)
    want = []
    while core.has_work:
        want += [token for news in core.step() for token in news.token_ids]
    await play.submit("plain", 6)
    await play.submit("plain", 6)
    if death is not None:
        await play.turns(death)
        await play.die(1)
    await play.finish()
    assert play.tokens == {"r0": want, "r1": want} and len(want) == 6


async def test_news_that_end_a_turn_let_the_next_ones_in(play):
    """At once: the supervision, which looks a few times a second, has no turn here."""
    await play.submit("plain", 50)
    await play.submit("plain", 50)
    await play.turns(2)
    await play.die(1)
    await play.next_core()
    await play.submit("plain", 50)  # arrives while the two are tried
    running = []
    for _ in range(30):
        play.core.loop.turn()
        running.append(play.core.core.scheduler.num_running)
    assert running[0] == 1 and running[-1] == 3 and running == sorted(running)


async def test_counters_are_sums_over_all_steps(supply, monkeypatch):
    monkeypatch.setattr(process, "STATS_SECONDS", -1.0)  # they come with every turn
    core = (await supply.take(0)).core
    said: list[News] = []
    loop = CoreLoop(core, Inbox(), said.append, traced=True)  # type: ignore[arg-type]
    add(core, "good")
    for name in ("bad", "worse"):
        add(core, name, logits_processors=[lambda ids, logits: logits * float("nan")])
    add(core, "left without a token", allowed_token_ids=[5], bad_word_ids=[[5, 5]])  # by its own limits
    while core.has_work:
        loop.turn()
    stats, steps = said[-1].stats, [step for news in said for step in news.steps or []]
    assert stats is not None and stats.nan_failures == 2
    assert stats.wait_seconds == pytest.approx(sum(step.wait for step in steps)) and stats.wait_seconds > 0
    assert stats.settle_seconds == pytest.approx(sum(step.settle for step in steps)) and stats.settle_seconds > 0
    assert stats.scheduled_tokens == sum(step.num_tokens for step in steps) > 0
    assert stats.schedule_seconds > 0 and stats.launch_seconds > 0


async def test_idle_time_is_used_after_a_second_of_quiet(supply, monkeypatch):
    """Before anybody has come, too; not between one request and the next, which would have to wait."""
    core, used = (await supply.take(0)).core, []
    monkeypatch.setattr(process, "QUIET_SECONDS", 3600.0)
    monkeypatch.setattr(core, "idle", lambda: used.append(core.steps) or False)
    loop = CoreLoop(core, Inbox(), lambda said: None)
    loop.turn()
    add(core, "good")
    while core.has_work:
        loop.turn()
    loop.turn()
    assert used == [0]
    monkeypatch.setattr(process, "QUIET_SECONDS", 0.0)
    loop.turn()
    assert used == [0, core.steps] and core.steps > 1


# ---------------------------------------------------------------- a core's life


async def test_a_client_knows_its_model_before_a_core_has_loaded_it(supply):
    client = supply.client()
    assert client.model_name == client.checkpoint.name and client.model_name in supply.config.model
    with pytest.raises(EngineDeadError, match="not been loaded"):
        _ = client.max_model_len
    await client.close()


async def test_who_starts_a_core_removes_what_killed_ones_left(supply, tmp_path, monkeypatch):
    monkeypatch.setattr(socket_pair, "places", lambda: [str(tmp_path)])
    dead, alive, young = (tmp_path / f"{PREFIX}{pid}-x" for pid in (2**31 - 1, os.getpid(), 2**31 - 2))
    for path in (dead, alive, young):
        path.mkdir()
        if path is not young:
            os.utime(path, (0, 0))
    client = supply.client()
    await client.start()
    assert set(tmp_path.iterdir()) == {alive, young}
    await client.close()


@pytest.mark.parametrize("permanent", [True, False])
async def test_a_mistake_in_the_options_is_not_tried_again(supply, permanent):
    client = supply.client()
    await client.start()
    await asyncio.sleep(0)
    core = supply.core
    core.fatal = Fatal("no such card", permanent)
    core.process.exit(2)
    async with asyncio.timeout(20):
        while client.dead is None and client.restarts == 0:
            await asyncio.sleep(0.001)
    assert (client.dead, client.restarts) == (("no such card", 0) if permanent else (None, 1))
    await client.close()


async def test_what_was_no_mistake_when_the_model_was_loaded_is_tried_again(play, supply, monkeypatch):
    """No memory for weights, a file that cannot be read: streams wait for a try that comes off."""
    monkeypatch.setattr(supervision, "SPAWN_BACKOFF", 0.001)
    await play.read()
    await play.die(1)
    for why in ("no memory is left", "the weights cannot be read"):
        async with asyncio.timeout(20):
            while play.core is None:
                await asyncio.sleep(0.001)
        play.core.fatal = Fatal(why, True)
        play.core.process.exit(2)
    await play.finish()
    assert play.readers[0].result() == "length" and play.client.restarts == 3
    play.check_empty()


@pytest.mark.parametrize("loaded", [False, True])
async def test_a_load_that_is_always_killed_is_given_up_with_its_reason(supply, monkeypatch, caplog, loaded):
    """The kill of a core that had served, or was ready, is none of these."""
    monkeypatch.setattr(supervision, "SPAWN_BACKOFF", 0.001)
    play = Play(supply, supply.client())
    await play.client.start()
    if loaded:
        await play.next_core()
        await play.read()
        await play.die(-9)
    else:
        await play.submit("plain", 5)
    async with asyncio.timeout(20):
        for _ in range(3):
            while play.core is None:
                await asyncio.sleep(0.001)
            assert play.client.dead is None
            await play.die(-9)
        while play.client.dead is None:
            await asyncio.sleep(0.001)
    why = "exit code -9, before its model was loaded: the kernel's OOM killer, perhaps"
    assert play.client.gave_up_with == [f"3 starts in a row failed; the last: {why}"]
    assert await play.readers[0] == "EngineDeadError" and play.client.restarts == 2 + loaded
    assert caplog.text.count(f"died ({why})") == 2
    play.check_empty()
    await play.client.close()


@settings(max_examples=200)
@given(st.lists(st.sampled_from(["killed early", "failed early", "killed", "killed at work", "hung at work"]), max_size=12))
def test_deaths_before_the_model_was_loaded_count_in_a_row_whoever_ended_them(kinds):
    deaths, early, last = supervision.Deaths(supervision.SupervisionConfig()), 0, 0.0
    for kind in kinds:
        core = SimpleNamespace(ready=None if "early" in kind else object(), fatal=None)
        why = deaths.hopeless(core, kind, "killed" in kind, "work" in kind)
        early = early + 1 if core.ready is None else 0
        assert why == (f"3 starts in a row failed; the last: {kind}" if early >= 3 else None)
        if why is not None:
            break
        assert deaths.backoff == 0.0 if "work" in kind else min(5.0, last + 0.05) <= deaths.backoff <= 5.0
        assert kind != "killed early" or deaths.backoff >= 1.0
        last = deaths.backoff


async def test_a_process_that_is_killed_while_it_loads_ends_the_engine(model, tmp_path, monkeypatch):
    """As the kernel does it where the weights have no room."""
    (tmp_path / "one_builder.py").write_text("import os\ndef build(config): os.kill(os.getpid(), 9)")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SRC), str(tmp_path)]))
    monkeypatch.setattr(supervision, "SPAWN_BACKOFF", 0.001)
    limits = supervision.SupervisionConfig(standby=False, restart_backoff=0.001)
    client = EngineClient(EngineConfig(model=model, device="cpu"), limits, builder="one_builder:build")
    await client.start()
    try:
        async with asyncio.timeout(120):
            with pytest.raises(EngineDeadError, match="3 starts in a row failed; the last: exit code -9, before its model"):
                await client.wait_loaded()
    finally:
        await client.close()


OF_RANKS = """
import time
from types import SimpleNamespace

def build(config):
    def prepare(tell):
        ranks.handler(SimpleNamespace(why="rank 1 is gone", killed=False))
        time.sleep(60)  # for the rank that is gone

    ranks = SimpleNamespace()
    ranks.on_death = lambda handler: setattr(ranks, "handler", handler)
    return SimpleNamespace(ranks=ranks, prepare=prepare)
"""
BUILDERS = {  # what the module of the builder holds: the last words, the exit code
    "def build(config): raise RuntimeError('no such card')": (Fatal("RuntimeError: no such card", False), 3),
    "from headrace.errors import HeadraceError\ndef build(config): raise HeadraceError('no such card')": (Fatal("no such card", True), 2),
    "raise SystemExit(5)": (None, 5),
    OF_RANKS: (Fatal("rank 1 is gone", False), 3),
}


@pytest.mark.parametrize("builder", BUILDERS, ids=["a failure", "a mistake", "an exit", "a rank's death"])
async def test_a_core_that_cannot_start_says_why_and_ends(tmp_path, monkeypatch, builder):
    (tmp_path / "one_builder.py").write_text(builder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SRC), str(tmp_path)]))
    words, code = BUILDERS[builder]
    context = zmq.asyncio.Context()
    core = await CoreProcess.spawn(context, "one_builder:build", "critical", "text", False)
    try:
        core.begin(EngineConfig(device="cpu"))
        core.listen(lambda message: None)
        async with asyncio.timeout(60):
            assert await core.process.wait() == code
            while core.fatal is None and words is not None:  # on its way
                await asyncio.sleep(0.001)
        assert core.fatal == words
    finally:
        await core.kill()
        context.destroy(linger=0)


BUSY = """
import sys, time
end = time.thread_time() + 0.01
while time.thread_time() < end:
    pass
"""


@pytest.fixture
def busy_modules(tmp_path, monkeypatch):
    """`busy_0` takes 10 ms of the CPU, then imports `busy_1`, and so on to the fourth."""
    for i in range(4):
        (tmp_path / f"busy_{i}.py").write_text(BUSY + (f"import busy_{i + 1}" if i < 3 else ""))
    (tmp_path / "busy_elsewhere.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield
    for name in [name for name in sys.modules if name.startswith("busy_")]:
        del sys.modules[name]


@pytest.mark.parametrize("cores", [1, 4])
def test_what_is_imported_without_haste_takes_its_part_of_the_cpu(busy_modules, monkeypatch, cores):
    monkeypatch.setattr(standing_by, "PART", 8)
    monkeypatch.setattr(standing_by, "usable_cores", lambda: cores)
    began = time.monotonic()
    imports = standing_by.Unhurried("busy_0")
    importlib.import_module("busy_elsewhere")  # another thread's
    assert "busy_3" not in sys.modules
    imports._thread.join(20)
    took = time.monotonic() - began
    assert "busy_3" in sys.modules and took >= 0.03 * 8 / cores  # the last has nobody to wait for


def test_what_is_imported_without_haste_ends_at_once_when_it_is_needed(busy_modules, monkeypatch):
    monkeypatch.setattr(standing_by, "PART", 1e6)
    imports = standing_by.Unhurried("busy_0")
    time.sleep(0.02)
    assert "busy_3" not in sys.modules
    imports.hurry()
    importlib.import_module("busy_0")
    assert "busy_3" in sys.modules


async def test_a_standby_has_what_it_needs_when_it_is_needed(tmp_path, monkeypatch):
    """Its imports are not done by then."""
    (tmp_path / "late_builder.py").write_text("import asks_headrace\ndef build(config): raise asks_headrace.Refused('no such card')")
    (tmp_path / "asks_headrace.py").write_text("from headrace.errors import HeadraceError as Refused")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SRC), str(tmp_path)]))
    context = zmq.asyncio.Context()
    asked: list[dict] = []

    async def spawn(**how: bool) -> CoreProcess:
        asked.append(how)
        return await CoreProcess.spawn(context, "late_builder:build", "critical", "text", False, **how)

    supply = PlacedSupply(spawn, Placement(EngineConfig(device="cpu")))
    try:
        supply.prepare(0, 0.001)
        core = await supply.take(0)
        supply.prepare(0, 0.0)  # as after a death
        core.begin(EngineConfig(device="cpu"))
        core.listen(lambda message: None)
        async with asyncio.timeout(120):
            await core.process.wait()
            while core.fatal is None:  # on its way
                await asyncio.sleep(0.001)
        assert core.fatal == Fatal("no such card", True) and asked == [{"standby": True}, {}]
    finally:
        await core.kill()
        await supply.close()
        context.destroy(linger=0)


async def test_a_flood_of_messages_is_read_to_its_end_and_others_have_turns(tmp_path, monkeypatch):
    monkeypatch.setattr(core_link, "TURN_SECONDS", -1.0)  # one message, then whoever else there is
    context = zmq.Context()
    outbox, theirs = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    outbox.bind("inproc://core")
    theirs.connect("inproc://core")
    for i in range(200):
        theirs.send(msgspec.msgpack.encode(Heartbeat(float(i))))
    process = Process()
    process.kill = lambda: process.exit(-9)  # type: ignore[attr-defined]
    core = CoreProcess(process, theirs, QueueOutbox(outbox), tmp_path)  # type: ignore[arg-type]
    heard: list[float] = []
    core.listen(lambda message: heard.append(message.busy_seconds))
    lengths = []
    try:
        async with asyncio.timeout(20):
            while len(heard) < 200:
                lengths.append(len(heard))
                await asyncio.sleep(0)
        assert heard == [float(i) for i in range(200)] and len(lengths) > 20
    finally:
        await core.kill()
        context.destroy(linger=0)
