"""Spans for OpenTelemetry: their tree and attributes, whose child they are, what is never in them, and collectors that are dead."""

from __future__ import annotations

import http.server
import logging
import socket
import subprocess
import sys
import threading

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from fake_engine import TEMPLATE, FakeEngine
from headrace.api import tracing
from headrace.api.config import ServerConfig
from headrace.api.tracing import MAX_SPANS, phases_of
from headrace.engine.messages import RequestTimes
from headrace.errors import ParameterError
from headrace.extras import EXTRAS, require
from remote_app import RemoteApp
from server_driver import LOOP, MODEL, SRC, Api

ENDPOINT = "http://127.0.0.1:4318"
TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = {"traceparent": f"00-{TRACE}-{CALLER}-01", "tracestate": "vendor=x"}
SECRET = "ZYX secret"
HI = [{"role": "user", "content": SECRET}]


class Traced(Api):
    """Its spans stay in memory."""

    def __init__(self, monkeypatch, engine: FakeEngine | None = None, remote: zmq.Context | None = None, **options):
        self.memory = InMemorySpanExporter()
        monkeypatch.setattr(tracing, "span_exporter", lambda endpoint: self.memory)
        super().__init__(engine, otlp_traces_endpoint=ENDPOINT, **options)
        if remote is not None:  # what the server's process would send
            config = msgspec.msgpack.decode(msgspec.msgpack.encode(ServerConfig(otlp_traces_endpoint=ENDPOINT, **options)), type=ServerConfig)
            self.app = RemoteApp(self.engine, config, remote)

    def spans(self) -> list:
        """Of the calls since the last time, in the order in which they began."""
        app = self.app.app if isinstance(self.app, RemoteApp) else self.app
        app.state.api.tracing.provider.force_flush()
        found = sorted(self.memory.get_finished_spans(), key=lambda span: (span.start_time, -(span.end_time or 0)))
        self.memory.clear()
        return found


def by_name(spans) -> dict:
    return {span.name: span for span in spans}


def close_remote(api: Traced) -> None:
    async def close():
        api.app.close()

    LOOP.run(close())


CALLS = {
    "/v1/chat/completions": ({"messages": HI}, "chat"), "/v1/completions": ({"prompt": SECRET}, "text_completion"), "/v1/responses": ({"input": SECRET}, "chat"),
    "/v1/messages": ({"messages": HI, "max_tokens": 9}, "chat"), "/generate": ({"prompt": SECRET}, "text_completion"), "/api/chat": ({"messages": HI}, "chat"),
}  # fmt: skip


