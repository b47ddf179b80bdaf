"""One engine core in virtual time: the real scheduler, and a device that takes the time that a cost model says.

The turns are those of engine.core.EngineCore:

    turn    | take requests | schedule N+1, launch | settle N, tell its tokens |
    device  |---------------- step N --------------|------------ step N+1 ----------

On a device that works while the host goes on, a turn ends when step N is done; without asynchronous scheduling, and on a CPU,
where the launch is the computation, it launches a step and settles the same.

**Leaps.** While all decode and nobody comes, ends or crosses a block, turns differ in their times only. Those of such a
stretch are computed at once (`scheduler.leap`), and cut where a request comes in between: the same numbers, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from headrace.scheduler.config import Limits
from headrace.scheduler.leap import leap, left_out, plain_steps
from headrace.scheduler.plan import StepPlan, StepResult
from headrace.scheduler.request import Request, Status
from headrace.scheduler.scheduler import Scheduler
from headrace_bench.simulation.cost import StepCost, Work

TOKEN, END = 1, 0  # what is sampled: one id, and the one that ends an answer before max_tokens
SHORTEST_LEAP = 3  # steps: a shorter stretch is made step by step


@dataclass(slots=True, eq=False)
class Job:
    """One request on its way, and what became of it. Seconds of virtual time; 0: not yet."""

    request: Request
    start: float  # when the client sent it
    output_len: int  # tokens after which it ends
    turns: tuple = ()  # of the conversation that still come
    admitted: float = 0.0
    first: float = 0.0
    last: float = 0.0  # when it got its last token before it was preempted, or found no block
    num_noted: int = 0  # its preemptions that have been noted
    core: int = 0
    missed: bool = False  # a limit of --goodput


class Listener(Protocol):
    """Who is told what comes out of a core."""

    def tokens(self, gap: float, count: int, at: float) -> None:
        """`count` tokens at one time, each `gap` seconds after the one before it."""

    def many_tokens(self, gaps: np.ndarray, count: int, at: np.ndarray) -> None:
        """The same at several times."""

    def first_token(self, job: Job, at: float) -> None: ...

    def ended(self, job: Job, at: float) -> None: ...


@dataclass(slots=True)
class Flight:
    plan: StepPlan
    finish: float
    seconds: float


@dataclass(slots=True)
class Stretch:
    """Turns that are alike but for their times: turn i lasts until ends[i], and launches a step of seconds[i]."""

    began: float
    ends: np.ndarray
    seconds: np.ndarray


class Core:
    """`turn(now)` makes the turn that begins then and returns when the next one begins; None: there is nothing to do."""

    def __init__(self, number: int, limits: Limits, cost: StepCost, listener: Listener, *, overlap: bool, leaps: bool):
        self.number, self.cost, self.listener = number, cost, listener
        self.scheduler = Scheduler(limits)
        self.jobs: dict[str, Job] = {}
        self.next: float | None = None  # when the next turn begins
        self.steps = self.turns = 0  # steps, and turns that were made one by one
        self.busy = 0.0  # seconds of the device
        self.stops_early = False  # some request ends before its max_tokens
        self._blocking = cost.blocking or not overlap
        self._overlap, self._leaps = overlap, leaps
        self._inbox: list[Job] = []
        self._flight: Flight | None = None
        self._free = 0.0  # when the device has done all that it was given
        self._settled = 0.0  # when the last step settled
        self._context = 0  # tokens that the decodes of the last step read, and
        self._version = -1  # which they were
        self._waiting: dict[str, Job] = {}  # decodes that found no block: the gap to their next token is their own
        self._stretch: Stretch | None = None

    def add(self, job: Job, now: float) -> None:
        """It is taken by the next turn that begins from now on."""
        self._inbox.append(job)
        if self._stretch is not None:
            stretch = self._stretch
            # turns that have begun by now are made; the next one takes the request
            begun = 1 + int(np.searchsorted(stretch.ends, now, "left")) if now > stretch.began else 0
            if begun < len(stretch.ends):
                self._land(begun)
                self.next = float(stretch.ends[begun - 1]) if begun else stretch.began
        elif self.next is None:
            self.next = now

    def turn(self, now: float) -> float | None:
        if self._stretch is not None:
            self._land(len(self._stretch.ends))
        for job in self._inbox:
            self.jobs[job.request.id] = job
            self.stops_early = self.stops_early or job.output_len < (job.request.params.max_tokens or 0)
            self.scheduler.add(job.request)
        self._inbox.clear()
        self.turns += 1
        preemptions = self.scheduler.stats.num_preemptions
        plan = self.scheduler.schedule(False)
        if self.scheduler.stats.num_preemptions != preemptions:
            self._note_preempted()
        waiting = left_out(self.scheduler)
        if waiting and self._flight is None:
            self._note_waiting(waiting)
        launched, end = None, now
        if plan is not None:
            launched = self._launch(plan, now)
            end = launched.finish if self._blocking else now + self._host(plan)
        flight, self._flight = self._flight, launched
        if flight is not None:
            end = max(end, flight.finish)
            self._settle(flight, end)
            if waiting:
                self._note_waiting(waiting)
        if launched is not None and not self._overlap:
            self._flight = None
            self._settle(launched, end)
        if self._flight is None and plan is None and flight is None:
            if self.scheduler.has_unfinished:
                raise RuntimeError(f"core {self.number} has requests, and none of them can run")
            self.next = None
        elif self._flight is None and not self.scheduler.has_unfinished:
            self.next = None
        else:
            self.next = end
            if self._leaps:
                self._plan_leap(end)
        return self.next

    # ---- one turn's parts

    def _launch(self, plan: StepPlan, now: float) -> Flight:
        self.scheduler.launched(plan)
        if not plan.is_plain:
            self._note_admitted(plan, now)
        seconds = self.cost.seconds(self._work(plan), self.steps)
        self.steps += 1
        self.busy += seconds
        if self._blocking:
            return Flight(plan, now + (self.cost.host + seconds), seconds)
        self._free = max(max(now + self.cost.host, self._free) + seconds, now + self._host(plan))
        return Flight(plan, self._free, seconds)

    def _host(self, plan: StepPlan) -> float:
        """The device begins with the launch of prompts before that has ended, and is not done before it has."""
        if plan.num_tokens == len(plan):
            return self.cost.host
        return next((seconds for most, seconds in self.cost.prompt_hosts if plan.num_tokens <= most), self.cost.host)

    def _work(self, plan: StepPlan) -> Work:
        count, used = plan.num_decodes, self.scheduler.kv_usage
        if plan.version == self._version:  # the same decodes, each with a token more
            self._context += count
        else:
            self._context, self._version = int(plan.starts[:count].sum()) + count, plan.version
        context = self._context
        if plan.is_plain:
            return Work(count, count, context, 0.0, count, used)
        pairs = 0.0
        for start, tokens in zip(plan.starts[count:].tolist(), plan.counts[count:].tolist(), strict=True):
            pairs += tokens * (start + (tokens + 1) / 2)
        return Work(plan.num_tokens, len(plan), context, pairs, int(plan.samples.sum()), used)

    def _settle(self, flight: Flight, at: float) -> None:
        plan = flight.plan
        self.scheduler.took(plan, flight.seconds)
        count = plan.num_decodes
        counts = [1] * count
        if not plan.is_plain:
            counts += plan.samples[count:].tolist()
        tokens = [TOKEN] * sum(counts)
        if self.stops_early:
            self._end_early(plan, counts, tokens)
        settled = self.scheduler.settle(plan, StepResult(tokens, counts))
        gap, alike = at - self._settled, len(settled.ids)
        if self._waiting:
            alike -= self._are_back(settled.ids, at)
        for request, ids in settled.gains:
            alike += self._gain(self.jobs[request.id], len(ids), at)
        if alike:
            self.listener.tokens(gap, alike, at)
        self._settled = at

    def _gain(self, job: Job, count: int, at: float) -> int:
        """Tokens that came a step after the one before them, as those of plain decodes: 0 or 1."""
        request, alike = job.request, 0
        if count and not job.first:
            job.first = at
            self.listener.first_token(job, at)
        elif count and request.status is not Status.WAITING and job.last > job.first:  # it is back: its gap is its own
            self.listener.tokens(at - job.last, count, at)
            job.last = 0.0
            self._waiting.pop(request.id, None)
        else:
            alike = count
        if request.status is Status.WAITING:  # preempted while this step had its row
            job.last = at
        if request.finished:
            del self.jobs[request.id]
            self.listener.ended(job, at)
        return alike

    def _end_early(self, plan: StepPlan, counts: list[int], tokens: list[int]) -> None:
        """Those that got all that they wanted sample the end token."""
        position = 0
        for name, count in zip(plan.ids, counts, strict=True):
            job = self.jobs.get(name)
            if job is not None and count and len(job.request.output_ids) + 1 == job.output_len:
                tokens[position] = END
            position += count

    def _note_admitted(self, plan: StepPlan, now: float) -> None:
        for name in plan.ids[plan.num_decodes :]:
            job = self.jobs[name]
            if not job.admitted:
                job.admitted = now

    def _note_waiting(self, requests: list[Request]) -> None:
        """All steps that had rows of them have settled; the last one just now, if they were not left out before."""
        for request in requests:
            job = self.jobs.get(request.id)
            if job is not None and request.id not in self._waiting:
                self._waiting[request.id] = job
                job.last = self._settled

    def _are_back(self, names: list[str], at: float) -> int:
        """How many of those that were left out have a token again."""
        back = self._waiting.keys() & set(names)
        for name in back:
            job = self._waiting.pop(name)
            self.listener.tokens(at - job.last, 1, at)
            job.last = 0.0
        return len(back)

    def _note_preempted(self) -> None:
        for job in self.jobs.values():
            if job.request.num_preemptions != job.num_noted:
                job.num_noted = job.request.num_preemptions
                self._waiting.pop(job.request.id, None)
                if job.last <= job.first:
                    job.last = self._settled

    # ---- stretches of steps that are alike

    def _plan_leap(self, now: float) -> None:
        """The turns from `now` on, if several in a row are alike."""
        count = plain_steps(self.scheduler) if not self._waiting else 0
        if self.stops_early and count >= SHORTEST_LEAP:
            jobs = (self.jobs[r.id] for r in self.scheduler.decoding)
            count = min(count, min(j.output_len - len(j.request.output_ids) for j in jobs) - 1)
        if count < SHORTEST_LEAP:
            return
        members = len(self.scheduler.decoding)
        work = Work(members, members, self._context + members, 0.0, members, self.scheduler.kv_usage)
        seconds = self.cost.many_seconds(work, self.steps, count)
        lasting = np.empty(count + 1)
        if self._blocking:
            lasting[0], lasting[1:] = now, self.cost.host + seconds
        else:
            flight = self._flight
            assert flight is not None
            lasting[0] = max(now + self.cost.host, flight.finish)
            np.maximum(self.cost.host, seconds[:-1], out=lasting[1:-1])
            lasting[-1] = 0.0
        ends = np.cumsum(lasting)
        ends = ends[1:] if self._blocking else ends[:-1]
        self._stretch = Stretch(now, ends, seconds)
        self.next = float(ends[-1])

    def _land(self, count: int) -> None:
        """Make the first `count` turns of the stretch; the rest of it is forgotten."""
        stretch, self._stretch = self._stretch, None
        assert stretch is not None
        if not count:
            return
        ends, seconds = stretch.ends[:count], stretch.seconds[:count]
        flight = self._flight
        settling = seconds.tolist() if flight is None else [flight.seconds, *seconds[:-1].tolist()]
        members = len(self.scheduler.decoding)
        leap(self.scheduler, flight.plan if flight is not None else None, count, TOKEN, settling)
        last = float(ends[-1])
        if flight is not None:
            flight.seconds = float(seconds[-1])
            flight.finish = last if self._blocking else last + flight.seconds
            self._free = flight.finish
        gaps = np.empty(count)
        gaps[0] = ends[0] - self._settled
        np.subtract(ends[1:], ends[:-1], out=gaps[1:])
        self.listener.many_tokens(gaps, members, ends)
        self._settled = last
        self.steps += count
        self._context += count * members
        for s in seconds.tolist():  # in this order: the same sum as step by step
            self.busy += s
