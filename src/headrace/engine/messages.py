"""What crosses the border of the engine core: plain msgspec structs, the same in one process and between two."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

import msgspec
import numpy as np

from headrace.errors import ParameterError
from headrace.sampling.params import SamplingParams
from headrace.scheduler.request import packed


def checked_ids(ids: Sequence[int], vocab_size: int, field: str = "prompt", valid: np.ndarray | None = None) -> array:
    """The ids packed. Raises ParameterError naming `field` unless all are integers in [0, vocab_size), and `valid`
    (bool [vocab_size]; None: all are).

    Long prompts come here: no loop in Python, and what is packed already costs next to nothing.
    """
    try:
        if not isinstance(ids, array):
            msgspec.convert(ids, list[int])  # the quickest to see that none is a bool, or some other thing like an integer
            ids = packed(ids)
        values = np.frombuffer(ids, np.int32)
        in_range = values.size == 0 or 0 <= values.min() <= values.max() < vocab_size
        if in_range and (valid is None or valid[values].all()):
            return ids
    except (msgspec.ValidationError, ParameterError):
        pass
    wrong = next((i for i in ids if type(i) is not int or not 0 <= i < vocab_size), None)
    if wrong is not None or valid is None:
        raise ParameterError(field, wrong, f"token ids in [0, {vocab_size - 1}]")
    known = f"token ids in [0, {int(valid.nonzero()[0].max(initial=0))}] that the tokenizer has a token for"
    raise ParameterError(field, next(i for i in ids if not valid[i]), known)


class EngineRequest(msgspec.Struct, omit_defaults=True):
    """One sample to generate. `output_ids` is preset when a stream that was cut off goes on; `seed` is then the first one's."""

    id: str
    prompt_ids: array  # int32 (see wire); in one process a list will do
    params: SamplingParams
    seed: int | None = None
    priority: int = 0
    cache_salt: str = ""
    output_ids: list[int] = []
    pooling: str | None = None  # "mean" | "last": embed the prompt instead of generating


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Raw logprobs at one position: the actual token first, then the most likely ones. ranks[0] counts from 1."""

    ids: list[int]
    logprobs: list[float]
    rank: int


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
    stop_reason: int | str | None = None
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


# ---------------------------------------------------------------- between the core's process and its client's


def to_wire(value: Any) -> bytes:
    """For encoders: packed ids as their bytes."""
    if isinstance(value, array):
        return value.tobytes()
    raise NotImplementedError(f"a {type(value).__name__} does not travel")


def from_wire(kind: type, value: Any) -> Any:
    """For decoders: the reverse."""
    if kind is array:
        return array("i", value)
    raise NotImplementedError(f"a {kind.__name__} does not travel")


class Abort(msgspec.Struct, tag=True):
    ids: list[str]


class Add(msgspec.Struct, tag=True):
    request: EngineRequest


class Shutdown(msgspec.Struct, tag=True):
    """End now; the client has drained what it wanted to."""


ToCore = Add | Abort | Shutdown


class CoreStats(msgspec.Struct, array_like=True):
    """The core's state and its counters since it started. Times are sums of seconds over all steps."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    steps: int = 0
    scheduled_tokens: int = 0
    preemptions: int = 0
    prefix_queries: int = 0  # prompt tokens looked up
    prefix_hits: int = 0  # prompt tokens found
    schedule_seconds: float = 0.0
    launch_seconds: float = 0.0
    wait_seconds: float = 0.0
    settle_seconds: float = 0.0
    nan_failures: int = 0
    drafts: int = 0  # speculation: times that a request's drafts were verified; mean accepted length = 1 + accepted / drafts
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: list[int] = []

    def added_to(self, past: CoreStats) -> CoreStats:
        """These gauges, with the counters of both."""
        apart = ("running", "waiting", "kv_usage", "accepted_per_position")  # gauges, and the one list
        names = (name for name in self.__struct_fields__ if name not in apart)
        sums = {name: getattr(past, name) + getattr(self, name) for name in names}
        places = zip_longest(past.accepted_per_position, self.accepted_per_position, fillvalue=0)
        return msgspec.structs.replace(self, accepted_per_position=[a + b for a, b in places], **sums)


class StepTrace(msgspec.Struct, array_like=True):
    """One turn of the loop. `began` is time.monotonic(), which all processes of a machine share; the rest are seconds."""

    began: float
    schedule: float
    launch: float
    wait: float
    settle: float
    num_tokens: int
    num_seqs: int
    running: int
    waiting: int
    kv_usage: float


class Ready(msgspec.Struct, tag=True):
    """The core has loaded its model: what the client must know of it."""

    max_model_len: int
    vocab_size: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    device: str
    dtype: str
    load_seconds: float


class News(msgspec.Struct, tag=True):
    outputs: Outputs
    stats: CoreStats | None = None
    steps: list[StepTrace] | None = None  # since the last News, when the core was started for tracing


class Heartbeat(msgspec.Struct, tag=True):
    """Sent by a thread of its own. `busy_seconds`: how long the loop has been inside the same step; 0 when idle."""

    busy_seconds: float


class Fatal(msgspec.Struct, tag=True):
    """The core ends because of this; a mistake in the options (`permanent`) is not worth another try."""

    error: str
    permanent: bool


FromCore = Ready | News | Heartbeat | Fatal
