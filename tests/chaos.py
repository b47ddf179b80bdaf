"""Clients of all bad habits against a real server whose core is killed and stopped all the while; every answer is checked.

    1. undisturbed   each request of a fixed pool is answered once, quietly: what it must always say
    2. chaos         clients send requests of the pool, whole, streamed, slowly read or left early; bad bodies, huge prompts;
                     a killer sends SIGKILL (now and then SIGSTOP) to the core; a watcher asks /health and notes memory
    3. quiet         nothing may be running or held any more, no process left over

An answer that differs, an error where none belongs, an unhealthy /health: each is a fault. All traffic is on this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from answers import Ask, Failed, Said, ask, parse_metrics, random_ask
from server_driver import ServerProcess, processes_of

MALFORMED: list[tuple[bytes, set[int]]] = [
    (b"", {400}), (b"{", {400}), (b"[]", {400}), (b"null", {400}), (b'{"model": 5}', {400}), (b"\xff\xfe", {400}),
    (b'{"model": "tiny", "prompt": "x", "max_tokens": -1}', {400}), (b'{"model": "nobody", "prompt": "x"}', {404}),
    (b'{"model": "tiny", "prompt": "x", "temperature": 1e9}', {400}), (b'{"model": "tiny", "prompt": "x", "n": 1000000}', {400}),
    (b'{"model": "tiny", "prompt": [99999999]}', {400}), (b'{"model": "tiny", "prompt": ' + b"[" * 5000, {400}),
]  # fmt: skip


@dataclass
class Report:
    """What happened."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    tokens_checked: int = 0
    tokens_lost: int = 0
    restarts: int = 0
    memory: list[tuple[float, float]] = field(default_factory=list)  # seconds, MiB of the HTTP process
    slowest_health: float = 0.0

    def fault(self, text: str) -> None:
        self.counts["faults"] += 1
        if len(self.faults) < 20:
            self.faults.append(text[:2000])

    def as_dict(self) -> dict[str, Any]:
        return {
            "counts": dict(self.counts), "faults": self.faults, "tokens_checked": self.tokens_checked,
            "tokens_lost": self.tokens_lost, "restarts": self.restarts, "slowest_health_seconds": round(self.slowest_health, 3),
            "rss_mib": [(round(t), round(m, 1)) for t, m in self.memory],
        }  # fmt: skip


