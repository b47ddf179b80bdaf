"""Speculation as the core sees it: who gets how many drafts in the next step, whose they are, and how good they were.

    core.step:  wants(requests) -> settle the step in flight first: proposers need its ids
                choose(requests) -> Request.num_drafts, which the scheduler grants in part or whole
                fill(plan)       -> Chunk.drafts, where the host knows them
                settled(...)     -> counters and acceptance rates

Who has no guess costs nothing: as long as nobody wants drafts, steps overlap as ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.engine.plan import StepPlan
from headrace.engine.request import Request
from headrace.speculative.draft_length import AcceptanceRate, DraftLengths
from headrace.speculative.proposer import HostProposer
from headrace.structured_output.manager import StructuredOutput

MAX_POSITIONS = 32  # that are counted one by one


@dataclass(slots=True)
class SpeculationStats:
    """Counters since the start. Mean accepted length = 1 + num_accepted_tokens / num_drafts."""

    num_drafts: int = 0  # chunks with drafts that were verified
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)

    def count(self, drafted: int, accepted: int) -> None:
        self.num_drafts += 1
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += accepted
        positions = self.accepted_per_position
        positions.extend([0] * (min(accepted, MAX_POSITIONS) - len(positions)))
        for i in range(min(accepted, MAX_POSITIONS)):
            positions[i] += 1


class Speculator:
    """Chooses drafts. `proposer` guesses on the host; without it the worker's drafter does, told only how many.

    Each request drafts as many tokens as its acceptance rate makes worth while (at most `num_tokens`; `cost` is that of one
    draft, relative to a step), and all together no more than fill a step up to `max_rows`: the more requests run, the less.
    What a grammar forces comes first: those drafts are free.
    """

    def __init__(
        self, num_tokens: int, max_rows: int, cost: float,
        proposer: HostProposer | None = None, structured: StructuredOutput | None = None,
    ):  # fmt: skip
        self.max_rows, self.proposer, self.structured = max_rows, proposer, structured
        self.stats = SpeculationStats()
        self._lengths = DraftLengths(num_tokens, cost)
        self._rates: dict[str, AcceptanceRate] = {}
        self._wishes: list[Request] = []
        self._drafts: dict[str, list[int]] = {}
        self._forced: set[str] = set()
        self._broken: set[str] = set()  # a step with drafts yielded nothing: these get none any more

    def wants(self, requests: Sequence[Request]) -> bool:
        """Whether somebody would draft, by the ids known so far; the last ones may still be on the device."""
        return len(requests) < self.max_rows and any(self._guess(r, 1) for r in requests)

    def choose(self, requests: Sequence[Request]) -> None:
        """Say how many drafts each of these decoding requests has, all of whose ids are known; the others have none."""
        self._forget_wishes()
        room = self.max_rows - len(requests)
        if room <= 0:
            return
        for request in requests:
            count = self._guess(request, room)
            if count:
                request.num_drafts = count
                self._wishes.append(request)
        fair = max(1, room // max(1, len(self._wishes)))
        if sum(r.num_drafts for r in self._wishes) > room:
            for request in self._wishes:
                request.num_drafts = min(request.num_drafts, fair)

    def pause(self) -> None:
        """The next step is scheduled before the last one is settled: no drafts."""
        self._forget_wishes()

    def fill(self, plan: StepPlan) -> None:
        for chunk in plan.chunks:
            if chunk.num_drafts:
                chunk.drafts = self._drafts.get(chunk.request.id, ())[: chunk.num_drafts]

    def settled(self, plan: StepPlan, sampled: Sequence[list[int]]) -> None:
        """`sampled[i]`: the ids of chunk i, one more than its drafts that were right."""
        for chunk, ids in zip(plan.chunks, sampled, strict=True):
            if not ids:
                if chunk.num_drafts and chunk.request.finish_reason is None:
                    self._broken.add(chunk.request.id)
                continue
            rate = self._rates.get(chunk.request.id)
            if chunk.num_drafts:
                self.stats.count(chunk.num_drafts, len(ids) - 1)
                if rate is not None and chunk.request.id not in self._forced:
                    rate.observe(chunk.num_drafts, len(ids) - 1)
            elif rate is not None:
                rate.rest()

    def end(self, request_id: str) -> None:
        self._rates.pop(request_id, None)
        self._broken.discard(request_id)
        if self.proposer is not None:
            self.proposer.end(request_id)

    def _forget_wishes(self) -> None:
        for request in self._wishes:
            request.num_drafts = 0
        self._wishes.clear()
        self._drafts.clear()
        self._forced.clear()

    def _guess(self, request: Request, room: int) -> int:
        """How many drafts there are for a request, at most `room`; those of the host are kept for `fill`."""
        if request.params.logits_processors or request.id in self._broken:
            return 0  # users' functions may count their calls
        matcher = None if self.structured is None else self.structured.matcher(request.id)
        if matcher is not None:
            forced = matcher.forced()[:room]
            if forced:
                self._drafts[request.id] = forced
                self._forced.add(request.id)
                return len(forced)
        rate = self._rates.get(request.id)
        if rate is None:
            rate = self._rates[request.id] = AcceptanceRate()
        most = min(self._lengths.of(rate), room)
        if most == 0:
            return 0
        if self.proposer is None:
            # what masks on the host must know cannot be guessed on the device
            return 0 if matcher is not None else most
        drafts = self.proposer.propose(request, most)
        if matcher is not None and drafts:
            drafts = drafts[: matcher.valid_prefix(drafts)]
        if drafts:
            self._drafts[request.id] = drafts
        return len(drafts)
