"""A step in the making, and the decodes that move on together in it: they cost no work per request, only per *event*.

A member's `num_scheduled` is its offset plus the batch's clock, so that one addition moves all of them on. A member is looked
at by the scheduler when its next row needs a block, fills one or is its last: all of that is known beforehand.
"""

from __future__ import annotations

from bisect import insort
from operator import attrgetter
from typing import NamedTuple

import msgspec
import numpy as np

from headrace.cache.radix_tree import Node
from headrace.scheduler.plan import Admitted, NewBlocks, StepPlan
from headrace.scheduler.request import Clock, Request

RANK = attrgetter("rank")


class Row(NamedTuple):
    """A sequence of a step beside the plain decodes; see StepPlan."""

    request: Request
    completes: bool  # all that exists of the request is computed
    slot: int
    start: int
    num_tokens: int
    drafts: int
    unverified: int
    samples: bool


class Decodes(NamedTuple):
    """The members of a batch as steps hold them: made anew when they change, never changed in place."""

    version: int
    requests: list[Request]
    ids: list[str]
    slots: np.ndarray
    offsets: np.ndarray  # int64
    ones: np.ndarray
    zeros: np.ndarray
    trues: np.ndarray

    @classmethod
    def of(cls, requests: list[Request], version: int) -> Decodes:
        count, i32 = len(requests), np.int32
        slots = np.fromiter((r.slot for r in requests), i32, count)
        offsets = np.fromiter((r.offset for r in requests), np.int64, count)
        ids = [r.id for r in requests]
        return cls(version, requests, ids, slots, offsets, np.ones(count, i32), np.zeros(count, i32), np.ones(count, np.bool_))


NOBODY = Decodes.of([], 0)


class Scheduled:
    """A step: a plan in the making, and what its settling needs."""

    __slots__ = (
        "_now", "admitted", "budget", "claimed", "computing", "decodes", "filled", "kept", "last", "new_blocks", "num_drafts",
        "number", "others",
    )  # fmt: skip

    def __init__(self, number: int, budget: int):
        self.number = number
        self.budget = budget  # tokens left
        self.decodes = NOBODY
        self._now = 0
        self.others: list[Row] = []
        self.admitted: list[Admitted] = []
        self.new_blocks: list[NewBlocks] = []
        self.kept: list[tuple[int, int]] = []  # see StepPlan
        self.last: list[Request] = []  # decodes that will not have another row
        self.filled: list[tuple[Request, int]] = []  # whose blocks get full, up to which token
        self.computing: set[tuple[Node | None, str, bytes]] = set()  # blocks that can be hit after this step
        self.num_drafts = 0
        self.claimed = 0  # blocks about to be given back that somebody waits for

    def decode(self, decodes: Decodes, now: int) -> None:
        self.decodes, self._now = decodes, now

    def admit(self, request: Request) -> None:
        """The worker must be told all about a request; its whole block table is new to it, the part that was hit too."""
        params, blocks = request.params, request.block_ids.copy()
        if params.logits_processors or params.structured_outputs:
            params = msgspec.structs.replace(params, logits_processors=None, structured_outputs=None)
        num_prompt, num_cached = len(request.prompt_ids), request.num_scheduled
        known = request.known_ids()
        told = Admitted(request.slot, known, num_prompt, num_cached, blocks, params, request.seed, request.pooling)
        told.snapshot = request.snapshot
        self.admitted.append(told)

    def requests(self) -> list[Request]:
        """In the plan's order."""
        return self.decodes.requests + [row.request for row in self.others]

    def plan(self) -> StepPlan:
        d = self.decodes
        starts = (d.offsets + self._now).astype(np.int32)
        head = self.number, d.version, len(d.ids)
        if not self.others:
            arrays = d.slots, starts, d.ones, d.zeros, d.zeros, d.trues
            return StepPlan(*head, d.ids, *arrays, [], self.new_blocks, kept=self.kept)
        others = np.array([row[2:] for row in self.others], np.int32).T
        columns = (d.slots, starts, d.ones, d.zeros, d.zeros)
        slots, starts, counts, drafts, unverified = (np.concatenate(pair) for pair in zip(columns, others, strict=False))
        samples = np.concatenate([d.trues, others[-1].astype(np.bool_)])
        ids = d.ids + [row.request.id for row in self.others]
        rows = slots, starts, counts, drafts, unverified, samples
        return StepPlan(*head, ids, *rows, self.admitted, self.new_blocks, kept=self.kept)


class DecodeBatch:
    """Members by rank."""

    def __init__(self, block_size: int):
        self.members: list[Request] = []
        self.clock = Clock()
        self._block_size = block_size
        self.events: dict[int, list[Request]] = {}  # by time; those who left or were put off are skipped
        self.decodes = NOBODY
        self.changed = False
        self.last_step = 0  # the number of the last one that has rows of them

    def __contains__(self, request: Request) -> bool:
        return request.clock is self.clock

    def join(self, request: Request) -> None:
        request.offset -= self.clock.now
        request.clock = self.clock
        insort(self.members, request, key=RANK)
        self.changed = True
        self.expect(request, request.num_scheduled)

    def leave(self, request: Request) -> None:
        request.offset += self.clock.now
        request.clock = None
        request.last_step = max(request.last_step, self.last_step)
        self.members.remove(request)
        self.changed = True

    def expect(self, request: Request, position: int) -> None:
        """Note when to look at a member whose row at `position` is the next that was not looked at."""
        filling = position + self._block_size - 1 - position % self._block_size
        request.next_event = min(filling, request.capacity, request.limit - 2) - request.offset
        self.events.setdefault(request.next_event, []).append(request)

    def due(self) -> list[Request]:
        """Those to be looked at before the next tick, by rank."""
        now = self.clock.now
        noted = self.events.pop(now, ())
        return sorted({r for r in noted if r in self and r.next_event == now}, key=RANK) if noted else []

    def tick(self, step: Scheduled) -> None:
        """Give every member a row of `step`."""
        if self.changed:
            self.decodes, self.changed = Decodes.of(self.members.copy(), self.decodes.version + 1), False
        step.decode(self.decodes, self.clock.now)
        self.clock.now += 1
        self.last_step = step.number
