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
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

from headrace.config import spare_current_directory
from headrace.errors import ParameterError
from headrace.machine import usable_cores
from headrace_bench.load import Load, Run
from headrace_bench.serve import check_place, parse_percentiles, save_result
from headrace_bench.simulation.options import add_arguments, checked, setup_of, traffic_of
from headrace_bench.simulation.sizing import FRONT_CORES, MOST, replicas_needed, shares
from headrace_bench.simulation.traffic import Traffic

if TYPE_CHECKING:
    from headrace_bench.simulation.figures import Outcome
    from headrace_bench.simulation.fleet import Setup

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    from headrace_bench.report import check_plot, parse_goodput, plot

    loads = checked(args)
    percentiles, goodput = parse_percentiles(args.metric_percentiles), parse_goodput(args.goodput)
    for option, path in (("--save-result", args.save_result), ("--plot", args.plot)):
        check_place(option, path)
    if args.plot:
        check_plot(args.plot)
    setup = setup_of(args)
    with Workers(args.jobs) as workers:
        studies = [Study(args, setup, traffic_of(args, load, setup.limits.max_model_len), goodput, workers) for load in loads]
        results = [study.shown(percentiles) for study in studies]
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
            spare_current_directory()
            self._pool = ProcessPoolExecutor(self._jobs, get_context("spawn"))
        return list(self._pool.map(simulate, *zip(*tasks, strict=True)))


@dataclass(slots=True)
class Study:
    """A fleet under one load."""

    args: argparse.Namespace
    setup: Setup  # of a front with one replica
    traffic: Traffic
    goodput: dict[str, float]
    workers: Workers
    tried: dict[int, float] = field(default_factory=dict)  # by replicas: the share of the requests that kept the limits
    took: float = 0.0  # seconds of the last simulation

    def shown(self, percentiles: list[float]) -> dict[str, Any]:
        """Print the tables, return the figures."""
        from headrace_bench.report import table
        from headrace_bench.simulation.figures import fleet_table, summary

        if self.goodput and self.args.replicas is None:
            replicas, outcome = self.sized()
        else:
            replicas = self.args.replicas or 1
            outcome = self.simulated(replicas, self.setup)
        figures = summary(outcome, percentiles, self.goodput, replicas / outcome.replicas)
        result = {**self.facts(replicas, outcome), **figures, **self.answers(outcome)}
        if self.args.price_per_hour is not None:
            result |= costs(result, self.args.price_per_hour)
        print(table(Run(self.traffic.load, [], figures["duration"], 0.0), figures, percentiles))
        print(fleet_table(result, percentiles), flush=True)
        print(
            f"headrace: {figures['duration']:,.0f} s of {outcome.replicas} replicas simulated in {self.took:.1f} s: "
            f"{len(outcome.columns['start']):,} requests, {outcome.steps:,} steps, {outcome.turns:,} of them one by one",
            file=sys.stderr,
        )
        return result

    def simulated(self, replicas: int, setup: Setup) -> Outcome:
        """A fleet of so many, or the part of it that --sample-fronts asks for."""
        from headrace_bench.simulation.figures import merged

        began = time.perf_counter()
        fronts = min(replicas, self.args.fronts or -(-replicas // FRONT_CORES))
        if fronts == 1 or self.args.dataset_name == "custom":
            tasks = [(replace(setup, replicas=replicas), self.traffic)]
        else:
            parts = enumerate(shares(replicas, fronts)[: self.args.sample_fronts])
            tasks = [(replace(setup, replicas=n), self.traffic.part(i, n / replicas)) for i, n in parts]
        outcome = merged(self.workers.simulate(tasks))
        self.took = time.perf_counter() - began
        return outcome

    def sized(self) -> tuple[int, Outcome]:
        """Replicas that keep the limits, and what becomes of the load with these."""
        from headrace_bench.simulation.figures import attained

        share, limits = self.args.goodput_share, " ".join(self.args.goodput)
        few = replace(self.traffic, count=min(self.traffic.count, 200), load=Load(math.inf, max_concurrency=1), peak=None)
        alone = attained(self.workers.simulate([(self.setup, few)])[0], self.goodput)
        if alone < share:
            kept = f"limits that {100 * share:g} % of the requests keep on an idle replica: {100 * alone:.1f} % do"
            raise ParameterError("--goodput", limits, kept)
        watched = replace(self.setup, goodput=self.goodput, share=share)
        best: dict[int, Outcome] = {}

        def keeping(replicas: int) -> float:
            outcome = self.simulated(replicas, watched)
            found = attained(outcome, self.goodput)
            if found >= share:
                best.clear()  # fewer are asked about from now on
                best[replicas] = outcome
            kept = f"less than {100 * share:g} %" if outcome.expected else f"{100 * found:.2f} %"  # cut short: nobody knows
            print(f"headrace: {replicas} replicas: {kept} keep the limits", file=sys.stderr, flush=True)
            return found

        replicas, self.tried = replicas_needed(keeping, share, self.args.fronts or 1)
        if not replicas:
            raise ParameterError("--goodput", limits, f"limits that {MOST} replicas keep")
        return replicas, best[replicas]

    def facts(self, replicas: int, outcome: Outcome) -> dict[str, Any]:
        args, load, limits = self.args, self.traffic.load, self.setup.limits
        return {
            "model_id": args.config or args.model or "embedded", "dataset_name": args.dataset_name,
            "cost": f"trace {args.trace}" if args.trace else f"{args.card} x {args.tensor_parallel_size}",
            "num_prompts": len(outcome.columns["start"]) + sum(outcome.refusals.values()),
            "request_rate": load.request_rate if math.isfinite(load.request_rate) else "inf", "burstiness": load.burstiness,
            "max_concurrency": load.max_concurrency, "replicas": replicas, "simulated_replicas": outcome.replicas,
            "cards": replicas * args.tensor_parallel_size, "router": args.router, "num_kv_blocks": limits.num_blocks,
            "block_size": limits.block_size,
        }  # fmt: skip

    def answers(self, outcome: Outcome) -> dict[str, Any]:
        """To --goodput."""
        from headrace_bench.simulation.figures import attained

        kept = {"goodput_share": attained(outcome, self.goodput)} if self.goodput else {}
        return {**kept, **({"tried": sorted(self.tried)} if self.tried else {})}


def costs(result: dict[str, Any], price: float) -> dict[str, float]:
    """Of all cards, while clients come."""
    hour, outputs = result["cards"] * price, result["steady_output_throughput"] * 3600
    all_tokens = result["total_input_tokens"] + result["total_output_tokens"]
    every = outputs * all_tokens / max(1, result["total_output_tokens"])
    million = {
        name: hour / count * 1e6 if count else math.inf for name, count in (("output_tokens", outputs), ("tokens", every))
    }
    return {"cost_per_hour": hour, **{f"cost_per_million_{name}": value for name, value in million.items()}}
