"""The checker of law 5: blocks, references, slots and counters of a scheduler add up. No torch here."""

from __future__ import annotations

from array import array
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

from headrace.cache.radix_tree import DETACHED, ROOT
from headrace.engine.entry import OFF_INDEX, Entry
from headrace.engine.request import Status

if TYPE_CHECKING:
    from headrace.engine.scheduler import Scheduler


def check_scheduler(scheduler: Scheduler) -> None:
    """Raise AssertionError, naming what does not add up; valid between any two calls of the scheduler's methods."""
    resident = scheduler._decoding + scheduler._prefilling + list(scheduler._leaving)
    waiting = scheduler._admission.waiting()
    _check_lists(scheduler, resident, waiting)
    _check_slots(scheduler, resident)
    _check_blocks(scheduler, resident)
    for entry in resident:
        _check_counters(scheduler, entry)
        _check_cursor(entry, scheduler.config.block_size)
    for entry in waiting:
        request = entry.request
        assert request.status is Status.WAITING, f"{request.id} waits as {request.status}"
        idle = (request.num_scheduled, request.num_pending, request.num_in_flight, request.slot, request.block_ids)
        assert idle == (0, 0, 0, -1, []), f"{request.id} waits and holds {idle}"


def _check_lists(scheduler: Scheduler, resident: list[Entry], waiting: list[Entry]) -> None:
    assert len(set(resident)) == len(resident), "a request is in two lists"
    live = {entry for entry in resident if not entry.finished} | set(waiting)
    assert live == set(scheduler._live.values()), "the lists and the table of live requests differ"
    assert len(waiting) == scheduler.num_waiting, f"{len(waiting)} wait, {scheduler.num_waiting} are counted"
    for entries in (scheduler._decoding, scheduler._prefilling):
        assert all(a.rank < b.rank for a, b in pairwise(entries)), "a list is not in the order of rank"
        assert not any(entry.parted for entry in entries), "a request that parts could get more rows"
    for entry in scheduler._decoding:
        request = entry.request
        assert request.num_tokens - request.num_scheduled == 1, f"{request.id} decodes more or less than one token"
        assert request.num_tokens < entry.limit, f"{request.id} would compute beyond its last token"
        assert entry.capacity <= -(-(entry.limit - 1) // scheduler.config.block_size) * scheduler.config.block_size, (
            f"{request.id} holds blocks beyond its last token"
        )
    hungry = scheduler._hungry
    assert hungry is None or hungry in scheduler._decoding or hungry in scheduler._prefilling, "blocks are kept for nobody"
    for entry in scheduler._leaving:
        assert entry.request.num_in_flight > 0, f"{entry.request.id} parts, but nothing holds it back"
    flights = Counter(entry for step in scheduler._flight.values() for entry in step.entries)
    for entry in resident:
        assert entry.request.num_in_flight == flights.pop(entry, 0), f"{entry.request.id}: rows in flight miscounted"
    assert not flights, "a launched step holds a row of a request that has left"
    drafting = sum(chunk.num_drafts > 0 for step in scheduler._flight.values() for chunk in step.chunks)
    assert drafting == scheduler._num_drafting == sum(entry.drafting for entry in resident), "drafts in flight miscounted"


def _check_slots(scheduler: Scheduler, resident: list[Entry]) -> None:
    slots = [entry.request.slot for entry in resident] + scheduler._free_slots
    assert sorted(slots) == list(range(scheduler.config.max_num_seqs)), f"slots used or free: {sorted(slots)}"


def _check_blocks(scheduler: Scheduler, resident: list[Entry]) -> None:
    pool, size = scheduler.pool, scheduler.config.block_size
    free, cached = pool.check(), scheduler.tree.check()
    references = Counter(block for entry in resident for block in entry.request.block_ids)
    for block, count in enumerate(pool.refs):
        assert count == references[block], f"block {block} has {count} references, the tables hold {references[block]}"
    in_use = set(references)
    assert not free & in_use, f"free blocks in tables: {free & in_use}"
    assert not free & cached, f"free blocks in the index: {free & cached}"
    total = len(free) + len(cached) + len(in_use)
    assert total == pool.num_blocks, f"{len(free)} free + {len(cached)} cached + {len(in_use)} in use != {pool.num_blocks}"
    first: dict[int, tuple[Entry, int]] = {}
    for entry in resident:
        for index, block in enumerate(entry.request.block_ids):
            other, other_index = first.setdefault(block, (entry, index))
            if other is entry:
                assert other_index == index, f"{entry.request.id} holds block {block} twice"
                continue
            assert other_index == index, f"block {block} stands at {index} and at {other_index}"
            start, stop = index * size, (index + 1) * size
            for holder in (entry, other):
                assert holder.request.num_scheduled >= stop, f"block {block} is shared before it is full"
            same = entry.request.token_ids(start, stop) == other.request.token_ids(start, stop)
            assert same, f"block {block} is shared by requests with other tokens"


def _check_counters(scheduler: Scheduler, entry: Entry) -> None:
    request, size = entry.request, scheduler.config.block_size
    blocks = -(-request.num_scheduled // size)
    held = len(request.block_ids)
    most = -(-(request.num_scheduled + scheduler.config.max_draft_rows) // size)  # rejected drafts leave their blocks
    assert blocks <= held <= most, f"{request.id}: {held} blocks, {blocks} needed"
    assert entry.capacity == held * size, f"{request.id}: capacity {entry.capacity} of {held} blocks"
    if entry.finished:
        return
    assert request.status is Status.RUNNING, f"{request.id} runs as {request.status}"
    assert 0 <= request.num_scheduled <= request.num_tokens <= entry.limit, f"{request.id}: counters out of order"
    assert 0 <= request.num_pending <= request.num_in_flight, f"{request.id}: more pending than in flight"


def _check_cursor(entry: Entry, size: int) -> None:
    """The path to the last indexed block spells the request's tokens."""
    node, request = entry.cursor, entry.request
    if node is None or node.block == DETACHED or entry.num_indexed == OFF_INDEX:
        return
    for index in reversed(range(entry.num_indexed)):
        assert node is not None and node.block >= 0, f"{request.id}: the path in the index is too short"
        key = array("i", request.token_ids(index * size, (index + 1) * size)).tobytes()
        assert node.key == key, f"{request.id}: block {index} of the path in the index holds other tokens"
        node = node.parent
    assert node is not None and node.block == ROOT, f"{request.id}: the path in the index is too long"
