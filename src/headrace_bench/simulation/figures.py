"""What became of simulated requests, in columns, and the figures of it under the keys of `headrace bench serve`.

Every gap between tokens is counted in a histogram whose bins are BIN wide (relative to the gap): percentiles of gaps are
exact to that; everything else is exact.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace_bench.report import distribution, row

if TYPE_CHECKING:
    from headrace_bench.simulation.core import Core, Job

BIN = 0.002
SHORTEST, LONGEST = 1e-7, 1e5  # seconds
SHORT = 10  # seconds: a run of fewer is never steady
BINS = int(log(LONGEST / SHORTEST) / BIN) + 2
COLUMNS = ("start", "admitted", "first", "end", "prompt", "output", "cached", "preempted")


@dataclass(slots=True)
class Outcome:
    """Of one front. Columns are arrays, by COLUMNS, of the requests in the order in which they ended; seconds, tokens."""

    columns: dict[str, np.ndarray]
    gaps: np.ndarray  # [BINS]: tokens
    gap_sums: tuple[float, float]  # of the gaps, and of their squares
    per_second: np.ndarray  # tokens
    refusals: dict[str, int]  # why, and how many
    replicas: int
    steps: int
    turns: int  # of which steps were made one by one
    busy: float  # seconds of devices
    preemptions: int
    prefix_queries: int  # tokens
    prefix_hits: int
    arriving: float = 0.0  # until when clients came of themselves
    expected: int = 0  # requests that there should have been, where the run was cut short: too many missed the limits


class Record:
    """An Outcome in the making."""

    def __init__(self) -> None:
        self._columns = {name: array("d") for name in COLUMNS}
        self._gaps = np.zeros(BINS, np.int64)
        self._sum = self._squares = 0.0
        self._per_second = np.zeros(4096, np.int64)
        self._refusals: Counter[str] = Counter()

    def refused(self, error: Exception) -> None:
        self._refusals[str(error)[:200] if not self._refusals or len(self._refusals) < 100 else "others"] += 1

    def tokens(self, gap: float, count: int, at: float) -> None:
        self._gaps[int(log(max(gap, SHORTEST) / SHORTEST) / BIN)] += count
        self._sum += gap * count
        self._squares += gap * gap * count
        self._count(int(at), count)

    def many_tokens(self, gaps: np.ndarray, count: int, at: np.ndarray) -> None:
        bins = (np.log(np.maximum(gaps, SHORTEST) / SHORTEST) / BIN).astype(np.int64)
        np.add.at(self._gaps, bins, count)
        self._sum += float(gaps.sum()) * count
        self._squares += float(gaps @ gaps) * count
        first, last = int(at[0]), int(at[-1])
        if first == last:
            self._count(first, count * len(at))
        else:
            self._grow(last)
            np.add.at(self._per_second, at.astype(np.int64), count)

    def first(self, at: float) -> None:
        self._count(int(at), 1)

    def ended(self, job: Job, at: float) -> None:
        request = job.request
        values = (
            job.start, job.admitted, job.first, at, len(request.prompt_ids), len(request.output_ids), request.num_cached,
            request.num_preemptions,
        )  # fmt: skip
        for column, value in zip(self._columns.values(), values, strict=True):
            column.append(value)

    def _count(self, second: int, tokens: int) -> None:
        if second >= len(self._per_second):
            self._grow(second)
        self._per_second[second] += tokens

    def _grow(self, second: int) -> None:
        if second >= len(self._per_second):
            self._per_second = np.concatenate([self._per_second, np.zeros(second + 1, np.int64)])

    def outcome(self, cores: list[Core]) -> Outcome:
        stats = [core.scheduler.stats for core in cores]
        return Outcome(
            columns={name: np.frombuffer(column, np.float64) for name, column in self._columns.items()},
            gaps=self._gaps,
            gap_sums=(self._sum, self._squares),
            per_second=self._per_second,
            refusals=dict(self._refusals),
            replicas=len(cores),
            steps=sum(core.steps for core in cores),
            turns=sum(core.turns for core in cores),
            busy=sum(core.busy for core in cores),
            preemptions=sum(s.num_preemptions for s in stats),
            prefix_queries=sum(s.prefix_query_tokens for s in stats),
            prefix_hits=sum(s.prefix_hit_tokens for s in stats),
        )


def merged(outcomes: list[Outcome]) -> Outcome:
    """Of several fronts."""
    length = max(len(o.per_second) for o in outcomes)
    refusals: Counter[str] = Counter()
    for o in outcomes:
        refusals.update(o.refusals)
    sums = {
        name: sum(getattr(o, name) for o in outcomes)
        for name in ("replicas", "steps", "turns", "busy", "preemptions", "prefix_queries", "prefix_hits", "expected")
    }
    return Outcome(
        columns={name: np.concatenate([o.columns[name] for o in outcomes]) for name in COLUMNS},
        gaps=np.sum([o.gaps for o in outcomes], axis=0),
        gap_sums=(sum(o.gap_sums[0] for o in outcomes), sum(o.gap_sums[1] for o in outcomes)),
        per_second=np.sum([np.pad(o.per_second, (0, length - len(o.per_second))) for o in outcomes], axis=0),
        refusals=dict(refusals),
        arriving=max(o.arriving for o in outcomes),
        **sums,
    )


def summary(o: Outcome, percentiles: Sequence[float], goodput: dict[str, float], scale: float = 1.0) -> dict[str, Any]:
    """As report.summary() of a real run. `scale`: the fleet's size over what was simulated; counts and rates are its."""
    c = o.columns
    num = len(c["start"])
    duration = float(c["end"].max() - c["start"].min()) if num else 0.0
    inputs, outputs = float(c["prompt"].sum()), float(c["output"].sum())
    per_second = scale / duration if duration else 0.0
    times = times_of(o)
    failed = sum(o.refusals.values())
    result: dict[str, Any] = {
        "duration": duration,
        "completed": round(num * scale),
        "failed": round(failed * scale),
        "total_input_tokens": round(inputs * scale),
        "total_output_tokens": round(outputs * scale),
        "request_throughput": num * per_second,
        "request_goodput": num * attained(o, goodput) * per_second if goodput else None,
        "output_throughput": outputs * per_second,
        "total_token_throughput": (inputs + outputs) * per_second,
        "steady_output_throughput": _steady(o) * scale if int(o.arriving) >= SHORT else outputs * per_second,
        "max_output_tokens_per_s": float(o.per_second.max()) * scale,
        "max_concurrent_requests": round(_peak(c["start"], c["end"]) * scale),
        "client_cpu": None,
    }
    for name, values in times.items():
        result |= distribution(name, values, percentiles)
        if name == "tpot":
            result |= _gap_figures(o, percentiles)
    result |= distribution("queue", 1e3 * (c["admitted"] - c["start"]), percentiles)
    queries = o.prefix_queries
    return result | {
        "prefix_hit_rate": o.prefix_hits / queries if queries else 0.0,
        "preemptions": round(o.preemptions * scale),
        "device_busy": o.busy / (duration * o.replicas) if duration else 0.0,
        "steps": round(o.steps * scale),
        "refusals": o.refusals,
    }


