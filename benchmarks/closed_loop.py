"""A closed loop of streams against a server over HTTP: each answer compared with the quiet one, each gap timed."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

POOL, OUTPUT = 24, 120  # requests that differ, tokens of each
NAME = "bench"  # the served model's


@dataclass
class Load:
    """What a load has seen."""

    answers: int = 0
    tokens: int = 0
    broken: list[str] = field(default_factory=list)
    differing: int = 0
    gaps: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        gaps = sorted(self.gaps) or [0.0]
        at = {f"gap_p{p:g}_ms": round(1e3 * gaps[min(len(gaps) - 1, int(len(gaps) * p / 100))], 1) for p in (50, 99, 99.9)}
        return {
            "answers": self.answers, "tokens": self.tokens, "broken": len(self.broken), "faults": self.broken[:3],
            "differing": self.differing, "seconds": round(self.seconds, 1),
            "tokens_per_second": round(self.tokens / self.seconds, 1) if self.seconds else None, **at,
            "gap_max_ms": round(1e3 * gaps[-1], 1),
        }  # fmt: skip


def body(number: int) -> dict[str, Any]:
    return {
        "model": NAME, "prompt": f"Story number {number % POOL}: the miller", "seed": number % POOL, "max_tokens": OUTPUT,
        "temperature": 0.7, "ignore_eos": True, "stream": True,
    }  # fmt: skip


async def stream(client: httpx.AsyncClient, number: int, load: Load) -> str:
    text, last = "", None
    async with client.stream("POST", "/v1/completions", json=body(number)) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code}: {(await response.aread()).decode()[:200]}")
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return text
            if line.startswith("data: "):
                event, now = json.loads(line[6:]), time.perf_counter()
                if "choices" not in event:
                    raise RuntimeError(line[:200])
                text += event["choices"][0]["text"]
                load.tokens += 1
                if last is not None:
                    load.gaps.append(now - last)
                last = now
    raise RuntimeError("a stream without an end")


class Client:
    """Clients of one server at a time; knows what each request's answer must be."""

    def __init__(self, streams: int):
        self.streams = streams
        self.want: dict[int, str] = {}

    def learn(self, url: str) -> None:
        """Each request once, four at a time."""

        async def work(client: httpx.AsyncClient) -> None:
            gate = asyncio.Semaphore(4)

            async def one(number: int) -> None:
                async with gate:
                    self.want[number] = await stream(client, number, Load())

            await asyncio.gather(*map(one, range(POOL)))

        asyncio.run(self._with(url, work))

    def load(self, url: str, seconds: float, during: Callable[[], Any] | None = None, curve: list[int] | None = None) -> Load:
        """Streams in a closed loop for so long, and for as long as `during` takes, which begins after a quarter of the time.

        `curve`: how many at once, in parts of the time; else `streams`.
        """
        return asyncio.run(self._with(url, lambda client: self._load(client, seconds, during, curve or [self.streams])))

    async def _load(
        self, client: httpx.AsyncClient, seconds: float, during: Callable[[], Any] | None, curve: list[int]
    ) -> Load:
        load, began = Load(), time.perf_counter()
        done = during is None

        async def disturb() -> None:
            nonlocal done
            await asyncio.sleep(seconds / 4)
            try:
                await asyncio.to_thread(during)  # type: ignore[arg-type]
            finally:
                done = True

        def wanted() -> int:
            passed = time.perf_counter() - began
            return 0 if passed > seconds and done else curve[min(len(curve) - 1, int(passed / seconds * len(curve)))]

        async def loop(place: int) -> None:
            number = place
            while time.perf_counter() - began <= seconds or not done:
                if place >= wanted():
                    await asyncio.sleep(0.1)
                    continue
                try:
                    text = await stream(client, number, load)
                    load.answers += 1
                    load.differing += text != self.want[number % POOL]
                except (httpx.HTTPError, RuntimeError) as e:
                    load.broken.append(f"{type(e).__name__}: {e}")
                number += max(curve)

        work: list[Awaitable[None]] = [loop(i) for i in range(max(curve))]
        await asyncio.gather(*work, *([] if during is None else [disturb()]))
        load.seconds = time.perf_counter() - began
        return load

    async def _with(self, url: str, work: Callable[[httpx.AsyncClient], Awaitable[Any]]) -> Any:
        limits = httpx.Limits(max_connections=256)
        async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
            return await work(client)
