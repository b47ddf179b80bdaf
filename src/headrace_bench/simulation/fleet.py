"""A front and its cores in virtual time: a heap of arrivals and turns, the real admission limits and the real balancer.

Large fleets have several fronts, each with its share of cores and of the traffic, as they would in a data centre: fronts know
nothing of each other, so each is simulated alone, in any process.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import Any, NamedTuple

import numpy as np

from headrace.api.config import ServerConfig
from headrace.api.errors import ApiError
from headrace.api.limits import Limits as QueueLimits
from headrace.api.limits import Ticket
from headrace.cache.recorded_tree import RecordedTree
from headrace.distributed.balancers import balancer_named
from headrace.engine.interface import Balancer, EngineStatus
from headrace.engine.slot import outstanding
from headrace.errors import HeadraceError
from headrace.sampling.params import SamplingParams
from headrace.scheduler.admission import token_limit
from headrace.scheduler.config import Limits
from headrace.scheduler.request import Request
from headrace_bench.simulation.core import END, Core, Job
from headrace_bench.simulation.cost import StepCost
from headrace_bench.simulation.figures import Outcome, Record
from headrace_bench.simulation.traffic import Ask, Traffic, Turn, ids_of, prompt_of

ARRIVAL, TURN = 0, 1  # at equal times a request comes before the turn that takes it begins


@dataclass(frozen=True, slots=True)
class Setup:
    """One front with its cores."""

    limits: Limits
    cost: StepCost
    replicas: int = 1
    router: str = "prefix"
    overlap: bool = True  # asynchronous scheduling
    front_seconds: float = 0.0  # of a request outside of its core: HTTP, tokenizing, messages
    max_tokens: int | None = None  # what clients ask for; None: exactly what they get
    server: ServerConfig = field(default_factory=ServerConfig)
    leaps: bool = True
    checks: bool = False  # the block accounting is checked after every turn
    goodput: dict[str, float] = field(default_factory=dict)  # limits in milliseconds; ends early where less than
    share: float = 0.0  # of the requests can keep them


class Pending(NamedTuple):
    """A request that is not yet with a core."""

    prompt: array
    output: int
    turns: tuple[Turn, ...]
    start: float
    is_open: bool = False  # it has the place of one that has ended, of --max-concurrency


def simulate(setup: Setup, traffic: Traffic) -> Outcome:
    """Run all of the traffic to its end."""
    return Fleet(setup, traffic).run()


class Fleet:
    """Also the `Listener` of its cores."""

    def __init__(self, setup: Setup, traffic: Traffic):
        self.setup, self.traffic = setup, traffic
        limits = setup.limits
        if setup.router == "prefix" and setup.replicas > 1 and limits.enable_prefix_caching:
            limits = replace(limits, kv_cache_events="hashes")
        self.limits = limits
        self.balancer: Balancer | None = balancer_named(setup.router, traffic.seed) if setup.replicas > 1 else None
        self.cores: list[Core] = []
        self.loads: dict[int, int] = {}  # tokens outstanding, by core
        for number in range(setup.replicas):
            self.cores.append(Core(number, limits, setup.cost, self, overlap=setup.overlap, leaps=setup.leaps))
            self.loads[number] = 0
            if self.balancer is not None:
                self.balancer.added(number)
        self.record = Record()
        self.queue = QueueLimits(_Engine(self), setup.server)  # type: ignore[arg-type]
        self._tickets: dict[str, tuple[Ticket, int]] = {}  # and the load that it is for its core
        self._heap: list[tuple[float, int, int, Any]] = []
        self._arrivals: Iterator[tuple[float, Ask]] = iter(())
        self._held: deque[Pending] = deque()  # for --max-concurrency
        self._num_open = self._num_made = 0
        self._num_missed, self._most_missed = 0, math.inf
        self._params: dict[int, SamplingParams] = {}

    # ---------------------------------------------------------------- the loop

    def run(self) -> Outcome:
        asks = self.traffic.arrivals()
        if self.setup.goodput:
            self._most_missed = (1 - self.setup.share) * sum(1 + len(ask.turns) for _, ask in asks)
        self._arrivals = iter(asks)
        self._next_arrival()
        while self._heap and self._num_missed <= self._most_missed:
            now, kind, _, what = heappop(self._heap)
            if kind == ARRIVAL:
                if isinstance(what, Ask):
                    self._next_arrival()
                    what = self._pending(what, now)
                self._arrive(what, now)
            elif what.next == now:
                self._turn(what, now)
        outcome = self.record.outcome(self.cores)
        outcome.arriving = asks[-1][0] if asks else 0.0
        if self._heap:
            outcome.expected = sum(1 + len(ask.turns) for _, ask in asks)
        return outcome

    def _turn(self, core: Core, now: float) -> None:
        core.turn(now)
        if self.setup.checks:
            core.scheduler.check()
        tree = core.scheduler.tree
        if self.balancer is not None and isinstance(tree, RecordedTree) and (events := tree.events()) is not None:
            self.balancer.blocks(core.number, events)
        if core.next is not None:
            heappush(self._heap, (core.next, TURN, core.number, core))

    # ---------------------------------------------------------------- requests

    def _next_arrival(self) -> None:
        found = next(self._arrivals, None)
        if found is not None:
            self._push(found[0], found[1])

    def _push(self, at: float, what: Ask | Pending) -> None:
        self._num_made += 1
        heappush(self._heap, (at + self.setup.front_seconds, ARRIVAL, self._num_made, what))

    def _pending(self, ask: Ask, now: float) -> Pending:
        prompt = prompt_of(ask, f"{self.traffic.seed}/{self._num_made}")
        return Pending(prompt, ask.output, ask.turns, now - self.setup.front_seconds)

    def _arrive(self, pending: Pending, now: float) -> None:
        most = self.traffic.load.max_concurrency
        if most is not None and self._num_open >= most and not pending.is_open:
            self._held.append(pending)
            return
        self._num_made += 1
        request = Request(str(self._num_made), pending.prompt, self._params_for(pending.output), seed=0, arrival=now)
        try:
            token_limit(request, self.limits)
            ticket = self.queue.take(1, len(request.prompt_ids))
        except (HeadraceError, ApiError) as e:
            self.record.refused(e)
            self._num_missed += 1
            if pending.is_open:
                self._close(now)
            return
        self._num_open += not pending.is_open
        number = 0 if self.balancer is None else self.balancer.choose(request.prompt_ids, "", self.loads)
        load = outstanding(request, begun=False)  # type: ignore[arg-type]
        self.loads[number] += load
        self._tickets[request.id] = ticket, load
        core = self.cores[number]
        before = core.next
        core.add(Job(request, pending.start, pending.output, pending.turns, core=number), now)
        if core.next is not None and core.next != before:
            heappush(self._heap, (core.next, TURN, number, core))

    def _params_for(self, output: int) -> SamplingParams:
        """As clients ask for so many tokens; with max_tokens the answer ends by itself before."""
        most = output if self.setup.max_tokens is None else max(output, self.setup.max_tokens)
        found = self._params.get(most)
        if found is None:
            params = SamplingParams(
                max_tokens=most, temperature=0.0, ignore_eos=self.setup.max_tokens is None, eos_token_ids=[END]
            )
            found = self._params[most] = params
        return found

    # ---------------------------------------------------------------- told by the cores

    def tokens(self, gap: float, count: int, at: float) -> None:
        self.record.tokens(gap, count, at)

    def many_tokens(self, gaps: np.ndarray, count: int, at: np.ndarray) -> None:
        self.record.many_tokens(gaps, count, at)

    def first_token(self, job: Job, at: float) -> None:
        self.record.first(at)
        job.missed = 1e3 * (at - job.start) > self.setup.goodput.get("ttft", math.inf)
        self._num_missed += job.missed
        ticket, load = self._tickets[job.request.id]
        ticket.started(len(job.request.prompt_ids))
        begun = outstanding(job.request, begun=True)  # type: ignore[arg-type]
        self.loads[job.core] += begun - load
        self._tickets[job.request.id] = ticket, begun

    def ended(self, job: Job, at: float) -> None:
        ticket, load = self._tickets.pop(job.request.id)
        ticket.ended()
        self.loads[job.core] -= load
        self.record.ended(job, at)
        if not job.missed and self.setup.goodput:
            self._num_missed += self._misses(job, at)
        if job.turns:
            self._go_on(job, at)
        self._close(at)

    def _close(self, at: float) -> None:
        """One is no longer in progress: the next of those that are held is sent."""
        if self._held:
            self._push(at, self._held.popleft()._replace(start=at, is_open=True))
        else:
            self._num_open -= 1

    def _misses(self, job: Job, at: float) -> bool:
        """One of the limits but that of the first token."""
        limits, later = self.setup.goodput, len(job.request.output_ids) - 1
        slow = later > 0 and 1e3 * (at - job.first) / later > limits.get("tpot", math.inf)
        return slow or 1e3 * (at - job.start) > limits.get("e2el", math.inf)

    def _go_on(self, job: Job, at: float) -> None:
        """The next message of a conversation: all that was said before, and something new."""
        turn, request = job.turns[0], job.request
        prompt = request.known_ids() + array("i", ids_of(f"{self.traffic.seed}/{request.id}/{len(job.turns)}", turn.own))
        if len(prompt) + turn.output > self.limits.max_len:
            return  # nobody goes on in a context that is full
        self._push(at + turn.after, Pending(prompt, turn.output, job.turns[1:], at + turn.after))


class _Engine:
    """The engine as the admission limits ask it."""

    def __init__(self, fleet: Fleet):
        self._fleet, self.config = fleet, _Seats(fleet.limits.max_num_seqs)

    def status(self) -> EngineStatus:
        return EngineStatus(
            loaded=True, alive=True, draining=False, progressing=True, num_running=self._fleet._num_open, num_waiting=0,
            waiting_tokens=0, drain_rate=0.0, num_cores=self._fleet.setup.replicas,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Seats:
    max_num_seqs: int
