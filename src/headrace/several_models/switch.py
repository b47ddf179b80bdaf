"""Which models are in memory: who asks for one waits until it is there; what nobody uses goes when another needs its room.

    unloaded -- asked for --> loading --> loaded -- idle, and its room is needed or its time is over --> unloading --> unloaded
                                 \\-> failed (whoever waits is told why) -- asked for again, a while later --> loading

Bytes are counted from the first moment of loading to the last of unloading, and never exceed the budget. A model is not
unloaded while anybody uses it. Whoever waits for room is served in the order of arrival: nobody overtakes, so that a large
model gets its turn. Where a model is never idle, it takes nothing new once another has waited for `patience` seconds: what it
has is finished, and what came for it meanwhile waits behind.

No clock but the event loop's, and no model: a `Runtime` loads and unloads.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from headrace.errors import EngineClosedError, HeadraceError

logger = logging.getLogger("headrace.server")
RETRY = 5.0  # seconds until a load that failed is tried again; doubles with each in a row
MOST_RETRY = 60.0


class State(StrEnum):
    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"
    FAILED = "failed"


HOLDING = (State.LOADING, State.LOADED, State.UNLOADING)


class Runtime(Protocol):
    """What a model runs in. Never asked for both at once, nor twice for the same."""

    async def load(self) -> None:
        """Until it serves. Whatever it raises, or if it is cancelled, nothing is left in memory."""

    async def unload(self) -> None: ...


class LoadFailedError(HeadraceError):
    """A model could not be loaded; `seconds`: until that is tried again."""

    def __init__(self, name: str, why: str, seconds: float):
        super().__init__(f"the model {name} could not be loaded: {why}")
        self.seconds = seconds


class TooManyWaitError(HeadraceError):
    """As many requests wait for models to be loaded as may."""


@dataclass(eq=False)
class Entry:
    """One model. `size`: bytes that it takes while it is not unloaded. `keep_alive`: seconds without a request after which it
    goes by itself; infinity: it stays until its room is needed."""

    name: str
    size: int
    runtime: Runtime
    pinned: bool = False  # loaded at the start, and never unloaded
    keep_alive: float = math.inf
    asked_keep_alive: float | None = None  # by a request, instead, for as long as it is loaded
    state: State = State.UNLOADED
    users: int = 0
    last_used: float = -math.inf  # when it was loaded, or a request ended
    turn: int = 0  # of that, among all models
    yielding: bool = False  # takes nothing new: somebody has waited too long for its room
    error: str | None = None  # of the last load, if it failed
    retry_at: float = -math.inf
    failures: int = 0  # in a row
    loads: int = 0  # that succeeded
    waiters: dict[asyncio.Future[None], float] = field(default_factory=dict)  # since when
    task: asyncio.Task[None] | None = None  # that loads or unloads it

    @property
    def holds(self) -> bool:
        """Memory is taken for it."""
        return self.state in HOLDING

    def idle_seconds(self) -> float:
        return 0.0 if self.users else asyncio.get_running_loop().time() - self.last_used

    def expires(self) -> float:
        """When it goes by itself; infinity: not now."""
        idle = self.state is State.LOADED and not self.users and not self.pinned
        seconds = self.keep_alive if self.asked_keep_alive is None else self.asked_keep_alive
        return self.last_used + seconds if idle else math.inf


class Switch:
    """Decides for all models. Every method belongs to one event loop."""

    def __init__(self, entries: Sequence[Entry], budget: int, max_waiting: int = 256, patience: float = 10.0):
        """Each fits into the budget beside those that are pinned: whoever made them has seen to that."""
        self.entries, self.budget, self.max_waiting, self.patience = tuple(entries), budget, max_waiting, patience
        self.closing = False
        self._timer: asyncio.TimerHandle | None = None
        self._turns = itertools.count(1)

    def start(self) -> None:
        """Load what is pinned."""
        self._advance()

    @property
    def held(self) -> int:
        """Bytes of all that is in memory, or comes, or goes."""
        return sum(entry.size for entry in self.entries if entry.holds)

    @property
    def num_waiting(self) -> int:
        return sum(len(entry.waiters) for entry in self.entries)

    # ---------------------------------------------------------------- requests

    async def enter(self, entry: Entry) -> None:
        """Until the model is loaded; from then on it stays, until `leave`.

        Raises LoadFailedError, TooManyWaitError, and EngineClosedError when all is being closed.
        """
        if self.closing:
            raise EngineClosedError("the server is being closed")
        if entry.state is State.LOADED and not entry.yielding:
            entry.users += 1
            return
        now = self._now()
        if entry.state is State.FAILED and now < entry.retry_at:
            raise LoadFailedError(entry.name, entry.error or "", entry.retry_at - now)
        if self.num_waiting >= self.max_waiting:
            raise TooManyWaitError(f"{self.num_waiting} requests wait for models to be loaded, and no more may")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry.waiters[turn] = now
        self._advance()
        try:
            await turn
        except asyncio.CancelledError:
            if entry.waiters.pop(turn, None) is not None:
                self._advance()
            elif not turn.cancelled() and turn.exception() is None:  # its turn had come just now
                self.leave(entry)
            raise

    def leave(self, entry: Entry) -> None:
        entry.users -= 1
        entry.last_used, entry.turn = self._now(), next(self._turns)
        if not entry.users:
            self._advance()

    @contextmanager
    def entered(self, entry: Entry, over: Callable[[Callable[[], None]], None] = lambda leave: leave()) -> Iterator[None]:
        """After `enter`: leaves at the end, however that comes; `over` may put it off."""
        try:
            yield
        finally:
            over(lambda: self.leave(entry))

    def keep(self, entry: Entry, seconds: float) -> None:
        """While it is loaded it goes after so long without a request; infinity: not by itself."""
        if entry.state is State.LOADED:
            entry.asked_keep_alive = seconds
            self._advance()

    def died(self, entry: Entry, why: str) -> None:
        """What it ran in is no more, for good: it is cleared away, and loaded again when it is asked for, a while later."""
        if entry.state is State.LOADED and not self.closing:
            logger.error("model %s has ended: %s", entry.name, why)
            self._count_failure(entry, why)
            self._begin_unload(entry, "it has ended", State.FAILED)
            self._refuse_waiters(entry)

    # ---------------------------------------------------------------- decisions

    def _advance(self) -> None:
        """Whatever has changed: start what can be started, and let in who can be."""
        if self.closing:
            return
        now, wakes = self._now(), [math.inf]
        for entry in self.entries:
            entry.yielding = False
            if entry.expires() <= now:
                self._begin_unload(entry, "idle for as long as it is kept")
        wanted = [entry for entry in self.entries if self._is_wanted(entry, now)]
        for entry in sorted(wanted, key=self._since):
            if entry.state not in (State.UNLOADED, State.FAILED):
                continue  # on its way in, or out
            wake = self._make_room(entry, now)
            if wake is not None:
                wakes.append(wake)
                break  # nobody overtakes
        for entry in self.entries:
            if entry.state is State.LOADED and not entry.yielding:
                self._let_in(entry)
            wakes.append(entry.expires())
            if entry.pinned and entry.state is State.FAILED and entry.retry_at > now:
                wakes.append(entry.retry_at)
        self._wake_at(min(wakes))

    def _is_wanted(self, entry: Entry, now: float) -> bool:
        return bool(entry.waiters) or (entry.pinned and now >= entry.retry_at and entry.state in (State.UNLOADED, State.FAILED))

    def _since(self, entry: Entry) -> float:
        return -math.inf if entry.pinned else min(entry.waiters.values())

    def _make_room(self, entry: Entry, now: float) -> float | None:
        """Load it (None), or free what it needs: the time at which to look again whatever happens; infinity: when something
        has happened."""
        missing = entry.size - (self.budget - self.held)
        if missing <= 0:
            self._begin_load(entry)
            return None
        missing -= sum(other.size for other in self.entries if other.state is State.UNLOADING)
        loaded = [other for other in self.entries if other.state is State.LOADED and not other.pinned]
        usual = sorted(loaded, key=lambda other: other.turn)
        idle = _enough([other for other in usual if not other.users], missing)
        if idle is not None:
            for other in idle:
                self._begin_unload(other, f"{entry.name} needs its room")
            return math.inf
        if (patient_until := self._since(entry) + self.patience) > now:
            return patient_until
        by_use = sorted(usual, key=lambda other: bool(other.users))  # those that are idle first
        for other in _enough(by_use, missing) or ():
            other.yielding = True
        return math.inf

    def _let_in(self, entry: Entry) -> None:
        for turn in entry.waiters:
            if not turn.done():  # else its request has gone, and does not know yet that it is no longer here
                entry.users += 1
                turn.set_result(None)
        entry.waiters.clear()

    def _refuse_waiters(self, entry: Entry) -> None:
        seconds = max(0.0, entry.retry_at - self._now())
        for turn in entry.waiters:
            if not turn.done():
                turn.set_exception(LoadFailedError(entry.name, entry.error or "", seconds))
        entry.waiters.clear()

    def _count_failure(self, entry: Entry, why: str) -> None:
        entry.error = why
        entry.retry_at = self._now() + min(MOST_RETRY, RETRY * 2**entry.failures)
        entry.failures = min(entry.failures + 1, 16)

    # ---------------------------------------------------------------- loading and unloading

    def _begin_load(self, entry: Entry) -> None:
        entry.state = State.LOADING
        entry.task = asyncio.get_running_loop().create_task(self._load(entry))

    async def _load(self, entry: Entry) -> None:
        began = self._now()
        logger.info("model %s: loading, %.2f of %.2f GiB are taken then", entry.name, self.held / 2**30, self.budget / 2**30)
        try:
            await entry.runtime.load()
        except asyncio.CancelledError:
            entry.state = State.UNLOADED
            raise
        except Exception as e:
            self._count_failure(entry, str(e) or type(e).__name__)
            logger.error("model %s could not be loaded: %s", entry.name, entry.error)
            entry.state = State.FAILED
            self._refuse_waiters(entry)
        else:
            logger.info("model %s: loaded in %.2f s", entry.name, self._now() - began)
            entry.state, entry.error, entry.failures = State.LOADED, None, 0
            entry.last_used, entry.turn = self._now(), next(self._turns)
            entry.loads += 1
            self._let_in(entry)
        self._advance()

    def _begin_unload(self, entry: Entry, why: str, then: State = State.UNLOADED) -> None:
        logger.info("model %s: unloading, %s", entry.name, why)
        entry.state, entry.yielding, entry.asked_keep_alive = State.UNLOADING, False, None
        entry.task = asyncio.get_running_loop().create_task(self._unload(entry, then))

    async def _unload(self, entry: Entry, then: State) -> None:
        try:
            await entry.runtime.unload()
        except Exception:
            logger.exception("model %s could not be unloaded well", entry.name)
        entry.state = then
        if then is State.FAILED:
            self._refuse_waiters(entry)
        self._advance()

    def _wake_at(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(when, self._advance) if when < math.inf else None

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    # ---------------------------------------------------------------- the end

    def stop(self) -> None:
        """Load nothing more, and send away who waits for that; who has been let in goes on."""
        if self.closing:
            return
        self.closing = True
        self._wake_at(math.inf)
        for entry in self.entries:
            for turn in entry.waiters:
                if not turn.done():
                    turn.set_exception(EngineClosedError("the server is being closed"))
            entry.waiters.clear()
            if entry.state is State.LOADING and entry.task is not None:
                entry.task.cancel()

    async def close(self) -> None:
        """Unload everything, whoever uses it."""
        self.stop()
        await asyncio.gather(*(entry.task for entry in self.entries if entry.task is not None), return_exceptions=True)
        for entry in self.entries:
            if entry.state is State.LOADED:
                self._begin_unload(entry, "the server is being closed")
        await asyncio.gather(*(entry.task for entry in self.entries if entry.task is not None), return_exceptions=True)


def _enough(entries: Sequence[Entry], missing: int) -> list[Entry] | None:
    """The first of them that have so many bytes together; None: all have less."""
    found: list[Entry] = []
    for entry in entries:
        if missing <= 0:
            break
        found.append(entry)
        missing -= entry.size
    return found if missing <= 0 else None
