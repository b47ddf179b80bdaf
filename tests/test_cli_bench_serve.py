"""`headrace bench serve`: its client, its workloads, its figures, and runs against a real server."""

from __future__ import annotations

import asyncio
import collections
import importlib.util
import itertools
import json
import math
import statistics
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.cli import main
from headrace.errors import ParameterError
from headrace_bench.http_client import Connection, HttpClient, TransportError
from headrace_bench.load import Load, Run, arrival_times
from headrace_bench.report import parse_goodput, summary, table
from headrace_bench.target import Measured, Plan, StreamReader, Target
from headrace_bench.workload import Lengths, PromptMaker, from_file, prefix_repetition, random_lengths
from server_driver import ServerProcess
from tiny_models import VOCAB

# of `vllm bench serve --percentile-metrics ttft,tpot,itl,e2el`
VLLM_KEYS = {
    "date", "backend", "model_id", "num_prompts", "request_rate", "burstiness", "max_concurrency", "duration", "completed",
    "failed", "total_input_tokens", "total_output_tokens", "request_throughput", "request_goodput", "output_throughput",
    "total_token_throughput", "max_output_tokens_per_s", "max_concurrent_requests",
    *(f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p99") for name in ("ttft", "tpot", "itl", "e2el")),
}  # fmt: skip
VLLM_DETAILS = {"input_lens", "output_lens", "ttfts", "itls", "generated_texts", "errors", "start_times", "latencies"}


@pytest.fixture(scope="module")
def server(model):
    with ServerProcess(model, "--max-model-len", "256", "--no-standby") as running:
        yield running.wait_ready().url


def bench(capsys, tmp_path: Path, *options: str) -> tuple[int, dict | list, str, str]:
    """Exit code, the saved JSON, standard output, standard error."""
    file = tmp_path / "result.json"
    file.unlink(missing_ok=True)
    code = main(["bench", "serve", "--save-result", str(file), *options])
    written = capsys.readouterr()
    return code, json.loads(file.read_text()) if file.exists() else {}, written.out, written.err


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_random_lengths_at_a_server(capsys, tmp_path, server, endpoint):
    options = ["--url", server, "--endpoint", endpoint, "--num-prompts", "6", "--random-input-len", "30"]
    options += ["--random-output-len", "10", "--max-concurrency", "3", "--save-detailed", "--num-warmups", "2"]
    code, result, out, err = bench(capsys, tmp_path, *options, "--goodput", "ttft:60000", "e2el:60000")
    assert code == 0 and not err and "Successful requests:                     6" in out
    assert set(result) >= VLLM_KEYS | VLLM_DETAILS
    assert result["completed"] == 6 and result["failed"] == 0
    assert result["total_output_tokens"] == 60 and result["output_lens"] == [10] * 6  # ignore_eos: exact lengths
    if endpoint == "completions":  # token ids: exact here too
        assert result["total_input_tokens"] == 180 and result["input_lens"] == [30] * 6
    assert result["max_concurrent_requests"] <= 3
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])
    for i, (ttft, gaps, latency) in enumerate(zip(result["ttfts"], result["itls"], result["latencies"], strict=True)):
        assert 0 < ttft <= ttft + sum(gaps) <= latency + 1e-6 and len(gaps) < 10, i
    assert result["mean_e2el_ms"] == pytest.approx(1e3 * statistics.mean(result["latencies"]))


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_a_server_that_tells_the_usage_so_far_is_measured_by_it(capsys, tmp_path, server, endpoint, monkeypatch):
    told = []
    monkeypatch.setattr("headrace_bench.serve.warn", lambda outcome: told.extend(outcome.results))
    options = ["--url", server, "--endpoint", endpoint, "--num-prompts", "3", "--random-input-len", "9", "--random-output-len", "12"]
    asked = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    code, result, _, _ = bench(capsys, tmp_path, *options, "--extra-body", json.dumps(asked), "--save-detailed")
    assert code == 0 and result["output_lens"] == [12] * 3 and len(told) == 3
    for r, gaps in zip(told, result["itls"], strict=True):
        assert len(r.counts) == len(r.gaps) + 1 and sum(r.counts) == 12 and len(gaps) == 12 - r.counts[0]
        assert sum(gaps) <= r.latency - r.ttft + 1e-6


