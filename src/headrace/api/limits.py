"""Who may be let in now: readiness, queue limits, requests of one key, Retry-After from the measured drain rate."""

from __future__ import annotations

import math
from collections import Counter

from headrace.api.config import ServerConfig
from headrace.api.errors import ApiError, too_many, unavailable
from headrace.engine.interface import AsyncEngine, seats_of_core

MAX_RETRY_AFTER = 120


class Ticket:
    """The admission of one request. What it still holds when the block ends is given back, however that happens."""

    def __init__(self, limits: Limits, num_samples: int, num_tokens: int):
        self._limits, self._samples, self._tokens = limits, num_samples, num_tokens
        limits.active += num_samples
        limits.unstarted_tokens += num_tokens

    def started(self, num_tokens: int) -> None:
        """A sample had its first output, or ended without."""
        self._tokens -= num_tokens
        self._limits.unstarted_tokens -= num_tokens

    def ended(self) -> None:
        """A sample has ended."""
        self._samples -= 1
        self._limits.active -= 1

    def __enter__(self) -> Ticket:
        return self

    def __exit__(self, *_: object) -> None:
        self._limits.active -= self._samples
        self._limits.unstarted_tokens -= self._tokens
        self._samples = self._tokens = 0


class Limits:
    """Counts what has been accepted, so that a burst cannot slip in between two reports of the engine.

    The methods that let in are coroutines: where several processes serve, another one counts for all of them.
    """

    def __init__(self, engine: AsyncEngine, config: ServerConfig):
        self.engine, self.config = engine, config
        self.active = 0  # samples accepted and not ended
        self.unstarted_tokens = 0  # prompt tokens of those without any output yet
        self._in_progress: Counter[int] = Counter()  # index of the key -> requests

    def check_ready(self) -> None:
        """Raise a 503 while the model loads, while the server drains and when the engine has given up."""
        status = self.engine.status()
        if not status.alive:
            raise unavailable("The engine has stopped.", 10, "engine_dead")
        if not status.loaded:
            raise unavailable("The model is still being loaded.", 5, "loading")
        if status.draining:
            raise unavailable("The server is shutting down.", 10, "draining")

    async def ready(self) -> None:
        """As `check_ready`."""
        self.check_ready()

    def retry_after(self) -> int:
        """Seconds until what waits now has been worked off."""
        status = self.engine.status()
        waiting = max(status.waiting_tokens, self.unstarted_tokens)
        if not status.drain_rate > 0 or not math.isfinite(status.drain_rate):
            return 1
        return max(1, min(MAX_RETRY_AFTER, math.ceil(waiting / status.drain_rate)))

    async def admit(self, num_samples: int, num_tokens: int) -> Ticket:
        """As `take`."""
        return self.take(num_samples, num_tokens)

    async def enter(self, key: int) -> None:
        """As `take_key`."""
        self.take_key(key)

    def take_key(self, key: int) -> None:
        """One more request of this key, until it leaves; raises a 429 if there are as many as may be."""
        most = self.config.max_concurrent_per_key
        if most is not None and self._in_progress[key] >= most:
            raise too_many(f"{most} requests are in progress for this key already.", self.retry_after())
        self._in_progress[key] += 1

    def leave(self, key: int) -> None:
        self._in_progress[key] -= 1

    def take(self, num_samples: int, num_tokens: int) -> Ticket:
        """Take `num_samples` samples of `num_tokens` prompt tokens together, or raise a 429. The ticket is a context manager.

        On an idle server a request is taken whatever its size: it could never come in otherwise.
        """
        self.check_ready()
        status = self.engine.status()
        seats = seats_of_core(self.engine) * max(1, status.num_cores)
        queued = max(status.num_waiting, self.active - seats, 0)
        will_wait = num_samples if queued else max(0, self.active + num_samples - seats)
        most = self.config.max_queued_requests
        if most is not None and self.active and will_wait and queued + will_wait > most:
            raise self._full(f"{queued} requests are waiting; at most {most} may.")
        tokens = self.config.max_queued_tokens
        if tokens is not None and self.unstarted_tokens and self.unstarted_tokens + num_tokens > tokens:
            raise self._full(f"{self.unstarted_tokens} prompt tokens are waiting; at most {tokens} may.")
        return Ticket(self, num_samples, num_tokens)

    def _full(self, text: str) -> ApiError:
        return too_many(f"The queue is full: {text}", self.retry_after(), "queue_full")
