"""The metrics page: what the HTTP layer and the engine's client tell is counted here and shown in Prometheus' text format.

Names and labels are vLLM's where the meaning is the same, under a prefix of one's choice. Counting is a few additions on
plain numbers for each token; the families are made when somebody asks. Counters never go back, whatever dies.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace.engine.interface import AsyncEngine, EngineStatus
from headrace.engine.messages import EngineOutput
from headrace.engine.stats import StepTrace
from headrace.engine.streams import Stream
from headrace.metrics.cores import core_metrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# upper bounds in seconds; vLLM's, with finer ones below
FIRST_TOKEN = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
BETWEEN_TOKENS = (
    0.0005, 0.001, 0.002, 0.003, 0.004, 0.006, 0.008, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1,
    2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
WHOLE_REQUEST = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920,
    7680,
)  # fmt: skip
TOKENS = tuple(float(m * 10**e) for e in range(7) for m in (1, 2, 5))
FINISH_REASONS = ("stop", "length", "abort", "error")
PATHS = frozenset({
    "/v1/models", "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/responses/input_tokens", "/v1/messages",
    "/v1/messages/count_tokens", "/v1/embeddings", "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter", "/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score", "/tokenize",
    "/detokenize",
    "/generate", "/health", "/ping", "/ready", "/version", "/metrics", "/glass/events", "/glass/text",
    "/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/api/tags", "/api/ps", "/api/show", "/api/version",
    "/api/pull",
})  # fmt: skip
REJECTIONS = {
    400: "invalid", 401: "unauthorized", 404: "not_found", 405: "invalid", 408: "timeout", 413: "too_large", 415: "invalid",
    422: "invalid", 429: "overload", 431: "too_large", 503: "unavailable", 504: "timeout",
}  # fmt: skip
MAX_ADAPTERS = 100  # names of adapters that are counted apart
MAX_FIELDS = 100  # names of ignored fields that are counted apart
PROBES = frozenset({"/health", "/ping", "/ready", "/metrics"})  # asked every few seconds
NEVER_REJECTIONS = PROBES | {"/version"}  # a 503 there is an answer


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
    adapter: str = ""  # its name


class HttpMetrics(Protocol):
    """Who is told what the HTTP layer does, and asked for the metrics page. It may be in another process."""

    def sample_ended(self, record: SampleRecord) -> None: ...

    def answered(self, path: str, status: int, ignored: Collection[str] = ()) -> None: ...

    async def page(self) -> tuple[bytes, str]:
        """The page and its media type."""


def counted_path(path: str) -> str:
    """The path as a label: there are few of these, whatever is asked for."""
    if path in PATHS:
        return path
    base = next((base for base in ("/v1/models/", "/v1/responses/") if path.startswith(base)), None)
    return "other" if base is None else base + "{id}"


class Histogram:
    """Counts of observations below each bound, and their sum."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]):
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def cumulative(self) -> list[tuple[str, float]]:
        total = 0
        found: list[tuple[str, float]] = []
        for bound, count in zip((*map(str, map(float, self.bounds)), "+Inf"), self.counts, strict=True):
            total += count
            found.append((bound, total))
        return found


