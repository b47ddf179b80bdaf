"""The metrics page, the line of statistics and the trace, fed by hand; the dashboard asks only for what the page has."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from answers import parse_metrics
from headrace.engine.interface import CoreStatus
from headrace.engine.messages import EngineOutput, EngineRequest, RequestTimes
from headrace.engine.slot import Slot
from headrace.engine.stats import CoreStats, StepTrace
from headrace.engine.streams import Offers, Stream
from headrace.engine.wire import Ready
from headrace.errors import ParameterError
from headrace.metrics.log_line import StatsLine
from headrace.metrics.prometheus import PATHS, Histogram, PrometheusMetrics, SampleRecord
from headrace.metrics.trace import TraceFile
from headrace.sampling.params import SamplingParams


class Source:
    """An engine's client to read from."""

    model_name = "a/model"
    restarts = num_poisonous = 0
    info = Ready(256, 512, 16, 64, 8, "cpu", "float32", 0.1, "Q4_1, Q8_0")

    def __init__(self) -> None:
        self.state = SimpleNamespace(loaded=True, alive=True, draining=False, progressing=True, num_running=3, num_waiting=2)
        self.core = CoreStats(kv_usage=0.25, steps=7, prefix_queries=100, prefix_hits=40, schedule_seconds=1.5)

    def status(self):
        return self.state

    def cores(self) -> list[CoreStatus]:
        return [CoreStatus(0, True, False, 7, 1, self.core, self.info)]

    def counters(self) -> CoreStats:
        return self.core


def stream(prompt: int = 10, arrival: float = 100.0) -> Stream:
    found = Stream(EngineRequest("r", [1] * prompt, SamplingParams()), Offers())
    found.arrival = arrival
    return found


def feed(metrics, s: Stream, at: list[float], count: int = 1) -> None:
    """Tokens at these times, as the client tells them."""
    for now in at:
        metrics.tokens(s, count, now)
        s.first, s.last = s.first or now, now


def test_the_page_is_well_formed_and_right():
    metrics = PrometheusMetrics(Source())
    s = stream()
    feed(metrics, s, [100.5, 100.6, 100.7], 2)
    metrics.ended(s, EngineOutput("r", finish_reason="stop", times=RequestTimes(0.25, 0.5, 0.75)), 101.0)
    metrics.sample_ended(SampleRecord("/v1/completions", "stop", 10, 6, 4, 0.5, 0.75))
    metrics.sample_ended(SampleRecord("/v1/completions", "error", 10, 0, 0, None, 0.1))
    for path, status in (("/v1/completions", 200), ("/v1/completions", 429), ("/ready", 503), ("/x" * 50, 404)):
        metrics.answered(path, status)
    data, content_type = metrics.render()
    assert content_type.startswith("text/plain")
    families = {f.name: f for f in text_string_to_metric_families(data.decode())}
    for family in families.values():
        if family.name.startswith("headrace:"):
            assert all(x.labels["model_name"] == "a/model" for x in family.samples), family.name
    page = parse_metrics(data.decode())
    expected = {
        "num_requests_running": 3, "num_requests_waiting": 2, "kv_cache_usage_perc": 0.25, "engine_up": 1,
        "prompt_tokens_total": 10, "generation_tokens_total": 6, "prefix_cache_queries_total": 100,
        "prefix_cache_hits_total": 40, "engine_steps_total": 7, 'engine_step_seconds_total{phase="schedule"}': 1.5,
        'request_success_total{finished_reason="stop"}': 1, 'request_success_total{finished_reason="error"}': 1,
        'request_success_total{finished_reason="length"}': 0, 'request_rejections_total{reason="overload"}': 1,
        'request_rejections_total{reason="unavailable"}': 0, 'request_rejections_total{reason="not_found"}': 1,
        'http_responses_total{path="other",status="404"}': 1, "time_to_first_token_seconds_count": 1,
        "time_to_first_token_seconds_sum": 0.5, "inter_token_latency_seconds_count": 4, "prompt_tokens_cached_total": 4,
        "request_queue_time_seconds_sum": 0.25, "e2e_request_latency_seconds_count": 1,
        "request_time_per_output_token_seconds_sum": 0.05, "request_generation_tokens_sum": 6,
    }  # fmt: skip
    for name, value in expected.items():
        assert page["headrace:" + name] == pytest.approx(value), name
    assert page["headrace:inter_token_latency_seconds_sum"] == pytest.approx(0.2)
    assert page['headrace:inter_token_latency_seconds_bucket{le="0.075"}'] == 4
    assert page['headrace:time_to_first_token_seconds_bucket{le="0.25"}'] == 0
    assert page['headrace:time_to_first_token_seconds_bucket{le="0.5"}'] == 1