@pytest.mark.parametrize("place", ["here", "in an HTTP process"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", CALLS)
def test_the_tree(monkeypatch, path, stream, place):
    body, operation = CALLS[path]
    context = zmq.Context()
    api = Traced(monkeypatch, remote=context if place != "here" else None)
    response = api.post(path, {**body, "stream": stream, **({"temperature": 0.5, "top_p": 0.75} if path != "/api/chat" else {})}, headers=PARENT)
    assert response.status_code == 200
    spans = api.spans()
    names = by_name(spans)
    assert [span.name for span in spans if span.parent is None] == [] and len(spans) == 5
    server, work = names[f"POST {path}"], names[f"{operation} {MODEL}"]
    assert server.kind is SpanKind.SERVER and format(server.parent.span_id, "016x") == CALLER
    assert all(format(span.context.trace_id, "032x") == TRACE for span in spans) and server.context.trace_state["vendor"] == "x"
    assert dict(server.attributes) | {"server.address": "", "server.port": 0} == {
        "http.request.method": "POST", "url.path": path, "http.route": path, "http.response.status_code": 200, "server.address": "",
        "server.port": 0, "headrace.request_id": response.headers["x-request-id"],
    }  # fmt: skip
    assert work.parent.span_id == server.context.span_id and work.kind is SpanKind.INTERNAL
    [prompt] = api.engine.prompts
    a = dict(work.attributes)
    assert a["gen_ai.operation.name"] == operation and a["gen_ai.provider.name"] == "headrace"
    assert a["gen_ai.request.model"] == a["gen_ai.response.model"] == MODEL
    assert a["gen_ai.usage.input_tokens"] == len(prompt) and a["gen_ai.usage.cache_read.input_tokens"] == 2
    assert a["gen_ai.usage.output_tokens"] > 0 and a["gen_ai.response.finish_reasons"] in (("stop",), ("length",))
    assert a.get("gen_ai.request.stream", False) is stream and a["gen_ai.output.type"] == "text" and a["gen_ai.response.id"]
    assert path == "/api/chat" or (a["gen_ai.request.temperature"], a["gen_ai.request.top_p"]) == (0.5, 0.75)
    assert a["gen_ai.response.time_to_first_chunk"] >= 0
    for phase in ("queue", "prefill", "decode"):
        assert names[phase].parent.span_id == work.context.span_id
        assert work.start_time <= names[phase].start_time <= names[phase].end_time <= work.end_time
    assert SECRET not in "".join(span.to_json() for span in spans)
    if place != "here":
        close_remote(api)
    context.destroy(linger=0)


@given(*[st.floats(0, 100)] * 6)
def test_phases_follow_one_another(a, b, c, queue, first_token, total):
    arrival, first, now = sorted((a, b, c))
    for times in (None, RequestTimes(queue, first_token, total)):
        phases = list(phases_of(arrival, first, now, times))
        edges = [phases[0][1], *(stop for _, _, stop in phases)]
        assert edges == sorted(edges) and edges[0] >= arrival and edges[-2:] == [first, now]
        assert [start for _, start, _ in phases] == edges[:-1]
    assert list(phases_of(arrival, None, now, None)) == []


def test_what_users_write_is_never_in_a_span(monkeypatch):
    engine = FakeEngine(script=lambda ids, params: f"{SECRET} answer", supports_structured=True)
    engine.tokenizer.chat_templates = {"default": TEMPLATE + "{# <tool_call> </think> #}"}
    api = Traced(monkeypatch, engine)
    tool = {"type": "function", "function": {"name": "ZYX", "description": SECRET, "parameters": {"type": "object"}}}
    api.ok("/v1/chat/completions", {"messages": HI, "stop": ["ZYX stop"], "tools": [tool], "user": "ZYX", "metadata": {"a": "ZYX"}, "bad_words": ["ZYX"]})
    api.ok("/v1/chat/completions", {"messages": HI, "response_format": {"type": "json_schema", "json_schema": {"name": "ZYX", "schema": {"title": "ZYX"}}}})
    api.ok("/v1/rerank", {"query": SECRET, "documents": ["ZYX"]})
    api.ok("/v1/embeddings", {"input": SECRET})
    assert api.post("/v1/completions", {"prompt": "ZYX", "temperature": 9}).status_code == 400
    spans = api.spans()
    assert len(spans) == 15 and "ZYX" not in "".join(span.to_json() for span in spans)
    kinds = [span.attributes.get("gen_ai.output.type") for span in spans if span.name == f"chat {MODEL}"]
    assert kinds == ["text", "json"]
    names = by_name(spans)
    assert names[f"embeddings {MODEL}"].attributes["gen_ai.usage.input_tokens"] == len(SECRET) + 1
    assert names[f"rerank {MODEL}"].parent.span_id == names["POST /v1/rerank"].context.span_id


@pytest.mark.parametrize("headers", [{"tracestate": f"= {SECRET}"}, {"tracestate": "a" * 9000}, {"tracestate": "a=1,a=2"}, {"traceparent": SECRET * 99}], ids=["member", "long", "twice", "parent"])
def test_what_stands_in_a_header_does_not_reach_the_log(monkeypatch, caplog, headers):
    api = Traced(monkeypatch)
    assert api.post("/v1/completions", {"prompt": "hi"}, headers=PARENT | headers).status_code == 200
    assert len(api.spans()) == 5 and not [r for r in caplog.records if r.name.startswith("opentelemetry")]


@pytest.mark.parametrize(("header", "kept"), [
    (f"00-{TRACE}-{CALLER}-00", None), (f"00-{'0' * 32}-{CALLER}-01", False), (f"00-{TRACE}-{'0' * 16}-01", False), ("nonsense", False),
    (f"00-{TRACE.upper()}-{CALLER}-01", False), (f"00-{TRACE}-{CALLER}-01", True), (f"ff-{TRACE}-{CALLER}-01", False),
])  # fmt: skip
def test_whose_child_it_is(monkeypatch, header, kept):
    """None: the caller does not want it sampled, and nothing is."""
    api = Traced(monkeypatch)
    assert api.post("/v1/completions", {"prompt": "hi"}, headers={"traceparent": header}).status_code == 200
    spans = api.spans()
    if kept is None:
        assert not spans
        return
    assert len({span.context.trace_id for span in spans}) == 1 and len(spans) == 5
    server = by_name(spans)["POST /v1/completions"]
    assert (server.parent is not None) is kept and (format(server.context.trace_id, "032x") == TRACE) is kept


def test_what_is_made_in_the_background_is_within_the_span_of_its_request(monkeypatch):
    api = Traced(monkeypatch)
    asked = api.ok("/v1/responses", {"input": SECRET, "background": True})
    while api.app.state.api.tasks or "POST /v1/responses" not in by_name(api.memory.get_finished_spans()):
        assert api.request("GET", f"/v1/responses/{asked['id']}").json()["status"] in ("queued", "in_progress", "completed")
        api.app.state.api.tracing.provider.force_flush()
    spans = api.spans()
    server, work = by_name(spans)["POST /v1/responses"], by_name(spans)[f"chat {MODEL}"]
    assert len(spans) == 5 and work.parent.span_id == server.context.span_id and work.end_time <= server.end_time
    assert server.attributes["http.response.status_code"] == 200 and work.attributes["gen_ai.response.id"] == asked["id"]


def test_how_it_ended(monkeypatch):
    api = Traced(monkeypatch, FakeEngine(fail=lambda n: "error" if n > 1 else None), api_keys=("k",))
    key = {"authorization": "Bearer k"}
    assert api.post("/v1/completions", {"prompt": "hi"}).status_code == 401 and not api.spans(), "strangers make no spans"
    assert api.request("GET", "/v1/models", headers=key).status_code == 200 and not api.spans()
    assert api.post("/v1//completions/", {"prompt": "hi", "max_tokens": 0}, headers=key).status_code == 400
    [server] = api.spans()
    assert server.attributes["http.response.status_code"] == 400 and server.status.status_code is StatusCode.UNSET
    assert api.post("/v1/completions", {"prompt": "hi", "n": 3}, headers=key).status_code == 500
    spans = api.spans()
    server, work = by_name(spans)["POST /v1/completions"], [s for s in spans if s.name == f"text_completion {MODEL}"]
    assert server.status.status_code is StatusCode.ERROR and server.attributes["error.type"] == "500"
    assert len(work) == 3 and {s.attributes["error.type"] for s in work} <= {"error", "abort"}
    assert any(s.status.status_code is StatusCode.ERROR and s.attributes["gen_ai.response.finish_reasons"] == ("error",) for s in work)


def test_a_stop_string_and_beams_have_spans(monkeypatch):
    api = Traced(monkeypatch, FakeEngine(script=lambda ids, params: "abc, and much more of it " * 9))
    api.ok("/v1/completions", {"prompt": "hi", "stop": ["abc"], "max_tokens": 99})
    assert {"queue and prefill", "decode"} <= set(by_name(api.spans()))


def test_nothing_is_imported_without_an_endpoint():
    code = "import sys; sys.path.insert(0, 'tests')\nfrom server_driver import Api\nApi().ok('/v1/completions', {'prompt': 'hi'})\n"
    code += "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=SRC.parent)


@pytest.mark.parametrize("url", ["collector:4317", "grpc://collector:4317", "http://", "http://a b", "http://c/v1?x=1", ""])
def test_endpoints_that_are_none(url):
    with pytest.raises(ParameterError, match="otlp_traces_endpoint"):
        ServerConfig(otlp_traces_endpoint=url)


def test_the_extra(monkeypatch):
    monkeypatch.setitem(EXTRAS, "opentelemetry.exporter.none.at.all", "otel")
    with pytest.raises(Exception, match=r"headrace\[otel\]"):
        require("otel")


class Collector(http.server.BaseHTTPRequestHandler):
    """Keeps what it is sent."""

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["content-length"]))
        self.server.got.append((self.path, ExportTraceServiceRequest.FromString(data)))  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args) -> None:
        pass