def _steady(o: Outcome) -> float:
    """Tokens per second in the second half of the time in which clients came: without the run's beginning and its end."""
    return float(o.per_second[int(o.arriving / 2) : int(o.arriving)].mean())


def times_of(o: Outcome) -> dict[str, np.ndarray]:
    """Milliseconds of each request."""
    c = o.columns
    several = c["output"] > 1
    tpot = (c["end"] - c["first"])[several] / (c["output"][several] - 1)
    return {"ttft": 1e3 * (c["first"] - c["start"]), "tpot": 1e3 * tpot, "e2el": 1e3 * (c["end"] - c["start"])}


def attained(o: Outcome, limits: dict[str, float]) -> float:
    """Share of the requests that kept every limit (milliseconds); one that was refused has not. Of no requests all did."""
    c = o.columns
    kept = np.ones(len(c["start"]), bool)
    times = times_of(o)
    tpot = np.zeros(len(kept))
    tpot[c["output"] > 1] = times["tpot"]
    for name, limit in limits.items():
        kept &= (tpot if name == "tpot" else times[name]) <= limit
    total = max(len(kept) + sum(o.refusals.values()), o.expected)
    return float(kept.sum()) / total if total else 1.0


def fleet_table(result: dict[str, Any], percentiles: Sequence[float]) -> str:
    """What a server's client does not see."""
    rows: list[tuple[str, Any]] = [
        ("Replicas:", result["replicas"]),
        ("Cards:", result["cards"]),
        ("Output tokens/s while clients come:", result["steady_output_throughput"]),
        ("Prompt tokens found in caches (%):", 100 * result["prefix_hit_rate"]),
        ("Preemptions:", result["preemptions"]),
        ("Devices busy (%):", 100 * result["device_busy"]),
    ]
    for key in ("mean", "median", *(f"p{p:g}" for p in percentiles)):
        rows.append((f"{key.capitalize()} queue (ms):", result[f"{key}_queue_ms"]))
    if "goodput_share" in result:
        rows.append(("Requests that keep the limits (%):", 100 * result["goodput_share"]))
    if "cost_per_hour" in result:
        rows += [
            ("Cost per hour:", result["cost_per_hour"]),
            ("Cost per million output tokens:", result["cost_per_million_output_tokens"]),
            ("Cost per million tokens:", result["cost_per_million_tokens"]),
        ]
    lines = [" Simulated Fleet ".center(50, "="), *map(row, rows), "=" * 50]
    return "\n".join(lines + [f"{count} requests were refused: {why}" for why, count in result["refusals"].items()])


def _gap_figures(o: Outcome, percentiles: Sequence[float]) -> dict[str, float]:
    count = int(o.gaps.sum())
    if not count:
        return distribution("itl", np.zeros(0), percentiles)
    mean = o.gap_sums[0] / count
    until = np.cumsum(o.gaps)

    def percentile(p: float) -> float:
        index = int(np.searchsorted(until, max(1, p / 100 * count)))
        return 1e3 * SHORTEST * float(np.exp((index + 0.5) * BIN))

    result = {
        "mean_itl_ms": 1e3 * mean,
        "median_itl_ms": percentile(50),
        "std_itl_ms": 1e3 * max(0.0, o.gap_sums[1] / count - mean**2) ** 0.5,
    }
    return result | {f"p{p:g}_itl_ms": percentile(p) for p in percentiles}


def _peak(starts: np.ndarray, ends: np.ndarray) -> int:
    """Most requests in progress at one time."""
    times = np.concatenate([ends, starts])  # an end before a start at the same time
    changes = np.concatenate([-np.ones(len(ends), int), np.ones(len(starts), int)])
    order = np.argsort(times, kind="stable")
    return int(np.cumsum(changes[order]).max(initial=0))
