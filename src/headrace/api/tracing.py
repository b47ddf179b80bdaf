"""Spans of requests for OpenTelemetry (the extra `otel`). Imported, and anything of it done, only where an endpoint is given.

    POST /v1/chat/completions             server span, child of the caller's `traceparent`
        chat MODEL                        one for each sample: parameters, counts of tokens, how it ended
            queue | prefill | decode

Nothing that anybody has written goes into a span: no prompt, no answer, no stop string. Spans wait in a bounded queue for a
thread that sends them; what a collector does not take is dropped, and nobody waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol
from urllib.parse import urlsplit

from opentelemetry import trace
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.api.lifeline import when_over
from headrace.engine.messages import RequestTimes
from headrace.sampling.params import SamplingParams

logger = logging.getLogger(__name__)
MAX_SPANS = 2048  # that wait to be sent
CLOSE_SECONDS = 2.0  # for the last ones
# what of a path's work the spans tell: gen_ai.operation.name
OPERATIONS = {
    **dict.fromkeys(("/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"), "chat"),
    **dict.fromkeys(("/v1/completions", "/generate", "/api/generate"), "text_completion"),
    **dict.fromkeys(("/v1/embeddings", "/api/embed", "/api/embeddings"), "embeddings"),
    **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score"), "rerank"),
}
# the semantic conventions' names in one place: those of gen_ai are still in development
OPERATION, PROVIDER = "gen_ai.operation.name", "gen_ai.provider.name"
REQUEST_MODEL, RESPONSE_MODEL = "gen_ai.request.model", "gen_ai.response.model"
RESPONSE_ID, FINISH_REASONS = "gen_ai.response.id", "gen_ai.response.finish_reasons"
FIRST_CHUNK, STREAM, OUTPUT_TYPE = "gen_ai.response.time_to_first_chunk", "gen_ai.request.stream", "gen_ai.output.type"
INPUT_TOKENS, OUTPUT_TOKENS = "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"
CACHED_TOKENS, ERROR_TYPE = "gen_ai.usage.cache_read.input_tokens", "error.type"
METHOD, PATH, ROUTE, STATUS = "http.request.method", "url.path", "http.route", "http.response.status_code"
ADDRESS, PORT, REQUEST_ID = "server.address", "server.port", "headrace.request_id"


def span_exporter(endpoint: str) -> SpanExporter:
    """Sends by OTLP over HTTP, in protobuf; headers, certificates and timeout by OpenTelemetry's own variables."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    parts = urlsplit(endpoint)
    return OTLPSpanExporter(parts._replace(path="/v1/traces").geturl() if parts.path in ("", "/") else endpoint)


class Sample(Protocol):
    """What is told of a generation.Sample, which is not imported from here."""

    request_id: str
    prompt_ids: Any
    params: SamplingParams
    body: Any
    text: Any  # SampleStream

    @property
    def num_cached(self) -> int: ...


class Tracing:
    """Makes the spans of one application. `model`, in its methods: the name that is reported."""

    def __init__(self, endpoint: str):
        for name in ("opentelemetry.sdk._shared_internal", "opentelemetry.exporter.otlp"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # a line for each batch that is lost; ours tells of the change
        for name in ("opentelemetry.trace.span", "opentelemetry.trace.propagation.tracecontext"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # whatever stands in a header that is no right one
        resource = Resource.create()
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "headrace"}))
        self.provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self.provider.add_span_processor(BatchSpanProcessor(Sender(endpoint), max_queue_size=MAX_SPANS))
        self.tracer = self.provider.get_tracer("headrace")

    def around(self, app: ASGIApp) -> ASGIApp:
        """The application, with a span for each request."""
        return Spans(app, self)

    async def close(self) -> None:
        """Send what is left, if the collector takes it soon."""
        thread = threading.Thread(target=self.provider.shutdown, name="last spans", daemon=True)
        thread.start()
        end = time.monotonic() + CLOSE_SECONDS
        while thread.is_alive() and time.monotonic() < end:
            await asyncio.sleep(0.02)

    def sample_ended(self, sample: Sample, endpoint: str, reason: str, arrival: float, first: float | None, model: str) -> None:
        """Times are of time.monotonic(). Called in the context of the request."""
        if not trace.get_current_span().is_recording():
            return
        now, zero = time.monotonic(), _zero()
        phases = list(phases_of(arrival, first, now, sample.text.times))
        begun = phases[0][1] if phases else arrival
        span = self._start(OPERATIONS.get(endpoint, "chat"), model, zero + _ns(begun))
        asked = getattr(sample.body, "model", None)
        if asked:
            span.set_attribute(REQUEST_MODEL, asked[:200])
        span.set_attributes(parameters(sample.params))
        span.set_attributes({
            RESPONSE_MODEL: model, RESPONSE_ID: sample.request_id.rpartition("-")[0], FINISH_REASONS: [reason],
            INPUT_TOKENS: len(sample.prompt_ids), OUTPUT_TOKENS: sample.text.num_tokens, CACHED_TOKENS: sample.num_cached,
        })  # fmt: skip
        if getattr(sample.body, "stream", None):
            span.set_attribute(STREAM, True)
        if first is not None:
            span.set_attribute(FIRST_CHUNK, first - arrival)
        if reason in ("error", "abort"):
            span.set_attribute(ERROR_TYPE, reason)
        if reason == "error":
            span.set_status(Status(StatusCode.ERROR))
        around = trace.set_span_in_context(span)
        for name, start, stop in phases:
            phase = self.tracer.start_span(name, around, start_time=zero + _ns(start))
            phase.end(zero + _ns(stop))
        span.end(zero + _ns(now))

    def prompts_ended(self, endpoint: str, began: float, num_tokens: int, model: str) -> None:
        """The prompts of a request that generates nothing have been computed."""
        if trace.get_current_span().is_recording():
            zero = _zero()
            span = self._start(OPERATIONS.get(endpoint, "embeddings"), model, zero + _ns(began))
            span.set_attributes({RESPONSE_MODEL: model, INPUT_TOKENS: num_tokens})
            span.end(zero + _ns(time.monotonic()))

    def _start(self, operation: str, model: str, start: int) -> Span:
        known = {OPERATION: operation, PROVIDER: "headrace", REQUEST_MODEL: model}
        return self.tracer.start_span(f"{operation} {model}", attributes=known, start_time=start)


