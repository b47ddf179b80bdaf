"""How many replicas keep the limits: doubled until some number does, then bisected."""

from __future__ import annotations

from collections.abc import Callable

FRONT_CORES = 64  # cores behind one front, where nobody says how many fronts there are
MOST = 2**20
EXACT = 64  # up to here to the replica; beyond to one part in so many


def replicas_needed(attained: Callable[[int], float], share: float, first: int = 1) -> tuple[int, dict[int, float]]:
    """The smallest number with attained(number) >= share, and all that was asked; attained() is taken to grow with it.

    `first` is asked first. 0: not even MOST replicas do.
    """
    asked: dict[int, float] = {}

    def enough(number: int) -> bool:
        if number not in asked:
            asked[number] = attained(number)
        return asked[number] >= share

    low, high = 0, first  # low does not do
    while not enough(high):
        if high >= MOST:
            return 0, asked
        low, high = high, 2 * high
    while high - low > max(1, high // EXACT):
        middle = (low + high) // 2
        if enough(middle):
            high = middle
        else:
            low = middle
    return high, asked


def shares(total: int, parts: int) -> list[int]:
    """`total` in so many parts that differ by one at most, the smaller ones first."""
    least, more = divmod(total, parts)
    return [least] * (parts - more) + [least + 1] * more
