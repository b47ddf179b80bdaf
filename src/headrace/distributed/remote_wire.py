"""What travels between an engine and whoever uses it from another process. Requests have numbers there, which are short."""

from __future__ import annotations

from array import array

import msgspec

from headrace.engine.interface import AsyncEngine, CoreStatus, EngineStatus
from headrace.engine.messages import EngineOutput
from headrace.engine.stats import CoreStats
from headrace.engine.wire import Ready
from headrace.errors import CapacityError, EngineClosedError, EngineDeadError, HeadraceError, ParameterError
from headrace.lora.version import Version
from headrace.sampling.params import SamplingParams


class Submit(msgspec.Struct, tag=True, omit_defaults=True):
    number: int
    id: str
    prompt_ids: array
    params: SamplingParams | None = None
    priority: int = 0
    cache_salt: str = ""
    pooling: str | None = None  # embed the prompt instead of generating


class Cancel(msgspec.Struct, tag=True):
    number: int


class Tokens(msgspec.Struct, tag=True):
    """What one turn of the engine brought to one reader: nearly all of it is one more token, `tokens[i]` of `numbers[i]`."""

    numbers: list[int]
    tokens: list[int]
    news: list[tuple[int, EngineOutput]]


class Failed(msgspec.Struct, tag=True):
    """What `generate` or `embed` raised: a name in ERRORS and what it is made with."""

    number: int
    error: str
    words: list[str]

    @classmethod
    def of(cls, number: int, error: Exception) -> Failed:
        if isinstance(error, ParameterError):
            return cls(number, "ParameterError", [error.field, str(error.value), error.allowed])
        for kind in type(error).__mro__:
            if kind.__name__ in ERRORS:
                return cls(number, kind.__name__, [str(error)])
        return cls(number, "HeadraceError", [f"{type(error).__name__}: {error}"])

    def exception(self) -> HeadraceError:
        return ERRORS[self.error](*self.words)


ERRORS = {kind.__name__: kind for kind in (ParameterError, CapacityError, EngineClosedError, EngineDeadError, HeadraceError)}


class EngineState(msgspec.Struct, tag=True):
    """All that an AsyncEngine says of itself."""

    status: EngineStatus
    stats: CoreStats
    info: Ready | None
    max_model_len: int | None
    restarts: int
    num_poisonous: int
    cores: list[CoreStatus]
    adapters: dict[str, Version] = {}

    @classmethod
    def of(cls, engine: AsyncEngine) -> EngineState:
        status = engine.status()
        longest = engine.max_model_len if status.loaded else None
        return cls(
            status, engine.counters(), engine.info, longest, engine.restarts, engine.num_poisonous, engine.cores(),
            dict(engine.adapters()),
        )  # fmt: skip


ToEngine = Submit | Cancel
FromEngine = Tokens | Failed | EngineState