def test_shared_prefixes_and_several_loads(capsys, tmp_path, server):
    options = ["--url", server + "/v1", "--dataset-name", "prefix_repetition", "--num-prompts", "4"]
    options += ["--prefix-repetition-prefix-len", "40", "--prefix-repetition-suffix-len", "8"]
    options += ["--prefix-repetition-num-prefixes", "2", "--prefix-repetition-output-len", "4", "--request-rate", "20", "inf"]
    code, results, out, _ = bench(capsys, tmp_path, *options)
    assert code == 0 and [r["request_rate"] for r in results] == [20, "inf"] and out.count("Serving Benchmark Result") == 2
    assert all(r["total_input_tokens"] == 4 * 48 and r["total_output_tokens"] == 16 for r in results)
    assert results[0]["duration"] >= 3 / 20


def test_files(capsys, tmp_path, server):
    file = tmp_path / "requests.jsonl"
    lines = [{"prompt": "hello you", "output_len": 3}, {"input_len": 20, "output_len": 5}, {"prompt": [5, 6, 7]}]
    file.write_text("\n".join(map(json.dumps, lines)))
    options = ["--url", server, "--dataset-name", "custom", "--dataset-path", str(file), "--custom-output-len", "2"]
    code, result, _, _ = bench(capsys, tmp_path, *options, "--ignore-eos", "--save-detailed")
    assert code == 0 and result["output_lens"] == [3, 5, 2] and result["input_lens"][1:] == [20, 3]
    code, _, _, err = bench(capsys, tmp_path, *options, "--endpoint", "chat")
    assert code == 1 and "token ids" in err
    for bad in ('{"prompt": 5}', '{"input_len": 0}', "not json", "[1]", '{"prompt": "x", "output_len": 0}', ""):
        file.write_text(bad)
        code, _, _, err = bench(capsys, tmp_path, *options)
        assert code == 1 and "--dataset-path" in err, bad


@pytest.mark.parametrize("command", ["bench serve --save-result", "bench serve --plot", "simulate --save-result", "bench latency --out"])
@pytest.mark.parametrize("place", ["no/such/directory/x.svg", "."])
def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(capsys, tmp_path, monkeypatch, command, place):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("headrace_bench.serve.measure", None)
    assert main([*command.split(), place]) == 1
    err = capsys.readouterr().err
    assert err == f"headrace: {command.split()[-1]}: got {place!r}, allowed: a file in a directory that can be written\n"


def test_failures_are_counted_and_told(capsys, tmp_path, server):
    options = ["--url", server, "--num-prompts", "3", "--random-input-len", "30", "--random-output-len", "1000"]
    code, result, _, err = bench(capsys, tmp_path, *options)
    assert code == 1 and result["failed"] == 3 and result["completed"] == 0 and "HTTP 400" in err and "context" in err
    code, _, _, err = bench(capsys, tmp_path, "--url", server, "--model", "other")
    assert code == 1 and "404" in err
    code, _, _, err = bench(capsys, tmp_path, "--url", "http://127.0.0.1:9")
    assert code == 1 and "cannot be reached" in err


@pytest.mark.parametrize(
    "options",
    [
        ["--request-rate", "0"], ["--burstiness", "-1"], ["--max-concurrency", "0"], ["--num-prompts", "0"], ["--goodput", "x:1"],
        ["--goodput", "ttft:soon"], ["--metric-percentiles", "101"], ["--random-range-ratio", "1"], ["--header", "x"],
        ["--dataset-name", "custom"], ["--extra-body", "[]"], ["--url", "ftp://x"], ["--request-rate", "nan"],
    ],
)  # fmt: skip
def test_bad_options(capsys, tmp_path, options, server):
    code, _, _, err = bench(capsys, tmp_path, "--url", server, *options)
    assert code == 1 and "allowed" in err


