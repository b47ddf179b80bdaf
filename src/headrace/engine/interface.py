"""What the layers above need of an engine; EngineClient fits it by structure, and so does a fake in the tests."""

from __future__ import annotations

from array import array
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from headrace.cache.events import BlockEvents
from headrace.config import EngineConfig
from headrace.engine.messages import EngineOutput
from headrace.engine.stats import CoreStats
from headrace.engine.streams import Taker
from headrace.engine.wire import Glimpse, Ready
from headrace.lora.version import Version
from headrace.model.config import ModelConfig
from headrace.sampling.params import SamplingParams


@dataclass(slots=True)
class EngineStatus:
    """A snapshot for /ready, admission and metrics; all fields are cheap to read."""

    loaded: bool  # weights are there and a core has been built
    alive: bool  # a core runs, or is being restarted; False: given up
    draining: bool  # no new requests
    progressing: bool  # a core's heartbeat is fresh
    num_running: int
    num_waiting: int
    waiting_tokens: int
    drain_rate: float  # tokens per second, measured; 0: not known yet
    num_cores: int  # that run or are being restarted: each takes `seats_of_core` samples at the same time
    doing: str = "loading"  # while `loaded` is false, in words: loading, compiling kernels 3 of 120, ...


@dataclass(slots=True)
class CoreStatus:
    """One of an engine's cores, for metrics and for who scales."""

    number: int
    up: bool  # it has loaded its model and makes progress
    leaving: bool  # takes nothing new, and ends when what it has is done
    load: int  # tokens outstanding
    restarts: int
    stats: CoreStats  # gauges of the present process, counters over all that there have been under this number
    info: Ready | None  # None: it has not loaded its model yet


class AsyncEngine(Protocol):
    """An engine as the server sees it. `generate` runs ONE sample; closing the generator aborts it.

    `tokenizer`, `model_config`, `max_model_len` and `generation_defaults` may be read once `status().loaded` is true.
    `generate` raises ParameterError or CapacityError for a request that can never run (a constraint that does not compile
    among them), EngineDeadError when there is no engine any more.

    `taker` saves a turn of the reader's task: while that waits for the generator, news that does not end the request may be
    given to `taker` instead, which must not wait and returns whether it has taken it; what it raises the generator does.
    """

    config: EngineConfig
    model_config: ModelConfig
    tokenizer: Any
    generation_defaults: dict[str, Any]
    model_name: str
    supports_structured: bool

    @property
    def info(self) -> Ready | None:
        """None: no core has loaded the model yet."""

    @property
    def restarts(self) -> int:
        """Cores started after one had died."""

    @property
    def num_poisonous(self) -> int:
        """Requests failed because cores died on them."""

    @property
    def max_model_len(self) -> int: ...

    def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        taker: Taker | None = None,
    ) -> AsyncGenerator[EngineOutput, None]: ...

    async def embed(
        self, request_id: str, prompt_ids: Sequence[int], pooling: str, *, priority: int = 0, cache_salt: str = ""
    ) -> list[float]: ...

    async def abort(self, request_id: str) -> None: ...

    def adapters(self) -> Mapping[str, Version]:
        """By name (SamplingParams.lora)."""

    async def load_adapter(self, name: str, path: str, replace: bool = True) -> None:
        """See ServedAdapters."""

    async def unload_adapter(self, name: str) -> None:
        """See ServedAdapters."""

    def status(self) -> EngineStatus: ...

    def counters(self) -> CoreStats:
        """Over all cores."""

    def cores(self) -> list[CoreStatus]: ...


def seats_of_core(engine: AsyncEngine) -> int:
    """Samples that each of its cores runs at the same time: as was asked for, or as the first that was loaded has decided."""
    decided = engine.info.max_num_seqs if engine.config.max_num_seqs is None and engine.info is not None else 1
    return engine.config.max_num_seqs or decided


class Spectator(Protocol):
    """Who looks into the cores of an EngineClient. Called in the event loop, so it must be quick."""

    def seen(self, core: int, glimpse: Glimpse) -> None: ...

    def loaded(self, core: int) -> None:
        """A core serves: it shows nothing before it is told to."""

    def died(self, core: int, why: str) -> None: ...


class Balancer(Protocol):
    """Which of several cores a request goes to. A core that takes the place of another has its number.

    Called in the event loop, so it must be quick.
    """

    def added(self, core: int) -> None:
        """A core is there, with an empty cache."""

    def removed(self, core: int) -> None:
        """It is gone, and its cache with it; it may never have been `added`."""

    def blocks(self, core: int, events: BlockEvents) -> None:
        """What has become of a core's blocks since it was last told."""

    def choose(self, prompt_ids: array, cache_salt: str, loads: Mapping[int, int]) -> int:
        """One of the cores in `loads`, which holds the tokens outstanding on each that can take requests: never empty."""
