"""The figures of a run, under the keys of `vllm bench serve`, the table that is printed, and a picture of several runs.

The picture needs matplotlib, which is an optional dependency.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.errors import ParameterError
from headrace.extras import require
from headrace_bench.load import Run
from headrace_bench.target import Measured

TITLES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}


def parse_goodput(words: Sequence[str]) -> dict[str, float]:
    """["ttft:200", "tpot:50"] -> limits in milliseconds."""
    limits = {}
    for word in words:
        name, _, value = word.partition(":")
        try:
            limits[{"e2e": "e2el"}.get(name, name)] = float(value)
            good = name in ("ttft", "tpot", "e2e", "e2el") and float(value) > 0
        except ValueError:
            good = False
        if not good:
            raise ParameterError("--goodput", word, "ttft:MS, tpot:MS or e2el:MS")
    return limits


def summary(run: Run, percentiles: Sequence[float], goodput: dict[str, float]) -> dict[str, Any]:
    """Times in the keys that end in _ms are milliseconds, throughputs are per second. Failed requests count only as such."""
    good = [r for r in run.results if r.success]
    inputs, outputs = sum(r.prompt_tokens for r in good), sum(r.output_tokens for r in good)
    result: dict[str, Any] = {
        "duration": run.duration,
        "completed": len(good),
        "failed": len(run.results) - len(good),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(good) / run.duration,
        "request_goodput": _goodput(good, goodput) / run.duration if goodput else None,
        "output_throughput": outputs / run.duration,
        "total_token_throughput": (inputs + outputs) / run.duration,
        "max_output_tokens_per_s": _peak_tokens(good),
        "max_concurrent_requests": _peak_requests(good),
        "client_cpu": run.client_cpu,
    }
    series = {
        "ttft": [r.ttft for r in good],
        "tpot": [r.tpot for r in good if r.output_tokens > 1],
        "itl": [gap for r in good for gap in r.itls],
        "e2el": [r.latency for r in good],
    }
    for name, seconds in series.items():
        result |= distribution(name, 1e3 * np.asarray(seconds), percentiles)
    return result


def distribution(name: str, values: np.ndarray, percentiles: Sequence[float]) -> dict[str, float]:
    """The figures of some times in milliseconds; zeros where there are none."""
    values = values if len(values) else np.zeros(1)
    result = {
        f"mean_{name}_ms": float(values.mean()),
        f"median_{name}_ms": float(np.median(values)),
        f"std_{name}_ms": float(values.std()),
    }
    return result | {f"p{p:g}_{name}_ms": float(np.percentile(values, p)) for p in percentiles}


def details(run: Run) -> dict[str, Any]:
    """Per request, in the order of sending."""
    return {
        "input_lens": [r.prompt_tokens for r in run.results],
        "output_lens": [r.output_tokens if r.success else 0 for r in run.results],
        "ttfts": [r.ttft for r in run.results],
        "itls": [r.itls for r in run.results],
        "latencies": [r.latency for r in run.results],
        "start_times": [r.start for r in run.results],
        "queue_times": [r.queue_time for r in run.results],
        "generated_texts": ["".join(r.text) for r in run.results],
        "errors": [r.error for r in run.results],
    }


def table(run: Run, result: dict[str, Any], percentiles: Sequence[float]) -> str:
    load = run.load
    rows: list[tuple[str, Any]] = [("Successful requests:", result["completed"]), ("Failed requests:", result["failed"])]
    if load.max_concurrency is not None:
        rows.append(("Maximum request concurrency:", load.max_concurrency))
    if not math.isinf(load.request_rate):
        rows.append(("Request rate configured (RPS):", float(load.request_rate)))
    rows += [
        ("Benchmark duration (s):", result["duration"]),
        ("Total input tokens:", result["total_input_tokens"]),
        ("Total generated tokens:", result["total_output_tokens"]),
        ("Request throughput (req/s):", result["request_throughput"]),
    ]
    if result["request_goodput"] is not None:
        rows.append(("Request goodput (req/s):", result["request_goodput"]))
    rows += [
        ("Output token throughput (tok/s):", result["output_throughput"]),
        ("Peak output token throughput (tok/s):", result["max_output_tokens_per_s"]),
        ("Peak concurrent requests:", result["max_concurrent_requests"]),
        ("Total token throughput (tok/s):", result["total_token_throughput"]),
    ]
    if result["client_cpu"] is not None:  # a simulated run has no client
        rows.append(("Client's share of a core (%):", 100 * result["client_cpu"]))
    lines = [" Serving Benchmark Result ".center(50, "="), *map(row, rows)]
    for name, title in TITLES.items():
        lines.append(title.center(50, "-"))
        for key in ("mean", "median", *(f"p{p:g}" for p in percentiles)):
            lines.append(row((f"{key.capitalize()} {name.upper()} (ms):", result[f"{key}_{name}_ms"])))
    return "\n".join([*lines, "=" * 50])


def row(pair: tuple[str, Any]) -> str:
    """A line of a table."""
    name, value = pair
    return f"{name:<40} {value:<10.2f}" if isinstance(value, float) else f"{name:<40} {value:<10}"


def _goodput(results: list[Measured], limits: dict[str, float]) -> int:
    """How many kept every limit."""
    times = {"ttft": lambda r: r.ttft, "tpot": lambda r: r.tpot, "e2el": lambda r: r.latency}
    return sum(all(1e3 * times[name](r) <= limit for name, limit in limits.items()) for r in results)


def _peak_tokens(results: list[Measured]) -> float:
    """Most tokens in one second of the run."""
    if not results:
        return 0.0
    times = np.concatenate([np.cumsum([r.start + r.ttft, *r.gaps]) for r in results])
    tokens = np.concatenate([r.tokens_per_event for r in results])
    return float(np.bincount((times - min(r.start for r in results)).astype(np.int64), tokens).max())


def _peak_requests(results: list[Measured]) -> int:
    """Most requests in progress at one time; one that ends as another begins does not count with it."""
    changes = sorted([(r.start, 1) for r in results] + [(r.start + r.latency, -1) for r in results])
    peak = now = 0
    for _, change in changes:
        now += change
        peak = max(peak, now)
    return peak


def check_plot(path: str) -> None:
    """Raises MissingPackageError or ParameterError before anything is measured if the picture could not be written."""
    require("plot")
    from matplotlib.figure import Figure

    kinds = Figure().canvas.get_supported_filetypes()
    if Path(path).suffix.removeprefix(".") not in kinds:
        raise ParameterError("--plot", path, "a file name that ends in one of ." + ", .".join(kinds))


def plot(path: str, runs: list[dict[str, Any]], percentiles: list[float], title: str) -> None:
    """`runs` as summary() makes them. The load is the rate at which requests were completed."""
    from matplotlib.figure import Figure

    runs = sorted(runs, key=lambda r: r["request_throughput"])
    load = [r["request_throughput"] for r in runs]
    figure = Figure(figsize=(12, 8), layout="constrained")
    axes = figure.subplots(2, 2)
    panels = (("ttft", "time to first token"), ("tpot", "time per output token"), ("e2el", "end-to-end latency"))
    for axis, (name, text) in zip(axes.flat, panels, strict=False):
        for key in ("mean", "median", *(f"p{p:g}" for p in percentiles)):
            axis.plot(load, [r[f"{key}_{name}_ms"] for r in runs], marker="o", label=key)
        axis.set(title=text, xlabel="requests/s completed", ylabel="ms")
        axis.set_ylim(bottom=0)
        axis.legend()
    last = axes.flat[3]
    last.plot(load, [r["output_throughput"] for r in runs], marker="o", label="output tokens/s")
    last.set(title="output throughput", xlabel="requests/s completed", ylabel="tokens/s")
    last.set_ylim(bottom=0)
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
