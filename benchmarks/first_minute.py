"""A server's start and its first minute: when it is ready, and whether any step then takes far longer than its like.

    python benchmarks/first_minute.py MODEL [--limit 5] [--seconds 60] [--empty] [-- OPTIONS OF headrace serve]

Starts `headrace serve MODEL` with a trace, prints what /ready says and when, and from the moment that it is ready puts load on
it: one stream, 64 at once, one stream again, prompts of many lengths. A step's kind is how many sequences or, with prompts, how
many tokens it has, up to a power of two. The loop waits in a step for the one before: counted are steps that follow their
like, and kinds of eight or more. --empty: with caches of compiled kernels that are empty, as on a fresh machine. Exits 1 if a
step took more than --limit times the median of its kind.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

HEADRACE = [sys.executable, "-m", "headrace.cli"]
LOADS = ((1, 6), (64, 256), (1, 6), (64, 256), (16, 64))  # streams at once, requests
FEWEST = 8  # steps that make a median


def ready_state(url: str) -> str:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5) as answer:
            return json.load(answer)["state"]
    except urllib.error.HTTPError as refused:
        return json.load(refused)["state"]
    except OSError:
        return "not listening"


def wait_ready(url: str, server: subprocess.Popen, began: float) -> float:
    """Seconds from the start of the process until it is ready; every state is printed with its time."""
    last = ""
    while last != "ready":
        if server.poll() is not None:
            raise SystemExit(f"the server ended with {server.returncode}")
        state = ready_state(url)
        if state.split(" ")[0] != last.split(" ")[0]:
            print(f"{time.perf_counter() - began:7.2f} s  {state}", flush=True)
        last = state
        time.sleep(0.02)
    return time.perf_counter() - began


def load(url: str, until: float) -> None:
    for streams, count in LOADS:
        left = until - time.monotonic()
        if left <= 0:
            return
        command = [
            *HEADRACE, "bench", "serve", "--base-url", url, "--dataset-name", "random", "--random-input-len", "600",
            "--random-output-len", "200", "--random-range-ratio", "0.8", "--ignore-eos", "--temperature", "0.6",
            "--num-prompts", str(count), "--max-concurrency", str(streams),
        ]  # fmt: skip
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(command, stdout=subprocess.DEVNULL, timeout=left, check=True)


def kind_of(seqs: int, tokens: int) -> str:
    size = 1 << (max(seqs, 1) - 1).bit_length()
    return f"decode of {size}" if tokens == seqs else f"prompts of {1 << (tokens - 1).bit_length()} tokens"


def by_kind(trace: Path, seconds: float) -> dict[str, list[float]]:
    """Milliseconds of the steps of the first `seconds` of the trace, which begins with the server; none comes before ready."""
    events = json.loads(trace.read_text())["traceEvents"]
    steps = [e for e in events if e["ph"] == "X" and e["name"].endswith("tokens") and e["args"]["tokens"]]
    kinds: dict[str, list[float]] = {}
    before = ""
    for step in sorted(steps, key=lambda step: step["ts"]):
        kind = kind_of(step["args"]["seqs"], step["args"]["tokens"])
        if kind == before and step["ts"] / 1e6 <= seconds:
            kinds.setdefault(kind, []).append(step["dur"] / 1e3)
        before = kind
    return kinds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--limit", type=float, default=5.0)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--empty", action="store_true")
    given = sys.argv[1:]
    at = given.index("--") if "--" in given else len(given)  # behind it: options of headrace serve
    args, options = parser.parse_args(given[:at]), given[at + 1 :]
    with tempfile.TemporaryDirectory() as home, socket.create_server(("127.0.0.1", 0)) as free:
        port, trace = free.getsockname()[1], Path(home) / "trace.json"
        free.close()
        caches = {"TRITON_CACHE_DIR": f"{home}/triton", "HEADRACE_CACHE": f"{home}/headrace"} if args.empty else {}
        url, began = f"http://127.0.0.1:{port}", time.perf_counter()
        ours = ["--port", str(port), "--trace", str(trace), "--stats-interval", "0"]
        command = [*HEADRACE, "serve", args.model, *ours, *options]
        server = subprocess.Popen(command, env=os.environ | caches)
        try:
            took = wait_ready(url, server, began)
            load(url, time.monotonic() + args.seconds)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait()
        kinds = by_kind(trace, args.seconds + took)
    print(f"ready after {took:.2f} s")
    worst = 0.0
    for kind, times in sorted(kinds.items()):
        if len(times) >= FEWEST:
            median, most = statistics.median(times), max(times)
            worst = max(worst, most / median)
            print(f"{kind:>26}: {len(times):6} steps, median {median:8.2f} ms, longest {most:8.2f} ms = {most / median:5.1f} x")
    print(f"the longest step is {worst:.1f} x the median of its kind")
    return int(worst > args.limit or not kinds)


if __name__ == "__main__":
    sys.exit(main())