def test_a_real_collector_gets_them():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        server.got = []  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        api = Api(otlp_traces_endpoint=f"http://127.0.0.1:{server.server_port}")
        api.ok("/v1/completions", {"prompt": "hi"})
        LOOP.run(api.app.state.api.tracing.close())
        server.shutdown()
        [(path, request)] = server.got  # type: ignore[attr-defined]
    assert path == "/v1/traces"
    [resource] = request.resource_spans
    assert {a.key: a.value.string_value for a in resource.resource.attributes}["service.name"] == "headrace"
    assert len(resource.scope_spans[0].spans) == 5


def test_a_dead_collector_disturbs_nobody(monkeypatch, caplog):
    """One that takes connections and says nothing, and one that refuses: requests are answered, memory is bounded, the end comes."""
    monkeypatch.setattr(tracing, "CLOSE_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for port in (silent.getsockname()[1], 9):
            api = Api(otlp_traces_endpoint=f"http://127.0.0.1:{port}/v1/traces")
            caplog.clear()
            with caplog.at_level(logging.WARNING):
                tracer = api.app.state.api.tracing
                for _ in range(MAX_SPANS + 1000):
                    tracer.tracer.start_span("much").end()
                for _ in range(3):
                    api.ok("/v1/completions", {"prompt": "hi"})
                queue = tracer.provider._active_span_processor._span_processors[0]._batch_processor._queue
                assert len(queue) <= MAX_SPANS
                LOOP.run(tracer.close())
            assert sum("takes no spans" in r.message for r in caplog.records) <= 1
            assert not [r for r in caplog.records if r.name.startswith("opentelemetry")]


def test_a_collector_that_comes_back_is_told_of_once(monkeypatch, caplog):
    api = Traced(monkeypatch)
    sender = api.app.state.api.tracing.provider._active_span_processor._span_processors[0].span_exporter
    answers = [True, False, False, True, True, False]

    def export(spans):
        if not answers.pop(0):
            raise OSError("gone")
        return tracing.SpanExportResult.SUCCESS

    monkeypatch.setattr(api.memory, "export", export)
    with caplog.at_level(logging.WARNING):
        while answers:
            sender.export([])
    said = [r.message for r in caplog.records]
    assert ["no spans" in line for line in said] == [True, False, True] and "127.0.0.1" in said[0]