class Chaos:
    """One run. `server` must be ready and serve a tiny model, in so many `cores`, as "tiny". `more`: further trouble, which goes on
    until it is cancelled."""

    def __init__(
        self, server: ServerProcess, *, seed: int, clients: int, pool: int, seconds: float, kill_every: float, cores: int = 1,
        least: int = 0, more: Sequence[Callable[[Chaos], Awaitable[None]]] = (),
    ):  # fmt: skip
        self.server, self.clients, self.seconds, self.kill_every = server, clients, seconds, kill_every
        self.cores, self.more = cores, more
        self.least, self.restarts = least, 0  # it goes on until so many cores have been replaced, for a minute more at most
        self.random = random.Random(seed)
        self.pool = [random_ask(self.random, "tiny", 100) for _ in range(pool)]
        self.want: list[Said] = []
        self.report = Report()

    def run(self) -> Report:
        asyncio.run(self._run())
        return self.report

    async def _run(self) -> None:
        limits = httpx.Limits(max_connections=2 * self.clients + 8)
        async with httpx.AsyncClient(base_url=self.server.url, timeout=180, limits=limits) as client:
            gate = asyncio.Semaphore(4)

            async def quietly(what: Ask) -> Said:
                async with gate:
                    said = await ask(client, what)
                assert said is not None
                return said

            self.want = list(await asyncio.gather(*map(quietly, self.pool)))
            self.began = time.monotonic()
            self.end = self.began + self.seconds
            seeds = [self.random.random() for _ in range(self.clients)]
            around = [asyncio.create_task(trouble) for trouble in (self._watch(client), self._kill(), *(make(self) for make in self.more))]
            try:
                await asyncio.gather(*(self._client(client, random.Random(s)) for s in seeds))
            finally:
                for task in around:
                    task.cancel()
            for task in around:
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            await self._quiet(client)

    # ---------------------------------------------------------------- clients

    async def _client(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        while time.monotonic() < self.end + 60 * (self.restarts < self.least):
            kind = rng.choices(("plain", "slow", "leave", "malformed", "huge"), (70, 6, 12, 6, 6))[0]
            try:
                await getattr(self, f"_{kind}")(client, rng)
            except (httpx.HTTPError, Failed) as e:
                self.report.fault(f"{kind}: {type(e).__name__} {e}")
            self.report.counts[kind] += 1

    async def _plain(self, client: httpx.AsyncClient, rng: random.Random, **how: Any) -> None:
        index = rng.randrange(len(self.pool))
        what, want = self.pool[index], self.want[index]
        try:
            said = await ask(client, what, **how)
        except Failed:
            self.report.tokens_lost += want.num_tokens
            raise
        assert said is not None
        self.report.tokens_checked += want.num_tokens
        if difference := said.differs(want):
            self.report.tokens_lost += abs(want.num_tokens - said.num_tokens) or want.num_tokens
            self.report.fault(f"{what}: {difference}")

    async def _slow(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        await self._plain(client, rng, pause=0.03)

    async def _leave(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        what = rng.choice(self.pool)
        if what.stream:
            await ask(client, what, leave_after=rng.randint(1, 20))
        else:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ask(client, what), rng.uniform(0.01, 0.5))

    async def _malformed(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        body, allowed = rng.choice(MALFORMED)
        response = await client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        if response.status_code not in allowed:
            self.report.fault(f"{body[:80]!r}: {response.status_code} {response.text[:200]}")

    async def _huge(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        body = {"model": "tiny", "prompt": "water " * rng.choice([300, 20_000, 200_000]), "max_tokens": 5}
        response = await client.post("/v1/completions", json=body)
        if response.status_code not in (400, 413):
            self.report.fault(f"a huge prompt: {response.status_code} {response.text[:200]}")

    # ---------------------------------------------------------------- around them

    async def _kill(self) -> None:
        """Faults at random times, each when the core before has become ready."""
        while True:
            await asyncio.sleep(self.random.uniform(0.3, 1.7) * self.kill_every)
            pid = self.random.choice(self.server.children()[: self.cores] or [0])
            if pid:
                stop = self.random.random() < 0.1
                self.report.counts["SIGSTOP" if stop else "SIGKILL"] += 1
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP if stop else signal.SIGKILL)
            end = time.monotonic() + 15
            while pid in self.server.children() or not await self._ready():
                await asyncio.sleep(0.05)
                if time.monotonic() > end:  # it was the one that stands by, which nobody watches
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGCONT)
                    break
            self.restarts = int((await self._metrics())["headrace:engine_restarts_total"])

    async def _ready(self) -> bool:
        async with httpx.AsyncClient(base_url=self.server.url, timeout=30) as client:
            return (await client.get("/ready")).status_code == 200

    async def _metrics(self) -> dict[str, float]:
        async with httpx.AsyncClient(base_url=self.server.url, timeout=30) as client:
            return parse_metrics((await client.get("/metrics")).text)

    async def _watch(self, client: httpx.AsyncClient) -> None:
        while True:
            began = time.monotonic()
            try:
                status = (await client.get("/health")).status_code
            except httpx.HTTPError as e:
                status = repr(e)  # type: ignore[assignment]
            self.report.slowest_health = max(self.report.slowest_health, time.monotonic() - began)
            if status != 200:
                self.report.fault(f"/health: {status}")
            self._note_memory()
            await asyncio.sleep(0.5)

    def _note_memory(self) -> None:
        at = time.monotonic() - self.began
        if not self.report.memory or at - self.report.memory[-1][0] >= max(2.0, self.seconds / 100):
            with open(f"/proc/{self.server.process.pid}/statm") as f:
                self.report.memory.append((at, int(f.read().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20))

    async def _quiet(self, client: httpx.AsyncClient) -> None:
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        end = time.monotonic() + 60
        while True:
            page = parse_metrics((await client.get("/metrics")).text)
            held: dict[str, Any] = {n: page[f"headrace:{n}"] for n in names if page[f"headrace:{n}"]}
            if zombies := list(processes_of(self.server.process.pid, zombies=True)):  # one may have been killed a moment ago
                held["zombies"] = zombies
            if len(children := self.server.children()) > self.cores + 1:  # one on standby
                held["children"] = children
            if not held and await self._ready():
                break
            if time.monotonic() > end:
                self.report.fault(f"still held when idle: {held}")
                break
            await asyncio.sleep(0.1)
        self.report.restarts = int(page["headrace:engine_restarts_total"])
        if page["headrace:engine_poisonous_requests_total"]:
            self.report.fault(f"{page['headrace:engine_poisonous_requests_total']:.0f} requests were blamed for kills from outside")
