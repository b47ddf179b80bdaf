"""What the metrics page says of each core, with a label `core`: families of their own, so that nobody adds parts to totals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from headrace.engine.interface import CoreStatus

GAUGES: dict[str, tuple[str, Callable[[CoreStatus], float]]] = {
    "core_up": ("1: the core has loaded its model and makes progress", lambda core: core.up),
    "core_leaving": ("1: the core takes nothing new, and ends when what it has is done", lambda core: core.leaving),
    "core_outstanding_tokens": ("Tokens to be computed of requests on the core, by which it is chosen", lambda core: core.load),
    "core_num_requests_running": ("Requests in the core's present step", lambda core: core.stats.running),
    "core_num_requests_waiting": ("Requests that wait in the core", lambda core: core.stats.waiting),
    "core_kv_cache_usage_perc": ("Share of the core's KV blocks that requests hold, 0 to 1", lambda core: core.stats.kv_usage),
}
COUNTERS: dict[str, tuple[str, Callable[[CoreStatus], float]]] = {
    "core_restarts": ("Processes started after the core's had died", lambda core: core.restarts),
    "core_steps": ("Steps of the core", lambda core: core.stats.steps),
    "core_scheduled_tokens": ("Tokens computed by the core", lambda core: core.stats.scheduled_tokens),
    "core_num_preemptions": ("Requests of the core that were computed again", lambda core: core.stats.preemptions),
    "core_prefix_cache_queries": ("Prompt tokens looked up in the core's cache", lambda core: core.stats.prefix_queries),
    "core_prefix_cache_hits": ("Prompt tokens found in the core's cache", lambda core: core.stats.prefix_hits),
}


def core_metrics(prefix: str, labels: dict[str, str], cores: Sequence[CoreStatus]) -> Iterator[Metric]:
    """`labels`: those that all metrics have."""
    names = [*labels, "core"]
    for found, kind in ((GAUGES, GaugeMetricFamily), (COUNTERS, CounterMetricFamily)):
        for name, (text, of) in found.items():
            family = kind(f"{prefix}:{name}", text, labels=names)
            for core in cores:
                family.add_metric([*labels.values(), str(core.number)], float(of(core)))
            yield family
