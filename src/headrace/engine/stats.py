"""What is measured of the core's loop: a step's times, and counters for metrics and traces."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import zip_longest

import msgspec


@dataclass(slots=True)
class LoopTimes:
    """Seconds of the last step's parts, for metrics and traces."""

    schedule: float = 0.0
    launch: float = 0.0
    wait: float = 0.0
    settle: float = 0.0
    num_tokens: int = 0
    num_seqs: int = 0
    recent_host: deque[float] = field(default_factory=lambda: deque(maxlen=4096))  # without the waits, a step each


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
    adapters: dict[str, str] = {}  # by digest: why one is not there that was to be; nothing: it is

    def added_to(self, past: CoreStats) -> CoreStats:
        """These gauges, with the counters of both."""
        apart = ("running", "waiting", "kv_usage", "accepted_per_position", "adapters")  # gauges, and the one list
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