def test_prompts_that_become_vectors_are_counted():
    """A server of embeddings had no throughput, on dashboards and in the line of statistics."""
    metrics = PrometheusMetrics(Source())
    metrics.ended(stream(10), EngineOutput("r", finish_reason="stop", embedding=[1.0]), 101.0)
    metrics.ended(stream(7), EngineOutput("r", finish_reason="error"), 101.0)
    assert parse_metrics(metrics.render()[0].decode())["headrace:prompt_tokens_total"] == 10


def test_each_core_is_shown_and_totals_are_over_all():
    """Under names of their own: a sum over the page's samples counts nothing twice."""
    source = Source()
    parts = [
        CoreStats(running=2, waiting=1, kv_usage=0.5, steps=10, scheduled_tokens=40, prefix_queries=9, prefix_hits=3),
        CoreStats(running=1, kv_usage=0.25, steps=20, scheduled_tokens=60, preemptions=4),
    ]
    source.cores = lambda: [
        CoreStatus(0, True, False, 500, 0, parts[0], source.info), CoreStatus(2, False, True, 0, 3, parts[1], None),
        CoreStatus(3, True, False, 0, 0, CoreStats(), source.info),
    ]  # fmt: skip
    text = PrometheusMetrics(source).render()[0].decode()
    page = parse_metrics(text)
    expected = {
        'core_up{core="0"}': 1, 'core_up{core="2"}': 0, 'core_leaving{core="2"}': 1, 'core_outstanding_tokens{core="0"}': 500,
        'core_num_requests_running{core="0"}': 2, 'core_num_requests_running{core="2"}': 1, 'core_steps_total{core="2"}': 20,
        'core_num_requests_waiting{core="0"}': 1, 'core_kv_cache_usage_perc{core="2"}': 0.25, 'core_restarts_total{core="2"}': 3,
        'core_scheduled_tokens_total{core="0"}': 40, 'core_num_preemptions_total{core="2"}': 4,
        'core_prefix_cache_queries_total{core="0"}': 9, 'core_prefix_cache_hits_total{core="0"}': 3,
        'cache_config_info{block_size="16",num_gpu_blocks="128"}': 1,
        'model_info{device="cpu",dtype="float32",weights="Q4_1, Q8_0"}': 1,
    }  # fmt: skip
    assert {name: page["headrace:" + name] for name in expected} == expected
    families = list(text_string_to_metric_families(text))
    assert all(all("core" in s.labels for s in f.samples) == (":core_" in f.name) for f in families if f.samples)
    now = [0.0]
    line = StatsLine(source, PrometheusMetrics(source), lambda: now[0])
    assert "running 3 (2 + - + 0), waiting 2;" in line.line()


def test_each_core_has_its_track(tmp_path):
    path = tmp_path / "trace.json"
    trace = TraceFile(path)
    step = StepTrace(1000.0, 0.001, 0.002, 0.003, 0.004, 5, 2, 2, 1, 0.5)
    for core in (0, 1, 5, 1):
        trace.steps([step], core)
    trace.close()
    events = read_trace(path)
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(names.values()) == ["core 1", "core 5", "engine", "requests"] and len(names) == 4
    slices = [names[e["pid"]] for e in events if e["ph"] == "X" and e["name"].startswith("2 seqs")]
    assert slices == ["engine", "core 1", "core 5", "core 1"]
    assert [names[e["pid"]] for e in events if e["name"] == "KV usage"] == ["engine", "core 1", "core 5"]


