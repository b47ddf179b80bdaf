"""The engine core: inbox -> schedule -> launch -> settle the previous step -> outbox.

With asynchronous scheduling the host works on step N while the device runs step N + 1:

    host    | schedule N+1 | launch N+1 | settle N | schedule N+2 | launch N+2 | settle N+1 | ...
    device  |------- step N -----------|----------- step N+1 -----------------|---- step N+2 ...

Step N + 1 takes the ids that step N sampled from the device; the host reads them one step late. On a CPU the launch returns
when the step is done and the same code runs one after the other.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from headrace.engine.inputs import checked_ids
from headrace.engine.messages import EngineOutput, EngineRequest, Outputs, RequestTimes, TokenLogprobs
from headrace.errors import HeadraceError, ParameterError
from headrace.extras import without_grammars
from headrace.sampling.params import SamplingParams
from headrace.scheduler.plan import Chunk, StepPlan
from headrace.scheduler.request import Request
from headrace.scheduler.scheduler import Scheduler, Settled
from headrace.speculative.speculator import Speculator
from headrace.structured_output.manager import GrammarMasks, StructuredOutput, follow
from headrace.worker.model_runner import ModelRunner, StepHandle, StepResult

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class StepTimes:
    """Seconds of the last step's parts, for metrics and traces."""

    schedule: float = 0.0
    launch: float = 0.0
    wait: float = 0.0
    settle: float = 0.0
    num_tokens: int = 0
    num_seqs: int = 0
    recent_host: deque[float] = field(default_factory=lambda: deque(maxlen=4096))  # without the waits, a step each


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
        self.times = StepTimes()
        self.steps = 0
        self._seed, self._seeds_drawn = seed, 0
        self._in_flight: tuple[StepPlan, StepHandle, float] | None = None  # and when its launch began
        self._finished = 0.0  # time.perf_counter() at which the device was done with the step before
        self._news: list[EngineOutput] = []  # of requests that ended outside of a step
        self._prompt_logprobs: dict[str, list[TokenLogprobs | None]] = {}
        self._pooled: dict[str, np.ndarray] = {}
        self._looked_at: list[Request] = []  # decodes, and
        self._is_picky = False  # whether the sampling of one of them needs host ids

    @property
    def has_work(self) -> bool:
        return bool(self._in_flight or self._news or self.scheduler.has_unfinished or self._compiling)

    @property
    def _compiling(self) -> bool:
        return self.structured is not None and self.structured.compiling

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises ParameterError or CapacityError if it can never run."""
        compiling = self.structured.waiting if self.structured is not None else []
        if self.scheduler.has(request.id) or any(waiting.id == request.id for waiting in compiling):
            raise ParameterError("request_id", request.id, "an id that no live request has")
        request.params.check_vocabulary(self.vocab_size)
        ids = checked_ids(request.prompt_ids, self.vocab_size)
        wish = request.params.structured_outputs
        if wish is None:
            self.scheduler.add(self._request(request, ids))
        elif self.structured is None:
            raise ParameterError("structured_outputs", wish.kind, f"nothing: {without_grammars()}")
        elif not request.params.eos_token_ids:
            raise ParameterError("structured_outputs", wish.kind, "nothing: this model has no end token")
        else:
            self.structured.compile(wish, self._request(request, ids))

    def _request(self, request: EngineRequest, prompt_ids: array) -> Request:
        return Request(
            id=request.id,
            prompt_ids=prompt_ids,
            params=request.params,
            seed=self._new_seed() if request.seed is None else request.seed,
            priority=request.priority,
            cache_salt=request.cache_salt,
            output_ids=list(request.output_ids),
            pooling=request.pooling,
        )

    def abort(self, request_id: str) -> None:
        """End a request now, whatever it is doing, and say so. Unknown ids are ignored: what has ended has said so already."""
        request = self.scheduler.abort(request_id)
        self._forget(request_id)
        if request is not None:
            self._news.append(self._output(request, []))
        elif self.structured is not None and self.structured.forget_jobs(lambda waiting: waiting.id == request_id):
            self._news.append(EngineOutput(request_id, finish_reason="abort"))

    def _forget(self, request_id: str) -> None:
        if self.speculator is not None:
            self.speculator.end(request_id)
        if self.structured is not None:
            self.structured.end(request_id)

    def step(self) -> Outputs:
        """One turn of the loop. Returns what happened to requests since the last turn. At most one step settles in it."""
        began = time.perf_counter()
        if self._compiling:
            self._add_compiled()
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
        if plan is None and not outputs and self._compiling:
            time.sleep(0.0005)  # nothing to do until a grammar is there
        if plan is not None and handle is not None:
            self._in_flight = (plan, handle, scheduled)
            self.steps += 1
            self.times.num_tokens, self.times.num_seqs = plan.num_tokens, plan.num_seqs
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
        if self._needs_host_ids(plan):
            pending = self.runner.forward(plan)
            self.scheduler.launched(plan)
            settled = None if outputs else self._settle_in_flight()  # the sampler needs these ids on the host
            try:
                return self.runner.sample(pending, self._masks(plan, pending.chunks)), outputs or settled
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
        nothing: list[list[int]] = [[] for _ in plan.others]
        settled = self.scheduler.settle(plan, [0] * len(plan.decodes), nothing, frozenset(range(plan.num_seqs)))
        if self.speculator is not None:
            self.speculator.settled(plan, nothing)
        for request, _ in settled.others:
            if self.speculator is not None:
                self.speculator.end(request.id)
            self._prompt_logprobs.pop(request.id, None)
            self._pooled.pop(request.id, None)
            self.scheduler.add(request.again())

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
        self._settle_in_flight()
        del self.runner
        self.speculator = None
        if self.structured is not None:
            self.structured.close()

    def _choose_drafts(self, speculator: Speculator) -> Outputs | None:
        """Let the next step have drafts."""
        outputs = None
        if self._in_flight is not None and speculator.settles_first(self._in_flight[0], self.scheduler.decoding):
            outputs = self._settle_in_flight()
        speculator.choose(self.scheduler.decoding)
        return outputs

    def _add_compiled(self) -> None:
        """Requests whose grammar has been compiled enter the scheduler; a failure is that request's alone."""
        assert self.structured is not None
        for request, found in self.structured.compiled():
            try:
                if isinstance(found, HeadraceError):
                    raise found
                follow(found, request.output_ids)
                self.scheduler.add(request)
            except HeadraceError as e:
                self._news.append(refused(request.id, e))
            else:
                self.structured.start(request.id, found)

    def _needs_host_ids(self, plan: StepPlan) -> bool:
        decoding = plan.decodes.requests
        if decoding is not self._looked_at:
            self._looked_at, self._is_picky = decoding, any(needs_host_ids(r.params) for r in decoding)
        return self._is_picky or any(c.samples and needs_host_ids(c.request.params) for c in plan.others)

    def _masks(self, plan: StepPlan, chunks: list[Chunk]) -> GrammarMasks | None:
        """For the decodes of a plan and its other chunks that sample."""
        if self.structured is None:
            return None
        rows: list[tuple[int, str, Sequence[int]]] = []
        rows += [(row, name, ()) for row, name in enumerate(plan.decodes.ids) if self.structured.has(name)]
        row = len(plan.decodes)
        for c in chunks:
            if self.structured.has(c.request.id):
                rows.append((row, c.request.id, c.drafts))
            row += c.num_sampled
        return self.structured.masks(rows) if rows else None

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
        for found in result.prompt_logprobs:
            self._keep_prompt_logprobs(*found)
        for chunk, vector in result.pooled:
            self._keep_pooled(chunk, vector)
        settled = self.scheduler.settle(plan, result.tokens, result.others, result.failed)
        outputs = self._outputs(plan, settled, result)
        if self.speculator is not None:
            self.speculator.observe(self.times.schedule + self.times.launch, seconds)
            self.speculator.settled(plan, result.others)
        if self.structured is not None and self.structured.has_any:
            for name, token in zip(settled.ids, settled.tokens, strict=True):
                self.structured.accept(name, [token])
            for request, ids in settled.others:
                if ids and request.finish_reason is None:
                    self.structured.accept(request.id, ids)
        for request, _ in settled.others:
            if request.finish_reason is not None:
                self._forget(request.id)
        self.times.wait, self.times.settle = waited - began, time.perf_counter() - waited
        return outputs

    def _outputs(self, plan: StepPlan, settled: Settled, result: StepResult) -> Outputs:
        if not result.logprobs:
            return Outputs(settled.ids, settled.tokens, [self._output(request, ids) for request, ids in settled.others])
        rows = {chunk.request: row for row, chunk in enumerate(plan.chunks)}
        requests = {request.id: request for request in plan.decodes.requests}
        plain = [(requests[name], [token]) for name, token in zip(settled.ids, settled.tokens, strict=True)]
        return Outputs(news=[self._output(request, ids, result, rows.get(request)) for request, ids in plain + settled.others])

    def _output(
        self, request: Request, ids: list[int], result: StepResult | None = None, row: int | None = None
    ) -> EngineOutput:
        now = time.monotonic()
        if ids and not request.first_token:
            request.first_token = now
        out = EngineOutput(request.id, ids, finish_reason=request.finish_reason, stop_reason=request.stop_reason)
        out.num_cached_tokens = request.num_cached
        if result is not None and ids and row in result.logprobs:
            rows = result.logprobs[row][: len(ids)]
            out.logprobs = [TokenLogprobs(top_ids.tolist(), top.tolist(), int(rank)) for top_ids, top, rank in rows]
        if request.params.prompt_logprobs is not None and (request.finish_reason or len(request.output_ids) <= len(ids)):
            found = self._prompt_logprobs.pop(request.id, None)
            if len(request.output_ids) == len(ids) > 0:
                out.prompt_logprobs = found or [None]  # a prompt of one token has no other
        if request.finish_reason is not None:
            first = request.first_token or now
            queue = (request.first_scheduled or now) - request.arrival
            out.times = RequestTimes(queue, first - request.arrival, now - request.arrival)
            if request.finish_reason == "error":
                out.error, out.exception = self._why_failed(request), request.exception
                logger.error("request %s failed after %d tokens: %s", request.id, len(request.output_ids), out.error)
            pooled = self._pooled.pop(request.id, None)
            if pooled is not None and request.finish_reason == "stop":
                out.embedding = self._normalized(request, pooled)
        return out

    def _why_failed(self, request: Request) -> str:
        why = None if self.structured is None else self.structured.error(request.id)
        if why is not None:
            return f"the output cannot follow its grammar any further: {why}"
        if request.exception is not None:
            return f"a logits processor failed: {request.exception!r}"
        limits = request.params.structured_outputs or request.params.allowed_token_ids or request.params.bad_word_ids
        return "the model produced NaN logits for this request" + (", or its limits left no token" if limits else "")

    def _keep_prompt_logprobs(self, chunk, ids: np.ndarray, logprobs: np.ndarray, ranks: np.ndarray) -> None:
        if chunk.request.finish_reason is not None:
            return
        kept = self._prompt_logprobs.setdefault(chunk.request.id, [None])
        del kept[chunk.start + 1 :]  # computed again after a preemption
        kept.extend(TokenLogprobs(i, p, r) for i, p, r in zip(ids.tolist(), logprobs.tolist(), ranks.tolist(), strict=True))

    def _keep_pooled(self, chunk, vector: np.ndarray) -> None:
        if chunk.request.finish_reason is None:
            before = 0.0 if chunk.start == 0 or chunk.request.pooling == "last" else self._pooled[chunk.request.id]
            self._pooled[chunk.request.id] = before + vector

    @staticmethod
    def _normalized(request: Request, pooled: np.ndarray) -> list[float]:
        vector = pooled / (len(request.prompt_ids) if request.pooling == "mean" else 1)
        return (vector / max(float(np.linalg.norm(vector)), 1e-12)).tolist()

    def _new_seed(self) -> int:
        if self._seed is None:
            return secrets.randbits(63)
        self._seeds_drawn += 1
        digest = hashlib.blake2b(f"{self._seed} {self._seeds_drawn}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1


def needs_host_ids(params: SamplingParams) -> bool:
    """Whether sampling needs the ids before it on the host."""
    return bool(params.logits_processors or params.structured_outputs)


def refused(request_id: str, error: HeadraceError) -> EngineOutput:
    """The answer to a request that `add` refused, for callers that cannot catch its exception."""
    output = EngineOutput(request_id, finish_reason="error", error=str(error))
    if isinstance(error, ParameterError):
        output.refused = (error.field, str(error.value), error.allowed)
    return output
