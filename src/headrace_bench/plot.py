"""A picture of several runs: latencies and throughput over load. Needs matplotlib, which is an optional dependency."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace.errors import ParameterError
from headrace.extras import require


def check_plot(path: str) -> None:
    """Raises MissingPackageError or ParameterError before anything is measured if the picture could not be written."""
    require("plot")
    from matplotlib.figure import Figure

    kinds = Figure().canvas.get_supported_filetypes()
    if Path(path).suffix.removeprefix(".") not in kinds:
        raise ParameterError("--plot", path, "a file name that ends in one of ." + ", .".join(kinds))


def plot(path: str, runs: list[dict[str, Any]], percentiles: list[float], title: str) -> None:
    """`runs` as report.summary makes them. The load is the rate at which requests were completed."""
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
