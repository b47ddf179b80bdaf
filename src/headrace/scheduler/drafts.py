"""Decodes with drafts, and behind drafts that have not settled: how many, as which chunk, what becomes of them. No torch here.

A chunk with drafts is counted as one token, and so is one behind it, as if the step before were without drafts: until the
steps settle, which say how many tokens it is.
"""

from __future__ import annotations

from headrace.scheduler.entry import Entry, Step
from headrace.scheduler.plan import Chunk
from headrace.scheduler.roster import Roster


def draft_count(roster: Roster, entry: Entry, most: int) -> int:
    """How many drafts of a decoding request this step can verify. They never take a block that others need.

    Behind drafts that have not settled there must be room as if all of them were right, for its own token too; -1: there
    is none, or what is to be done to that token depends on which one it is. Then it waits until they settle.
    """
    request, capacity, unsure = entry.request, entry.capacity, entry.request.num_unsure
    start = request.num_scheduled + unsure
    count = min(request.num_drafts, most, entry.limit - start - 2)
    if start + count >= capacity:
        spare = max(0, roster.tree.num_available - len(roster.decoding)) if roster.hungry is None else 0
        count = min(count, capacity + spare * roster.block_size - start - 1)
    if not unsure:
        return max(0, count)
    index = request.num_scheduled + 1 - entry.num_prompt
    early = index + unsure + max(0, count) < entry.min_output  # stop ids are banned in all rows, whatever is accepted
    return max(-1, count) if entry.ahead is None and (early or index > entry.min_output) else -1


def add_draft_chunk(roster: Roster, entry: Entry, step: Step, count: int) -> None:
    """A row of `step` for a decode with `count` drafts, or behind drafts that have not settled."""
    request, size, unsure = entry.request, roster.block_size, entry.request.num_unsure
    start, stop = request.num_scheduled, request.num_scheduled + 1
    new_blocks: list[int] = []
    offset = 0
    missing = -(-(stop + unsure + count - entry.capacity) // size)
    if missing > 0:
        offset = len(request.block_ids)
        new_blocks = roster.grow(entry, missing)
    chunk = Chunk(
        request, request.slot, start, 1 + count, True, False, new_blocks, offset, stop - entry.num_prompt, count, slack=unsure
    )
    step.entries.append(entry)
    step.chunks.append(chunk)
    entry.last_step = step.number
    if unsure:
        entry.ahead = (step, chunk)
    elif not stop % size:
        step.filled.append((entry, stop))
    request.num_scheduled = stop
    if count:
        request.num_unsure += count
        roster.num_drafting += 1
        step.num_drafts += count


def settle_drafts(roster: Roster, entry: Entry, chunk: Chunk, accepted: int) -> None:
    """So many drafts of a chunk were right; -1: it came to nothing, which is as if it had not been."""
    request = entry.request
    request.num_unsure -= chunk.num_drafts
    roster.num_drafting -= 1
    if entry.finished:
        return
    request.num_scheduled += accepted
    if accepted < 0 and entry.cursor is not None:
        roster.tree.drop_path(entry.cursor)  # as if the request had failed
    if entry.ahead is not None:
        step, behind = entry.ahead
        entry.ahead = None
        behind.start += accepted
        behind.output_index += accepted
        behind.slack = 0
        if not (behind.start + 1) % roster.block_size:
            step.filled.append((entry, behind.start + 1))