def test_plot(capsys, tmp_path, server, monkeypatch):
    options = ["--url", server, "--num-prompts", "2", "--random-input-len", "5", "--random-output-len", "3"]
    options += ["--max-concurrency", "1", "2"]
    if importlib.util.find_spec("matplotlib"):
        code, _, _, _ = bench(capsys, tmp_path, *options, "--plot", str(tmp_path / "picture.svg"))
        assert code == 0 and (tmp_path / "picture.svg").read_text().startswith("<?xml")
        code, _, _, err = bench(capsys, tmp_path, *options, "--plot", "picture.nonsense")
        assert code == 1 and ".svg" in err
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else real(name, *rest))
    code, _, _, err = bench(capsys, tmp_path, *options, "--plot", "picture.svg")
    assert code == 1 and "pip install 'headrace[plot]'" in err


# ------------------------------------------------------------------------------------------------------------ the client


def chunked(body: bytes, sizes: list[int]) -> bytes:
    out, at = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", 0
    for size in [*sizes, len(body)]:
        piece = body[at : at + size]
        at += size
        if piece:
            out += b"%x;ext=1\r\n%s\r\n" % (len(piece), piece)
    return out + b"0\r\nTrailer: x\r\n\r\n"


def with_length(body: bytes, sizes: list[int]) -> bytes:
    return b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 404 Not Found\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


def until_close(body: bytes, sizes: list[int]) -> bytes:
    return b"HTTP/1.1 500 Oops\r\n\r\n" + body


class NoTransport:
    def write(self, data: bytes) -> None:
        pass

    def abort(self) -> None:
        pass


@given(
    st.binary(max_size=60), st.lists(st.integers(1, 20), max_size=5), st.lists(st.integers(0, 200), max_size=8),
    st.sampled_from([(chunked, 200), (with_length, 404), (until_close, 500)]),
)  # fmt: skip
def test_any_cut_of_a_response_gives_its_body(body, sizes, cuts, kind):
    encode, status = kind

    async def receive() -> tuple[int, bytes, bool]:
        connection, got = Connection(), []
        connection.connection_made(NoTransport())  # type: ignore[arg-type]
        answer = connection.request(b"", lambda data, now: got.append(data))
        data = encode(body, sizes)
        for a, b in itertools.pairwise([0, *sorted(min(c, len(data)) for c in cuts), len(data)]):
            if a < b:
                connection.data_received(data[a:b])
        if encode is until_close:
            connection.connection_lost(None)
        return await answer, b"".join(got), connection.reusable

    assert asyncio.run(receive()) == (status, body, encode is not until_close)


@pytest.mark.parametrize(
    "data", [b"SSH-2.0\r\n\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", b"HTTP/1.1 200"]
)
def test_what_is_not_http_is_an_error(data):
    async def receive() -> None:
        connection = Connection()
        connection.connection_made(NoTransport())  # type: ignore[arg-type]
        answer = connection.request(b"", lambda data, now: None)
        connection.data_received(data)
        connection.connection_lost(None)
        assert not connection.reusable
        await answer

    with pytest.raises(TransportError):
        asyncio.run(receive())


def event(**choice) -> bytes:
    return b"data: " + json.dumps({"id": "x", "choices": [{"index": 0, **choice}]}, ensure_ascii=False).encode() + b"\n\n"


STREAMS = {
    "completions": event(text="a", finish_reason=None) + b": keep-alive\n\n" + event(text="", finish_reason=None)
    + event(text="é😀", finish_reason="stop"),
    "chat": event(delta={"role": "assistant", "content": ""}) + event(delta={"reasoning": "a"})
    + event(delta={"content": "é😀"}) + event(delta={}, finish_reason="stop"),
}  # fmt: skip
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}}\n\n'


