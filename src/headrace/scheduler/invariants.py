"""The checker of law 5: blocks, references, slots and counters of a scheduler add up. No torch here."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection
from itertools import pairwise

from headrace.scheduler.block_manager import BlockManager
from headrace.scheduler.config import Limits
from headrace.scheduler.decode_batch import Scheduled
from headrace.scheduler.drafting import Drafting
from headrace.scheduler.request import Request, Status


def check_scheduler(limits: Limits, blocks: BlockManager, drafting: Drafting, flight: Collection[Scheduled]) -> None:
    """Raise AssertionError, naming what does not add up; valid between any two calls of the scheduler's methods.

    `flight`: the steps that are scheduled and not settled.
    """
    resident = blocks.decoding + blocks.prefilling + list(blocks.leaving)
    waiting = blocks.admission.waiting()
    _check_lists(blocks, resident, waiting)
    _check_flights(blocks, resident, flight)
    _check_drafts(drafting, resident, flight)
    _check_batch(blocks, resident)
    slots = [request.slot for request in resident] + blocks.free_slots
    assert sorted(slots) == list(range(limits.max_num_seqs)), f"slots used or free: {sorted(slots)}"
    _check_blocks(blocks, resident)
    blocks.snapshots.check(set(resident))
    for request in resident:
        _check_counters(limits, request)
        _check_cursor(request, blocks.block_size)
    promised = sum(-(-(request.limit - 1) // blocks.block_size) for request in resident)
    assert blocks.admission.promised == promised, "what running requests can ask for is miscounted"
    for request in waiting:
        assert request.status is Status.WAITING, f"{request.id} waits as {request.status}"
        idle = (request.num_scheduled, request.num_pending, request.clock, request.slot, request.block_ids)
        assert idle == (0, 0, None, -1, []), f"{request.id} waits and holds {idle}"


def _check_lists(blocks: BlockManager, resident: list[Request], waiting: list[Request]) -> None:
    assert len(set(resident)) == len(resident), "a request is in two lists"
    live = {request for request in resident if not request.finished} | set(waiting)
    assert live == set(blocks.live.values()), "the lists and the table of live requests differ"
    assert len(waiting) == blocks.admission.num_waiting, f"{len(waiting)} wait, {blocks.admission.num_waiting} are counted"
    for requests in (blocks.decoding, blocks.prefilling):
        assert all(a.rank < b.rank for a, b in pairwise(requests)), "a list is not in the order of rank"
        assert not any(request.retired for request in requests), "a request that retires could get more rows"
    for request in blocks.decoding:
        assert request.num_tokens - request.num_scheduled == 1, f"{request.id} decodes more or less than one token"
        assert request.num_tokens < request.limit, f"{request.id} would compute beyond its last token"
        assert request.capacity <= -(-(request.limit - 1) // blocks.block_size) * blocks.block_size, (
            f"{request.id} holds blocks beyond its last token"
        )
    starved = blocks.starved
    assert starved is None or starved in blocks.decoding or starved in blocks.prefilling, "blocks are kept for nobody"


def _check_drafts(drafting: Drafting, resident: list[Request], flight: Collection[Scheduled]) -> None:
    drafts = Counter[Request]()
    for step in flight:
        for row in step.others:
            if row.unverified and drafts[row.request] and not row.request.finished:
                assert row.request.ahead is step, f"{row.request.id}: step {step.number} is behind drafts and not told of them"
            drafts[row.request] += row.drafts
    for request in resident:
        assert request.num_unverified == drafts[request], f"{request.id}: drafts in flight miscounted"
    in_flight = sum(row.drafts > 0 for step in flight for row in step.others)
    assert in_flight == drafting.num_rows, "sequences with drafts miscounted"


def _check_flights(blocks: BlockManager, resident: list[Request], flight: Collection[Scheduled]) -> None:
    flights: dict[Request, list[int]] = {}
    for step in flight:
        for request in step.requests():
            flights.setdefault(request, []).append(step.number)
    for request in resident:
        steps = flights.pop(request, [])
        assert len(set(steps)) == len(steps), f"{request.id} has two rows in a step"
        assert request.finished or request.num_pending <= len(steps), f"{request.id}: more pending than in flight"
        assert request.retired == (request in blocks.leaving), f"{request.id} retires, or does not"
        assert steps or not request.retired, f"{request.id} retires, but nothing holds it back"
        if request not in blocks.batch:
            last = request.last_step if request.last_step > blocks.num_settled else 0
            assert last == max(steps, default=0), f"{request.id}: its last row is not in step {request.last_step}"
    assert not flights, "a launched step holds a row of a request that has left"


def _check_batch(blocks: BlockManager, resident: list[Request]) -> None:
    batch, size = blocks.batch, blocks.block_size
    members = [request for request in blocks.decoding if request in batch]
    assert members == batch.members, "the batch of decodes is not what its members think"
    for request in set(resident) - set(members):
        assert request.clock is None, f"{request.id} moves on without decoding"
    for request in members:
        assert not request.num_unverified, f"{request.id} has drafts and moves on without them"
        assert request in batch.events[request.next_event], f"{request.id} is due and nobody knows"
        position = request.num_scheduled
        while (position + 1) % size and position < request.capacity and position + 2 < request.limit:
            position += 1
        until = request.next_event - batch.clock.now
        assert position - request.num_scheduled == until, f"{request.id} is looked at too early or late"


def _check_blocks(blocks: BlockManager, resident: list[Request]) -> None:
    pool, size = blocks.pool, blocks.block_size
    free, cached = pool.check(), blocks.tree.check()
    references = Counter(block for request in resident for block in request.block_ids)
    for block, count in enumerate(pool.refs):
        assert count == references[block], f"block {block} has {count} references, the tables hold {references[block]}"
    in_use = set(references)
    assert not free & in_use, f"free blocks in tables: {free & in_use}"
    assert not free & cached, f"free blocks in the index: {free & cached}"
    total = len(free) + len(cached) + len(in_use)
    assert total == pool.num_blocks, f"{len(free)} free + {len(cached)} cached + {len(in_use)} in use != {pool.num_blocks}"
    first: dict[int, tuple[Request, int]] = {}
    for request in resident:
        for index, block in enumerate(request.block_ids):
            other, other_index = first.setdefault(block, (request, index))
            if other is request:
                assert other_index == index, f"{request.id} holds block {block} twice"
                continue
            assert other_index == index, f"block {block} stands at {index} and at {other_index}"
            start, stop = index * size, (index + 1) * size
            for holder in (request, other):
                assert holder.num_scheduled >= stop, f"block {block} is shared before it is full"
            same = request.token_ids(start, stop) == other.token_ids(start, stop)
            assert same, f"block {block} is shared by requests with other tokens"


def _check_counters(limits: Limits, request: Request) -> None:
    size = limits.block_size
    blocks = -(-request.num_scheduled // size)
    held = len(request.block_ids)
    most = -(-(request.num_scheduled + 2 * limits.max_draft_rows) // size)  # of two steps; rejected ones leave blocks
    assert blocks <= held <= most, f"{request.id}: {held} blocks, {blocks} needed"
    assert request.capacity == held * size, f"{request.id}: capacity {request.capacity} of {held} blocks"
    if request.finished:
        return
    assert request.status is Status.RUNNING, f"{request.id} runs as {request.status}"
    assert 0 <= request.num_scheduled <= request.num_tokens <= request.limit, f"{request.id}: counters out of order"


def _check_cursor(request: Request, size: int) -> None:
    """The path to the last indexed block spells the request's tokens."""
    node = request.cursor
    if node is None or not node.indexed or not request.indexing:
        return
    for index in reversed(range(request.num_indexed)):
        assert node is not None and not node.is_root, f"{request.id}: the path in the index is too short"
        key = array("i", request.token_ids(index * size, (index + 1) * size)).tobytes()
        assert node.key == key, f"{request.id}: block {index} of the path in the index holds other tokens"
        node = node.parent
    assert node is not None and node.is_root, f"{request.id}: the path in the index is too long"