def test_another_prefix_and_two_collectors_in_one_process():
    one, two = PrometheusMetrics(Source(), "vllm", "shown"), PrometheusMetrics(Source())
    one.answered("/v1/models", 200)
    assert b"headrace:" not in one.render()[0] and b'vllm:num_requests_running{engine="0",model_name="shown"} 3.0' in one.render()[0]
    assert b"http_responses_total{" not in two.render()[0]


def test_paths_of_clients_do_not_grow_the_page():
    metrics = PrometheusMetrics(Source())
    for i in range(1000):
        metrics.answered(f"/nothing/{i}", 404)
        metrics.answered(f"/v1/models/{i}", 404)
    for path in PATHS:
        metrics.answered(path, 200)
    assert len(metrics.responses) == len(PATHS) + 2


def test_times_of_an_interrupted_request_are_not_taken_for_whole():
    metrics = PrometheusMetrics(Source())
    s = stream()
    feed(metrics, s, [100.5])
    s.interrupted = True
    metrics.ended(s, EngineOutput("r", finish_reason="stop", times=RequestTimes(0.01, 0.02, 0.03)), 101.0)
    assert not any(metrics.queue.counts)


def test_histograms_count_at_their_bounds():
    h = Histogram((1.0, 2.0))
    for value, times in ((0.5, 1), (1.0, 2), (1.5, 3), (2.5, 4)):
        h.observe(value, times)
    assert h.cumulative() == [("1.0", 3), ("2.0", 6), ("+Inf", 10)] and h.sum == 0.5 + 2 + 4.5 + 10


def test_counters_go_on_when_a_core_starts_from_zero():
    slot = Slot.__new__(Slot)
    slot.past, slot.stats = CoreStats(), CoreStats(running=3, steps=5, wait_seconds=1.0, kv_usage=0.5)
    before = slot.counters()
    slot.past, slot.stats = slot.counters(), CoreStats()
    after = slot.counters()
    assert (after.steps, after.wait_seconds) == (before.steps, before.wait_seconds) == (5, 1.0)
    assert (after.running, after.kv_usage) == (0, 0.0)
    slot.stats = CoreStats(steps=2)
    assert slot.counters().steps == 7


def test_the_line_of_statistics():
    source = Source()
    metrics = PrometheusMetrics(source)
    now = [0.0]
    line = StatsLine(source, metrics, lambda: now[0])
    s = stream(prompt=50)
    feed(metrics, s, [100.0 + i for i in range(20)])
    source.core = CoreStats(kv_usage=0.5, prefix_queries=200, prefix_hits=90)
    now[0] = 10.0
    assert line.line() == "running 3, waiting 2; prompt 5 tok/s, generation 2 tok/s; KV cache 50.0%, prefix hits 50.0%"
    source.state.num_running = source.state.num_waiting = 0
    assert line.line() is None


def read_trace(path: Path) -> list[dict]:
    return json.loads(path.read_text())["traceEvents"]