class PrometheusMetrics(Collector):
    """Told by the HTTP layer and, as an observer, by the engine's client; a collector for Prometheus."""

    def __init__(self, engine: AsyncEngine, prefix: str = "headrace", model_name: str | None = None):
        self.engine, self.prefix = engine, prefix
        self.labels = [model_name or engine.model_name, "0"]
        self.prompt_tokens = self.generation_tokens = self.cached_tokens = self.http_restarts = 0
        self.finished: Counter[str] = Counter(dict.fromkeys(FINISH_REASONS, 0))
        self.responses: Counter[tuple[str, int]] = Counter()
        self.ignored: Counter[str] = Counter()
        self.adapters: Counter[str] = Counter()
        self.rejections: Counter[str] = Counter(dict.fromkeys(sorted(set(REJECTIONS.values())), 0))
        self.first_token, self.between = Histogram(FIRST_TOKEN), Histogram(BETWEEN_TOKENS)
        self.per_token, self.whole = Histogram(BETWEEN_TOKENS), Histogram(WHOLE_REQUEST)
        self.queue, self.prefill = Histogram(WHOLE_REQUEST), Histogram(WHOLE_REQUEST)
        self.decode, self.inference = Histogram(WHOLE_REQUEST), Histogram(WHOLE_REQUEST)
        self.prompt_length, self.output_length = Histogram(TOKENS), Histogram(TOKENS)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    # ---------------------------------------------------------------- told by the engine's client

    def tokens(self, stream: Stream, count: int, now: float) -> None:
        self.generation_tokens += count
        if stream.first:
            self.between.observe((now - stream.last) / count, count)
        else:
            self.prompt_tokens += len(stream.request.prompt_ids)
            self.first_token.observe(now - stream.arrival)

    def ended(self, stream: Stream, news: EngineOutput, now: float) -> None:
        times = news.times
        if news.embedding is not None:  # there is no first token that would tell of the prompt
            self.prompt_tokens += len(stream.request.prompt_ids)
        if times is None or stream.interrupted or not stream.first:  # those of the last core alone would be too short
            return
        self.queue.observe(times.queue)
        self.prefill.observe(max(0.0, times.first_token - times.queue))
        self.decode.observe(max(0.0, times.total - times.first_token))
        self.inference.observe(max(0.0, times.total - times.queue))

    def steps(self, steps: list[StepTrace], core: int = 0) -> None:
        pass  # their sums come with the core's counters

    # ---------------------------------------------------------------- told by the HTTP layer

    def sample_ended(self, record: SampleRecord) -> None:
        self.finished[record.reason] += 1
        if record.adapter:
            known = record.adapter in self.adapters or len(self.adapters) < MAX_ADAPTERS
            self.adapters[record.adapter if known else "other"] += 1
        if record.reason == "error":
            return
        self.cached_tokens += min(record.cached_tokens, record.prompt_tokens)
        self.whole.observe(record.total)
        self.prompt_length.observe(record.prompt_tokens)
        self.output_length.observe(record.output_tokens)
        if record.first_output is not None and record.output_tokens > 1:
            self.per_token.observe((record.total - record.first_output) / (record.output_tokens - 1))

    def answered(self, path: str, status: int, ignored: Collection[str] = ()) -> None:
        """`ignored`: fields of the body that were left out."""
        path = counted_path(path)
        self.responses[path, status] += 1
        if status in REJECTIONS and path not in NEVER_REJECTIONS:
            self.rejections[REJECTIONS[status]] += 1
        for field in ignored:
            known = field in self.ignored or len(self.ignored) < MAX_FIELDS  # clients invent names
            self.ignored[field[:64] if known else "other"] += 1

    # ---------------------------------------------------------------- asked by Prometheus

    async def page(self) -> tuple[bytes, str]:
        return self.render()

    def render(self) -> tuple[bytes, str]:
        return generate_latest(self._registry), CONTENT_TYPE

    def collect(self) -> Iterator[Metric]:
        status, core = self.engine.status(), self.engine.counters()
        yield self._gauge("num_requests_running", "Requests in the present step", status.num_running)
        yield self._gauge("num_requests_waiting", "Requests that wait for a slot or for blocks", status.num_waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of the KV cache's blocks that requests hold, 0 to 1", core.kv_usage)
        yield self._gauge("engine_up", "1: a core has loaded its model and makes progress", int(_up(status)))
        cores = self.engine.cores()
        infos = [core.info for core in cores if core.info is not None]
        if infos:
            blocks = {"block_size": str(infos[0].block_size), "num_gpu_blocks": str(sum(info.num_blocks for info in infos))}
            yield self._info("cache_config_info", "The KV cache of all cores", blocks)
            first = infos[0]
            numbers = {"device": first.device, "dtype": first.dtype.removeprefix("torch."), "weights": first.weights}
            yield self._info("model_info", "What the cores compute in, and hold the weights in", numbers)
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens of requests that got a first token or a vector", self.prompt_tokens),
            ("generation_tokens", "Tokens generated", self.generation_tokens),
            ("prompt_tokens_cached", "Prompt tokens found in the prefix cache, by requests that ended", self.cached_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", core.prefix_queries),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache", core.prefix_hits),
            ("num_preemptions", "Requests that lost their blocks and were computed again", core.preemptions),
            ("engine_steps", "Steps of all cores", core.steps),
            ("engine_scheduled_tokens", "Tokens computed: prompts, outputs, both again when preempted", core.scheduled_tokens),
            ("engine_restarts", "Cores started after one had died", self.engine.restarts),
            ("engine_poisonous_requests", "Requests failed because cores died on them", self.engine.num_poisonous),
            ("http_process_restarts", "HTTP processes started after one had died", self.http_restarts),
            ("nan_failures", "Requests failed because their logits were not finite", core.nan_failures),
            ("spec_decode_num_drafts", "Times that a request's drafts were verified", core.drafts),
            ("spec_decode_num_draft_tokens", "Drafted tokens", core.draft_tokens),
            ("spec_decode_num_accepted_tokens", "Drafted tokens that were right", core.accepted_tokens),
        ):
            yield self._counter(name, text, {(): value})
        places = {(str(i),): v for i, v in enumerate(core.accepted_per_position)}
        yield self._counter(
            "spec_decode_num_accepted_tokens_per_pos", "Drafted tokens that were right, by place", places, ("position",)
        )
        seconds = {"schedule": core.schedule_seconds, "launch": core.launch_seconds, "device": core.wait_seconds}
        seconds["settle"] = core.settle_seconds
        yield self._counter(
            "engine_step_seconds", "Time of the loop by phase; device: waiting for it", {(k,): v for k, v in seconds.items()},
            ("phase",),
        )  # fmt: skip
        reasons = {(k,): v for k, v in self.finished.items()}
        yield self._counter("request_success", "Samples that ended, by how", reasons, ("finished_reason",))
        responses = {(p, str(s)): v for (p, s), v in self.responses.items()}
        yield self._counter("http_responses", "HTTP answers", responses, ("path", "status"))
        rejections = {(k,): v for k, v in self.rejections.items()}
        yield self._counter("request_rejections", "Requests that were refused, by why", rejections, ("reason",))
        ignored = {(k,): v for k, v in self.ignored.items()}
        yield self._counter("request_ignored_fields", "Fields of bodies that were left out, by name", ignored, ("field",))
        by_adapter = {(k,): v for k, v in self.adapters.items()}
        yield self._counter("adapter_requests", "Samples that ended, by the adapter that they had", by_adapter, ("lora_name",))
        yield from core_metrics(self.prefix, dict(zip(("model_name", "engine"), self.labels, strict=True)), cores)
        yield from self._histograms()

    def _histograms(self) -> Iterator[Metric]:
        for name, text, histogram in (
            ("time_to_first_token_seconds", "From a request's acceptance to its first token", self.first_token),
            ("inter_token_latency_seconds", "Between tokens of a request", self.between),
            ("request_time_per_output_token_seconds", "Mean time of a request's tokens after the first", self.per_token),
            ("e2e_request_latency_seconds", "From a request's arrival to its end", self.whole),
            ("request_queue_time_seconds", "From arrival in the core to the first step", self.queue),
            ("request_prefill_time_seconds", "From the first step to the first token", self.prefill),
            ("request_decode_time_seconds", "From the first token to the last", self.decode),
            ("request_inference_time_seconds", "From the first step to the last token", self.inference),
            ("request_prompt_tokens", "Prompt tokens of a sample", self.prompt_length),
            ("request_generation_tokens", "Tokens generated for a sample", self.output_length),
        ):
            family = HistogramMetricFamily(f"{self.prefix}:{name}", text, labels=["model_name", "engine"])
            family.add_metric(self.labels, histogram.cumulative(), histogram.sum)
            yield family

    def _info(self, name: str, text: str, told: Mapping[str, str]) -> Metric:
        family = GaugeMetricFamily(f"{self.prefix}:{name}", text, labels=["model_name", "engine", *told])
        family.add_metric([*self.labels, *told.values()], 1)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"{self.prefix}:{name}", text, labels=["model_name", "engine"])
        family.add_metric(self.labels, value)
        return family

    def _counter(self, name: str, text: str, values: Mapping[Any, float], labels: tuple[str, ...] = ()) -> Metric:
        family = CounterMetricFamily(f"{self.prefix}:{name}", text, labels=["model_name", "engine", *labels])
        for own, value in values.items():
            family.add_metric([*self.labels, *own], value)
        return family


def _up(status: EngineStatus) -> bool:
    return status.loaded and status.alive and status.progressing
