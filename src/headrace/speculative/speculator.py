"""Speculation as the core sees it: who gets how many drafts in the next step, whose they are, and how good they were.

    core.step:  settles_first(...) -> whether the step in flight must be read before the next is scheduled
                choose(requests)   -> Request.num_drafts, which the scheduler grants in part or whole
                fill(plan)         -> StepPlan.guesses, where the host knows them
                settled(...)       -> counters and acceptance rates

A drafter on the device needs no ids on the host: its steps overlap as ever. A proposer on the host knows the tokens one step
late. It may guess on, from the ids that it has through those that the step in flight is sampling; but behind a guess that
fails all drafts are wrong. Or that step is settled first, and the device waits while the host schedules. What yields more
follows from the acceptance so far and from the host's share of a step, both measured: text that is copied and small models
are guessed on, partly accepted drafts of a large model are worth the wait.

What a grammar forces is drafted whether or not anybody guesses, and needs no wait: when a run of forced tokens is known, the
one that the step in flight samples is its first, for the mask leaves no other, and the drafts are those behind it. Requests
without a grammar do not pay for it: beside them forced tokens only fill rows that the step has anyway, those to which a
captured step is padded.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from headrace.scheduler.plan import StepPlan, StepResult
from headrace.scheduler.request import Request
from headrace.speculative.draft_length import AcceptanceRate, DraftLengths, expected_tokens
from headrace.structured_output.manager import StructuredOutput

if TYPE_CHECKING:
    from headrace.structured_output.llguidance_backend import Matcher

MAX_POSITIONS = 32  # that are counted one by one


@dataclass(slots=True)
class SpeculationStats:
    """Counters since the start. Mean accepted length = 1 + num_accepted_tokens / num_drafts."""

    num_drafts: int = 0  # rows with drafts that were verified
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


class HostProposer(Protocol):
    """A proposer of drafts on the host (one on the device: worker/drafter.py): guesses from the ids that the host knows, before
    the step is scheduled. Whatever it says, output is exact."""

    def propose(self, request: Request, most: int) -> list[int]:
        """Up to `most` (>= 1) ids that may follow the known ones, in order; empty if there is no guess."""

    def end(self, request_id: str) -> None:
        """Forget what was kept for a request, if anything was."""


class Speculator:
    """Chooses drafts. `proposer` guesses on the host; without it the worker's drafter does, told only how many.

    Each request drafts as many tokens as its acceptance rate makes worth while (at most `num_tokens`, 0: nobody guesses;
    `cost` is that of one draft, relative to a step), and all together no more than fill a step up to `max_rows`: the more
    requests run, the less. What a grammar forces comes first: it is no guess. `overlap`: a launched step runs while the host
    goes on, so that there is something to gain by not waiting for it.
    """

    def __init__(
        self, num_tokens: int, max_rows: int, cost: float,
        proposer: HostProposer | None = None, structured: StructuredOutput | None = None, overlap: bool = False,
    ):  # fmt: skip
        self.max_rows, self.proposer, self.structured, self.overlap = max_rows, proposer, structured, overlap
        self.padded: Callable[[int], int] = lambda rows: rows  # that a step of so many decodes really has
        self._guesses = num_tokens > 0
        self.stats = SpeculationStats()
        self.idle = 0.1  # how long a device that waits for the host does so, relative to a step
        self._lengths = DraftLengths(num_tokens, cost)
        self._rates: dict[str, AcceptanceRate] = {}
        self._chosen: list[Request] = []
        self._drafts: dict[str, list[int]] = {}
        self._forced: set[str] = set()
        self._free: set[tuple[int, str]] = set()  # steps with what a grammar forces, and of whom: no evidence of guesses
        self._broken: set[str] = set()  # a step with drafts yielded nothing: these get none any more

    @property
    def active(self) -> bool:
        """Whether there is anything to choose: without guesses and grammars a step does not ask."""
        return self._guesses or bool(self._chosen) or (self.structured is not None and self.structured.has_any)

    @property
    def has_drafts(self) -> bool:
        """Whether a request was given any by `choose`."""
        return bool(self._chosen)

    def settles_first(self, in_flight: StepPlan, requests: Sequence[Request]) -> bool:
        """Whether the step in flight must be read before the next is scheduled, for the sake of these decoding requests."""
        if len(requests) >= self.max_rows:
            return False
        constrained = all(self._has_grammar(r) for r in requests)
        if not self.overlap:  # nothing is lost
            return constrained or in_flight.num_drafts > 0 or any(self._guess(r, 1, 0) for r in requests)
        if self.proposer is None and not constrained:
            return False
        settled = guessed = 0.0  # tokens that a step yields
        for request in requests:
            gain = 0.0
            if constrained and (run := self._forced_run(request)):
                gain = len(run)
                guessed += 0.0 if request.num_unverified else gain
            elif self.proposer is not None and request.num_pending and (count := self._guess(request, 1 << 30, 0)):
                if self._has_grammar(request):  # its masks need the ids as well
                    return True
                rate = self._rates[request.id].measured
                gain = expected_tokens(rate, count) - 1.0
                guessed += gain * rate ** (request.num_pending + request.num_unverified)
            settled += 1.0 + gain
            guessed += 1.0
        return settled > guessed * (1.0 + self.idle)

    def observe(self, host: float, device: float) -> None:
        """Seconds that the host schedules and launches, and that the device computes, a step."""
        self.idle = 0.9 * self.idle + 0.1 * host / max(device, 1e-6)

    def choose(self, requests: Sequence[Request]) -> None:
        """Say how many drafts each of these decoding requests has; the others have none."""
        self._forget_choice()
        room = self.max_rows - len(requests)
        if room <= 0:
            return
        constrained = all(self._has_grammar(r) for r in requests)
        free = room if constrained else min(room, self.padded(len(requests)) - len(requests))
        for request in requests:
            # behind drafts that have not settled it is not known where a run goes on
            run = self._forced_run(request)[:free] if free and not request.num_unverified else []
            if run:
                self._drafts[request.id] = run
                self._forced.add(request.id)
                free -= 0 if constrained else len(run)
            count = len(run) or self._guess(request, room, request.num_pending)
            if count:
                request.num_drafts = count
                self._chosen.append(request)
        fair = max(1, room // max(1, len(self._chosen)))
        if sum(r.num_drafts for r in self._chosen) > room:
            for request in self._chosen:
                request.num_drafts = min(request.num_drafts, fair)

    def fill(self, plan: StepPlan) -> None:
        drafts, unverified = plan.drafts.tolist(), plan.unverified.tolist()
        for i in range(plan.num_decodes, len(plan)):
            name = plan.ids[i]
            if not drafts[i]:
                continue
            if guessed := self._drafts.get(name, ())[: unverified[i] + drafts[i]]:
                plan.guesses[i] = list(guessed)
            if name in self._forced:
                self._free.add((plan.step, name))

    def settled(self, plan: StepPlan, result: StepResult, live: Container[str]) -> None:
        """A step's counts are one more than its drafts that were right; `live`: the requests that go on."""
        for name in plan.ids[: plan.num_decodes] if self._rates else ():
            if (rate := self._rates.get(name)) is not None:
                rate.rest()
        drafts = plan.drafts.tolist()
        for i in range(plan.num_decodes, len(plan)):
            name, drafted, count = plan.ids[i], drafts[i], result.counts[i]
            if not drafted:
                continue
            forced = (plan.step, name) in self._free
            self._free.discard((plan.step, name))
            if not count:
                if name in live:
                    self._broken.add(name)
                continue
            self.stats.count(drafted, count - 1)
            if not forced and (rate := self._rates.get(name)) is not None:
                rate.observe(drafted, count - 1)

    def end(self, request_id: str) -> None:
        self._rates.pop(request_id, None)
        self._broken.discard(request_id)
        if self.proposer is not None:
            self.proposer.end(request_id)

    def _forget_choice(self) -> None:
        for request in self._chosen:
            request.num_drafts = 0
        self._chosen.clear()
        self._drafts.clear()
        self._forced.clear()

    def _matcher(self, request: Request) -> Matcher | None:
        return None if self.structured is None else self.structured.matcher(request.id)

    def _has_grammar(self, request: Request) -> bool:
        return self._matcher(request) is not None

    def _takes_drafts(self, request: Request) -> bool:
        return not request.params.logits_processors and request.id not in self._broken  # users' functions may count their calls

    def _forced_run(self, request: Request) -> list[int]:
        """What a request's grammar forces behind its tokens in launched steps, as if all of those were right."""
        matcher = self._matcher(request)
        if matcher is None or not self._takes_drafts(request):
            return []
        return matcher.forced()[request.num_pending + request.num_unverified :]

    def _guess(self, request: Request, room: int, pending: int) -> int:
        """How many drafts are guessed for a request, at most `room`; those of the host are kept for `fill`.

        They come behind `pending` tokens that have no id on the host yet, and behind the drafts of the steps that sample those.
        """
        if not self._guesses or not self._takes_drafts(request):
            return 0
        rate = self._rates.get(request.id)
        if rate is None:
            rate = self._rates[request.id] = AcceptanceRate()
        most = min(self._lengths.of(rate), room)
        matcher = self._matcher(request)
        if most == 0 or (matcher is not None and (pending or self.proposer is None)):
            return 0  # what masks on the host must know cannot be guessed on the device, nor behind tokens without an id
        if self.proposer is None:
            return most
        unverified = request.num_unverified if pending else 0
        drafts = self.proposer.propose(request, pending + unverified + most)[pending:]
        if matcher is not None and drafts:
            drafts = drafts[: matcher.valid_prefix(drafts)]
        if len(drafts) <= unverified:
            return 0
        self._drafts[request.id] = drafts
        return len(drafts) - unverified
