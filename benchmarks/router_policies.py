"""The rules by which a core is chosen, on prompts with shared beginnings: hit rate, TTFT, throughput.

    python benchmarks/router_policies.py simulated [--replicas 8] [--json FILE]    Qwen3-8B on H100s, in virtual time
    python benchmarks/router_policies.py real [--cores 2] [--json FILE]            the embedded model on this machine

Simulated are the real scheduler, block pool, prefix index and balancers, by `headrace simulate`, the same arrivals for each
rule. Real is `headrace bench serve` against `headrace serve --data-parallel-size`, one server for each rule, one after the
other, with the same requests. Three kinds of traffic:
    system-prompt    some system prompts with a question each
    multi-turn       conversations that carry their history
    few-shot         many tasks with long examples: more of them than one cache holds
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import re
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace.machine import usable_cores

HERE = Path(__file__).parent
HEADRACE = [sys.executable, "-m", "headrace.cli"]
ROUTERS = ("round-robin", "least-loaded", "prefix")
FEW_SHOT = (
    "--dataset-name", "prefix_repetition", "--prefix-repetition-prefix-len", "3000", "--prefix-repetition-num-prefixes", "300",
    "--prefix-repetition-suffix-len", "60", "--prefix-repetition-output-len", "16",
)  # fmt: skip
SIMULATED = {  # options, and requests per second and replica
    "system-prompt": (("--dataset-name", "system-prompt"), 12.0),
    "multi-turn": (("--dataset-name", "multi-turn"), 12.0),
    "few-shot": (FEW_SHOT, 20.0),
}
FIGURES = ("mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_tpot_ms", "output_throughput", "duration")


def run(*words: str, **options: Any) -> str:
    env = os.environ | {"PYTHONPATH": str(HERE.parent / "src")}
    return subprocess.run([*HEADRACE, *words], check=True, text=True, stdout=subprocess.PIPE, env=env, **options).stdout


def shown(kind: str, router: str, hit: float, figures: dict[str, Any]) -> dict[str, Any]:
    row = {"traffic": kind, "router": router, "hit_rate": round(hit, 4), **{name: round(figures[name], 2) for name in FIGURES}}
    print(
        f"{kind:14}{router:13}{100 * hit:7.1f}%{row['mean_ttft_ms']:10.1f}{row['p99_ttft_ms']:10.1f}"
        f"{row['mean_tpot_ms']:9.2f}{row['output_throughput']:10.1f}", flush=True,
    )  # fmt: skip
    return row


# ---- in virtual time


def simulated(replicas: int, seconds: float) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        for kind, (options, rate) in SIMULATED.items():
            for router in ROUTERS:
                result = f"{folder}/result.json"
                run(
                    "simulate", "--config", str(HERE / "shapes/qwen3-8b.json"), "--card", "h100", "--replicas", str(replicas),
                    "--router", router, "--request-rate", str(rate * replicas), "--duration", str(seconds), *options,
                    "--save-result", result, stderr=subprocess.DEVNULL,
                )  # fmt: skip
                found = json.loads(Path(result).read_text())
                found = found[0] if isinstance(found, list) else found
                yield shown(kind, router, found["prefix_hit_rate"], found)


# ---- on the real engine


def requests_of(kind: str, count: int, rng: random.Random) -> list[dict[str, Any]]:
    """About `count`; a conversation has six turns."""

    def ids(count: int) -> list[int]:
        return [rng.randrange(1000, 40_000) for _ in range(count)]

    if kind == "multi-turn":
        histories, asks = [ids(250) for _ in range(count // 6)], []
        for _ in range(6):
            for history in rng.sample(histories, len(histories)):
                history += ids(60)
                asks.append({"prompt": history.copy(), "output_len": 16})
                history += ids(60)  # an answer
        return asks
    several, length, own, output = (5, 640, 40, 24) if kind == "system-prompt" else (40, 480, 30, 4)
    beginnings = [ids(length) for _ in range(several)]
    return [{"prompt": rng.choice(beginnings) + ids(own), "output_len": output} for _ in range(count)]


@contextlib.contextmanager
def server(router: str, cores: int, cache_bytes: int) -> Iterator[str]:
    env = os.environ | {"PYTHONPATH": str(HERE.parent / "src")}
    process = subprocess.Popen(
        [*HEADRACE, "serve", "--port", "0", "--data-parallel-size", str(cores), "--router", router, "--no-standby",
         "--kv-cache-bytes", str(cache_bytes), "--stats-interval", "0"],
        stderr=subprocess.PIPE, text=True, env=env,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        base = ""
        for line in process.stderr:
            if found := re.search(r"listening on (http://\S+)", line):
                base = found[1]
            if "cores are ready" in line or (cores == 1 and "ready after" in line):
                break
        else:
            raise RuntimeError("the server did not start")
        yield base
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()


def prefix_counters(base: str) -> tuple[float, float]:
    text = urllib.request.urlopen(base + "/metrics").read().decode()
    queries, hits = (
        sum(float(value) for value in re.findall(rf"^headrace:prefix_cache_{name}_total\{{[^}}]*\}} (\S+)", text, re.M))
        for name in ("queries", "hits")
    )
    return queries, hits


def real(cores: int, cache_bytes: int, concurrency: int, count: int) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        for router in ROUTERS:
            with server(router, cores, cache_bytes) as base:
                for kind in SIMULATED:
                    path, result = f"{folder}/{kind}.jsonl", f"{folder}/result.json"
                    Path(path).write_text("".join(json.dumps(r) + "\n" for r in requests_of(kind, count, random.Random(kind))))
                    before = prefix_counters(base)
                    run(
                        "bench", "serve", "--base-url", base, "--dataset-name", "custom", "--dataset-path", path,
                        "--max-concurrency", str(concurrency), "--ignore-eos", "--save-result", result,
                    )  # fmt: skip
                    queries, hits = (b - a for a, b in zip(before, prefix_counters(base), strict=True))
                    found = json.loads(Path(result).read_text())
                    yield shown(kind, router, hits / queries, found[0] if isinstance(found, list) else found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("simulated", "real"))
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=120.0, help="simulated: of arrivals")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--kv-cache-bytes", type=int, default=600 << 20, help="real: of each core, 13,600 tokens in float32")
    parser.add_argument("--concurrency", type=int, default=8, help="real: requests in progress")
    parser.add_argument("--requests", type=int, default=160, help="real: of each kind, about")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    print(f"{'traffic':14}{'router':13}{'hits':>8}{'TTFT ms':>10}{'p99':>10}{'TPOT ms':>9}{'tok/s':>10}")
    if args.what == "simulated":
        rows = simulated(args.replicas, args.seconds)
    else:
        rows = real(args.cores, args.kv_cache_bytes, args.concurrency, args.requests)
    found = list(rows)
    if args.json:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=HERE)
        about = {
            "what": args.what, "commit": commit.stdout.strip() or None, "python": platform.python_version(),
            "machine": f"{platform.machine()}, {usable_cores()} cores",
            "options": {k: v for k, v in vars(args).items() if k != "json"},
            "traffic": {kind: [" ".join(options), rate] for kind, (options, rate) in SIMULATED.items()},
        }  # fmt: skip
        Path(args.json).write_text(json.dumps({**about, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