@given(st.sampled_from(sorted(STREAMS)), st.lists(st.integers(0, 500), max_size=10))
def test_any_cut_of_a_stream_gives_its_text_and_times(kind, cuts):
    data = STREAMS[kind] + USAGE + b"data: [DONE]\n\n"
    measured = Measured(start=1.0)
    reader, clock, arrived = StreamReader(measured), itertools.count(2), {}
    for a, b in itertools.pairwise([0, *sorted(min(c, len(data)) for c in cuts), len(data)]):
        now = float(next(clock))
        reader(data[a:b], now)
        arrived |= dict.fromkeys(range(a, b), now)
    assert "".join(measured.text) == "aé😀" and not measured.error and reader.finished
    assert (measured.prompt_tokens, measured.output_tokens) == (7, 5) and len(measured.gaps) == 1
    first = arrived[data.index(b"\n\n", data.index(b'"a"'))]
    second = arrived[data.index(b"\n\n", data.index("é😀".encode()))]
    assert measured.ttft == pytest.approx(first - 1, abs=1) and measured.gaps[0] >= 0
    assert 0 <= measured.ttft + measured.gaps[0] - (second - 1) <= 1
    assert measured.latency >= measured.ttft + measured.gaps[0]


class Scripted:
    """A server whose events come at known times: it answers with (seconds after the start of the request, event)."""

    def __init__(self, *script: tuple[float, bytes]):
        self.script = script

    async def send(self, method: str, path: str, body: bytes, sink: StreamReader) -> int:
        for seconds, data in self.script:
            sink(data, sink.measured.start + seconds)
        return 200


def measured_by(*script: tuple[float, bytes]) -> Measured:
    target = Target(Scripted(*script), "m", "completions", {}, timeout=10)  # type: ignore[arg-type]
    found = asyncio.run(target.send(Plan("x", 4)))
    assert found.success, found.error
    return found


def usage(tokens: int, **choice) -> bytes:
    """An event that tells the usage so far, or, without a choice, in the end."""
    choices = [{"index": 0, **choice}] if choice else []
    return b"data: " + json.dumps({"choices": choices, "usage": {"prompt_tokens": 1, "completion_tokens": tokens}}).encode() + b"\n\n"


COUNTING = {  # how an event says which tokens it holds
    "usage at the end": lambda text, ids, so_far, end: event(text=text, finish_reason=end),
    "usage so far": lambda text, ids, so_far, end: usage(so_far, text=text, finish_reason=end),
    "ids": lambda text, ids, so_far, end: event(text=text, finish_reason=end, token_ids=ids),
    "chat, usage so far": lambda text, ids, so_far, end: usage(so_far, delta={"content": text}, finish_reason=end),
    "chat, ids": lambda text, ids, so_far, end: event(delta={"content": text}, token_ids=ids, finish_reason=end),
}


@pytest.mark.parametrize("how", sorted(COUNTING))
def test_times_are_per_token_however_many_share_an_event(how):
    texts = [(0.5 + 0.1 * i, COUNTING[how]("a b c d", [1, 2, 3, 4], 4 * i + 4, "length" if i == 9 else None)) for i in range(10)]
    m = measured_by(*texts, (1.5, usage(40)), (1.5, b"data: [DONE]\n\n"))
    assert m.output_tokens == 40 and m.itls == pytest.approx([0.025] * 36)
    assert (m.ttft, m.tpot, m.latency) == pytest.approx((0.5, 0.9 / 39, 1.4))
    figures = summary(Run(Load(), [m], duration=1.4, client_cpu=0.0), [50, 99], {})
    assert figures["mean_itl_ms"] == pytest.approx(25) and figures["p99_itl_ms"] == pytest.approx(25)
    assert figures["mean_tpot_ms"] == pytest.approx(900 / 39) and figures["mean_e2el_ms"] == pytest.approx(1400)
    assert figures["max_output_tokens_per_s"] in (20, 24)  # 5 or 6 events begin in the first second after the start


@given(st.lists(st.tuples(st.floats(0.001, 1), st.integers(0, 6)), min_size=1, max_size=20), st.sampled_from(sorted(COUNTING)))
def test_times_between_tokens_add_up(pieces, how):
    """Their sum is the time from the first event to the last that held a token, their number that of the tokens after it."""
    pieces = [(gap, max(tokens, how == "usage at the end")) for gap, tokens in pieces]
    script, now, so_far = [(0.25, COUNTING[how]("a", [0], 1, None))], 0.25, 1
    for gap, tokens in pieces:
        now, so_far = now + gap, so_far + tokens
        script.append((now, COUNTING[how]("a", [0] * tokens, so_far, None)))
    script.append((now + 1, COUNTING[how]("a", [0] * 3, so_far + 3, "stop")))
    m = measured_by(*script, (now + 1, usage(so_far + 3)))
    assert sum(m.itls) == pytest.approx(m.latency - m.ttft) and m.latency == pytest.approx(now + 1)
    assert len(m.itls) == so_far + 3 - m.tokens_per_event[0]
    assert m.tpot == pytest.approx((m.latency - m.ttft) / (so_far + 2))


