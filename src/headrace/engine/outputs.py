"""What a settled step means for those who asked: news of requests, with logprobs, embeddings, times and reasons."""

from __future__ import annotations

import logging
import time

import numpy as np

from headrace.engine.messages import EngineOutput, Outputs, RequestTimes
from headrace.errors import HeadraceError, ParameterError
from headrace.scheduler.plan import StepPlan, StepResult, TokenLogprobs
from headrace.scheduler.request import Request
from headrace.scheduler.scheduler import Gain, Settled
from headrace.structured_output.manager import StructuredOutput

logger = logging.getLogger(__name__)


class OutputBuilder:
    """Keeps what comes in pieces (logprobs and embeddings of prompts) until it can be told. `live`: requests by id."""

    def __init__(self, live: dict[str, Request], structured: StructuredOutput | None):
        self._live, self._structured = live, structured
        self._prompt_logprobs: dict[str, list[TokenLogprobs | None]] = {}
        self._pooled: dict[str, np.ndarray] = {}

    def keep(self, plan: StepPlan, result: StepResult) -> None:
        """Take a step's pieces, before it is settled."""
        for s, found in result.prompt_logprobs.items():
            if (name := plan.ids[s]) in self._live:
                kept = self._prompt_logprobs.setdefault(name, [None])
                del kept[plan.starts[s] + 1 :]  # computed again after a preemption
                kept += found
        for s, vector in result.pooled.items():
            if (name := plan.ids[s]) in self._live:
                before = 0.0 if plan.starts[s] == 0 or self._live[name].pooling == "last" else self._pooled[name]
                self._pooled[name] = before + vector

    def of_step(self, plan: StepPlan, settled: Settled, result: StepResult) -> Outputs:
        if not result.logprobs:  # nearly always
            return Outputs(settled.ids, settled.tokens, [self.of(request, ids) for request, ids in settled.gains])
        scores = {plan.ids[i]: found for i, found in result.logprobs.items()}
        pairs = list(zip(settled.ids, settled.tokens, strict=True))
        gains = [Gain(self._live[name], [token]) for name, token in pairs if name in scores] + settled.gains
        plain = [pair for pair in pairs if pair[0] not in scores]
        return Outputs(
            [name for name, _ in plain], [token for _, token in plain],
            [self.of(request, ids, scores.get(request.id)) for request, ids in gains],
        )  # fmt: skip

    def of(self, request: Request, ids: list[int], scores: list[TokenLogprobs] | None = None) -> EngineOutput:
        now = time.monotonic()
        out = EngineOutput(request.id, ids, finish_reason=request.finish_reason, stop_reason=request.stop_reason)
        out.num_cached_tokens = request.num_cached
        if scores and ids:
            out.logprobs = scores[: len(ids)]
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
                out.embedding = _normalized(pooled)
        return out

    def forget(self, request_id: str) -> None:
        self._prompt_logprobs.pop(request_id, None)
        self._pooled.pop(request_id, None)

    def _why_failed(self, request: Request) -> str:
        why = None if self._structured is None else self._structured.error(request.id)
        if why is not None:
            return f"the output cannot follow its grammar any further: {why}"
        if request.exception is not None:
            return f"a logits processor failed: {request.exception!r}"
        limits = request.params.structured_outputs or request.params.allowed_token_ids or request.params.bad_word_ids
        return "the model produced NaN logits for this request" + (", or its limits left no token" if limits else "")


def _normalized(pooled: np.ndarray) -> list[float]:
    """To length 1, so that the sum over a prompt will do for its mean."""
    return (pooled / max(float(np.linalg.norm(pooled)), 1e-12)).tolist()


def refused(request_id: str, error: HeadraceError) -> EngineOutput:
    """The answer to a request that `add` refused, for callers that cannot catch its exception."""
    output = EngineOutput(request_id, finish_reason="error", error=str(error))
    if isinstance(error, ParameterError):
        output.refused = (error.field, str(error.value), error.allowed)
    return output
