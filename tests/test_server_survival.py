"""The core dies, hangs or is poisoned under real servers: streams go on with the very tokens, everything else stays right."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from answers import Ask, Failed, Said, ask, random_ask
from core_builders import POISON, POISON_HANG, POISON_NAN
from server_driver import ServerProcess, processes_of, until


@pytest.fixture(scope="module")
def server(model, tmp_path_factory) -> Iterator[ServerProcess]:
    options = ("--served-model-name", "tiny", "--heartbeat-timeout", "2", "--max-restarts", "1000")
    with ServerProcess(model, *options, tmp=tmp_path_factory.mktemp("tmp")) as process:
        yield process.wait_ready()


@pytest.fixture(scope="module")
def sick(model, tmp_path_factory) -> Iterator[ServerProcess]:
    """A server whose model does not bear some tokens."""
    options = ("--served-model-name", "tiny", "--step-timeout", "2", "--max-restarts", "1000")
    tmp = tmp_path_factory.mktemp("sick")
    with ServerProcess(model, *options, builder="core_builders:sensitive", tmp=tmp) as process:
        yield process.wait_ready()


def run(server: ServerProcess, work: Callable[[httpx.AsyncClient], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        limits = httpx.Limits(max_connections=100)
        async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:
            return await asyncio.wait_for(work(client), 100)

    return asyncio.run(main())


def idle(server: ServerProcess) -> dict[str, float]:
    """The metrics when nothing runs: the pool is whole."""

    def whole() -> dict[str, float] | None:
        page = server.metrics()
        busy = page["headrace:num_requests_running"] or page["headrace:num_requests_waiting"] or page["headrace:kv_cache_usage_perc"]
        return None if busy else page

    return until(whole, 20)


def undisturbed(server: ServerProcess, asks: list[Ask]) -> list[Said]:
    return run(server, lambda client: asyncio.gather(*(ask(client, a) for a in asks)))


def disturbed(server: ServerProcess, asks: list[Ask], disturb: Callable[[int], None], every: int, times: int) -> list[Said]:
    """The same while `disturb(pid of the core)` is called each time `every` more events have come."""
    count = done = 0

    def on_event() -> None:
        nonlocal count, done
        count += 1
        if count >= every * (done + 1) and done < times and server.children():
            done += 1
            disturb(server.core())

    async def work(client: httpx.AsyncClient) -> list[Any]:
        jobs = asyncio.gather(*(ask(client, a, on_event=on_event) for a in asks))
        while not jobs.done():
            assert (await client.get("/health")).status_code == 200
            await asyncio.sleep(0.05)
        return await jobs

    said = run(server, work)
    assert done == times, "nothing was disturbed"
    return said


def some_asks(seed: int, count: int) -> list[Ask]:
    rng = random.Random(seed)
    asks = [random_ask(rng, "tiny", 200) for _ in range(count)]
    long = {"model": "tiny", "prompt": "The water", "max_tokens": 200, "ignore_eos": True}
    return asks + [
        Ask("/v1/completions", {**long, "temperature": 0.0}, True),
        Ask("/v1/completions", {**long, "temperature": 1.0, "seed": 5, "n": 3, "logprobs": 2}, True),
        Ask("/v1/completions", {**long, "temperature": 0.8, "seed": 6, "n": 2}, False),
    ]


def test_streams_survive_kills_of_the_core(server, times=2):
    asks = some_asks(1, 6)
    want = undisturbed(server, asks)
    before = idle(server)
    got = disturbed(server, asks, lambda pid: os.kill(pid, signal.SIGKILL), 120, times)
    for what, a, b in zip(asks, got, want, strict=True):
        assert a.differs(b) is None, f"{what}: {a.differs(b)}"
    after = idle(server)
    assert after["headrace:engine_restarts_total"] == before["headrace:engine_restarts_total"] + times
    assert after["headrace:engine_poisonous_requests_total"] == 0
    back = [k for k in before if "_total" in k and after[k] < before[k]]
    assert not back, f"counters went back: {back}"
    assert not list(processes_of(server.process.pid, zombies=True)) and not leftovers(server)


def leftovers(server: ServerProcess) -> list[Path]:
    return list(Path(server.errors.name).parent.glob("headrace-*"))


def test_a_core_that_hangs_is_replaced(server):
    asks = some_asks(9, 1)
    want = undisturbed(server, asks)
    got = disturbed(server, asks, lambda pid: os.kill(pid, signal.SIGSTOP), 100, 1)
    assert [a.differs(b) for a, b in zip(got, want, strict=True)] == [None] * len(asks)
    assert "no heartbeat" in server.log()
    idle(server)


def test_readiness_follows_the_core_and_health_does_not(server):
    server.wait_ready()
    until(lambda: len(server.children()) == 2, 20)  # one on standby
    os.kill(server.children()[1], signal.SIGKILL)  # without it a restart takes long enough to be seen
    os.kill(server.core(), signal.SIGKILL)
    until(lambda: server.http.get("/ready").status_code == 503, 10, every=0.001)
    assert server.http.get("/health").status_code == 200
    # a request that comes meanwhile waits
    body = {"model": "tiny", "prompt": "x", "max_tokens": 3, "temperature": 0}
    assert server.http.post("/v1/completions", json=body).status_code == 200
    assert server.http.get("/ready").status_code == 200


def prompts(*fatal: int) -> list[Ask]:
    rng = random.Random(3)
    common = {"model": "tiny", "max_tokens": 150, "ignore_eos": True, "logit_bias": {str(i): -100 for i in (POISON, POISON_NAN, POISON_HANG)}}
    ids = [[rng.choice([i for i in range(3, 512) if i not in (77, 78, 79)]) for _ in range(12)] for _ in range(4)]
    good = [Ask("/v1/completions", {**common, "prompt": p, "temperature": 0.7, "seed": i}, True) for i, p in enumerate(ids)]
    return good + [Ask("/v1/completions", {**common, "prompt": [*ids[0], token]}, i % 2 == 0) for i, token in enumerate(fatal)]


def with_bad_ones(sick: ServerProcess, bad: list[Ask], good: list[Ask], delay: float) -> tuple[list[Any], list[Any]]:
    async def work(client: httpx.AsyncClient) -> Any:
        running = [asyncio.ensure_future(ask(client, a)) for a in good]
        await asyncio.sleep(delay)
        failed = await asyncio.gather(*(ask(client, a) for a in bad), return_exceptions=True)
        return failed, await asyncio.gather(*running)

    return run(sick, work)


def poisonous(error: Any) -> bool:
    """A 500, unless restarts took so long that the stream began with keep-alive comments: then the error is in it."""
    return isinstance(error, Failed) and error.status in (500, 200) and "this request ends the engine" in str(error)


@pytest.mark.parametrize("delay", [0.0, 0.3])
def test_the_request_that_kills_the_core_fails_and_the_rest_go_on(sick, delay):
    good = prompts()
    want = undisturbed(sick, good)
    before = idle(sick)
    failed, got = with_bad_ones(sick, prompts(POISON)[-1:], good, delay)
    assert poisonous(failed[0]), failed
    assert [a.differs(b) for a, b in zip(got, want, strict=True)] == [None] * len(good)
    after = idle(sick)
    assert after["headrace:engine_restarts_total"] == before["headrace:engine_restarts_total"] + 2
    assert after["headrace:engine_poisonous_requests_total"] == before["headrace:engine_poisonous_requests_total"] + 1


def test_several_killers_at_once(sick):
    good = prompts()[:2]
    want = undisturbed(sick, good)
    failed, got = with_bad_ones(sick, prompts(POISON, POISON, POISON)[-3:], good, 0.1)
    assert all(map(poisonous, failed)), failed
    assert [a.differs(b) for a, b in zip(got, want, strict=True)] == [None] * len(good)
    idle(sick)


def test_nan_fails_one_row_alone(sick):
    good = prompts()
    want = undisturbed(sick, good)
    before = idle(sick)
    failed, got = with_bad_ones(sick, prompts(POISON_NAN, POISON_NAN)[-2:], good, 0.1)
    assert [getattr(f, "status", None) for f in failed] == [500, 500] and "NaN" in str(failed[0])
    assert [a.differs(b) for a, b in zip(got, want, strict=True)] == [None] * len(good)
    after = idle(sick)
    assert after["headrace:nan_failures_total"] == before["headrace:nan_failures_total"] + 2
    assert after["headrace:engine_restarts_total"] == before["headrace:engine_restarts_total"]


def test_a_step_that_never_ends(sick):
    good = prompts()[:2]
    want = undisturbed(sick, good)
    began = time.monotonic()
    failed, got = with_bad_ones(sick, prompts(POISON_HANG)[-1:], good, 0.1)
    assert poisonous(failed[0]), failed
    assert time.monotonic() - began > 4 and "one step takes" in sick.log()
    assert [a.differs(b) for a, b in zip(got, want, strict=True)] == [None] * len(good)
    idle(sick)