def test_the_trace_is_valid_after_every_flush(tmp_path):
    path = tmp_path / "trace.json"
    trace = TraceFile(path)
    assert len(read_trace(path)) == 3
    trace.steps([StepTrace(1000.0 + i, 0.001, 0.002, 0.003, 0.004, 5, 2, 2, 1, 0.5) for i in range(3)])
    s = stream()
    feed(trace, s, [100.5])
    trace.ended(s, EngineOutput("r", finish_reason="stop", times=RequestTimes(0.25, 0.5, 0.75)), 101.0)
    trace.flush()
    events = read_trace(path)
    steps = [e for e in events if e.get("tid") == 1 and e["ph"] == "X"]
    assert [e["name"] for e in steps[:5]] == ["2 seqs, 5 tokens", "schedule", "launch", "wait", "settle"]
    whole, parts = steps[0], steps[1:5]
    assert sum(p["dur"] for p in parts) == pytest.approx(whole["dur"]) and parts[0]["ts"] == whole["ts"]
    assert all(a["ts"] + a["dur"] == pytest.approx(b["ts"], abs=0.3) for a, b in pairwise(parts))
    phases = [(e["name"], e["ph"]) for e in events if e.get("cat") == "request"]
    assert phases == [(n, ph) for n in ("r", "queue", "prefill", "decode") for ph in "be"]
    begin = {e["name"]: e["ts"] for e in events if e["ph"] == "b"}
    assert begin["prefill"] - begin["queue"] == pytest.approx(0.25e6) and begin["decode"] - begin["prefill"] == pytest.approx(0.25e6)
    trace.steps([StepTrace(2000.0, 0.001, 0, 0, 0, 5, 2, 2, 1, 0.5)])
    trace.close()
    assert len(read_trace(path)) > len(events)
    trace.steps([StepTrace(3000.0, 0.001, 0, 0, 0, 5, 2, 2, 1, 0.5)])
    trace.close()  # after the end nothing happens


def test_the_trace_is_bounded(tmp_path):
    path = tmp_path / "trace.json"
    trace = TraceFile(path, max_bytes=20_000)
    for i in range(10_000):
        trace.steps([StepTrace(1000.0 + i, 0.001, 0.002, 0.003, 0.004, 5, 2, i, 1, 0.5)])
    trace.close()
    assert path.stat().st_size <= 20_000
    read_trace(path)
    with pytest.raises(ParameterError, match="--trace"):
        TraceFile(tmp_path / "no" / "such" / "directory")


def test_a_full_disk_ends_the_trace_and_nothing_else(tmp_path, caplog):
    TraceFile("/dev/full").close()
    assert "the trace /dev/full ends here: [Errno 28]" in caplog.text
    trace = TraceFile(tmp_path / "trace")
    trace._file.close()
    trace._file = open("/dev/full", "w+b")  # noqa: SIM115
    trace._name(1, "full")
    trace.close()
    assert caplog.text.count("ends here") == 2


def test_the_dashboard_asks_for_what_there_is():
    dashboard = json.loads((Path(__file__).parents[1] / "docs" / "grafana.json").read_text())
    metrics = PrometheusMetrics(Source())
    metrics.answered("/v1/completions", 429)
    page = metrics.render()[0].decode()
    names = set(re.findall(r"headrace:\w+", page))
    expressions = [t["expr"] for p in dashboard["panels"] for t in p.get("targets", ())]
    asked = {n for e in expressions for n in re.findall(r"headrace:\w+", e)}
    assert len(expressions) > 15 and asked <= names, asked - names
    ids = [p["id"] for p in dashboard["panels"]]
    assert len(ids) == len(set(ids))


def test_speculation_is_counted_over_all_cores():
    source = Source()
    slot = Slot.__new__(Slot)
    slot.past = CoreStats(drafts=2, draft_tokens=8, accepted_tokens=5, accepted_per_position=[2, 2, 1])
    slot.stats = CoreStats(drafts=1, draft_tokens=4, accepted_tokens=1, accepted_per_position=[1])
    source.core = slot.counters()
    values = parse_metrics(PrometheusMetrics(source).render()[0].decode())
    found = {name.split("{")[0].removeprefix("headrace:"): value for name, value in values.items() if "spec_decode" in name}
    assert found["spec_decode_num_drafts_total"] == 3
    assert found["spec_decode_num_draft_tokens_total"] == 12
    assert found["spec_decode_num_accepted_tokens_total"] == 6
    per_place = [value for name, value in sorted(values.items()) if "per_pos_total" in name]
    assert per_place == [3, 2, 1]