def phases_of(
    arrival: float, first: float | None, now: float, times: RequestTimes | None
) -> Iterator[tuple[str, float, float]]:
    """Name, begin and end of each. Without the core's times (a request that was cut off has none) two are one."""
    if first is None:
        return
    if times is None:
        yield "queue and prefill", arrival, first
    else:
        came = max(arrival, first - times.first_token)
        admitted = min(first, came + times.queue)
        yield "queue", came, admitted
        yield "prefill", admitted, first
    yield "decode", first, now


def parameters(p: SamplingParams) -> dict[str, Any]:
    """Of sampling, those that are set; never what could hold a user's text."""
    found: dict[str, Any] = {
        "gen_ai.request.max_tokens": p.max_tokens, "gen_ai.request.temperature": p.temperature, "gen_ai.request.top_p": p.top_p,
        "gen_ai.request.top_k": p.top_k if (p.top_k or 0) > 0 else None, "gen_ai.request.seed": p.seed,
        "gen_ai.request.frequency_penalty": p.frequency_penalty or None,
        "gen_ai.request.presence_penalty": p.presence_penalty or None,
        OUTPUT_TYPE: "text" if p.structured_outputs is None else "json",
    }  # fmt: skip
    return {name: value for name, value in found.items() if value is not None}


def _zero() -> int:
    """What is to be added to time.monotonic() in nanoseconds."""
    return time.time_ns() - time.monotonic_ns()


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


class Spans:
    """Plain ASGI, behind the keys' check: a span for each request that the model works for."""

    def __init__(self, app: ASGIApp, tracing: Tracing):
        self.app, self._tracer = app, tracing.tracer
        self._context = TraceContextTextMapPropagator()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] != "http" or scope["method"] != "POST" or path not in OPERATIONS:
            return await self.app(scope, receive, send)
        zero = _zero()
        given = {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])}
        span = self._tracer.start_span(
            f"POST {path}", self._context.extract(given), SpanKind.SERVER, _attributes(scope),
            start_time=zero + _ns(scope["state"]["arrival"]),
        )  # fmt: skip

        async def send_and_note(message: Message) -> None:
            if message["type"] == "http.response.start":
                status = message["status"]
                span.set_attribute(STATUS, status)
                if status >= 500:
                    span.set_attribute(ERROR_TYPE, str(status))
                    span.set_status(Status(StatusCode.ERROR))
            await send(message)

        try:
            with trace.use_span(span, record_exception=False, set_status_on_exception=False):
                await self.app(scope, receive, send_and_note)
        finally:
            when_over(scope, lambda: span.end(zero + time.monotonic_ns()))


def _attributes(scope: Scope) -> dict[str, Any]:
    found = {METHOD: "POST", PATH: scope["path"], ROUTE: scope["path"], REQUEST_ID: scope["state"]["request_id"]}
    if scope.get("server"):
        found |= {ADDRESS: scope["server"][0], PORT: scope["server"][1] or 0}
    return found


class Sender(SpanExporter):
    """Tells once when the collector stops taking spans, and when it takes them again."""

    def __init__(self, endpoint: str):
        self._exporter, self._failing = span_exporter(endpoint), False
        self._where = urlsplit(endpoint).hostname

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            result = self._exporter.export(spans)
        except Exception:
            result = SpanExportResult.FAILURE
        failing = result is not SpanExportResult.SUCCESS
        if failing and not self._failing:
            logger.warning("the collector at %s takes no spans: they are dropped until it does", self._where)
        elif self._failing and not failing:
            logger.warning("the collector at %s takes spans again", self._where)
        self._failing = failing
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._exporter.force_flush(timeout_millis)
