"""What somebody who reads GET /glass/events knows of a core: the state that the events describe, by their documentation alone."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx


class Picture:
    """One core, from a snapshot on."""

    def __init__(self, snapshot: dict[str, Any]):
        self.snapshot = snapshot
        self.n: int = snapshot["n"]
        self.decodes: list[int] = snapshot["decodes"]
        self.tables: dict[int, list[int]] = {slot: blocks for slot, *blocks in snapshot["tables"]}
        self.nodes: dict[int, int] = dict(zip(snapshot["nodes"][::2], snapshot["nodes"][1::2], strict=True))
        self.waiting: set[str] = set()
        self.slots: dict[int, str] = {}
        self.scheduled: dict[str, int] = {}
        self.ended: dict[str, tuple[str, int]] = {}
        self.first: set[str] = set()
        self.preempted: dict[str, int] = {}
        for name, _, _, _, slot, _, scheduled, *_, reason, _ in snapshot["requests"]:
            if slot >= 0:
                self.slots[slot] = name
                self.scheduled[name] = scheduled
            elif reason is None:
                self.waiting.add(name)
        self.head = snapshot["head"]
        self.steps: list[int] = []  # numbers
        self._events: list[list[Any]] = []

    @property
    def owners(self) -> dict[int, set[str]]:
        """By block in use."""
        found: dict[int, set[str]] = {}
        for slot, blocks in self.tables.items():
            for block in blocks:
                found.setdefault(block, set()).add(self.slots[slot])
        return found

    def take(self, name: str, value: dict[str, Any]) -> None:
        if name == "request":
            self._events += value["events"]
        elif name == "step":
            for step in value["steps"]:
                self._happen(before=step[0])
                self._step(*step)
            self._happen(before=1 << 60)
            for block in value["gone"]:
                del self.nodes[block]
            entered = value["entered"]
            for block, above in zip(entered[::2], entered[1::2], strict=True):
                assert block not in self.nodes
                self.nodes[block] = above
            self.head = value["head"]

    def _happen(self, before: int) -> None:
        while self._events and self._events[0][1] < before:
            what, _, _, name, *facts = self._events.pop(0)
            if what == "arrived":
                self.waiting.add(name)
            elif what == "admitted":
                self.waiting.remove(name)
                self.slots[facts[0]] = name
                self.scheduled[name] = facts[1]
            elif what == "first":
                self.first.add(name)
            elif what == "preempted":
                assert facts[0] > self.preempted.get(name, 0)
                self.preempted[name] = facts[0]
                self.waiting.add(name)
            else:
                assert what == "ended"
                self.waiting.discard(name)
                self.ended[name] = (facts[0], facts[1])

    def _step(self, n, time, times, count, decodes, rows, left, taken, verified) -> None:
        for slot in left:
            del self.tables[slot]
        while taken:
            slot, column, length, *rest = taken
            blocks, taken = rest[:length], rest[length:]
            if column == 0:
                assert slot not in self.tables
                self.tables[slot] = []
            assert len(self.tables[slot]) == column
            self.tables[slot] += blocks
        for _, slot, tokens in zip(verified[::3], verified[1::3], verified[2::3], strict=True):
            if slot in self.slots:
                self.scheduled[self.slots[slot]] += tokens - 1
        if n == self.n:
            assert not count and not rows
            return
        self.steps.append(n)
        self.n, self.decodes = n, self.decodes if decodes is None else decodes
        assert count == len(self.decodes)
        for slot in self.decodes:
            self.scheduled[self.slots[slot]] += 1
        for slot, kind, start, tokens, _ in zip(*(rows[i::5] for i in range(5)), strict=True):
            self.scheduled[self.slots[slot]] = start + (tokens if kind == 1 else 1)


async def picture_of(url: str, core: int = 0) -> Picture:
    """What somebody sees who comes now."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as http, http.stream("GET", "/glass/events", params={"core": core}) as stream:
        name = ""
        async for line in stream.aiter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: ") and name == "snapshot":
                return Picture(json.loads(line.removeprefix("data: ")))
    raise AssertionError("the feed has ended without a snapshot")


async def is_true(page: Any, url: str) -> None:
    """The page shows what the core holds, as a second viewer and /metrics know it; nothing runs, or it may change meanwhile."""
    numbers = "() => ['in-use', 'nodes'].map((name) => Number(document.querySelector(`[data-count=${name}]`).innerText.replace(/,/g, '')))"
    async with asyncio.timeout(30):
        while True:
            picture = await picture_of(url)
            async with httpx.AsyncClient(base_url=url, timeout=60) as http:
                lines = (await http.get("/metrics")).text.splitlines()
            usage = next(float(line.split()[-1]) for line in lines if line.startswith("headrace:kv_cache_usage_perc"))
            shown, known = await page.evaluate(numbers), [len(picture.owners), len(picture.nodes)]
            if shown == known and known[0] == round(usage * picture.snapshot["num_blocks"]):
                return
            await asyncio.sleep(0.1)
