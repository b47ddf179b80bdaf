"""A request as the engine core knows it: token ids, sampling parameters, the two counters that are its progress."""

from __future__ import annotations

import enum
import time
from array import array
from dataclasses import dataclass, field
from typing import Any

from headrace.cache.radix_tree import ID_BYTES, Node
from headrace.sampling.checks import packed
from headrace.sampling.params import SamplingParams


class Status(enum.Enum):
    WAITING = "waiting"  # in the queue: never admitted, or preempted
    RUNNING = "running"  # owns a slot and blocks
    FINISHED = "finished"


class Clock:
    """How many steps a batch of decodes has made: each gives every member one token."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0


@dataclass(slots=True, eq=False)
class Request:
    """Progress is two counters: `num_scheduled` tokens have their KV in the cache or in a launched step;
    `num_tokens` exist (prompt, output, and sampled ones that the host has not read yet).
    """

    id: str
    prompt_ids: array  # int32; a list is packed
    params: SamplingParams
    seed: int  # always set: a request without one gets a random one at admission
    priority: int = 0  # lower runs first
    cache_salt: str = ""  # separates the prefix caches of tenants
    pooling: str | None = None  # "mean" | "last": no token is sampled, the prompt's hidden states are the result
    arrival: float = field(default_factory=time.monotonic)
    output_ids: list[int] = field(default_factory=list)  # settled on the host; may be preset to resume a broken stream

    status: Status = Status.WAITING
    slot: int = -1
    block_ids: list[int] = field(default_factory=list)
    offset: int = 0  # num_scheduled, but for what the clock says
    clock: Clock | None = None  # of the batch of decodes in which it runs
    num_drafts: int = 0  # guesses of its next tokens that somebody has, to be verified in its next decode
    num_unverified: int = 0  # drafts in launched steps: how many of them are right the host has not read
    num_cached: int = 0  # prompt tokens found in the prefix cache at first admission
    num_preemptions: int = 0
    finish_reason: str | None = None  # "stop" | "length" | "abort" | "error"
    stop_reason: int | str | None = None  # the stop token id that ended it, None for EOS
    exception: Exception | None = None  # what one of its logits processors raised: its row fails
    first_scheduled: float = 0.0  # time.monotonic() of the first admission
    first_token: float = 0.0

    # ---- the scheduler's notes, from `prepare` on
    rank: tuple[float, float, int] = (0, 0.0, 0)  # orders all requests, lower first: who lacks blocks takes them from behind
    limit: int = 0  # tokens at which it ends whatever it samples
    stops: dict[int, int | None] = field(default_factory=dict)  # id -> stop_reason; None also for an EOS named as a stop id
    caching: bool = False  # its blocks enter the prefix index
    reads_cache: bool = False
    delayed: bool = False  # has waited a step for somebody else's blocks
    retired: bool = False  # gets no more rows, but launched steps may hold some; it leaves with the last
    last_step: int = 0  # the number of the last step that holds its row; of a batch's member: before it became one
    next_event: int = 0  # when, on the clock of the batch in which it runs, it must be looked at
    ahead: Any = None  # the step that has a row of it behind drafts that have not settled

    # ---- its blocks, anew with each admission
    keys: bytes = b""  # known ids as the prefix index compares them, made once and not again in each step of waiting
    path: list[Node] = field(default_factory=list)  # where the index agrees with `keys`, while waiting
    indexing: bool = False  # its next full block may enter the index
    num_indexed: int = 0  # blocks that have
    cursor: Node | None = None  # the node of the last of them; None: the root
    num_hit: int = 0  # blocks got from the index
    snapshot: int = -1  # the state that goes with them, where layers keep one
    capacity: int = 0  # tokens that the block table has room for

    def __post_init__(self) -> None:
        self.prompt_ids = packed(self.prompt_ids)

    def prepare(self, rank: tuple[float, float, int], limit: int, caching: bool) -> None:
        """Enter a scheduler. ParameterError if an id is no int32."""
        params = self.params
        self.rank, self.limit, self.caching = rank, limit, caching
        self.stops = {i: i for i in params.stop_token_ids or ()}
        if not params.ignore_eos:
            self.stops.update(dict.fromkeys(params.eos_token_ids))
        # a hit would skip the very rows whose logprobs or mean were asked for
        self.reads_cache = caching and params.prompt_logprobs is None and self.pooling != "mean"
        self.reset()

    def reset(self) -> None:
        """Be as if never admitted."""
        self.keys = self.known_ids().tobytes()
        self.path, self.cursor = [], None
        self.indexing, self.num_indexed = self.caching, 0
        self.num_hit = self.capacity = 0

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def min_output(self) -> int:
        return self.params.min_tokens

    def failed(self, exception: Exception) -> None:
        """One of its logits processors has raised this."""
        self.exception = self.exception or exception

    def again(self) -> Request:
        """The same from the start, with what is known of its output."""
        return Request(
            self.id, self.prompt_ids, self.params, self.seed, self.priority, self.cache_salt, self.pooling, self.arrival,
            self.output_ids, num_cached=self.num_cached, first_scheduled=self.first_scheduled, first_token=self.first_token,
        )  # fmt: skip

    @property
    def num_scheduled(self) -> int:
        return self.offset if self.clock is None else self.offset + self.clock.now

    @num_scheduled.setter
    def num_scheduled(self, value: int) -> None:
        self.offset = value if self.clock is None else value - self.clock.now

    @property
    def num_pending(self) -> int:
        """Tokens sampled by launched steps whose results the host has not read."""
        return self.num_tokens - self.num_known

    @property
    def num_tokens(self) -> int:
        known = len(self.prompt_ids) + len(self.output_ids)
        # who computed all that was known has sampled; what comes after the end is discarded
        return known if self.status is Status.FINISHED else max(known, self.num_scheduled + 1)

    @property
    def num_known(self) -> int:
        """Tokens whose ids the host has."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_output(self) -> int:
        """Output tokens that exist, read or not."""
        return self.num_tokens - len(self.prompt_ids)

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Known ids at positions [start, stop)."""
        n = len(self.prompt_ids)
        if stop <= n:
            return self.prompt_ids[start:stop].tolist()
        if start >= n:
            return self.output_ids[start - n : stop - n]
        return self.prompt_ids[start:].tolist() + self.output_ids[: stop - n]

    def known_ids(self) -> array:
        """All of them, int32."""
        return self.prompt_ids + packed(self.output_ids) if self.output_ids else self.prompt_ids

    def fills(self, stop: int, size: int) -> bool:
        """Whether, with `stop` tokens computed, another full block of `size` can enter the prefix index."""
        return self.indexing and (self.num_indexed + 1) * size <= stop

    def key(self, index: int, width: int) -> bytes:
        """The key of the full block `index`, `width` bytes, of ids that the host knows."""
        key = self.keys[index * width : (index + 1) * width]
        if len(key) < width:
            self.keys = b""  # beyond what was known at admission: from here on each block is asked for once
            size = width // ID_BYTES
            key = packed(self.token_ids(index * size, (index + 1) * size)).tobytes()
        return key
