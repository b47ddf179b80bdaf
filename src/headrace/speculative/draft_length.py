"""How many tokens to draft for a request, from how many of its drafts were right so far."""

from __future__ import annotations

LEVELS = 64  # of the acceptance rate, for which the best length is known beforehand
MEMORY = 16.0  # drafts over which a rate forgets
RECOVERY = 0.99  # of the evidence is kept each step in which nothing was drafted: who was switched off is tried again
LEAST_GAIN = 1.1  # costs are estimates: a draft that cost four times as much would still not lose anything
PRIOR_RIGHT, PRIOR_ALL = 0.7, 1.0  # a new request is taken for one that repeats itself


class DraftLengths:
    """The best number of drafts for each acceptance rate.

    If each draft is right with probability a, a step with k drafts yields 1 + a + ... + a^k tokens (Leviathan et al. 2023),
    and costs 1 + k * cost steps without. The best k is the one with the most tokens per cost; 0 where none pays.
    """

    def __init__(self, most: int, cost: float):
        self.best = [best_length(level / LEVELS, most, cost) for level in range(LEVELS + 1)]

    def of(self, rate: AcceptanceRate) -> int:
        return self.best[int(rate.value * LEVELS)]


def best_length(rate: float, most: int, cost: float) -> int:
    """The k in [0, most] that maximizes (1 + rate + ... + rate^k) / (1 + k * cost); 0 where that is below LEAST_GAIN."""
    best, best_gain = 0, LEAST_GAIN
    for k in range(1, most + 1):
        gain = expected_tokens(rate, k) / (1.0 + k * cost)
        if gain > best_gain * 1.0001:
            best, best_gain = k, gain
    return best


def expected_tokens(rate: float, count: int) -> float:
    """That a step with `count` drafts yields, each of which is right with probability `rate` < 1 if those before it are."""
    return 1.0 + count if rate >= 1.0 else (1.0 - rate ** (count + 1)) / (1.0 - rate)


class AcceptanceRate:
    """Of one request: an estimate of the probability that a draft is right if those before it were."""

    __slots__ = ("_all", "_right")

    def __init__(self) -> None:
        self._right = self._all = 0.0

    @property
    def value(self) -> float:
        return (self._right + PRIOR_RIGHT) / (self._all + PRIOR_ALL)

    @property
    def measured(self) -> float:
        """The same without what is believed of a new request, once there is evidence: 1 where no draft was wrong."""
        return self._right / self._all if self._all >= 4.0 else self.value

    def observe(self, drafted: int, accepted: int) -> None:
        """Of `drafted` tokens the first `accepted` were right; of those after the first wrong one nothing is known."""
        tried = min(accepted + 1, drafted)
        keep = max(0.0, 1.0 - tried / MEMORY)
        self._right = self._right * keep + accepted
        self._all = self._all * keep + tried

    def rest(self) -> None:
        """A step without drafts."""
        self._right *= RECOVERY
        self._all *= RECOVERY
