"""What HTTP costs: tokens per second through streams with a model of zero cost, beside a bare uvicorn endpoint.

    python benchmarks/http_overhead.py                 1, 64 and 512 streams; the limit is measured in the same run
    python benchmarks/http_overhead.py --api-processes 1 2 4 --streams 64 512       what several HTTP processes buy
    python benchmarks/http_overhead.py --model-run     SmolLM2 on the CPU, 32 clients: HTTP against the offline API

The limit is a raw ASGI application that writes one constant chunk of the same size for each token and yields in between: one
process, always. Client, server and core share the machine; the client reads bytes and counts events, nothing else. CPU is that
of the server's processes: seconds for 1,000 tokens, which is the share of one CPU that 1,000 tokens/s take. With several HTTP
processes `http` is the sum of all, and `parent` the process that has the engine's client: neither it nor the core can be busier
than one CPU, which bounds what any number of HTTP processes can do.

A model of zero cost outruns HTTP, so that several tokens share an event. With --step-ms a step takes so long: then the figure
is how many of the tokens still have an event of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import uvloop

from about import about, write

HERE = Path(__file__).parent
SRC = HERE.parent / "src"
CHUNK = b'data: {"id":"cmpl-0a8c8b5ce1df4288a7a0b473fb64079d","object":"text_completion","created":1795833734,"model":"m","choices":[{"index":0,"text":" water","logprobs":null,"finish_reason":null}]}\n\n'  # noqa: E501
BARE = """
import asyncio, sys, uvicorn
CHUNK = {chunk!r}
async def app(scope, receive, send):
    if scope["type"] != "http":
        return
    count = int(scope["query_string"] or 0)
    await send({{"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}})
    for _ in range(count):
        await send({{"type": "http.response.body", "body": CHUNK, "more_body": True}})
        await asyncio.sleep(0)
    await send({{"type": "http.response.body", "body": b"data: [DONE]\\n\\n"}})
uvicorn.run(app, port=0, log_level="info", access_log=False, loop="uvloop", http="httptools", lifespan="off")
"""


class Reader(asyncio.Protocol):
    """One request; reads to its end."""

    def __init__(self, request: bytes, done: asyncio.Future[None]):
        self.request, self.done, self.bytes, self.events, self.first = request, done, 0, 0, 0.0
        self.tail = b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        if not self.bytes and not data.startswith(b"HTTP/1.1 200"):
            self.done.set_exception(RuntimeError(data[:500].decode()))
        self.first = self.first or time.perf_counter()
        self.bytes += len(data)
        self.events += data.count(b"data: {")
        self.tail = self.tail[-16:] + data[-32:]
        if self.tail.endswith(b"\r\n0\r\n\r\n") and not self.done.done():
            self.done.set_result(None)
            self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(RuntimeError(f"the connection was lost: {error}"))


async def load(port: int, requests: list[bytes]) -> tuple[float, int, int]:
    """Send all at once; seconds until the last has ended, bytes and events."""
    loop = asyncio.get_running_loop()
    began = time.perf_counter()
    readers, ends = [], []
    for request in requests:
        done = loop.create_future()
        _, reader = await loop.create_connection(lambda r=request, d=done: Reader(r, d), "127.0.0.1", port)
        readers.append(reader)
        ends.append(done)
    await asyncio.gather(*ends)
    return time.perf_counter() - began, sum(r.bytes for r in readers), sum(r.events for r in readers)


def http_request(path: str, body: dict[str, Any] | None = None) -> bytes:
    data = b"" if body is None else json.dumps(body).encode()
    method = "GET" if body is None else "POST"
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def cpu_seconds(pid: int) -> dict[str, float]:
    """Of a server's processes so far, by what they do: parent (which serves HTTP itself if no other does), http, core."""
    found: dict[str, float] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            own = int(entry.name) == pid
            if not own and int(fields[1]) != pid:
                continue
            part = "parent" if own else "http" if b"headrace.api_processes" in (entry / "cmdline").read_bytes() else "core"
        except OSError:
            continue
        found[part] = found.get(part, 0.0) + (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


class Process:
    """A server; `port` is read from what it prints."""

    def __init__(self, command: list[str], marker: str):
        environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "PYTHONPATH": f"{SRC}:{HERE}"}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, env=environment, text=True)
        assert self.process.stderr is not None
        self.seen = ""
        for line in self.process.stderr:
            self.seen += line
            if marker in line:
                break
        else:
            raise RuntimeError(self.seen)
        self.port = int(self.seen.rpartition("http://127.0.0.1:")[2].split("/")[0].split()[0])

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def measure(self, requests: list[bytes], tokens: int) -> dict[str, Any]:
        before = cpu_seconds(self.process.pid)
        seconds, size, events = uvloop.run(load(self.port, requests))
        cpu = {k: v - before.get(k, 0.0) for k, v in cpu_seconds(self.process.pid).items()}
        if "http" not in cpu:
            cpu["http"] = cpu.pop("parent")
        shares = {f"{part}_cpu_per_1000_tokens": 1000 * cpu.get(part, 0.0) / tokens for part in ("http", "parent", "core")}
        rates = {"tokens_per_second": tokens / seconds, "events_per_token": events / tokens}
        return {**rates, **shares, "bytes_per_token": size / tokens}


def serve_command(builder: str | None, *options: str) -> list[str]:
    code = (
        "import sys; from headrace.cli import parser, serve; p = parser.CommandParser(); serve.add_arguments(p); "
        f"sys.exit(serve.run(p.parse_args(sys.argv[1:]), {f'builder={builder!r}' if builder else ''}))"
    )
    return [sys.executable, "-c", code, "--port", "0", "--stats-interval", "0", "--no-standby", *options]


def overhead(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Headrace and the limit in turn, the best of several rounds of each: the machine may be busy otherwise."""
    results = []
    os.environ["FAKE_STEP_MS"] = str(args.step_ms)
    options = ["--max-num-seqs", "512", "--max-model-len", "2048", "--served-model-name", "m"]
    bodies = {
        "/v1/completions": {"prompt": "x"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    }
    common = {"model": "m", "stream": True, "ignore_eos": True, "temperature": 0.0}
    with contextlib.ExitStack() as stack:
        bare = stack.enter_context(Process([sys.executable, "-c", BARE.format(chunk=CHUNK)], "running on"))
        servers = {}
        for count in args.api_processes:
            command = serve_command("fake_model:build_fake", "--api-processes", str(count), *options)
            servers[count] = stack.enter_context(Process(command, "ready after"))
        for streams in args.streams:
            each = max(64, min(1500, args.tokens // streams))
            runs: dict[tuple[str, int], list[dict[str, Any]]] = {("bare", 1): []}
            for _ in range(args.rounds):
                runs["bare", 1].append(bare.measure([http_request(f"/?{each}")] * streams, each * streams))
                for path, body in bodies.items():
                    request = http_request(path, {**common, **body, "max_tokens": each})
                    for count, ours in servers.items():
                        runs.setdefault((path, count), []).append(ours.measure([request] * streams, each * streams))
            best = {name: max(found, key=lambda r: r["tokens_per_second"]) for name, found in runs.items()}
            for (name, count), result in best.items():
                share = result["tokens_per_second"] / best["bare", 1]["tokens_per_second"]
                workload = {"what": name, "api_processes": count, "streams": streams, "tokens_each": each}
                results.append({**workload, **result, "share_of_limit": share})
                parts = ", ".join(f"{p} {result[f'{p}_cpu_per_1000_tokens']:.4f}" for p in ("http", "parent", "core"))
                print(
                    f"{streams:4d} streams  {name:22s} x{count}  {result['tokens_per_second']:9.0f} tok/s  {share:6.1%} of the "
                    f"limit   CPU s per 1000 tokens: {parts}   {result['events_per_token']:.2f} events/token", flush=True,
                )  # fmt: skip
    return results


PROMPTS = ["The capital of France is", "Water flows", "Write a story about a mill", "Once upon a time", "In 1850 the", "Why is"]


def model_run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The same prompts through the offline API in a process of its own, and through HTTP by `--clients` clients."""
    offline = (
        "import json, sys, time; from headrace import LLM, SamplingParams; prompts = json.loads(sys.argv[1]); "
        "llm = LLM(device='cpu', max_num_seqs=64, max_model_len=1024); "
        "p = SamplingParams(max_tokens=int(sys.argv[2]), temperature=0.0, ignore_eos=True); llm.generate(prompts[:2], p); "
        "t, c = time.perf_counter(), time.process_time(); out = llm.generate(prompts, p); "
        "t, c = time.perf_counter() - t, time.process_time() - c; n = sum(len(o.outputs[0].token_ids) for o in out); "
        "print(n / t, 1000 * c / n)"
    )
    prompts = [f"{PROMPTS[i % len(PROMPTS)]} {i}" for i in range(args.clients)]
    environment = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": str(args.threads)}
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    options = ["--device", "cpu", "--max-num-seqs", "64", "--max-model-len", "1024", "--served-model-name", "m"]
    body = {"model": "m", "stream": True, "ignore_eos": True, "temperature": 0.0, "max_tokens": args.each}
    requests = [http_request("/v1/completions", {**body, "prompt": p}) for p in prompts]
    rates: dict[str, list[float]] = {"offline": [], "http": []}
    cpu: dict[str, list[float]] = {"offline": [], "core": [], "http": []}  # seconds for 1,000 tokens
    for _ in range(args.rounds):
        command = [sys.executable, "-c", offline, json.dumps(prompts), str(args.each)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        rate, seconds = map(float, done.stdout.split()[-2:])
        rates["offline"].append(rate)
        cpu["offline"].append(seconds)
        with Process(serve_command(None, *options), "ready after") as server:
            server.measure(requests[:2], 2 * args.each)  # as the offline API
            result = server.measure(requests, args.clients * args.each)
        rates["http"].append(result["tokens_per_second"])
        cpu["core"].append(result["core_cpu_per_1000_tokens"])
        cpu["http"].append(result["http_cpu_per_1000_tokens"])
        print(
            f"offline {rate:.1f} tok/s, {seconds:.2f} CPU s per 1000 tokens; HTTP {rates['http'][-1]:.1f} tok/s, "
            f"core {cpu['core'][-1]:.2f} and HTTP {cpu['http'][-1]:.3f} CPU s per 1000 tokens", flush=True,
        )  # fmt: skip
    best = {k: max(v) for k, v in rates.items()}
    share = best["http"] / best["offline"]
    print(f"SmolLM2-135M, {args.clients} clients: HTTP {best['http']:.1f} of {best['offline']:.1f} tok/s: {share:.1%}")
    return [{"what": "smollm2", "clients": args.clients, "runs": rates, "cpu_seconds_per_1000_tokens": cpu, "share": share}]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 512])
    parser.add_argument("--tokens", type=int, default=100_000, help="in all, for each number of streams")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--api-processes", type=int, nargs="+", default=[1], help="HTTP processes, a server for each number")
    parser.add_argument("--step-ms", type=float, default=0.0, help="that a step of the model takes")
    parser.add_argument("--model-run", action="store_true")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--each", type=int, default=64, help="model run: tokens of each client")
    parser.add_argument("--threads", type=int, default=1, help="model run: OpenMP threads")
    parser.add_argument("--out", help="write the results to this JSON file")
    args = parser.parse_args()
    results = model_run(args) if args.model_run else overhead(args)
    if args.out:
        more = {name: version(name) for name in ("uvicorn", "uvloop", "httptools", "pyzmq", "msgspec")}
        write(args.out, {"versions": about()["versions"] | more, "step_ms": args.step_ms, "results": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
