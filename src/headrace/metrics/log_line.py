"""One line of statistics every few seconds while there is something to tell."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from headrace.engine.interface import AsyncEngine
from headrace.metrics.prometheus import PrometheusMetrics


class StatsLine:
    """Differences between two looks at the counters, as a line of text."""

    def __init__(self, engine: AsyncEngine, metrics: PrometheusMetrics, clock: Callable[[], float] = time.monotonic):
        self.engine, self.metrics, self._clock = engine, metrics, clock
        self._last = self._look()

    def _look(self) -> tuple[float, int, int, int, int]:
        core, m = self.engine.counters(), self.metrics
        return self._clock(), m.prompt_tokens, m.generation_tokens, core.prefix_queries, core.prefix_hits

    def line(self) -> str | None:
        """What has happened since the last call; None if that is nothing."""
        status, now = self.engine.status(), self._look()
        seconds, prompt, output, queries, hits = (b - a for a, b in zip(self._last, now, strict=True))
        self._last = now
        if not (prompt or output or status.num_running or status.num_waiting):
            return None
        seconds = max(seconds, 1e-9)
        found = f", prefix hits {hits / queries:.1%}" if queries > 0 else ""
        return (
            f"running {status.num_running}{self._by_core()}, waiting {status.num_waiting}; "
            f"prompt {prompt / seconds:.0f} tok/s, generation {output / seconds:.0f} tok/s; "
            f"KV cache {self.engine.counters().kv_usage:.1%}{found}"
        )

    def _by_core(self) -> str:
        """Where there are several, what each of them runs; of one that is not there: -."""
        cores = self.engine.cores()
        return f" ({' + '.join(str(c.stats.running) if c.up else '-' for c in cores)})" if len(cores) > 1 else ""

    async def run(self, interval: float, write: Callable[[str], None]) -> None:
        while True:
            await asyncio.sleep(interval)
            if text := self.line():
                write(text)
