"""`headrace simulate`: what `headrace bench serve` would print of a fleet, by the real scheduler and router in virtual time.

docs/capacity.md says what is real in it, what is a model, and how well it agrees with engines that were measured.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

from headrace.errors import ParameterError
from headrace.extras import require
from headrace.machine import usable_cores
from headrace_bench.load import Load, Run
from headrace_bench.serve import parse_percentiles, save_result
from headrace_bench.simulation.options import add_arguments, checked, setup_of, traffic_of
from headrace_bench.simulation.sizing import FRONT_CORES, MOST, replicas_needed, shares
from headrace_bench.simulation.traffic import Traffic

if TYPE_CHECKING:
    from headrace_bench.simulation.figures import Outcome
    from headrace_bench.simulation.fleet import Setup

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    require("serve")
    from headrace_bench.report import check_plot, parse_goodput, plot

    loads = checked(args)
    percentiles, goodput = parse_percentiles(args.metric_percentiles), parse_goodput(args.goodput)
    if args.plot:
        check_plot(args.plot)
    setup = setup_of(args)
    results = []
    with Workers(args.jobs) as workers:
        for load in loads:
            traffic = traffic_of(args, load, setup.limits.max_model_len)
            replicas, asked = args.replicas or 1, dict[int, float]()
            if goodput and args.replicas is None:
                replicas, asked = size(args, setup, traffic, goodput, workers)
            results.append(shown(args, setup, traffic, replicas, asked, percentiles, goodput, workers))
    save_result(args.save_result, results)
    if args.plot:
        plot(args.plot, results, percentiles, f"{results[0]['model_id']}, {args.dataset_name}, simulated")
    return 0


class Workers:
    """Simulates fronts, several at once where there are several."""

    def __init__(self, jobs: int | None):
        self._jobs = jobs or usable_cores()
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def simulate(self, tasks: Sequence[tuple[Setup, Traffic]]) -> list[Outcome]:
        from headrace_bench.simulation.fleet import simulate

        if len(tasks) == 1 or self._jobs == 1:
            return [simulate(*task) for task in tasks]
        if self._pool is None:
            self._pool = ProcessPoolExecutor(self._jobs, get_context("spawn"))
        return list(self._pool.map(simulate, *zip(*tasks, strict=True)))


def tasks_of(
    args: argparse.Namespace, setup: Setup, traffic: Traffic, replicas: int
) -> tuple[list[tuple[Setup, Traffic]], float]:
    """The fronts to simulate, and the size of the fleet over theirs."""
    fronts = min(replicas, args.fronts or -(-replicas // FRONT_CORES))
    if args.dataset_name == "custom":
        fronts = 1
    if fronts == 1:
        return [(replace(setup, replicas=replicas), traffic)], 1.0
    parts = shares(replicas, fronts)[: args.sample_fronts]
    tasks = [(replace(setup, replicas=n), traffic.part(i, fronts)) for i, n in enumerate(parts)]
    return tasks, fronts / len(parts)


def size(
    args: argparse.Namespace, setup: Setup, traffic: Traffic, goodput: dict[str, float], workers: Workers
) -> tuple[int, dict[int, float]]:
    """Replicas that keep the limits, and the share of the requests that kept them with each number that was tried."""
    from headrace_bench.simulation.figures import attained, merged

    few = replace(traffic, count=min(traffic.count, 200), load=Load(math.inf, max_concurrency=1), peak=None)
    alone = attained(workers.simulate([(setup, few)])[0], goodput)
    if alone < args.goodput_share:
        kept = f"limits that {100 * args.goodput_share:g} % of the requests keep on an idle replica: {100 * alone:.1f} % do"
        raise ParameterError("--goodput", " ".join(args.goodput), kept)

    def share(replicas: int) -> float:
        tasks, _ = tasks_of(args, setup, traffic, replicas)
        watched = [(replace(s, goodput=goodput, share=args.goodput_share), t) for s, t in tasks]
        found = attained(merged(workers.simulate(watched)), goodput)
        print(f"headrace: {replicas} replicas: {100 * found:.2f} % keep the limits", file=sys.stderr, flush=True)
        return found

    replicas, asked = replicas_needed(share, args.goodput_share)
    if not replicas:
        raise ParameterError("--goodput", " ".join(args.goodput), f"limits that {MOST} replicas keep")
    return replicas, asked


def shown(
    args: argparse.Namespace, setup: Setup, traffic: Traffic, replicas: int, asked: dict[int, float],
    percentiles: list[float], goodput: dict[str, float], workers: Workers,
) -> dict[str, Any]:  # fmt: skip
    """Run one load, print its tables, return the figures."""
    from headrace_bench.report import table
    from headrace_bench.simulation.figures import attained, fleet_table, merged, summary

    began = time.perf_counter()
    tasks, scale = tasks_of(args, setup, traffic, replicas)
    outcome = merged(workers.simulate(tasks))
    took = time.perf_counter() - began
    figures = summary(outcome, percentiles, goodput, scale)
    load = traffic.load
    result: dict[str, Any] = {
        "model_id": args.config or args.model or "embedded", "dataset_name": args.dataset_name,
        "cost": f"trace {args.trace}" if args.trace else f"{args.card} x {args.tensor_parallel_size}",
        "num_prompts": figures["completed"] + figures["failed"],
        "request_rate": load.request_rate if math.isfinite(load.request_rate) else "inf", "burstiness": load.burstiness,
        "max_concurrency": load.max_concurrency, "replicas": replicas, "router": args.router,
        "cards": replicas * args.tensor_parallel_size, "simulated_replicas": outcome.replicas,
        "num_kv_blocks": setup.limits.num_blocks, "block_size": setup.limits.block_size, **figures,
    }  # fmt: skip
    if goodput:
        result["goodput_share"] = attained(outcome, goodput)
    if asked:
        result["tried"] = {str(n): round(share, 4) for n, share in sorted(asked.items())}
    if args.price_per_hour is not None:
        result |= costs(result, args.price_per_hour)
    print(table(Run(load, [], figures["duration"], 0.0), figures, percentiles))
    print(fleet_table(result, percentiles), flush=True)
    print(
        f"headrace: {figures['duration']:,.0f} s of {outcome.replicas} replicas simulated in {took:.1f} s: "
        f"{len(outcome.columns['start']):,} requests, {outcome.steps:,} steps, {outcome.turns:,} of them one by one",
        file=sys.stderr,
    )
    return result


def costs(result: dict[str, Any], price: float) -> dict[str, float]:
    """Of all cards over the time of the run."""
    hour = result["cards"] * price
    million = {
        name: hour / (result[key] * 3600) * 1e6 if result[key] else math.inf
        for name, key in (("output_tokens", "output_throughput"), ("tokens", "total_token_throughput"))
    }
    return {"cost_per_hour": hour, **{f"cost_per_million_{name}": value for name, value in million.items()}}
