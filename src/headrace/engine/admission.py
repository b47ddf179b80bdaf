"""When a waiting request may start: the forecast peak of KV use must fit the cache. No torch here."""

from __future__ import annotations

from bisect import insort

FIRST_GUESS = 256.0  # output tokens, before any request has ended
MEMORY = 32  # requests over which the mean forgets


class LengthEstimate:
    """How many more tokens a request will produce, from the lengths of those that have ended.

    Optimistic on purpose: max_tokens is an upper bound that clients set high and rarely reach, and reserving it would let
    one client with 32k starve all others. Who is wrong pays with a preemption.
    """

    def __init__(self) -> None:
        self.mean = FIRST_GUESS

    def observe(self, num_output: int) -> None:
        self.mean += (num_output - self.mean) / MEMORY

    def remaining(self, num_output: int, most: int) -> int:
        """Expected output tokens still to come of a request that has `num_output` and can get at most `most` more.

        A request that comes near the mean or outlives it is expected to go on for a quarter of that length.
        """
        mean = self.mean
        return min(most, int(max(mean - num_output, mean / 4, num_output / 4)) + 1)


class PeakForecast:
    """The peak of future KV use of the running requests, in blocks, with and without a candidate.

    All requests grow one token a step, and one that has produced its expected rest gives its own blocks back. So use is
    highest just before some request ends; with the rows sorted by expected rest, longest first, the peak is

        max over j of  fixed + sum over i <= j of blocks(own_i + rest_j)

    where `own` counts the tokens in blocks that no other request holds and `fixed` the blocks that belong to no row
    (shared prefixes, requests about to leave); those are taken to stay. A last block is half empty on average.
    (The idea is that of the Past-Future scheduler, Gong et al., ASPLOS 2025, with a mean for its distribution.)
    """

    def __init__(self, num_blocks: int, block_size: int, fixed: int):
        self._num_blocks, self._block_size = num_blocks, block_size
        self._fixed = fixed
        self._bound = 0  # blocks if nobody gave anything back before the last one ends
        self._rows: list[tuple[int, int]] = []  # (-rest, own)

    def add(self, own: int, rest: int, fixed: int = 0) -> None:
        self._fixed += fixed
        self._bound += self._blocks(own + rest)
        insort(self._rows, (-rest, own))

    def fits(self, own: int, rest: int, fixed: int = 0) -> bool:
        """Whether the peak stays within the cache with one more request, which makes `fixed` more blocks fixed."""
        room = self._num_blocks - self._fixed - fixed
        if self._bound + self._blocks(own + rest) <= room:
            return True  # the usual case, without a look at the rows
        rows = self._rows.copy()
        insort(rows, (-rest, own))
        size, half = self._block_size, self._block_size // 2
        tokens = 0
        for alive, (negative_rest, row_own) in enumerate(rows, 1):
            tokens += row_own + half
            if tokens - alive * negative_rest > room * size:
                return False
        return True

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_size)
