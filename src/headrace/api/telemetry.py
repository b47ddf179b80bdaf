"""What the HTTP layer tells a metrics collector, and the collector that only reports the engine's state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from headrace.api.interface import AsyncEngine


@dataclass(slots=True)
class SampleRecord:
    """One sample that ended. Times are in seconds, measured in the HTTP process."""

    endpoint: str
    reason: str  # stop | length | abort | error
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    first_output: float | None  # arrival of the request to the sample's first tokens
    total: float  # arrival to end


class Metrics(Protocol):
    """The hook: `create_app(..., metrics=...)` takes any object with these methods."""

    def sample_ended(self, record: SampleRecord) -> None: ...
    def answered(self, path: str, status: int) -> None: ...
    def render(self) -> tuple[bytes, str]: ...


class EngineGauges:
    """Used when no collector is given: nothing is counted, /metrics shows the engine's state of the moment."""

    def __init__(self, engine: AsyncEngine):
        self.engine = engine

    def sample_ended(self, record: SampleRecord) -> None:
        pass

    def answered(self, path: str, status: int) -> None:
        pass

    def render(self) -> tuple[bytes, str]:
        status = self.engine.status()
        lines = []
        for name, value in (
            ("num_requests_running", status.num_running),
            ("num_requests_waiting", status.num_waiting),
            ("engine_up", int(status.alive and status.loaded)),
        ):
            lines += [f"# TYPE headrace:{name} gauge", f"headrace:{name} {value}"]
        return ("\n".join(lines) + "\n").encode(), "text/plain; version=0.0.4; charset=utf-8"
