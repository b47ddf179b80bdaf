"""What crosses the border of the engine core: plain msgspec structs, the same in one process and between two."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

import msgspec

from headrace.sampling.params import SamplingParams
from headrace.scheduler.plan import TokenLogprobs


class EngineRequest(msgspec.Struct, omit_defaults=True):
    """One sample to generate. `output_ids` is preset when a stream that was cut off goes on; `seed` is then the first one's."""

    id: str
    prompt_ids: array  # int32 (see wire.py); in one process a list will do
    params: SamplingParams
    seed: int | None = None
    priority: int = 0
    cache_salt: str = ""
    output_ids: list[int] = []
    pooling: str | None = None  # "mean" | "last": embed the prompt instead of generating


class RequestTimes(msgspec.Struct, array_like=True):
    """Seconds. `queue`: arrival to first admission; `first_token`: arrival to the first token known to the host."""

    queue: float
    first_token: float
    total: float


class EngineOutput(msgspec.Struct, omit_defaults=True):
    """News of one request: tokens that it got, and how it ended if it did."""

    id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # with the first output; first entry None
    finish_reason: str | None = None  # stop | length | abort | error
    stop_reason: int | str | None = None  # of an error: the field of the request that is to blame, if one is
    num_cached_tokens: int = 0
    times: RequestTimes | None = None  # with the last output
    embedding: list[float] | None = None
    error: str | None = None  # what went wrong, for finish_reason "error"
    refused: tuple[str, str, str] | None = None  # it was the request's mistake: field, value, what is allowed
    exception: Any = None  # in one process: what a logits processor of the request raised


class Outputs(msgspec.Struct, array_like=True):
    """What one turn of the core brought. Nearly all of it is one more token each: `tokens[i]` of request `ids[i]`.

    A request is in one of the two parts only. As an iterable: all of it as news.
    """

    ids: list[str] = []
    tokens: list[int] = []
    news: list[EngineOutput] = []

    def __iter__(self) -> Iterator[EngineOutput]:
        yield from self.news
        for request_id, token in zip(self.ids, self.tokens, strict=True):
            yield EngineOutput(request_id, [token])

    def __bool__(self) -> bool:
        return bool(self.ids or self.news)
