"""What a core shows of itself while somebody looks: its steps, requests, blocks and prefix index, 20 times a second at most.

The documents that it makes are described in api/glass.py, which sends them on as they are: JSON is made here, in the process
that has the numbers, once for all who look.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

import msgspec

from headrace.engine.core import EngineCore
from headrace.engine.wire import Glimpse
from headrace.scheduler.plan import StepPlan, StepResult
from headrace.scheduler.request import Request, Status
from headrace.scheduler.scheduler import Settled
from headrace.scheduler.watched import Holdings, WaitingReason, WatchedScheduler, rows_of, verified_by
from headrace.worker.reading import Reading

logger = logging.getLogger(__name__)
FRAME_SECONDS = 0.05
MOST_STEPS = 512  # in a frame; a core that makes more in FRAME_SECONDS sends it earlier


def harmless(method: Callable[..., None]) -> Callable[..., None]:
    """Who watches must not disturb: what fails here is told to the log, and nothing more is shown."""

    @wraps(method)
    def guarded(self: GlassObserver, *args: Any) -> None:
        if not self.broken:
            try:
                method(self, *args)
            except Exception:
                self.fail()

    return guarded


class GlassObserver:
    """Looks at a core from the moment it is made until `close`; asked for what it has seen once in each turn of the loop."""

    def __init__(self, core: EngineCore, reading: Reading | None = None):
        self._core, self._plain, self._reading = core, core.scheduler, reading
        scheduler = core.scheduler
        self.broken = False
        self.holdings = Holdings(scheduler)
        self._reason = WaitingReason(scheduler)
        self._encoder = msgspec.json.Encoder()
        self._version = -1  # of the plain decodes that were told last
        self._decodes: list[int] = []  # their slots
        self._step = scheduler.num_steps  # the number of the last step
        self._full = False
        self._wanted = True  # a snapshot
        self._due = 0.0
        self._steps: list[list[Any]] = []
        self._requests: list[list[Any]] = []
        self._planned: list[Any] | None = None  # the step of this turn, until its times are known
        self._left: list[int] = []  # since the last step
        self._verified: list[int] = []
        self._device = 0.0  # seconds of the step that settled last
        self._head: tuple[str, str] | None = None
        core.scheduler = WatchedScheduler(scheduler, self)

    def close(self) -> None:
        self._core.scheduler = self._plain

    def want_snapshot(self) -> None:
        self._wanted, self._due = True, 0.0

    def fail(self) -> None:
        logger.exception("what shows the engine failed, and shows nothing more until somebody looks anew")
        self.broken = True

    # ---------------------------------------------------------------- told by the scheduler

    @harmless
    def arrived(self, request: Request) -> None:
        known = request.num_known
        self._tell("arrived", request, len(request.prompt_ids), request.priority, known - len(request.prompt_ids))

    @harmless
    def aborted(self, request: Request) -> None:
        self._ended(request)
        self._departures()

    @harmless
    def scheduled(self, plan: StepPlan | None) -> None:
        self._time()
        if plan is None:
            self._departures()
            return
        self._departures(everyone=bool(plan.admitted))
        taken: list[int] = []
        for admitted, request in self._admitted(plan):
            slot, blocks = admitted.slot, admitted.block_ids
            if (before := self.holdings.replaced(slot, request)) is not None:
                self._leaves(slot, before)
            self.holdings.admit(slot, request, blocks, admitted.num_cached // self._plain.limits.block_size)
            self._tell("admitted", request, slot, admitted.num_cached, len(admitted.token_ids))
            taken += (slot, 0, len(blocks), *blocks)
        for new in plan.new_blocks:
            if new.slot in self.holdings.by_slot:  # else preempted again by this very step
                self.holdings.grow(new.slot, new.blocks)
                taken += (new.slot, new.column, len(new.blocks), *new.blocks)
        decodes = None
        if plan.version != self._version:
            self._version = plan.version
            self._decodes = decodes = plan.slots[: plan.num_decodes].tolist()
        self._full = plan.num_tokens >= self._plain.limits.max_num_batched_tokens
        self._planned = [plan.step, plan.num_decodes, decodes, rows_of(plan), self._left, taken, self._verified]
        self._left, self._verified = [], []
        self._step = plan.step

    @harmless
    def settled(self, plan: StepPlan, result: StepResult, settled: Settled) -> None:
        self._verified += verified_by(plan, result)
        for request, ids in settled.gains:
            if ids and len(ids) == len(request.output_ids):
                self._tell("first", request)
            if request.finish_reason is not None:
                self._ended(request)
        self._departures()

    @harmless
    def took(self, seconds: float) -> None:
        self._device = seconds

    def _admitted(self, plan: StepPlan) -> list[tuple[Any, Request]]:
        """With the requests; one that this step has preempted again has no slot."""
        if not plan.admitted:
            return []
        begin = plan.num_decodes
        ids = dict(zip(plan.slots[begin:].tolist(), plan.ids[begin:], strict=True))
        live = self._plain.live
        return [(a, request) for a in plan.admitted if (request := live.get(ids[a.slot])) and request.slot == a.slot]

    def _ended(self, request: Request) -> None:
        self._tell("ended", request, request.finish_reason, len(request.output_ids))

    def _departures(self, everyone: bool = False) -> None:
        for slot, request in self.holdings.departed(everyone):
            self._leaves(slot, request)

    def _leaves(self, slot: int, request: Request) -> None:
        self._left.append(slot)
        if not request.finished:
            self._tell("preempted", request, request.num_preemptions)

    def _tell(self, what: str, request: Request, *facts: Any) -> None:
        self._requests.append([what, self._step, round(time.monotonic(), 4), request.id, *facts])

    # ---------------------------------------------------------------- asked by the loop

    def turned(self) -> Glimpse | None:
        """After each turn of the loop: what there is to show, when it is time to."""
        if self.broken:
            return None
        try:
            self._time()
            now = time.monotonic()
            if now < self._due and len(self._steps) < MOST_STEPS:
                return None
            return self._glimpse(now)
        except Exception:
            self.fail()
            return None

    def _time(self) -> None:
        """The turn of a step is over, and its times are known."""
        if self._planned is None:
            return
        (step, *rest), self._planned, times = self._planned, None, self._core.times
        parts = (times.schedule, times.launch, times.wait, times.settle, self._device)
        began = time.monotonic() - sum(parts[:4])
        self._steps.append([step, round(began, 4), [round(1e6 * seconds) for seconds in parts], *rest])

    def _glimpse(self, now: float) -> Glimpse | None:
        head = self._reason.words(self._full)
        entered, gone = self.holdings.index_changes()
        seen = self._steps or self._requests or self._left or self._verified or entered or gone
        if not (seen or self._wanted or head != self._head):
            return None
        self._due, self._head = now + FRAME_SECONDS, head
        shown = Glimpse()
        if self._requests:
            shown.requests = self._encoder.encode({"events": self._requests})
            self._requests = []
        if self._left or self._verified:  # what a turn without a step brought: a row of its own, with nothing scheduled
            self._steps.append([self._step, round(now, 4), [], 0, None, [], self._left, [], self._verified])
            self._left, self._verified = [], []
        document = {"now": round(now, 4), "steps": self._steps, "entered": entered, "gone": gone, "head": head}
        shown.steps = self._encoder.encode(document)
        self._steps = []
        if self._wanted:
            self._wanted = False
            shown.snapshot = self._encoder.encode(self.snapshot(now, head))
        return shown

    def snapshot(self, now: float, head: tuple[str, str] | None = None) -> dict[str, Any]:
        limits, held = self._plain.limits, self.holdings.by_slot
        return {
            "now": round(now, 4), "n": self._step, "block_size": limits.block_size, "num_blocks": limits.num_blocks,
            "max_num_seqs": limits.max_num_seqs, "budget": limits.max_num_batched_tokens, "policy": limits.policy,
            "decodes": self._decodes,
            "requests": [_described(request) for request in self._known()],
            "tables": [[slot, *h.blocks] for slot, h in held.items()],
            "nodes": self.holdings.nodes(),
            "head": head, "reading": self._read(),
        }  # fmt: skip

    def _read(self) -> tuple[int, int, int] | None:
        """What a step reads at least, and the machine's rate: measured when somebody looks who disturbs nobody by it."""
        if self._reading is None:
            return None
        if not self._plain.live:
            self._reading.measure()
        rate = round(self._reading.rate)
        return (self._reading.weights, self._reading.token, rate) if rate else None

    def _known(self) -> list[Request]:
        """All that wait or hold a slot, also those who have ended and whose row is under way."""
        waiting = [request for request in self._plain.live.values() if request.status is Status.WAITING]
        return [held.request for held in self.holdings.by_slot.values()] + waiting


def _described(request: Request) -> list[Any]:
    return [
        request.id, len(request.prompt_ids), request.priority, round(request.arrival, 4), request.slot, request.num_cached,
        request.num_scheduled, request.num_known, round(request.first_scheduled, 4), round(request.first_token, 4),
        request.num_preemptions, request.finish_reason, len(request.output_ids),
    ]  # fmt: skip
