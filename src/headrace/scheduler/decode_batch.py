"""The decodes that move on together, one token a step: a step costs no work per request, only per request that is *due*.

A member's `num_scheduled` is its offset plus the batch's clock, so that one addition moves all of them on. A member is due,
and looked at by the scheduler, when its next row needs a block, fills one or is its last: all of that is known beforehand.
"""

from __future__ import annotations

from array import array
from bisect import insort
from operator import attrgetter

from headrace.scheduler.entry import Entry, Step
from headrace.scheduler.plan import Decodes
from headrace.scheduler.request import Clock

RANK = attrgetter("rank")


class DecodeBatch:
    """Members by rank. What steps in flight hold of them is made anew when they change, never changed in place."""

    def __init__(self, block_size: int):
        self.entries: list[Entry] = []
        self.clock = Clock()
        self._block_size = block_size
        self._agenda: dict[int, list[Entry]] = {}  # by time; those who left or were put off are skipped
        self._decoding: list[Entry] = []  # a copy of `entries` for steps; empty: to be made
        self._decodes = Decodes.none()
        self._last_step = 0  # the number of the last one that has rows of them

    def __contains__(self, entry: Entry) -> bool:
        return entry.request.clock is self.clock

    def join(self, entry: Entry) -> None:
        request = entry.request
        request.offset -= self.clock.now
        request.clock = self.clock
        insort(self.entries, entry, key=RANK)
        self._decoding = []
        self.expect(entry, request.num_scheduled)

    def leave(self, entry: Entry) -> None:
        request = entry.request
        request.offset += self.clock.now
        request.clock = None
        entry.last_step = max(entry.last_step, self._last_step)
        self.entries.remove(entry)
        self._decoding = []

    def expect(self, entry: Entry, position: int) -> None:
        """Note when to look at a member whose row at `position` is the next that was not looked at."""
        filling = position + self._block_size - 1 - position % self._block_size
        entry.due = min(filling, entry.capacity, entry.limit - 2) - entry.request.offset
        self._agenda.setdefault(entry.due, []).append(entry)

    def due(self) -> list[Entry]:
        """Those to be looked at before the next tick, by rank."""
        now = self.clock.now
        noted = self._agenda.pop(now, ())
        return sorted({e for e in noted if e in self and e.due == now}, key=RANK) if noted else []

    def tick(self, step: Step) -> None:
        """Give every member a row of `step`."""
        if not self._decoding:
            entries = self._decoding = self.entries.copy()
            requests = [entry.request for entry in entries]
            slots, offsets = array("i", [r.slot for r in requests]), array("q", [r.offset for r in requests])
            self._decodes = Decodes(requests, [r.id for r in requests], slots, offsets)
        same = self._decodes
        blocks = [(self._decoding.index(entry), index, block) for entry, index, block in step.new_blocks]
        step.decoding = self._decoding
        step.decodes = Decodes(same.requests, same.ids, same.slots, same.offsets, self.clock.now, blocks)
        self.clock.now += 1
        self._last_step = step.number
