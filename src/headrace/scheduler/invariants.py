"""The checker of law 5: blocks, references, slots and counters of a scheduler add up. No torch here."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection
from itertools import pairwise

from headrace.cache.radix_tree import DETACHED, ROOT
from headrace.scheduler.config import SchedulerConfig
from headrace.scheduler.entry import OFF_INDEX, Entry, Step
from headrace.scheduler.request import Status
from headrace.scheduler.roster import Roster


def check_scheduler(config: SchedulerConfig, roster: Roster, flight: Collection[Step]) -> None:
    """Raise AssertionError, naming what does not add up; valid between any two calls of the scheduler's methods.

    `flight`: the steps that are scheduled and not settled.
    """
    resident = roster.decoding + roster.prefilling + list(roster.leaving)
    waiting = roster.admission.waiting()
    _check_lists(roster, resident, waiting)
    _check_flights(roster, resident, flight)
    _check_drafts(roster, resident, flight)
    _check_batch(roster, resident)
    slots = [entry.request.slot for entry in resident] + roster.free_slots
    assert sorted(slots) == list(range(config.max_num_seqs)), f"slots used or free: {sorted(slots)}"
    _check_blocks(roster, resident)
    for entry in resident:
        _check_counters(config, entry)
        _check_cursor(entry, roster.block_size)
    promised = sum(-(-(entry.limit - 1) // roster.block_size) for entry in resident)
    assert roster.admission._promised == promised, "what running requests can ask for is miscounted"
    for entry in waiting:
        request = entry.request
        assert request.status is Status.WAITING, f"{request.id} waits as {request.status}"
        idle = (request.num_scheduled, request.num_pending, request.clock, request.slot, request.block_ids)
        assert idle == (0, 0, None, -1, []), f"{request.id} waits and holds {idle}"


def _check_lists(roster: Roster, resident: list[Entry], waiting: list[Entry]) -> None:
    assert len(set(resident)) == len(resident), "a request is in two lists"
    live = {entry for entry in resident if not entry.finished} | set(waiting)
    assert live == set(roster.live.values()), "the lists and the table of live requests differ"
    assert len(waiting) == roster.admission.num_waiting, f"{len(waiting)} wait, {roster.admission.num_waiting} are counted"
    for entries in (roster.decoding, roster.prefilling):
        assert all(a.rank < b.rank for a, b in pairwise(entries)), "a list is not in the order of rank"
        assert not any(entry.parted for entry in entries), "a request that parts could get more rows"
    for entry in roster.decoding:
        request = entry.request
        assert request.num_tokens - request.num_scheduled == 1, f"{request.id} decodes more or less than one token"
        assert request.num_tokens < entry.limit, f"{request.id} would compute beyond its last token"
        assert entry.capacity <= -(-(entry.limit - 1) // roster.block_size) * roster.block_size, (
            f"{request.id} holds blocks beyond its last token"
        )
    hungry = roster.hungry
    assert hungry is None or hungry in roster.decoding or hungry in roster.prefilling, "blocks are kept for nobody"


def _check_drafts(roster: Roster, resident: list[Entry], flight: Collection[Step]) -> None:
    drafts = Counter[Entry]()
    for step in flight:
        for entry, chunk in zip(step.entries, step.chunks, strict=True):
            drafts[entry] += chunk.num_drafts
            if chunk.slack and not entry.finished:
                assert entry.ahead == (step, chunk), f"{entry.request.id}: step {step.number} is behind settled drafts"
    for entry in resident:
        assert entry.request.num_unsure == drafts[entry], f"{entry.request.id}: drafts in flight miscounted"
    drafting = sum(chunk.num_drafts > 0 for step in flight for chunk in step.chunks)
    assert drafting == roster.num_drafting, "chunks with drafts miscounted"


def _check_flights(roster: Roster, resident: list[Entry], flight: Collection[Step]) -> None:
    flights: dict[Entry, list[int]] = {}
    for step in flight:
        for entry in step.decoding + step.entries:
            flights.setdefault(entry, []).append(step.number)
    for entry in resident:
        steps = flights.pop(entry, [])
        assert len(set(steps)) == len(steps), f"{entry.request.id} has two rows in a step"
        assert entry.finished or entry.request.num_pending <= len(steps), f"{entry.request.id}: more pending than in flight"
        assert entry.parted == (entry in roster.leaving), f"{entry.request.id} parts, or does not"
        assert steps or not entry.parted, f"{entry.request.id} parts, but nothing holds it back"
        if entry not in roster.batch:
            last = entry.last_step if entry.last_step > roster.num_settled else 0
            assert last == max(steps, default=0), f"{entry.request.id}: its last row is not in step {entry.last_step}"
    assert not flights, "a launched step holds a row of a request that has left"


def _check_batch(roster: Roster, resident: list[Entry]) -> None:
    batch, size = roster.batch, roster.block_size
    members = [entry for entry in roster.decoding if entry in batch]
    assert members == batch.entries, "the batch of decodes is not what its members think"
    for entry in set(resident) - set(members):
        assert entry.request.clock is None, f"{entry.request.id} moves on without decoding"
    for entry in members:
        request = entry.request
        assert not request.num_unsure, f"{request.id} has drafts and moves on without them"
        assert entry in batch._agenda[entry.due], f"{request.id} is due and nobody knows"
        position = request.num_scheduled
        while (position + 1) % size and position < entry.capacity and position + 2 < entry.limit:
            position += 1
        assert position - request.num_scheduled == entry.due - batch.clock.now, f"{request.id} is looked at too early or late"


def _check_blocks(roster: Roster, resident: list[Entry]) -> None:
    pool, size = roster.pool, roster.block_size
    free, cached = pool.check(), roster.tree.check()
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


def _check_counters(config: SchedulerConfig, entry: Entry) -> None:
    request, size = entry.request, config.block_size
    blocks = -(-request.num_scheduled // size)
    held = len(request.block_ids)
    most = -(-(request.num_scheduled + 2 * config.max_draft_rows) // size)  # of two steps; rejected ones leave blocks
    assert blocks <= held <= most, f"{request.id}: {held} blocks, {blocks} needed"
    assert entry.capacity == held * size, f"{request.id}: capacity {entry.capacity} of {held} blocks"
    if entry.finished:
        return
    assert request.status is Status.RUNNING, f"{request.id} runs as {request.status}"
    assert 0 <= request.num_scheduled <= request.num_tokens <= entry.limit, f"{request.id}: counters out of order"


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
