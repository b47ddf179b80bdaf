"""A scheduler that is looked at: what each step does to requests, slots, blocks and prefix index, in numbers. No torch here.

One wing: a core has a plain Scheduler until somebody looks, and gets it back afterwards, so nothing of this costs anything
while nobody does. What is told comes from plans and results, and what they touched is then read from the truth: who has left
a slot, which of the touched blocks are in the index now. Where the counts show that something went unseen (a whole path was
dropped, the cache was reset) everything is read again.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

from headrace.cache.radix_tree import Node
from headrace.scheduler.plan import StepPlan, StepResult
from headrace.scheduler.request import Request
from headrace.scheduler.scheduler import Scheduler, Settled

DRAFTED, PREFILL = 0, 1  # kinds of rows beside the plain decodes
REASON_SECONDS = 0.5  # between two looks at why the head of the queue waits: a forecast is a walk over all who run


class Eye(Protocol):
    """Who is told."""

    def scheduled(self, plan: StepPlan | None) -> None: ...

    def settled(self, plan: StepPlan, result: StepResult, settled: Settled) -> None: ...

    def took(self, seconds: float) -> None: ...

    def arrived(self, request: Request) -> None: ...

    def aborted(self, request: Request) -> None: ...


class WatchedScheduler(Scheduler):
    """The scheduler that it is made of, and one more who is told: all that a scheduler has they share."""

    __slots__ = ("_eye",)

    def __init__(self, scheduler: Scheduler, eye: Eye):
        self.__dict__ = scheduler.__dict__
        self._eye = eye

    def add(self, request: Request) -> None:
        super().add(request)
        self._eye.arrived(request)

    def abort(self, request_id: str) -> Request | None:
        request = super().abort(request_id)
        if request is not None:
            self._eye.aborted(request)
        return request

    def schedule(self, drafting: bool = True) -> StepPlan | None:
        plan = super().schedule(drafting)
        self._eye.scheduled(plan)
        return plan

    def settle(self, plan: StepPlan, result: StepResult) -> Settled:
        settled = super().settle(plan, result)
        self._eye.settled(plan, result, settled)
        return settled

    def took(self, plan: StepPlan, seconds: float) -> None:
        super().took(plan, seconds)
        self._eye.took(seconds)


class Held:
    """A slot that is taken: by whom, and the blocks of its table that have been told of."""

    __slots__ = ("blocks", "indexed", "request")

    def __init__(self, request: Request, blocks: list[int], indexed: int):
        self.request, self.blocks, self.indexed = request, blocks, indexed


class Holdings:
    """Slots, block tables and index nodes as they were last told, and what has changed since."""

    def __init__(self, scheduler: Scheduler):
        self._scheduler = scheduler
        self.by_slot: dict[int, Held] = {}
        self._nodes: list[Node | None] = list(scheduler.tree.nodes)  # by block
        self._num_nodes = scheduler.tree.num_nodes
        self._touched: set[int] = set()  # blocks that may have entered the index or left it
        blocks = scheduler.blocks
        for request in [*blocks.decoding, *blocks.prefilling, *blocks.leaving]:
            self.by_slot[request.slot] = Held(request, request.block_ids.copy(), request.num_indexed)

    def departed(self, everyone: bool = False) -> list[tuple[int, Request]]:
        """Those who have given their slots back since the last call. `everyone`: somebody may be in such a slot already."""
        free = len(self._scheduler.blocks.free_slots)
        if not everyone and free + len(self.by_slot) == self._scheduler.limits.max_num_seqs:
            return []
        gone = [(slot, held.request) for slot, held in self.by_slot.items() if held.request.slot != slot]
        for slot, _ in gone:
            self._touched.update(self.by_slot.pop(slot).blocks)
        return gone

    def replaced(self, slot: int, request: Request) -> Request | None:
        """Who was in a slot that this one has now: a request can leave one and get the same in one turn."""
        held = self.by_slot.pop(slot, None)
        if held is not None:
            self._touched.update(held.blocks)
        return None if held is None else held.request

    def admit(self, slot: int, request: Request, blocks: list[int], num_hit: int) -> None:
        self.by_slot[slot] = Held(request, list(blocks), num_hit)
        self._touched.update(blocks[num_hit:])

    def grow(self, slot: int, blocks: list[int]) -> None:
        self.by_slot[slot].blocks += blocks
        self._touched.update(blocks)

    def index_changes(self) -> tuple[list[int], list[int]]:
        """What has entered the index since the last call, as (block, block above or -1) in a row; the blocks that left it."""
        tree, touched = self._scheduler.tree, self._touched
        for held in self.by_slot.values():
            indexed = held.request.num_indexed
            if indexed > held.indexed:
                touched.update(held.blocks[held.indexed : indexed])
                held.indexed = indexed
        entered: list[int] = []
        gone: list[int] = []
        self._compare(touched, entered, gone)
        if self._num_nodes != tree.num_nodes:
            self._compare(range(tree.pool.num_blocks), entered, gone)
        self._touched = set()
        return entered, gone

    def _compare(self, blocks: Any, entered: list[int], gone: list[int]) -> None:
        told, now = self._nodes, self._scheduler.tree.nodes
        for block in blocks:
            node, before = now[block], told[block]
            if node is before:
                continue
            told[block] = node
            if before is not None:
                self._num_nodes -= 1
                gone.append(block)
            if node is not None:
                self._num_nodes += 1
                entered += (block, above(node))

    def nodes(self) -> list[int]:
        """The whole index, as `index_changes` tells of what enters it."""
        found: list[int] = []
        for block, node in enumerate(self._nodes):
            if node is not None:
                found += (block, above(node))
        return found


def above(node: Node) -> int:
    parent = node.parent
    return -1 if parent is None or parent.is_root else parent.block


def rows_of(plan: StepPlan) -> list[int]:
    """Those beside the plain decodes, as (slot, kind, start, tokens, drafts) in a row."""
    found: list[int] = []
    begin = plan.num_decodes
    if begin == len(plan):
        return found
    columns = (plan.slots, plan.starts, plan.counts, plan.drafts, plan.unverified)
    for slot, start, count, drafts, unverified in zip(*(column[begin:].tolist() for column in columns), strict=True):
        found += (slot, DRAFTED if drafts or unverified else PREFILL, start, count, drafts)
    return found


def verified_by(plan: StepPlan, result: StepResult) -> list[int]:
    """What became of the drafts of a step that has settled: (its number, slot, tokens that the row brought) in a row."""
    found: list[int] = []
    if plan.num_drafts:
        for sequence in range(plan.num_decodes, len(plan)):
            if plan.drafts[sequence]:
                found += (plan.step, int(plan.slots[sequence]), result.counts[sequence])
    return found


class WaitingReason:
    """Why the head of the queue does not run, in words."""

    def __init__(self, scheduler: Scheduler):
        self._scheduler = scheduler
        self._due = 0.0
        self._about: tuple[Request | None, bool] = (None, False)
        self._words: tuple[str, str] | None = None

    def words(self, full: bool) -> tuple[str, str] | None:
        """The head's id, and why it waits; None: nobody does. `full`: the last step used up its budget."""
        head, admission = self._head(), self._scheduler.admission
        if head is None:
            self._about = (None, False)
            return None
        about, now = (head, head is admission.refused), time.monotonic()
        if about != self._about or now >= self._due:
            self._about, self._due = about, now + REASON_SECONDS
            self._words = head.id, self._why(head, full)
        return self._words

    def _head(self) -> Request | None:
        admission = self._scheduler.admission
        if not admission.num_waiting:
            return None
        first = admission.head
        return first if not first.finished else min(admission.waiting(), key=lambda request: request.rank)

    def _why(self, head: Request, full: bool) -> str:
        scheduler, blocks = self._scheduler, self._scheduler.blocks
        limits, admission = scheduler.limits, scheduler.admission
        if not blocks.free_slots:
            return f"all {limits.max_num_seqs} slots are taken"
        if head is admission.refused:
            if head.num_preemptions:
                return "preempted: it waits until another request has ended"
            share = self.peak(head) / limits.num_blocks
            if share > 1:
                return f"the peak of KV use would be {max(101, round(100 * share))} % of the cache"
            return "no block is free for its first chunk"
        if full:
            return f"the step's budget of {limits.max_num_batched_tokens:,} tokens is used up"
        return "it enters with the next step"

    def peak(self, head: Request) -> float:
        """The forecast that refuses it, in blocks; see PeakForecast."""
        scheduler, blocks = self._scheduler, self._scheduler.blocks
        refs = scheduler.pool.refs
        revived = sum(not refs[node.block] for node in head.path)
        forecast = scheduler.admission.forecast((blocks.decoding, blocks.prefilling))
        return forecast.peak(scheduler.admission.demand(head, len(head.path), revived))
