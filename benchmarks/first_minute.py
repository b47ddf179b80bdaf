"""A server's start and its first minute: when it is ready, and whether any step then takes far longer than its like.

    python benchmarks/first_minute.py MODEL [--limit 5] [--seconds 60] [--empty] [--out JSON] [-- OPTIONS OF headrace serve]

Starts `headrace serve MODEL` with a trace, prints what /ready says and when, and from the moment that it is ready puts load on
it, over and over: one stream, 64 at once, one stream again, prompts of many lengths. A step's kind is how many sequences or,
with prompts, how many tokens it has, up to a power of two, and the same of the step before, for which the loop waits in it, if
it does not come after a pause. Counted are kinds of eight or more; of the rest it says how many and the longest. --empty: with
caches of compiled kernels that are empty, as on a fresh machine.
Exits 1 if a step took more than --limit times the median of its kind.
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
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from about import write

HEADRACE = [sys.executable, "-m", "headrace.cli"]
LOADS = ((1, 6), (64, 256), (1, 6), (64, 256), (16, 64))  # streams at once, requests
FEWEST = 8  # steps that make a median
PAUSE = 1e-3  # seconds without a turn: there was nothing to do


def ready_state(url: str) -> str:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5) as answer:
            return json.load(answer)["state"]
    except urllib.error.HTTPError as refused:
        return json.load(refused)["state"]
    except OSError:
        return "not listening"


@dataclass
class Server:
    port: int
    process: subprocess.Popen
    ready_after: float  # seconds from the start of the process


@contextlib.contextmanager
def serving(model: str, options: list[str], environment: dict[str, str]) -> Iterator[Server]:
    """`headrace serve`, when it is ready; it has ended behind this."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    began = time.perf_counter()
    command = [*HEADRACE, "serve", model, "--port", str(port), "--stats-interval", "0", *options]
    process = subprocess.Popen(command, env=os.environ | environment)
    try:
        yield Server(port, process, wait_ready(f"http://127.0.0.1:{port}", process, began))
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def options_behind() -> tuple[list[str], list[str]]:
    """Arguments of ours, and behind -- those of headrace serve."""
    given = sys.argv[1:]
    at = given.index("--") if "--" in given else len(given)
    return given[:at], given[at + 1 :]


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
    for streams, count in cycle(LOADS):
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


@dataclass
class Step:
    at: float  # seconds since the trace began, with the server
    milliseconds: float
    parts: str  # and what of it took how long


def by_kind(trace: Path, seconds: float) -> dict[str, list[Step]]:
    """The steps of the first `seconds` of the trace, which begins with the server; none comes before ready."""
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X" and e["args"]["tokens"]]
    kinds: dict[str, list[Step]] = {}
    before, step = "", Step(-PAUSE, 0.0, "")
    for event in events:  # a step, and behind it its parts
        if not event["name"].endswith("tokens"):
            step.parts += f" {event['name']} {event['dur'] / 1e3:.2f}"
            continue
        kind, end = kind_of(event["args"]["seqs"], event["args"]["tokens"]), step.at + step.milliseconds / 1e3
        step = Step(event["ts"] / 1e6, event["dur"] / 1e3, "")
        behind = "a pause" if step.at - end > PAUSE else before
        if step.at <= seconds:
            kinds.setdefault(kind if kind == behind else f"{kind} after {behind}", []).append(step)
        before = kind
    return kinds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--limit", type=float, default=5.0)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--empty", action="store_true")
    parser.add_argument("--out", type=Path)
    given, options = options_behind()
    args = parser.parse_args(given)
    with tempfile.TemporaryDirectory() as home:
        trace = Path(home) / "trace.json"
        caches = {"TRITON_CACHE_DIR": f"{home}/triton", "HEADRACE_CACHE": f"{home}/headrace"} if args.empty else {}
        with serving(args.model, ["--trace", str(trace), *options], caches) as server:
            load(f"http://127.0.0.1:{server.port}", time.monotonic() + args.seconds)
        kinds = by_kind(trace, args.seconds + server.ready_after)
    print(f"ready after {server.ready_after:.2f} s")
    worst, found = 0.0, []
    rare = [(step, kind) for kind, steps in kinds.items() if len(steps) < FEWEST for step in steps]
    for kind, steps in sorted(kinds.items()):
        if len(steps) >= FEWEST:
            median, longest = statistics.median(step.milliseconds for step in steps), max(steps, key=lambda s: s.milliseconds)
            share = longest.milliseconds / median
            worst = max(worst, share)
            figures = {"median_ms": median, "longest_ms": longest.milliseconds, "longest_over_median": share}
            found.append({"kind": kind, "steps": len(steps), **{name: round(value, 3) for name, value in figures.items()}})
            where = f"at {longest.at - server.ready_after:.2f} s:{longest.parts}" if share > args.limit else ""
            told = f"{len(steps):6} steps, median {median:8.2f} ms, longest {longest.milliseconds:8.2f} ms = {share:5.1f} x"
            print(f"{kind:>52}: {told} {where}")
    if rare:
        print(f"{len(rare)} steps of rarer kinds, the longest:")
        for step, kind in sorted(rare, key=lambda pair: -pair[0].milliseconds)[:FEWEST]:
            print(f"{kind:>52}: {step.milliseconds:.2f} ms at {step.at - server.ready_after:.2f} s:{step.parts}")
    print(f"the longest step is {worst:.1f} x the median of its kind")
    if args.out:
        result = {"model": args.model, "ready_s": round(server.ready_after, 2), "seconds": args.seconds, "kinds": found}
        write(args.out, result)
    return int(worst > args.limit or not kinds)


if __name__ == "__main__":
    sys.exit(main())
