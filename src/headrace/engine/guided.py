"""Requests whose sampling needs the ids before it on the host: users' logits processors, and grammars."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from headrace.engine.messages import EngineOutput
from headrace.engine.outputs import refused
from headrace.errors import HeadraceError, ParameterError
from headrace.extras import without_grammars
from headrace.sampling.params import SamplingParams
from headrace.sampling.penalties import UserProcessor
from headrace.scheduler.plan import StepPlan
from headrace.scheduler.request import Request
from headrace.structured_output.manager import GrammarMasks, StructuredOutput, follow


class Guided:
    """Those of one core. Who has a grammar enters when it is compiled; `structured` is None where no grammars can be had."""

    def __init__(self, structured: StructuredOutput | None):
        self._structured = structured
        self._running: dict[str, Request] = {}

    @property
    def compiling(self) -> bool:
        return self._structured is not None and self._structured.compiling

    def is_waiting(self, request_id: str) -> bool:
        """Whether this one's grammar is being compiled."""
        return self._structured is not None and any(waiting.id == request_id for waiting in self._structured.waiting)

    def check(self, params: SamplingParams) -> None:
        """Raises ParameterError for a grammar that cannot be had here."""
        spec = params.structured_outputs
        if spec is None:
            return
        if self._structured is None:
            raise ParameterError("structured_outputs", spec.kind, f"nothing: {without_grammars()}")
        if not params.eos_token_ids:
            raise ParameterError("structured_outputs", spec.kind, "nothing: this model has no end token")

    def compile(self, request: Request) -> None:
        """Of one that `check` has let pass."""
        assert self._structured is not None and request.params.structured_outputs is not None
        self._structured.compile(request.params.structured_outputs, request, request.params.eos_token_ids)

    def enter_compiled(self, enter: Callable[[Request], None]) -> Iterator[EngineOutput]:
        """Those whose grammar has been compiled enter; a failure is that request's alone: yields the answers to such."""
        assert self._structured is not None
        for request, found in self._structured.compiled():
            try:
                if isinstance(found, HeadraceError):
                    raise found
                follow(found, request.output_ids)
                enter(request)
            except HeadraceError as e:
                yield refused(request.id, e)
            else:
                self._structured.start(request.id, found, len(request.output_ids))

    def entered(self, request: Request) -> None:
        if request.params.logits_processors or request.params.structured_outputs:
            self._running[request.id] = request

    def end(self, request_id: str) -> None:
        self._running.pop(request_id, None)
        if self._structured is not None:
            self._structured.end(request_id)

    def stop_waiting(self, request_id: str) -> bool:
        """Forget one whose grammar is being compiled; whether there was one."""
        return self._structured is not None and bool(self._structured.forget_jobs(lambda waiting: waiting.id == request_id))

    def has_rows_in(self, plan: StepPlan) -> bool:
        return bool(self._running) and any(plan.ids[i] in self._running for i in plan.samples.nonzero()[0].tolist())

    def of_rows(self, plan: StepPlan) -> tuple[GrammarMasks | None, list[UserProcessor]]:
        """The masks and users' functions of the rows of a plan that have them; all ids before it are settled."""
        users, constrained, row = [], [], 0
        for i, (name, count) in enumerate(zip(plan.ids, plan.num_sampled.tolist(), strict=True)):
            request, guesses = self._running.get(name), plan.guesses.get(i, [])
            if request is not None and count:
                if processors := request.params.logits_processors:
                    users.append(UserProcessor(row, processors, [*request.output_ids, *guesses], request.failed))
                if request.params.structured_outputs:
                    constrained.append((row, name, guesses))
            row += count
        return (self._structured.masks(constrained) if self._structured is not None and constrained else None), users

    def settled(self) -> None:
        """Lead the matchers past the ids that have come."""
        if self._structured is not None:
            for request in self._running.values():
                self._structured.follow(request.id, request.output_ids)

    def close(self) -> None:
        if self._structured is not None:
            self._structured.close()
