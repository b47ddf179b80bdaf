"""Who looks at an engine, and what each is sent: a core is watched while somebody looks at it, and no longer.

A viewer that takes what it gets is sent each document once. One that does not is sent nothing of what it has missed, but a
snapshot when it comes back: so what is kept for it is bounded, and so is what it costs the core.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol

import msgspec

from headrace.api.sse import named_event
from headrace.engine.client import EngineClient
from headrace.engine.interface import AsyncEngine
from headrace.engine.wire import Glimpse
from headrace.errors import HeadraceError

MOST_VIEWERS = 4
MOST_BYTES = 2**20  # that wait for a viewer; one who is behind by more has missed something
STATS_SECONDS = 0.5
SNAPSHOT_SECONDS = 1.0  # between two that a core is asked for because a viewer is slow


class TooManyViewersError(HeadraceError):
    """As many look as may."""


class Viewing(Protocol):
    async def next(self) -> bytes:
        """Server-sent events, at least one, as soon as there are any; nothing: that was all."""


class Glass(Protocol):
    """What the page's feed comes from; it may be in another process."""

    def look(self, core: int) -> AbstractAsyncContextManager[Viewing]:
        """Entering it raises TooManyViewersError."""

    async def token_ids(self, request_id: str, start: int, stop: int) -> list[int] | None:
        """Of a request in flight; None: there is no such one."""


class Viewer:
    """One who looks at a core."""

    def __init__(self, hub: GlassHub, core: int):
        self._hub, self.core = hub, core
        self.current = False  # has the state that the next document is about
        self.over = False
        self._waiting: list[bytes] = []
        self._size = 0
        self._more = asyncio.Event()

    def put(self, data: bytes) -> None:
        """Whatever it has seen."""
        if self._is_behind(data):
            self.forget()
        self._waiting.append(data)
        self._size += len(data)
        self._more.set()

    def forget(self) -> None:
        """It has missed what it had not taken."""
        self.current, self._waiting, self._size = False, [], 0

    def _is_behind(self, data: bytes) -> bool:
        return bool(self._waiting) and self._size + len(data) > MOST_BYTES

    def follow(self, data: bytes) -> None:
        """Only behind all that came before."""
        if self.current and self._is_behind(data):
            self.forget()
        elif self.current:
            self.put(data)

    def begin(self, snapshot: bytes) -> None:
        if not self.current:
            self.put(snapshot)
            self.current = True

    def end(self) -> None:
        self.over = True
        self._more.set()

    async def next(self) -> bytes:
        if self.over:
            return b""
        if not self.current:
            self._hub.want(self.core)
        while not (self._waiting or self.over):  # it may have missed what it was woken for
            self._more.clear()
            await self._more.wait()
        data, self._waiting, self._size = b"".join(self._waiting), [], 0
        return data


class GlassHub:
    """All viewers of an engine's client, whose `spectator` it is. Belongs to the client's event loop."""

    def __init__(self, client: EngineClient, texts: bool = False):
        """`texts`: they may be asked for, which is said and not decided here."""
        self._client, self._texts = client, texts
        self.viewers: set[Viewer] = set()
        self._asked: dict[int, float] = {}  # when a core was last asked for a snapshot
        self._stats: asyncio.Task[None] | None = None
        client.spectator = self

    @asynccontextmanager
    async def look(self, core: int) -> AsyncIterator[Viewer]:
        viewer = self.open(core)
        try:
            yield viewer
        finally:
            self.close(viewer)

    def open(self, core: int) -> Viewer:
        if len(self.viewers) >= MOST_VIEWERS:
            raise TooManyViewersError(f"{MOST_VIEWERS} look at this engine already, and no more may at a time")
        viewer = Viewer(self, core)
        self.viewers.add(viewer)
        viewer.put(_event("stats", {"texts": self._texts, **stats_of(self._client)}))
        self._asked.pop(core, None)
        self.want(core)
        if self._stats is None or self._stats.done():
            self._stats = asyncio.create_task(self._tell_stats())
        return viewer

    def close(self, viewer: Viewer) -> None:
        self.viewers.discard(viewer)
        if not any(other.core == viewer.core for other in self.viewers):
            self._client.watch(viewer.core, False)
        if not self.viewers and self._stats is not None:
            self._stats.cancel()

    def want(self, core: int) -> None:
        """A snapshot, for somebody who has none; not more often than a core should be asked."""
        now = time.monotonic()
        if now - self._asked.get(core, -SNAPSHOT_SECONDS) >= SNAPSHOT_SECONDS:
            self._asked[core] = now
            self._client.watch(core, True)

    async def token_ids(self, request_id: str, start: int, stop: int) -> list[int] | None:
        return self.known_ids(request_id, start, stop)

    def known_ids(self, request_id: str, start: int, stop: int) -> list[int] | None:
        return self._client.token_ids(request_id, start, stop)

    # ---------------------------------------------------------------- told by the client

    def seen(self, core: int, glimpse: Glimpse) -> None:
        for name, document in (("request", glimpse.requests), ("step", glimpse.steps)):
            if document is not None:
                self._each(core, Viewer.follow, named_event(name.encode(), document))
        if glimpse.snapshot is not None:
            self._each(core, Viewer.begin, named_event(b"snapshot", glimpse.snapshot))

    def loaded(self, core: int) -> None:
        self._each(core, Viewer.put, _event("core", {"core": core, "state": "loaded"}))
        if any(viewer.core == core for viewer in self.viewers):
            self._client.watch(core, True)

    def died(self, core: int, why: str) -> None:
        for viewer in self.viewers:
            if viewer.core == core:
                viewer.current = False
        self._each(core, Viewer.put, _event("core", {"core": core, "state": "died", "why": why}))

    def _each(self, core: int, put: Callable[[Viewer, bytes], None], data: bytes) -> None:
        for viewer in self.viewers:
            if viewer.core == core:
                put(viewer, data)

    async def _tell_stats(self) -> None:
        while self.viewers:
            await asyncio.sleep(STATS_SECONDS)
            data = _event("stats", {"texts": self._texts, **stats_of(self._client)})
            over = self._client.draining and not self._client.num_requests
            for viewer in self.viewers:
                viewer.put(data)
                if over:  # who looks must not keep the server from ending
                    viewer.end()
            for core in {viewer.core for viewer in self.viewers if not viewer.current}:
                self.want(core)  # it may have been asked too early, or too soon again


def _event(name: str, value: Any) -> bytes:
    return named_event(name.encode(), msgspec.json.encode(value))


def stats_of(engine: AsyncEngine) -> dict[str, Any]:
    """The engine's counters and gauges, over all cores and of each."""
    status, total = engine.status(), engine.counters()
    names = [name for name in total.__struct_fields__ if name != "accepted_per_position"]

    def numbers(stats: Any) -> dict[str, Any]:
        return {name: getattr(stats, name) for name in names}

    return {
        "now": round(time.monotonic(), 4), "loaded": status.loaded, "alive": status.alive, "draining": status.draining,
        "requests": status.num_running + status.num_waiting, "restarts": engine.restarts, **numbers(total),
        "cores": [
            {"core": core.number, "up": core.up, "leaving": core.leaving, "restarts": core.restarts, **numbers(core.stats)}
            for core in engine.cores()
        ],
    }  # fmt: skip
