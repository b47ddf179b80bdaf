"""A request as the engine core knows it: token ids, sampling parameters and the two counters that are its progress."""

from __future__ import annotations

import enum
import struct
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.errors import ParameterError
from headrace.sampling.params import SamplingParams


def packed(ids: Sequence[int]) -> array:
    """Token ids as int32, as they go from here to the device, the prefix index and other processes. Raises ParameterError."""
    if isinstance(ids, array):
        return ids
    try:
        return array("i", struct.pack(f"{len(ids)}i", *ids))  # a third of the time of array("i", ids)
    except struct.error:
        raise ParameterError("prompt_ids", ids, "token ids: integers in [0, 2^31)") from None


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
    num_unsure: int = 0  # drafts in launched steps: how many of them are right the host has not read
    num_cached: int = 0  # prompt tokens found in the prefix cache at first admission
    num_preemptions: int = 0
    finish_reason: str | None = None  # "stop" | "length" | "abort" | "error"
    stop_reason: int | str | None = None  # the stop token id that ended it, None for EOS
    exception: Exception | None = None  # what one of its logits processors raised: its row fails
    first_scheduled: float = 0.0  # time.monotonic() of the first admission
    first_token: float = 0.0

    def __post_init__(self) -> None:
        self.prompt_ids = packed(self.prompt_ids)

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
