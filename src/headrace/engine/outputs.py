"""What a settled step means for those who asked: news of requests, with logprobs, embeddings, times and reasons."""

from __future__ import annotations

import logging
import time

from headrace.engine.failures import why_failed
from headrace.engine.messages import EngineOutput, Outputs, RequestTimes
from headrace.engine.prompt_results import PromptResults
from headrace.errors import HeadraceError, ParameterError
from headrace.scheduler.plan import StepPlan, StepResult, TokenLogprobs
from headrace.scheduler.request import Request
from headrace.scheduler.scheduler import Gain, Settled
from headrace.structured_output.manager import StructuredOutput

logger = logging.getLogger(__name__)


class OutputBuilder:
    """`live`: requests by id."""

    def __init__(self, live: dict[str, Request], structured: StructuredOutput | None):
        self._live, self._structured = live, structured
        self.prompts = PromptResults(live)

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
        if request.params.prompt_logprobs is not None or request.pooling is not None:
            self.prompts.tell(request, out)
        if request.finish_reason is not None:
            first = request.first_token or now
            queue = (request.first_scheduled or now) - request.arrival
            out.times = RequestTimes(queue, first - request.arrival, now - request.arrival)
            if request.finish_reason == "error":
                (out.error, out.stop_reason), out.exception = why_failed(request, self._structured), request.exception
                level = logging.WARNING if out.stop_reason else logging.ERROR  # the request's own fault, or the engine's
                logger.log(level, "request %s failed after %d tokens: %s", request.id, len(request.output_ids), out.error)
        return out


def refused(request_id: str, error: HeadraceError) -> EngineOutput:
    """The answer to a request that `add` refused, for callers that cannot catch its exception."""
    output = EngineOutput(request_id, finish_reason="error", error=str(error))
    if isinstance(error, ParameterError):
        output.refused = (error.field, str(error.value), error.allowed)
    return output
