"""Requests to a real server while it is disturbed: what it says must be what it says when it is left in peace."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx

from answers import Ask, Failed, Said, ask, random_ask
from core_builders import POISON, POISON_HANG, POISON_NAN
from server_driver import ServerProcess, until


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

    return until(whole, 60)


def undisturbed(server: ServerProcess, asks: list[Ask]) -> list[Said]:
    return run(server, lambda client: asyncio.gather(*(ask(client, a) for a in asks)))


def disturbed(
    server: ServerProcess, asks: list[Ask], disturb: Callable[[int], None], every: int, times: int, stays: str = "/health"
) -> list[Said]:
    """The same while `disturb(pid of the first core)` is called each time `every` more events have come (a fast core's tokens share
    them: of 600 there may be less than 100); until the last time the cores are braked. `stays` is 200."""
    count = done = 0

    def on_event() -> None:
        nonlocal count, done
        count += 1
        if count >= every * (done + 1) and done < times and (pid := server.core()):
            done += 1
            disturb(pid)
            if done == times:
                let_go()

    async def work(client: httpx.AsyncClient) -> list[Any]:
        jobs = asyncio.gather(*(ask(client, a, on_event=on_event) for a in asks))
        while not jobs.done():
            assert (await client.get(stays)).status_code == 200
            await asyncio.sleep(0.05)
        return await jobs

    with server.braked() as let_go:
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


def leftovers(server: ServerProcess) -> list[Path]:
    return list(Path(server.errors.name).parent.glob("headrace-*"))


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
        let_go()
        return failed, await asyncio.gather(*running)

    with sick.braked() as let_go:
        return run(sick, work)


def poisonous(error: Any) -> bool:
    """A 500, unless restarts took so long that the stream began with keep-alive comments: then the error is in it."""
    return isinstance(error, Failed) and error.status in (500, 200) and "this request ends the engine" in str(error)
