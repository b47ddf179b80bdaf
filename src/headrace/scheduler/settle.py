"""What a step has sampled reaches its requests: ids become known, requests end. No torch here."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from headrace.scheduler.drafts import settle_drafts
from headrace.scheduler.entry import Entry, Step
from headrace.scheduler.request import Request
from headrace.scheduler.roster import Roster

Taken = list[tuple[Request, list[int]]]  # requests with the ids that they really took


class Settled(NamedTuple):
    """What a step brought to its requests, but for those that had ended before."""

    ids: list[str]  # requests that got just one more token
    tokens: list[int]
    others: Taken  # who got several or ended


def settle_step(roster: Roster, step: Step, tokens: list[int], sampled: Sequence[list[int]], failed: frozenset[int]) -> Settled:
    """As Scheduler.settle."""
    results: Taken = []
    for i in sorted(failed) if failed else ():
        entry = step.entry(i)
        if not entry.finished:
            if entry.cursor is not None:
                # a NaN in a shared block would fail everybody who hits it, for ever; so the whole path is forgotten
                roster.tree.drop_path(entry.cursor)
            roster.finish(entry, "error")
            results.append((entry.request, []))
    for entry, stop in step.filled:  # before the new ids: all of these are known by now
        if not entry.finished:
            roster.index(entry, stop)
    plain = _settle_decodes(roster, step, tokens, results)
    for entry, chunk, ids in zip(step.entries, step.chunks, sampled, strict=True):
        if chunk.num_drafts:
            settle_drafts(roster, entry, chunk, len(ids) - 1)
        if chunk.samples or entry.parted:
            _settle_row(roster, entry, ids if chunk.samples else None, results)
        if chunk.num_drafts and entry.request.num_tokens >= entry.limit and not entry.parted:
            roster.part(entry)  # a launched step samples its last token
    return Settled(*plain, results)


def _settle_decodes(roster: Roster, step: Step, tokens: list[int], results: Taken) -> tuple[list[str], list[int]]:
    """The requests that just got one more token, and the tokens; what happened to the others is added to `results`."""
    apart = []
    for row, (entry, token) in enumerate(zip(step.decoding, tokens, strict=True)):
        if entry.parted or token in entry.stops:
            apart.append(row)
        else:  # shorter than its limit: whoever gets there has parted
            entry.output.append(token)
    ids = step.decodes.ids if step.decodes is not None else []
    if not apart:
        return ids, tokens
    for row in apart:
        _settle_row(roster, step.decoding[row], [tokens[row]], results)
    ids, tokens = ids.copy(), tokens.copy()
    for row in reversed(apart):
        del ids[row], tokens[row]
    return ids, tokens


def _settle_row(roster: Roster, entry: Entry, ids: list[int] | None, results: Taken) -> None:
    """Who is not finished keeps what was sampled for it, if it samples; who parts leaves after its last row."""
    if ids is not None and not entry.finished:
        taken = _take(roster, entry, ids)  # if that ends it, it may be gone already
        if taken or entry.finished:
            results.append((entry.request, taken))
    if entry in roster.leaving:
        roster.let_go(entry)


def _take(roster: Roster, entry: Entry, ids: list[int]) -> list[int]:
    """Append sampled ids, up to the one that ends the request; the ids that it took."""
    request, output, stops = entry.request, entry.output, entry.stops
    if request.pooling is not None:
        roster.finish(entry, "stop")  # the prompt is computed: that was all
        return []
    if not request.first_token:
        request.first_token = time.monotonic()
    for n, token in enumerate(ids, 1):
        output.append(token)
        length = len(output)
        stopped = token in stops and length >= entry.min_output
        if stopped or length >= entry.max_output:
            _index_accepted(roster, entry, n)
            roster.finish(entry, "stop" if stopped else "length", stops[token] if stopped else None)
            return ids[:n]
    _index_accepted(roster, entry, len(ids))
    return ids


def _index_accepted(roster: Roster, entry: Entry, count: int) -> None:
    """`count` ids have been taken of a step: all but the last were right drafts, computed tokens like any other."""
    stop = entry.request.num_known - 1
    if count > 1 and (entry.num_indexed + 1) * roster.block_size <= stop:
        roster.index(entry, stop)
