"""Which of many cores hold which blocks: a dict from a block's hash to a bit mask of cores. No torch, no sockets here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice

TIDIED = 256  # masks looked at in one go for bits of cores that are gone
MOST_GONE = 64  # such bits, beyond the number of cores


class BlockIndex:
    """What each core holds, as its events have told, and what it is about to hold, as what it has been sent tells.

    A core has a *place*, the number of its bit. A core that goes, or forgets everything, leaves its bit in the masks: the bit
    is no longer `live`, and its place is given to another core only when every mask has been looked at, a few at a time.

    Both dicts are bounded. Above three quarters of its bound the first one keeps those used last: the blocks of a prompt that
    is looked up move to its end, the deepest first, so that what goes first is the far end of the prompt not seen for longest.
    """

    def __init__(self, max_blocks: int, max_expected: int):
        self.max_blocks, self.max_expected = max_blocks, max_expected
        self.places: dict[int, int] = {}  # by core
        self.live = 0  # the bits of these places
        self._held: dict[int, int] = {}
        self._expected: dict[int, int] = {}  # sent, and not stored yet
        self._cores: list[int] = []  # by place
        self._unused: list[int] = []  # places of which no mask has the bit
        self._used = self._gone = self._tidied = 0  # bits: that masks may have; that must leave them; that are leaving them
        self._untidied: Iterator[int] = iter(())

    def __len__(self) -> int:
        return len(self._held)

    def add(self, core: int) -> None:
        """A core that holds nothing yet. One that is known already has forgotten everything."""
        self.remove(core)
        if self._unused:
            place = self._unused.pop()
            self._cores[place] = core
        else:
            place = len(self._cores)
            self._cores.append(core)
        self.places[core] = place
        self.live |= 1 << place

    def remove(self, core: int) -> None:
        place = self.places.pop(core, None)
        if place is None:
            return
        bit = 1 << place
        self.live &= ~bit
        if self._used & bit:
            self._gone |= bit
        else:
            self._unused.append(place)
        while (self._gone | self._tidied).bit_count() > len(self.places) + MOST_GONE:  # faster than they are tidied up after
            self.tidy(len(self._held) + len(self._expected) + 1)

    def stored(self, core: int, hashes: Iterable[int]) -> None:
        """Blocks that follow each other: mostly their masks are equal, and then they are one object."""
        bit = self._bit(core)
        held, before, after = self._held, 0, bit
        for name in hashes:
            mask = held.get(name, 0)
            if mask != before:
                before, after = mask, mask | bit
            held[name] = after
        if self._expected:
            self._leave(self._expected, hashes, bit)
        if len(held) > self.max_blocks:
            forget_oldest(held, len(held) - self.max_blocks + self.max_blocks // 64)

    def evicted(self, core: int, hashes: Iterable[int]) -> None:
        bit = self._bit(core)
        self._leave(self._held, hashes, bit)
        if self._expected:
            self._leave(self._expected, hashes, bit)

    def expect(self, core: int, hashes: Iterable[int]) -> None:
        """The core has been sent a prompt with these blocks, and will hold them soon."""
        bit, expected = self._bit(core), self._expected
        for name in hashes:
            expected[name] = expected.get(name, 0) | bit
        if len(expected) > self.max_expected:
            forget_oldest(expected, len(expected) - self.max_expected + self.max_expected // 64)

    def holders(self, name: int) -> int:
        """The mask of the cores that hold a block, or are about to."""
        return (self._held.get(name, 0) | self._expected.get(name, 0)) & self.live

    def depth(self, hashes: list[int], bits: int, most: int) -> int:
        """How many of a prompt's first `most` blocks some of these cores hold: who holds one holds all before it."""
        held, expected, low = self._held, self._expected, 0
        while low < most:
            middle = (low + most) // 2
            if (held.get(hashes[middle], 0) | expected.get(hashes[middle], 0)) & bits:
                low = middle + 1
            else:
                most = middle
        return low

    def core(self, bit: int) -> int:
        """The core whose bit this is."""
        return self._cores[bit.bit_length() - 1]

    def touch(self, hashes: list[int]) -> None:
        """The blocks of a prompt, from its beginning, are used."""
        held = self._held
        if 4 * len(held) <= 3 * self.max_blocks:
            return
        for name in reversed(hashes):
            mask = held.pop(name, 0)
            if mask:
                held[name] = mask

    def tidy(self, count: int = TIDIED) -> None:
        """Look at so many more masks for bits of cores that are gone."""
        if not self._tidied:
            if not self._gone:
                return
            self._tidied, self._gone = self._gone, 0
            self._untidied = iter(list(chain(self._held, self._expected)))
        names = list(islice(self._untidied, count))
        self._leave(self._held, names, self._tidied)
        self._leave(self._expected, names, self._tidied)
        if len(names) < count:
            self._unused += [place for place in range(len(self._cores)) if self._tidied >> place & 1]
            self._used &= ~self._tidied
            self._tidied = 0

    def _bit(self, core: int) -> int:
        bit = 1 << self.places[core]
        self._used |= bit
        return bit

    @staticmethod
    def _leave(masks: dict[int, int], hashes: Iterable[int], bits: int) -> None:
        """Take bits out of some masks."""
        for name in hashes:
            mask = masks.get(name, 0)
            if mask & bits:
                mask &= ~bits
                if mask:
                    masks[name] = mask
                else:
                    del masks[name]


def forget_oldest(masks: dict[int, int], count: int) -> None:
    """Many at once, for a dict is looked through from its beginning, where those that went before have left holes."""
    for name in list(islice(masks, count)):
        del masks[name]
