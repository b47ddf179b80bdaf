"""What the scheduler is held to: sizes and rules, checked once, and a bound of time. Its counters. No torch here."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from headrace.errors import ParameterError

WINDOW, LAST = 32, 4  # steps whose differences show the slope, and those that show the base


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """All that bounds a step and a request, decided; the worker's tables and the scheduler are made by it.

    Sizes in tokens. Raises ParameterError on a value out of range.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int
    max_draft_rows: int = 0  # decodes are filled up to so many rows with drafts; 0: no speculation
    enable_prefix_caching: bool = True
    max_itl: float | None = None  # seconds that a step with decodes is expected to take at most, but for one block of prefill
    policy: Literal["fcfs", "priority"] = "fcfs"

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size", "num_blocks"):
            if getattr(self, name) < 1:
                raise ParameterError(name, getattr(self, name), "an integer >= 1")
        if self.policy not in ("fcfs", "priority"):
            raise ParameterError("policy", self.policy, "one of fcfs, priority")

    @property
    def max_len(self) -> int:
        """Tokens at which every request ends; KV is kept for all of them but the last."""
        return min(self.max_model_len, self.num_blocks * self.block_size + 1)

    @property
    def max_decode_rows(self) -> int:
        """Rows of the largest step in which all are sampled: one for each sequence, or those of drafts."""
        return max(self.max_num_seqs, self.max_draft_rows)


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the start."""

    num_preemptions: int = 0
    prefix_query_tokens: int = 0  # prompt tokens looked up in the prefix index, at first admissions
    prefix_hit_tokens: int = 0


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
