"""Chooses a core for a request: by what each holds of the prompt and what each has to do. No torch, no sockets here."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Mapping

from headrace.cache.events import BlockEvents, block_hashes
from headrace.distributed.block_index import BlockIndex

HOLDERS = 4  # candidates that hold as much of a prompt as each other
OTHERS = 2  # candidates that are looked at whatever they hold, at least
CANDIDATES = 2 * HOLDERS + OTHERS
MASK = 2**64 - 1
RECENT = 8  # requests for each core: what many of these have is popular
PREFIX_WEIGHT = 4.0  # of 0.5 to 16 in `headrace simulate`: with less, requests leave their prefix; with more, loads differ
MAX_BLOCKS = 2_000_000  # about 80 bytes each, 240 if 1,000 cores hold each another choice of them
MAX_EXPECTED = 65_536


class Router:
    """A Balancer that sends a request where the least lies before its first token.

    That are the tokens outstanding on a core, and those of the prompt that it does not hold, which weigh `prefix_weight` times
    as much: they are computed before the first token, while most of the others are answers that go on beside it. They weigh
    less where many of the last requests had the same beginning: a copy of that on one more core serves them too.

    Looked at are the cores that hold most of the prompt, those that hold the second most, up to four of each, and at least two
    others at random. What a core holds is exact: its own events tell it, and a prompt just sent counts as held, so that a burst
    of requests with one beginning stays together as far as the load allows. A conversation sticks to a core as long as its
    blocks are there.

    A hash is made once for each block of a prompt; finding who holds how much of it is a binary search, for who holds a block
    holds all before it.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        prefix_weight: float = PREFIX_WEIGHT,
        max_blocks: int = MAX_BLOCKS,
        max_expected: int = MAX_EXPECTED,
    ):
        self.block_size = 0  # of the cores' caches; 0: no core has told yet
        self.prefix_weight = prefix_weight
        self.index = BlockIndex(max_blocks, max_expected)
        self._random = Draws(seed)
        self._recent: deque[int] = deque()  # of the last requests: the last block of each that was held
        self._uses: dict[int, int] = {}  # how often each is in there

    # ---- what becomes of cores and blocks

    def added(self, core: int) -> None:
        self.index.add(core)

    def removed(self, core: int) -> None:
        self.index.remove(core)

    def blocks(self, core: int, events: BlockEvents) -> None:
        index = self.index
        if core not in index.places:
            return  # its last words
        if events.cleared:
            if events.block_size != self.block_size:
                self._begin(events.block_size)
            index.add(core)
        if events.block_size != self.block_size:
            return  # an old core, while new ones with another size of blocks take over: nothing that it holds is known
        index.evicted(core, events.evicted)
        for run in events.stored:
            index.stored(core, run.hashes)
        index.tidy()

    def _begin(self, block_size: int) -> None:
        """Hashes of blocks of another size say nothing any more."""
        index = BlockIndex(self.index.max_blocks, self.index.max_expected)
        for core in self.index.places:
            index.add(core)
        self.block_size, self.index = block_size, index

    # ---- where a request goes

    def choose(self, prompt_ids: array, cache_salt: str, loads: Mapping[int, int]) -> int:
        if len(loads) == 1:
            return next(iter(loads))
        hashes = block_hashes(prompt_ids, self.block_size, cache_salt) if self.block_size else []
        hits = self._candidates(hashes, loads)
        worth = self._worth(hashes, max(hits.values())) * self.block_size
        # of equals the first: who holds more, else whom the draw brought first
        chosen = min(hits, key=lambda core: loads[core] - worth * hits[core])
        if hashes and chosen in self.index.places:
            self.index.expect(chosen, hashes[hits[chosen] :])
            self.index.tidy()
        return chosen

    def _worth(self, hashes: list[int], most: int) -> float:
        """Tokens outstanding that one token is worth which is held: less for a beginning that many requests have.

        To compute it once more is the price of a copy on another core. The more uses of that are to be expected, the less of
        the price each bears: without this one popular prompt would keep all its requests on few cores.
        """
        if not most:
            return self.prefix_weight
        uses, recent, name = self._uses, self._recent, hashes[most - 1]
        recent.append(name)
        uses[name] = uses.get(name, 0) + 1
        while len(recent) > RECENT * max(1, len(self.index.places)):
            oldest = recent.popleft()
            uses[oldest] -= 1
            if not uses[oldest]:
                del uses[oldest]
        others = uses.get(name, 1) - 1
        return self.prefix_weight / (1 + others / (1 + self.index.holders(name).bit_count()))

    def _candidates(self, hashes: list[int], loads: Mapping[int, int]) -> dict[int, int]:
        """Cores in `loads`, with how many blocks of the prompt each holds, those that hold most first."""
        index = self.index
        usable = index.live
        if len(loads) != len(index.places):
            usable = sum(1 << place for core, place in index.places.items() if core in loads)
        hits: dict[int, int] = {}
        most = index.depth(hashes, usable, len(hashes))
        more, anyone = 0, 0
        if most:
            index.touch(hashes[:most])
            best = index.holders(hashes[most - 1]) & usable
            self._pick(best, most, hits, loads)
            more = index.depth(hashes, usable & ~best, most)
            anyone = index.holders(hashes[0])
        if more:
            self._pick(index.holders(hashes[more - 1]) & usable & ~best, more, hits, loads)
        for core in self._random.some(list(loads), max(OTHERS, CANDIDATES - len(hits)), hits):
            bit = 1 << index.places[core] if core in index.places else 0
            hits[core] = index.depth(hashes, bit, most) if bit & anyone else 0
        return hits

    def _pick(self, mask: int, depth: int, hits: dict[int, int], loads: Mapping[int, int]) -> None:
        """Note up to HOLDERS cores of a mask, which hold so many blocks: all, or some at random."""
        few = mask.bit_count() <= HOLDERS
        for _ in range(HOLDERS):
            if not mask:
                break
            above = mask if few else mask >> (start := self._random.below(mask.bit_length())) << start
            bit = above & -above
            mask ^= bit
            core = self.index.core(bit)
            if core in loads:
                hits[core] = depth


class Draws:
    """Random numbers as a function of a seed and their count."""

    def __init__(self, seed: int):
        self._seed, self._count = seed, 0

    def below(self, bound: int) -> int:
        """splitmix64 (Steele, Lea and Flood, OOPSLA 2014), without its last round."""
        self._count += 1
        x = (self._seed + self._count * 0x9E3779B97F4A7C15) & MASK
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
        return (x ^ x >> 27) % bound

    def some(self, values: list[int], count: int, but: Mapping[int, int]) -> list[int]:
        """So many of the values that are not in `but`, or all there are; the list is shuffled as far as it is read."""
        found: list[int] = []
        for i in range(len(values)):
            j = i + self.below(len(values) - i)
            value, values[j] = values[j], values[i]
            if value not in but:
                found.append(value)
                if len(found) == count:
                    break
        return found
