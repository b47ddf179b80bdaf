"""The cost of a step from a run itself: each step takes what it took. So what a simulation does otherwise than the run did is
the fault of its loop, its scheduler or its arrivals.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from headrace.engine.stats import StepTrace
from headrace_bench.simulation.cost import Hosts, Work


@dataclass(slots=True)
class Replayed:
    """A StepCost. `shapes`: tokens and sequences of each step that was asked about."""

    taken: list[float]
    blocking: bool
    host: float = 0.0
    prompt_hosts: Hosts = ()
    shapes: list[tuple[int, int]] = field(default_factory=list)

    def seconds(self, work: Work, step: int) -> float:
        self.shapes.append((work.tokens, work.seqs))
        return self.taken[min(step, len(self.taken) - 1)]  # more steps than there were: it has gone another way

    def many_seconds(self, work: Work, step: int, count: int) -> np.ndarray:
        return np.array([self.seconds(work, step + i) for i in range(count)])

    def alike(self, steps: Sequence[StepTrace]) -> int:
        """How many steps were of the shapes of these, up to the first that was not."""
        shapes = shapes_of(steps)
        pairs = zip(shapes, self.shapes, strict=False)
        return next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(shapes), len(self.shapes)))


def shapes_of(steps: Sequence[StepTrace]) -> list[tuple[int, int]]:
    return [(step.num_tokens, step.num_seqs) for step in steps if step.num_seqs]


def replayed(
    steps: Sequence[StepTrace], looked: Sequence[float], told: Sequence[float], arrivals: Sequence[float], blocking: bool
) -> Replayed:
    """Of a run's turns. `looked`: when the loop found that no other message had come (a request that comes later is the next
    turn's), `told`: when it sent news, `arrivals`: when requests came. All ascending, and in the clock of the steps.
    """
    begun = [looked[bisect_right(looked, step.began) - 1] for step in steps]
    taken: list[float] = []
    launched: deque[float] = deque()
    start = finish = 0.0
    goes_on = False
    for i, step in enumerate(steps):
        if not goes_on:
            waited = bisect_right(arrivals, begun[i - 1]) if i else 0
            start = max(start, arrivals[waited])
        goes_on = bool(step.running or step.waiting) and i + 1 < len(steps)
        end = begun[i + 1] if goes_on else told[bisect_right(told, begun[i])]
        if step.num_seqs:
            launched.append(start)
        if launched and (blocking or step.wait):
            taken.append(end - max(launched.popleft(), finish))
            finish = end
        start = end
    return Replayed(taken, blocking)