def test_an_end_token_without_text_is_a_token():
    texts = [(0.1 * i, event(text="a", finish_reason=None)) for i in range(1, 5)]
    m = measured_by(*texts, (0.5, event(text="", finish_reason="stop")), (0.5, usage(5)))
    assert m.itls == pytest.approx([0.1] * 4) and m.tpot == pytest.approx(0.1)
    m = measured_by(*texts, (0.4, event(text="", finish_reason="stop")))  # no usage at all: an event is a token
    assert m.output_tokens == 4 and m.itls == pytest.approx([0.1] * 3) and m.tpot == pytest.approx(0.1)


def serve_once(answers: list[bytes], use):
    """Run `use(client)` against a server that gives these answers, each on a connection that it closes then."""

    async def handle(reader, writer):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            seen.append(head)
            lengths = [int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")]
            await reader.readexactly(sum(lengths))
            writer.write(answers.pop(0))
            await writer.drain()
            if answers and answers[0] == b"close":
                answers.pop(0)
                writer.close()
                return

    seen: list[bytes] = []

    async def run():
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        client = HttpClient(f"127.0.0.1:{port}/v1/", "secret", {"X-Test": "1"})
        try:
            return await use(client), seen
        finally:
            client.close()
            server.close()

    return asyncio.run(run())


def test_errors_of_a_request_are_in_its_result():
    stream = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    started = event(text="a", finish_reason=None)
    chunk = b"%x\r\n%s\r\n" % (len(started), started)
    error = b'data: {"error": {"message": "engine died"}}\n\n'
    answers = [
        b"HTTP/1.1 429 Too Many\r\nContent-Length: 4\r\n\r\nbusy",
        stream + chunk, b"close",
        stream + chunk + b"0\r\n\r\n",
        stream + chunk + b"%x\r\n%s\r\n0\r\n\r\n" % (len(error), error),
        stream + chunk,
    ]  # fmt: skip

    async def use(client: HttpClient) -> list[Measured]:
        return [await Target(client, "m", "completions", {}, timeout=t).send(Plan("x", 4)) for t in (20, 20, 20, 20, 0.3)]

    results, seen = serve_once(answers, use)
    for r, expected in zip(results, ["HTTP 429: busy", "closed", "finish_reason", "engine died", "within 0.3 s"], strict=True):
        assert not r.success and expected in r.error, r.error
    assert all(b"POST /v1/completions " in h and b"Authorization: Bearer secret" in h and b"X-Test: 1" in h for h in seen)


# -------------------------------------------------------------------------------------------- workloads, arrivals, figures


@given(st.integers(2, 300), st.floats(0.1, 1e4), st.floats(0.1, 100), st.integers(0, 5))
@settings(max_examples=50)
def test_arrivals_keep_their_rate(count, rate, burstiness, seed):
    times = arrival_times(count, Load(rate, burstiness), seed)
    assert times == sorted(times) and times[0] == 0 and len(times) == count
    assert times[-1] == pytest.approx((count - 1) / rate)
    assert times == arrival_times(count, Load(rate, burstiness), seed)


def test_burstiness_shapes_the_gaps():
    def variation(burstiness: float) -> float:
        gaps = [b - a for a, b in itertools.pairwise(arrival_times(4001, Load(10, burstiness), 0))]
        return statistics.pstdev(gaps) / statistics.mean(gaps)

    for burstiness in (0.25, 1.0, 4.0):  # the coefficient of variation of a gamma distribution
        assert variation(burstiness) == pytest.approx(1 / math.sqrt(burstiness), rel=0.15)
    assert arrival_times(3, Load(), 0) == [0, 0, 0]


@given(st.integers(1, 50), st.integers(1, 500), st.integers(1, 500), st.floats(0, 0.99), st.integers(0, 3))
def test_random_lengths(count, inputs, outputs, ratio, seed):
    lengths = random_lengths(seed, count, inputs, outputs, 3, ratio)
    assert len(lengths) == count and lengths == random_lengths(seed, count, inputs, outputs, 3, ratio)
    for n in lengths:
        assert max(1, int(inputs * (1 - ratio))) <= n.input_len <= max(1, inputs * (1 + ratio))
        assert max(1, int(outputs * (1 - ratio))) <= n.output_len <= max(1, outputs * (1 + ratio))


@pytest.mark.parametrize("vocabulary", [VOCAB, None])
def test_prefixes_are_shared_and_the_rest_is_not(vocabulary):
    wanted = prefix_repetition(0, 12, 3, prefix_len=40, suffix_len=20, output_len=4)
    maker = PromptMaker(0, vocabulary)
    plans = maker.plans(wanted, "a")
    prompts = [tuple(p.prompt) if vocabulary else tuple(p.prompt.split()) for p in plans]
    assert all(len(p) == 60 for p in prompts) and len(set(prompts)) == 12
    assert sorted(collections.Counter(p[:40] for p in prompts).values()) == [4, 4, 4]
    assert plans == maker.plans(wanted, "a") and plans != PromptMaker(1, vocabulary).plans(wanted, "a")
    # another run has nothing of this one in the prefix cache
    other = [tuple(p.prompt) if vocabulary else tuple(p.prompt.split()) for p in maker.plans(wanted, "b")]
    assert not {p[:20] for p in other} & {p[:20] for p in prompts}


def test_a_file_is_used_again_when_it_is_short(tmp_path):
    file = tmp_path / "x.jsonl"
    file.write_text('{"input_tokens": 3, "output_tokens": 2}\n\n{"prompt": "hi"}\n')
    assert list(from_file(str(file), None, 9)) == [Lengths(3, 2), Plan("hi", 9)]
    assert list(from_file(str(file), 3, 9)) == [Lengths(3, 2), Plan("hi", 9), Lengths(3, 2)]


def test_figures():
    results = [
        Measured(start=0.0, ttft=0.1, gaps=[0.2, 0.2], latency=0.5, prompt_tokens=10, output_tokens=3),
        Measured(start=0.5, ttft=0.3, gaps=[0.1], latency=0.4, prompt_tokens=10, output_tokens=2),
        Measured(start=0.6, ttft=0.2, latency=0.2, prompt_tokens=5, output_tokens=1),
        Measured(start=0.7, ttft=9.0, error="broke"),
    ]
    run = Run(Load(max_concurrency=2), results, duration=2.0, client_cpu=0.1)
    r = summary(run, [50, 99], parse_goodput(["ttft:250", "tpot:150"]))
    assert (r["completed"], r["failed"], r["total_input_tokens"], r["total_output_tokens"]) == (3, 1, 25, 6)
    assert (r["request_throughput"], r["output_throughput"], r["total_token_throughput"]) == (1.5, 3.0, 15.5)
    assert r["mean_ttft_ms"] == pytest.approx(200) and r["median_ttft_ms"] == pytest.approx(200)
    assert r["mean_tpot_ms"] == pytest.approx(150)  # 200 and 100; one token has no TPOT
    assert r["mean_itl_ms"] == pytest.approx(500 / 3) and r["p50_e2el_ms"] == pytest.approx(400)
    assert r["request_goodput"] == pytest.approx(0.5)  # only the third: the first is too slow per token, the second begins late
    assert r["max_concurrent_requests"] == 2  # the first had ended when the second began
    assert r["max_output_tokens_per_s"] == 6
    assert "Maximum request concurrency:             2" in table(run, r, [50, 99])
    empty = summary(Run(Load(), [results[-1]], 1.0, 0.0), [99], {})
    assert empty["completed"] == 0 and empty["mean_ttft_ms"] == 0 and empty["request_goodput"] is None
    with pytest.raises(ParameterError):
        parse_goodput(["ttft:-1"])
