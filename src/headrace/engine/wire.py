"""What travels between the core's process and its client's, as msgpack: requests in, news, gauges and signs of life out."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec

from headrace.cache.events import BlockEvents
from headrace.config import EngineConfig
from headrace.engine.messages import EngineRequest, Outputs
from headrace.engine.stats import CoreStats, StepTrace
from headrace.lora.version import Version


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


class Place(msgspec.Struct, frozen=True):
    """The part of its machine that a core has to itself. None: all that the machine gives any process."""

    name: str | None = None  # in the log; None: core
    cards: list[str] | None = None  # as in CUDA_VISIBLE_DEVICES
    cpus: list[int] | None = None  # logical ones that its threads run on
    threads: int | None = None
    memory: int | None = None  # bytes of the host, for weights and cache on a CPU


class Begin(msgspec.Struct):
    """What a core does, and where: its first message."""

    config: EngineConfig
    place: Place = Place()


class Abort(msgspec.Struct, tag=True):
    ids: list[str]


class Add(msgspec.Struct, tag=True):
    request: EngineRequest


class Shutdown(msgspec.Struct, tag=True):
    """End now; the client has drained what it wanted to."""


class Watch(msgspec.Struct, tag=True):
    """Somebody looks, and begins with a snapshot; or nobody does any more."""

    on: bool


class LoadAdapter(msgspec.Struct, tag=True):
    """Requests that come from now on may have this one. What becomes of it is told in CoreStats."""

    version: Version


class UnloadAdapter(msgspec.Struct, tag=True):
    """No request has it any more."""

    digest: str


ToCore = Add | Abort | Watch | LoadAdapter | UnloadAdapter | Shutdown


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
    weights: str = ""  # the formats that they are held in


class Progress(msgspec.Struct, tag=True):
    """How far a core is that does not serve yet: what it does, and of what that can be counted, how much is done."""

    doing: str
    done: int = 0
    total: int = 0

    def __str__(self) -> str:
        return f"{self.doing} {self.done} of {self.total}" if self.total else self.doing


class Glimpse(msgspec.Struct, array_like=True):
    """What there is to be shown, as JSON (api/glass.py): `requests` and `steps` to those who have seen all before."""

    requests: bytes | None = None
    steps: bytes | None = None
    snapshot: bytes | None = None  # the state after these: for those who come new, or have missed something


class News(msgspec.Struct, tag=True):
    outputs: Outputs
    stats: CoreStats | None = None
    steps: list[StepTrace] | None = None  # since the last News, when the core was started for tracing
    blocks: BlockEvents | None = None  # since the last News, where somebody balances by them
    glimpse: Glimpse | None = None  # while somebody looks


class Heartbeat(msgspec.Struct, tag=True):
    """Sent by a thread of its own. `busy_seconds`: how long the loop has been inside the same step; 0 when idle."""

    busy_seconds: float


class Fatal(msgspec.Struct, tag=True):
    """The core ends because of this; a mistake in the options (`permanent`) is not worth another try, unless
    the model has been loaded before."""

    error: str
    permanent: bool


FromCore = Progress | Ready | News | Heartbeat | Fatal
