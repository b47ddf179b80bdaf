"""An engine used from another process: the same news, bounded whatever its reader does, and nothing left when he dies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_engine import FakeEngine
from headrace.api.config import ServerConfig
from headrace.api.errors import ApiError
from headrace.api.limits import Limits
from headrace.api_processes.desk import Desk
from headrace.api_processes.wire import Admit, Begun, Ended, Enter, Granted, Left, Refused, Returned
from headrace.config import EngineConfig
from headrace.distributed.engine_host import EngineHost
from headrace.distributed.pipe import QUEUE
from headrace.distributed.remote_wire import Cancel, Failed, FromEngine, ToEngine
from headrace.errors import CapacityError, EngineClosedError, EngineDeadError, HeadraceError, ParameterError
from headrace.metrics.prometheus import PrometheusMetrics
from headrace.sampling.params import SamplingParams
from remote_app import Pair, remote_engine
from server_driver import soon


@asynccontextmanager
async def joined(engine: FakeEngine) -> AsyncIterator[SimpleNamespace]:
    """`remote` is `engine` as seen from the far end of a pipe."""
    context = zmq.Context()
    pair = Pair(context, ToEngine, FromEngine)
    host, remote = EngineHost(engine, pair.near, "7."), remote_engine(engine, pair.far.say)
    pair.near_handler, pair.far_handler = host.heard, remote.heard
    try:
        yield SimpleNamespace(pair=pair, host=host, remote=remote)
    finally:
        host.close()
        pair.close()
        context.destroy(linger=0)


def merged(outputs) -> tuple:
    """What all news of a request say together."""
    tokens = [t for o in outputs for t in o.token_ids]
    logprobs = [entry for o in outputs for entry in o.logprobs or ()]
    first = next((o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None), None)
    return tokens, logprobs, first, outputs[-1].finish_reason, outputs[-1].stop_reason, outputs[-1].num_cached_tokens


@pytest.mark.parametrize("bursts", [1, 4])
@pytest.mark.parametrize("logprobs", [None, 2])
async def test_the_news_are_those_of_the_engine(bursts, logprobs):
    """Of many requests at once, whatever comes in one message."""
    engine, alone = FakeEngine(bursts=bursts, delay=0.0005), FakeEngine(bursts=bursts)

    async def news(of, number: int):
        params = SamplingParams(max_tokens=60, seed=number, logprobs=logprobs, prompt_logprobs=logprobs if number % 2 else None)
        return merged([o async for o in of.generate(f"r{number}", [65, 66, number], params)])

    async with joined(engine) as here:
        found = await asyncio.gather(*[news(here.remote, i) for i in range(40)])
        assert found == [await news(alone, i) for i in range(40)]
        await soon(lambda: not here.host.num_requests)
        vector = await here.remote.embed("e", [1, 2, 3], "mean", priority=4, cache_salt="s")
        assert vector == await alone.embed("e", [1, 2, 3], "mean")
        assert engine.priorities[-1] == 4 and engine.salts[-1] == "s"


async def test_a_huge_prompt():
    engine = FakeEngine(max_model_len=2**21)
    prompt = [i % 256 for i in range(1_000_000)]
    async with joined(engine) as here:
        async for _ in here.remote.generate("r", prompt, SamplingParams(max_tokens=3)):
            pass
        assert engine.prompts == [prompt]


@pytest.mark.parametrize("begun", [False, True])
async def test_closing_a_stream_aborts_it(begun):
    engine = FakeEngine(script=lambda i, p: "x" * 4000, delay=0.001)
    async with joined(engine) as here:
        if not begun:
            engine.gate.clear()
        outputs = here.remote.generate("r", [65], SamplingParams(max_tokens=4000))
        first = asyncio.ensure_future(anext(outputs))
        await soon(lambda: engine.active == {"7.r"})
        if begun:
            await first
        else:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
        await outputs.aclose()
        await soon(lambda: not engine.active and not here.host.num_requests)
        assert engine.aborted == ["7.r"]
        early = asyncio.ensure_future(anext(here.remote.generate("s", [65], SamplingParams(max_tokens=5))))
        await asyncio.sleep(0)
        early.cancel()  # both messages travel together
        await asyncio.gather(early, return_exceptions=True)
        await soon(lambda: not engine.active and not here.host.num_requests)


@pytest.mark.parametrize(
    "error",
    [ParameterError("top_k", -5, "at least -1"), CapacityError("too large"), EngineDeadError("gone"), EngineClosedError("closed"),
     HeadraceError("a grammar"), RuntimeError("a fault")],
)  # fmt: skip
async def test_what_the_engine_raises(error):
    def fail(at: int):
        raise error

    async with joined(FakeEngine(fail=fail)) as here:
        with pytest.raises(HeadraceError) as found:
            async for _ in here.remote.generate("r", [65], SamplingParams(max_tokens=3)):
                pass
        if isinstance(error, HeadraceError):
            assert type(found.value) is type(error) and str(found.value) == str(error).replace("-5", "'-5'")
        assert Failed.of(1, error).exception().args and not here.host.num_requests


async def test_a_reader_that_takes_nothing_holds_up_nobody_and_loses_nothing():
    engine = FakeEngine(script=lambda i, p: "0123456789" * 2000, bursts=1, delay=1e-6, max_model_len=2**16)
    async with joined(engine) as here:
        other = FakeEngine.generate  # the engine itself goes on for those in this process
        params = SamplingParams(max_tokens=20_000)
        loop = asyncio.get_running_loop()
        loop.remove_reader(here.pair.far._inbox.fileno())  # as a process that is stopped
        stuck = asyncio.ensure_future(_tokens(here.remote.generate("r", [65], params)))
        await soon(lambda: here.pair.near.full, 30)
        held = engine.yielded
        assert held <= 4 * QUEUE  # what both queues hold, and no more
        small = SamplingParams(max_tokens=50)
        assert len([o async for o in other(engine, "own", [66], small)]) == 50
        assert len(here.host._tokens.tokens) <= 1 and engine.yielded <= held + 52
        loop.add_reader(here.pair.far._inbox.fileno(), here.pair.far._read)
        here.pair.far._read()
        assert bytes(await stuck) == b"0123456789" * 2000
        await soon(lambda: not here.pair.near.full)


async def _tokens(outputs) -> list[int]:
    return [t async for o in outputs for t in o.token_ids]


async def test_the_death_of_a_reader_aborts_what_he_asked_for():
    engine = FakeEngine(script=lambda i, p: "x" * 4000, delay=0.001)
    async with joined(engine) as here:
        readers = [asyncio.ensure_future(_tokens(here.remote.generate(f"r{i}", [i], SamplingParams(max_tokens=4000)))) for i in range(5)]
        await soon(lambda: len(engine.active) == 5 and engine.yielded > 20)
        here.host.close()
        await soon(lambda: not engine.active and not here.host.num_requests)
        assert sorted(engine.aborted) == [f"7.r{i}" for i in range(5)]
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


async def test_silence_is_what_was_listened_to(monkeypatch):
    """A process that was stopped itself, or held up, does not take the others for dead."""
    now = [time.monotonic()]
    async with joined(FakeEngine()) as here:
        clock = SimpleNamespace(monotonic=lambda: now[0], perf_counter=time.perf_counter)
        monkeypatch.setattr("headrace.distributed.pipe.time", clock)
        near, far = here.pair.near, here.pair.far
        near.silence()

        def listen(seconds: float, every: float) -> float:
            found = 0.0
            for _ in range(round(seconds / every)):
                now[0] += every
                found = near.silence()
            return found

        assert listen(10, 0.25) == pytest.approx(10, abs=0.5) and listen(5, 0.25) == pytest.approx(15, abs=0.5)
        now[0] += 3600
        assert near.silence() <= 16
        far.say(Cancel(1))
        far.flush()
        await soon(lambda: near.silence() == 0)
        now[0] += 3600
        assert near.silence() <= 0.5 and listen(1, 0.25) <= 1.5


# ---------------------------------------------------------------- limits over several processes


class Mouth:
    """What a desk says to its process."""

    full = False

    def __init__(self):
        self.said = []

    def say(self, message) -> None:
        self.said.append(message)


ACTIONS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["admit", "enter", "begin", "end", "return", "leave", "die"]), st.integers(0, 5)),
    max_size=60,
)


@settings(max_examples=150)
@given(ACTIONS)
def test_the_limits_hold_over_all_processes(actions):
    """Three processes at one server of 2 seats and 3 places, 50 tokens and 2 requests a key: a model counts along."""
    engine = FakeEngine(config=EngineConfig(max_num_seqs=2))
    config = ServerConfig(max_queued_requests=3, max_queued_tokens=50, max_concurrent_per_key=2)
    limits = Limits(engine, config)  # type: ignore[arg-type]
    metrics = PrometheusMetrics(engine)  # type: ignore[arg-type]

    def desk() -> Desk:
        return Desk(engine, limits, metrics, Mouth(), "")  # type: ignore[arg-type]

    desks = [desk() for _ in range(3)]
    held: list[dict[int, list[int]]] = [{} for _ in desks]  # number -> samples, tokens not begun
    keys: list[dict[int, int]] = [{} for _ in desks]
    for number, (who, what, value) in enumerate(actions):
        samples = sum(s for h in held for s, _ in h.values())
        tokens = sum(t for h in held for _, t in h.values())
        old = value if value in held[who] else next(iter(held[who]), None)
        if what == "admit":
            count, size = 1 + value % 3, 10 * value
            desks[who].heard(Admit(number, count, size))
            fits = not samples or samples + count <= 2 + 3
            fits = fits and (not tokens or tokens + size <= 50)
            answer = desks[who]._pipe.said.pop()
            assert isinstance(answer, Granted if fits else Refused), answer
            if fits:
                held[who][number] = [count, size]
            else:
                assert answer.status == 429 and answer.code == "queue_full" and int(answer.headers["retry-after"]) >= 1
        elif what == "enter":
            desks[who].heard(Enter(number, value % 2))
            fits = sum(k == value % 2 for each in keys for k in each.values()) < 2
            assert isinstance(desks[who]._pipe.said.pop(), Granted if fits else Refused)
            if fits:
                keys[who][number] = value % 2
        elif what == "leave":
            found = next(iter(keys[who]), 10**6)
            desks[who].heard(Left(found))
            keys[who].pop(found, None)
        elif what == "die":
            desks[who].close()
            desks[who], held[who], keys[who] = desk(), {}, {}
        elif old is None:
            desks[who].heard({"begin": Begun(10**6, 1), "end": Ended(10**6), "return": Returned(10**6)}[what])
        elif what == "begin":
            desks[who].heard(Begun(old, held[who][old][1]))
            held[who][old][1] = 0
        elif what == "end" and held[who][old][0]:
            desks[who].heard(Ended(old))
            held[who][old][0] -= 1
        elif what == "return":
            desks[who].heard(Returned(old))
            del held[who][old]
        assert limits.active == sum(s for h in held for s, _ in h.values())
        assert limits.unstarted_tokens == sum(t for h in held for _, t in h.values())
    for each in desks:
        each.close()
    assert limits.active == limits.unstarted_tokens == 0 and not any(limits._in_progress.values())


def test_refusals_are_the_limits_own():
    engine = FakeEngine()
    engine.state.draining = True
    config, mouth = ServerConfig(), Mouth()
    limits = Limits(engine, config)  # type: ignore[arg-type]
    Desk(engine, limits, PrometheusMetrics(engine), mouth, "").heard(Admit(1, 1, 1))  # type: ignore[arg-type]
    with pytest.raises(ApiError) as found:
        limits.take(1, 1)
    refused, error = mouth.said[0], found.value
    assert (refused.status, refused.message, refused.code, refused.headers) == (error.status, error.message, error.code, error.headers)
