"""The engine core: inbox -> schedule -> launch -> settle the previous step -> outbox.

With asynchronous scheduling the host works on step N while the device runs step N + 1:

    host    | schedule N+1 | launch N+1 | settle N | schedule N+2 | launch N+2 | settle N+1 | ...
    device  |------- step N -----------|----------- step N+1 -----------------|---- step N+2 ...

Step N + 1 takes the ids that step N sampled from the device; the host reads them one step late. On a CPU the launch returns
when the step is done, so it is settled at once: nothing runs meanwhile, and its tokens would only come a step later.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import time

from headrace.engine.guided import Guided
from headrace.engine.messages import EngineOutput, EngineRequest, Outputs
from headrace.engine.outputs import OutputBuilder
from headrace.engine.stats import LoopTimes
from headrace.errors import ParameterError
from headrace.lora.core import CoreAdapters, check_adapter
from headrace.sampling.checks import check_vocabulary, checked_ids
from headrace.scheduler.plan import StepPlan, StepResult
from headrace.scheduler.request import Request
from headrace.scheduler.scheduler import Scheduler
from headrace.speculative.speculator import Speculator
from headrace.structured_output.manager import StructuredOutput
from headrace.worker.model_runner import ModelRunner, StepHandle

logger = logging.getLogger(__name__)


class EngineCore:
    """Owns the scheduler and the runner; knows nothing of text, HTTP or processes."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        *,
        vocab_size: int,
        async_scheduling: bool = True,
        debug_checks: bool = False,
        seed: int | None = None,
        structured: StructuredOutput | None = None,
        speculator: Speculator | None = None,
    ):
        self.structured, self.speculator = structured, speculator
        self.scheduler, self.runner, self.vocab_size = scheduler, runner, vocab_size
        self.async_scheduling, self.debug_checks = async_scheduling, debug_checks
        self.times = LoopTimes()
        self.steps = 0
        self._seed, self._seeds_drawn = seed, 0
        self._in_flight: tuple[StepPlan, StepHandle, float] | None = None  # and when its launch began
        self._finished = 0.0  # time.perf_counter() at which the device was done with the step before
        self._news: list[EngineOutput] = []  # of requests that ended outside of a step
        self._outputs = OutputBuilder(scheduler.live, structured)
        self._guided = Guided(structured)
        self.adapters: CoreAdapters | None = None  # None: it takes none

    @property
    def has_work(self) -> bool:
        return bool(self._in_flight or self._news or self.scheduler.has_unfinished or self._guided.compiling)

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises ParameterError or CapacityError if it can never run."""
        if request.id in self.scheduler.live or self._guided.is_waiting(request.id):
            raise ParameterError("request_id", request.id, "an id that no live request has")
        check_vocabulary(request.params, self.vocab_size)
        ids = checked_ids(request.prompt_ids, self.vocab_size)
        self._guided.check(request.params)
        check_adapter(self.adapters, request.params.lora)
        entering = Request(
            id=request.id,
            prompt_ids=ids,
            params=request.params,
            seed=self._new_seed() if request.seed is None else request.seed,
            priority=request.priority,
            cache_salt=request.cache_salt,
            output_ids=list(request.output_ids),
            pooling=request.pooling,
        )
        if request.params.structured_outputs is None:
            self._enter(entering)
        else:
            self._guided.compile(entering)

    def _enter(self, request: Request) -> None:
        self.scheduler.add(request)
        self._guided.entered(request)

    def abort(self, request_id: str) -> None:
        """End a request now, whatever it is doing, and say so. Unknown ids are ignored: what has ended has said so already."""
        request = self.scheduler.abort(request_id)
        self._forget(request_id)
        if request is not None:
            self._news.append(self._outputs.of(request, []))
        elif self._guided.stop_waiting(request_id):
            self._news.append(EngineOutput(request_id, finish_reason="abort"))

    def _forget(self, request_id: str) -> None:
        self._guided.end(request_id)
        self._outputs.prompts.forget(request_id)
        if self.speculator is not None:
            self.speculator.end(request_id)

    def step(self) -> Outputs:
        """One turn of the loop. Returns what happened to requests since the last turn. At most one step settles in it."""
        began = time.perf_counter()
        if self._guided.compiling:
            self._news.extend(self._guided.enter_compiled(self._enter))
        outputs = handle = None
        if self.speculator is not None and self.speculator.active:
            outputs = self._choose_drafts(self.speculator)
        plan = self.scheduler.schedule(self.speculator is not None and self.speculator.has_drafts)
        scheduled = time.perf_counter()
        try:
            if plan is not None:
                handle, outputs = self._launch(plan, outputs)
            launched = time.perf_counter()
            outputs = outputs or self._settle_in_flight()
        except BaseException:  # no memory, a signal's handler
            self._keep(outputs)
            if plan is not None:
                self._give_up(plan)
            raise
        if plan is None and not outputs and self._guided.compiling:
            time.sleep(0.0005)  # nothing to do until a grammar is there
        if plan is not None and handle is not None:
            self._in_flight = (plan, handle, scheduled)
            self.steps += 1
            self.times.num_tokens, self.times.num_seqs = plan.num_tokens, len(plan)
            if not self.async_scheduling:
                outputs = self._settle_in_flight()
        self.times.schedule, self.times.launch = scheduled - began, launched - scheduled
        self.times.recent_host.append(self.times.schedule + self.times.launch + self.times.settle)
        if self.debug_checks:
            self.scheduler.check()
        outputs = outputs or Outputs()
        if self._news:
            outputs.news, self._news = self._news + outputs.news, []
        return outputs

    def _launch(self, plan: StepPlan, outputs: Outputs | None) -> tuple[StepHandle, Outputs | None]:
        if self.speculator is not None and plan.num_drafts:
            self.speculator.fill(plan)
        if self._guided.has_rows_in(plan):
            pending = self.runner.forward(plan)
            self.scheduler.launched(plan)
            settled = None if outputs else self._settle_in_flight()  # the sampler needs these ids on the host
            try:
                return self.runner.sample(pending, *self._guided.of_rows(plan)), outputs or settled
            except BaseException:
                self._keep(settled)
                raise
        handle = self.runner.launch(plan)
        self.scheduler.launched(plan)
        return handle, outputs

    def _keep(self, outputs: Outputs | None) -> None:
        """A step fails after it has settled another: that one's news come with the next."""
        self._news += outputs or ()

    def _give_up(self, plan: StepPlan) -> None:
        """Whatever the device has done of a plan is lost. Its requests begin again with what they have: counted randomness
        and the replayed ids lead to the same tokens."""
        self._keep(self._settle_in_flight())
        count = plan.num_decodes
        nothing = StepResult([0] * count, [1] * count + [0] * (len(plan) - count), frozenset(range(len(plan))))
        settled = self.scheduler.settle(plan, nothing)
        if self.speculator is not None:
            self.speculator.settled(plan, nothing, self.scheduler.live)
        for request, _ in settled.gains:
            if self.speculator is not None:
                self.speculator.end(request.id)
            self._outputs.prompts.forget(request.id)
            self._enter(request.again())

    def idle(self) -> bool:
        """Nothing runs: use the time. False if there is nothing to use it for. What fails here nobody has asked for yet."""
        try:
            return self.runner.idle()
        except Exception:
            logger.exception("what was prepared in idle time failed; the rest of it is left out")
            self.runner.leave_preparations()
            return False

    def close(self) -> None:
        """Wait for what is in flight and let go of the runner and of drafts; the core cannot step afterwards."""
        try:
            self._settle_in_flight()
        finally:
            del self.runner
            self.speculator = None
            self._guided.close()

    def _choose_drafts(self, speculator: Speculator) -> Outputs | None:
        """Let the next step have drafts."""
        outputs = None
        if self._in_flight is not None and speculator.settles_first(self._in_flight[0], self.scheduler.decoding):
            outputs = self._settle_in_flight()
        speculator.choose(self.scheduler.decoding)
        return outputs

    def _settle_in_flight(self) -> Outputs | None:
        if self._in_flight is None:
            return None
        plan, handle, launched = self._in_flight
        began = time.perf_counter()
        result = handle.result()
        self._in_flight = None  # not before: who is interrupted while it waits reads it later
        waited = time.perf_counter()
        seconds = handle.finished - max(launched, self._finished)
        self.scheduler.took(plan, seconds)
        self._finished = handle.finished
        if result.prompt_logprobs or result.pooled:
            self._outputs.prompts.keep(plan, result)
        settled = self.scheduler.settle(plan, result)
        outputs = self._outputs.of_step(plan, settled, result)
        if self.speculator is not None:
            self.speculator.observe(self.times.schedule + self.times.launch, seconds)
            self.speculator.settled(plan, result, self.scheduler.live)
        for request, _ in settled.gains:
            if request.finish_reason is not None:
                self._forget(request.id)
        self._guided.settled()
        self.times.wait, self.times.settle = waited - began, time.perf_counter() - waited
        return outputs

    def _new_seed(self) -> int:
        if self._seed is None:
            return secrets.randbits(63)
        self._seeds_drawn += 1
        digest = hashlib.blake2b(f"{self._seed} {self._seeds_drawn}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1
