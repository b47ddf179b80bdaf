"""What `LLM` returns; names and fields are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.engine.messages import RequestTimes
from headrace.text.stream import Logprob


@dataclass(slots=True)
class CompletionOutput:
    """One sample of a request."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None  # stop | length | abort | error
    stop_reason: int | str | None = None
    error: str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Seconds. `queue`: arrival to first admission; `ttft`: to the first token; `tpot`: per token after it; `e2e`: all."""

    queue: float
    ttft: float
    tpot: float
    e2e: float


@dataclass(slots=True)
class RequestOutput:
    """A request with its `n` samples, as vLLM names things."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    finished: bool = True
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None


def request_metrics(times: RequestTimes | None, num_tokens: int) -> RequestMetrics | None:
    if times is None:
        return None
    tpot = (times.total - times.first_token) / (num_tokens - 1) if num_tokens > 1 else 0.0
    return RequestMetrics(times.queue, times.first_token, tpot, times.total)
