"""Who looks on while an engine works: told of requests and steps, for metrics and traces. How fast tokens come."""

from __future__ import annotations

import logging
import time
from typing import Protocol

from headrace.engine.messages import EngineOutput
from headrace.engine.stats import StepTrace
from headrace.engine.streams import Stream

logger = logging.getLogger(__name__)


class Observer(Protocol):
    """Is told what happens in the engine; called in the event loop, so it must be quick. Times are time.monotonic()."""

    def tokens(self, stream: Stream, count: int, now: float) -> None:
        """`stream` has got tokens; its `first` and `last` are those from before."""

    def ended(self, stream: Stream, news: EngineOutput, now: float) -> None:
        """A request is over, and no core has it any more: told once of each. `news.times` are its times in the core."""

    def steps(self, steps: list[StepTrace], core: int = 0) -> None:
        """Steps of a core since the last call; only for clients made with `traced`."""


class Observers(list[Observer]):
    """Tells each. Who watches must not disturb: an exception of an observer is its last (so each is told from the end on)."""

    def tokens(self, stream: Stream, count: int, now: float) -> None:
        for observer in reversed(self):
            try:
                observer.tokens(stream, count, now)
            except Exception:
                self._dismiss(observer)

    def ended(self, stream: Stream, news: EngineOutput, now: float) -> None:
        for observer in reversed(self):
            try:
                observer.ended(stream, news, now)
            except Exception:
                self._dismiss(observer)

    def steps(self, steps: list[StepTrace], core: int = 0) -> None:
        for observer in reversed(self):
            try:
                observer.steps(steps, core)
            except Exception:
                self._dismiss(observer)

    def _dismiss(self, observer: Observer) -> None:
        logger.exception("%s failed and is told nothing any more", type(observer).__name__)
        self.remove(observer)


class DrainRate:
    """Tokens per second over the last seconds."""

    WINDOW = 10.0

    def __init__(self) -> None:
        self._began, self._tokens, self._last = time.monotonic(), 0, 0.0

    def add(self, tokens: int, now: float) -> None:
        if now - self._began > self.WINDOW:
            self._last = self._tokens / (now - self._began)
            self._began, self._tokens = now, 0
        self._tokens += tokens

    def rate(self) -> float:
        elapsed = time.monotonic() - self._began
        return self._tokens / elapsed if elapsed > 1.0 else self._last or self._tokens / max(elapsed, 0.1)
