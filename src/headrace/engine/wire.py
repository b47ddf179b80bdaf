"""What travels between the core's process and its client's, as msgpack: requests in, news, gauges and signs of life out."""

from __future__ import annotations

from array import array
from itertools import zip_longest
from typing import Any

import msgspec
import numpy as np

from headrace.engine.messages import EngineRequest, Outputs


def to_wire(value: Any) -> Any:
    """For encoders: packed ids as their bytes."""
    if isinstance(value, array):
        return value.tobytes()
    raise NotImplementedError(f"a {type(value).__name__} does not travel")


def from_wire(kind: type, value: Any) -> Any:
    """For decoders: the reverse."""
    if kind is array:
        return array("i", value)
    raise NotImplementedError(f"a {kind.__name__} does not travel")


def step_to_wire(value: Any) -> Any:
    """For encoders of plans and results: their arrays too, as type, shape and bytes."""
    return (value.dtype.str, value.shape, value.tobytes()) if isinstance(value, np.ndarray) else to_wire(value)


def step_from_wire(kind: type, value: Any) -> Any:
    if kind is not np.ndarray:
        return from_wire(kind, value)
    dtype, shape, data = value
    return np.frombuffer(data, dtype).reshape(shape)


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
