"""What a caller gets back, and the stream that makes it out of the core's news: text, stops, logprobs with their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace.engine.messages import EngineOutput, RequestTimes, TokenLogprobs
from headrace.sampling.params import SamplingParams
from headrace.text.stream import TextStream

if TYPE_CHECKING:
    from headrace.model.tokenizer import Tokenizer


@dataclass(slots=True)
class Logprob:
    """Raw log probability of a token, its rank in the vocabulary (1 = most likely) and its text."""

    logprob: float
    rank: int | None
    decoded_token: str | None


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


@dataclass(slots=True)
class Delta:
    """What one piece of news adds to a sample."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    hides_last: bool = False  # the last token ended the sample and is no part of its text
    stopped_here: bool = False  # a stop string ended it: the core does not know yet and must be told


class SampleStream:
    """News of one sample in, deltas out. The deltas' texts joined are the sample's text, however the news was cut."""

    def __init__(self, tokenizer: Tokenizer | None, params: SamplingParams, prompt_ids: Sequence[int] = ()):
        self.tokenizer, self.params = tokenizer, params
        self.done = False
        self.num_cached_tokens = 0
        self.num_tokens = 0
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self.times: RequestTimes | None = None
        stops = params.stop if isinstance(params.stop, list) else []
        self._text = (
            TextStream(tokenizer, stops, params.include_stop_str_in_output, params.skip_special_tokens, prompt_ids)
            if params.detokenize and tokenizer is not None
            else None
        )

    def push(self, news: EngineOutput) -> Delta:
        """The news as a delta; after the sample is done, empty ones."""
        if self.done:
            return Delta()
        self.num_cached_tokens = news.num_cached_tokens or self.num_cached_tokens
        if news.times is not None:
            self.times = news.times
        if news.prompt_logprobs is not None:
            self.prompt_logprobs = [None if t is None else self._decoded(t) for t in news.prompt_logprobs]
        ids = news.token_ids
        delta = Delta(token_ids=ids, finish_reason=news.finish_reason, stop_reason=news.stop_reason, error=news.error)
        logprobs = news.logprobs
        if self._text is not None:
            self._push_text(delta, news)
        self.num_tokens += len(delta.token_ids)
        if logprobs is not None:
            delta.logprobs = [self._decoded(t) for t in logprobs[: len(delta.token_ids)]]
        self.done = delta.finish_reason is not None
        return delta

    def _push_text(self, delta: Delta, news: EngineOutput) -> None:
        assert self._text is not None
        ids = news.token_ids
        # the token that ended the sample is not part of its text unless asked for
        hidden = bool(ids) and news.finish_reason == "stop" and not self.params.include_stop_str_in_output
        hidden = hidden and not self._text.may_stop_at(ids[-1])
        result = self._text.push(ids[:-1] if hidden else ids)
        delta.text, delta.hides_last = result.text, hidden and result.stop_hit is None
        if result.stop_hit is not None:
            delta.token_ids = ids[: result.num_ids]
            delta.finish_reason, delta.stop_reason = "stop", result.stop_hit
            delta.stopped_here = news.finish_reason is None
        elif news.finish_reason is not None:
            delta.text += self._text.finish()
            if self._text.stop_hit is not None:  # the last, unfinished character completed it
                delta.finish_reason, delta.stop_reason = "stop", self._text.stop_hit

    def _decoded(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        result: dict[int, Logprob] = {}
        for place, (token, logprob) in enumerate(zip(entry.ids, entry.logprobs, strict=True)):
            rank = entry.rank if place == 0 else place
            text = None if self.tokenizer is None else self.tokenizer.token_to_text(token)
            result.setdefault(token, Logprob(logprob, rank, text))
        return result


def request_metrics(times: RequestTimes | None, num_tokens: int) -> RequestMetrics | None:
    if times is None:
        return None
    tpot = (times.total - times.first_token) / (num_tokens - 1) if num_tokens > 1 else 0.0
    return RequestMetrics(times.queue, times.first_token, tpot, times.total)
