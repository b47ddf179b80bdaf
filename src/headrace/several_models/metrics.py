"""The metrics page of several models: each family with a sample for each of them, by the label model_name; what is of the
server has no such label."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace.metrics.prometheus import CONTENT_TYPE, PrometheusMetrics, SampleRecord
from headrace.several_models.models import Models
from headrace.several_models.switch import State

OF_SERVER = ("http_responses", "request_rejections", "request_ignored_fields", "http_process_restarts")


class ModelsMetrics(Collector):
    """Told of every answer; each model's own metrics are told of its samples."""

    def __init__(self, models: Models, prefix: str = "headrace"):
        self._models, self._prefix = models, prefix
        self._http = PrometheusMetrics(models, prefix, "")  # type: ignore[arg-type]
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def sample_ended(self, record: SampleRecord) -> None:
        raise AssertionError("a sample is a model's")

    def answered(self, path: str, status: int, ignored: Collection[str] = ()) -> None:
        self._http.answered(path, status, ignored)

    @property
    def prompt_tokens(self) -> int:
        return sum(model.metrics.prompt_tokens for model in self._models.served)

    @property
    def generation_tokens(self) -> int:
        return sum(model.metrics.generation_tokens for model in self._models.served)

    async def page(self) -> tuple[bytes, str]:
        return generate_latest(self._registry), CONTENT_TYPE

    def collect(self) -> Iterator[Metric]:
        of_server = tuple(f"{self._prefix}:{name}" for name in OF_SERVER)
        merged: dict[str, Metric] = {}
        for metrics in (self._http, *(model.metrics for model in self._models.served)):
            for family in metrics.collect():
                if (family.name in of_server) != (metrics is self._http):
                    continue
                if metrics is self._http:
                    for sample in family.samples:
                        del sample.labels["model_name"], sample.labels["engine"]
                if family.name in merged:
                    merged[family.name].samples += family.samples
                else:
                    merged[family.name] = family
        yield from merged.values()
        yield from self._states()

    def _states(self) -> Iterator[Metric]:
        labels = ["model_name"]
        state = GaugeMetricFamily(f"{self._prefix}:model_state", "1: the state that the model is in", labels=[*labels, "state"])
        size = GaugeMetricFamily(f"{self._prefix}:model_memory_bytes", "Of the budget, that are taken for it", labels=labels)
        loads = CounterMetricFamily(f"{self._prefix}:model_loads", "Times that it was loaded", labels=labels)
        waiting = GaugeMetricFamily(f"{self._prefix}:model_waiting", "Requests that wait until it is loaded", labels=labels)
        for _, entry in self._models:
            for each in State:
                state.add_metric([entry.name, each.value], int(entry.state is each))
            size.add_metric([entry.name], entry.size if entry.holds else 0)
            loads.add_metric([entry.name], entry.loads)
            waiting.add_metric([entry.name], len(entry.waiters))
        yield from (state, size, loads, waiting)
