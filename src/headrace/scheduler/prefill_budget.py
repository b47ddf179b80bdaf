"""A bound of a step's time (`max_itl`), kept by the prefill beside the decodes. No torch here."""

from __future__ import annotations

from collections import deque
from itertools import islice

WINDOW, LAST = 32, 4  # steps whose differences show the slope, and those that show the base


class PrefillBudget:
    """How much prefill a step may carry while others decode: as much as keeps its expected time under a bound.

    Expects seconds = base + slope * prefill tokens of a step with decodes.

    The slope is that of the last steps (least squares), and remembered while nothing is prefilled: steps that are alike say
    nothing about it. The base, which the decodes make, is the highest of the very last ones. A step is at most twice as
    large as the largest before, so that the line is not followed far into the unknown; and never smaller than `least`, so
    that every prompt gets on.
    """

    def __init__(self, max_seconds: float, least: int, most: int):
        self._max_seconds, self._least, self._most = max_seconds, least, most
        self._steps: deque[tuple[int, float]] = deque(maxlen=WINDOW)  # the last first
        self._slope = self._trust = 0.0  # the trust is that in the slope of before, against steps that differ little
        self._largest = 0

    def observe(self, tokens: int, seconds: float) -> None:
        """A step with so many prefill tokens beside its decodes took so long."""
        self._steps.appendleft((tokens, seconds))
        if tokens:
            self._largest = max(self._largest, tokens)
            self._fit()

    def _fit(self) -> None:
        count = len(self._steps)
        tokens, seconds = sum(x for x, _ in self._steps) / count, sum(y for _, y in self._steps) / count
        spread = sum((x - tokens) ** 2 for x, _ in self._steps)
        common = sum((x - tokens) * (y - seconds) for x, y in self._steps)
        if spread:
            self._slope = max(0.0, (common + self._trust * self._slope) / (spread + self._trust))
            self._trust = (self._largest / 4) ** 2

    def prefill_tokens(self) -> int:
        """How many the next step with decodes may have."""
        base = max((y - self._slope * x for x, y in islice(self._steps, LAST)), default=0.0)
        most, room = min(self._most, 2 * self._largest), self._max_seconds - base
        if self._slope * most > room:
            most = int(room / self._slope) if self._slope else 0
        return max(self._least, most)
