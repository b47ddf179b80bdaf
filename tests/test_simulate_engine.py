"""What `headrace simulate` foretells from a trace, beside the real core that wrote it: its loop, scheduler and messages in virtual time."""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from headrace.engine.core import EngineCore
from headrace.engine.process import CoreLoop, spare_collections
from headrace.engine.stats import StepTrace
from headrace.metrics.trace import TraceFile
from headrace.scheduler.config import Limits
from headrace.scheduler.plan import StepPlan
from headrace.scheduler.scheduler import Scheduler
from headrace_bench.load import Load
from headrace_bench.simulation.cost import Work
from headrace_bench.simulation.fleet import Setup, simulate
from headrace_bench.simulation.replay import replayed, shapes_of
from headrace_bench.simulation.trace_fit import fit_trace
from headrace_bench.simulation.traffic import Ask, Traffic
from headrace_bench.workload import random_lengths
from virtual_engine import Client, Clock, Model, run, virtual_time

LIMITS = Limits(max_num_seqs=64, max_num_batched_tokens=512, max_model_len=4096, block_size=16, num_blocks=4000)
CONCURRENCY, REQUESTS = (1, 2, 4, 8, 16), 100


def seconds(plan: StepPlan) -> float:
    """A CPU's: weights are read in any step, beyond a few rows it computes; attention and keys on top."""
    decodes = plan.num_decodes
    pairs = sum(c * (s + c / 2) for s, c in zip(plan.starts[decodes:].tolist(), plan.counts[decodes:].tolist(), strict=True))
    rows = max(0.0027, 0.00045 * plan.num_tokens) + 5e-5 * len(plan)
    return 4e-4 + rows + 2e-6 * float(plan.starts[:decodes].sum()) + 2e-7 * pairs


def slow_spells(spread: float, seed: int) -> Callable[[StepPlan, int], float]:
    """Of a machine that others use, too: slow for some fifty steps, then fast again."""
    rng, stay, state = random.Random(seed), 0.98, 0.0

    def taken(plan: StepPlan, number: int) -> float:
        nonlocal state
        state = stay * state + rng.gauss(0, spread * math.sqrt(1 - stay * stay))
        return seconds(plan) * math.exp(state)

    return taken


@dataclass
class Seen:
    """Milliseconds of many requests."""

    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)

    def add(self, start: float, first: float, last: float, tokens: int) -> None:
        self.ttft.append(1e3 * (first - start))
        if tokens > 1:
            self.tpot.append(1e3 * (last - first) / (tokens - 1))

    def figures(self) -> dict[str, float]:
        parts = {"ttft": self.ttft, "tpot": self.tpot}
        return {f"p{p} {name}": float(np.percentile(part, p)) for name, part in parts.items() for p in (50, 90, 99)}


def asks(seed: int, count: int) -> list[Ask]:
    return [Ask(w.input_len, w.output_len) for w in random_lengths(seed, count, 100, 40, 0, 0.5)]


def compare(path: Path, model: Callable[[Clock, int], Model], share: float, rounds: int) -> dict[str, tuple[float, float]]:
    """A calibration at several concurrencies, then other requests at a share of the highest throughput: real, foretold."""
    with virtual_time() as clock:
        steps, best, calibrated = [], 0.0, model(clock, 0)
        overlap = calibrated.host is not None
        for at_once in CONCURRENCY:
            client = run(clock, LIMITS, calibrated, asks(1, 60 + 6 * at_once), Load(max_concurrency=at_once), 1, overlap)
            steps += client.steps
            ended = max(times.last for times in client.seen.values())
            best = max(best, len(client.seen) / (ended - client.begin))
            clock.now += 1.0
        trace = TraceFile(path)
        trace.steps(steps)
        trace.close()
        real, foretold, load = Seen(), Seen(), Load(share * best)
        for number in range(10, 10 + rounds):
            done = run(clock, LIMITS, model(clock, number), asks(number, REQUESTS), load, number, overlap)
            for times in done.seen.values():
                real.add(times.start, times.first, times.last, times.tokens)
            traffic = Traffic(lambda _, count, n=number: asks(n, count), load, REQUESTS, number)  # type: ignore[misc]
            columns = simulate(Setup(LIMITS, fit_trace(str(path), number), overlap=overlap), traffic).columns
            for row in zip(*(columns[name] for name in ("start", "first", "end", "output")), strict=True):
                foretold.add(*row)
    assert len(foretold.ttft) == len(real.ttft) == rounds * REQUESTS
    foretold_figures = foretold.figures()
    return {name: (value, foretold_figures[name]) for name, value in real.figures().items()}


@pytest.mark.parametrize(("host", "share"), [(None, 0.5), (None, 0.8), (4e-4, 0.8)])
def test_the_real_loop_is_foretold_within_a_tenth(host, share, tmp_path):
    """On a CPU, and on a device that works while the host goes on (`host`: seconds of a launch)."""

    def model(clock: Clock, seed: int) -> Model:
        return Model(clock, lambda plan, number: seconds(plan), host)

    for name, (real, foretold) in compare(tmp_path / "trace.json", model, share, 2).items():
        assert foretold == pytest.approx(real, rel=0.1), name


@pytest.mark.parametrize("host", [None, 4e-4])
@pytest.mark.parametrize("share", [0.3, 0.8])
def test_steps_that_take_what_they_took_make_the_very_same_run(host, share):
    """All that is left to be wrong is the simulator's loop, its scheduler and its arrivals."""
    with virtual_time() as clock:
        model, load = Model(clock, slow_spells(0.3, 1), host), Load(25.0 * share)
        done = run(clock, LIMITS, model, asks(3, REQUESTS), load, 3, host is not None)
    arrivals = [times.start for times in done.seen.values()]
    cost = replayed(done.steps, done.looked, done.told, arrivals, host is None)
    traffic = Traffic(lambda _, count: asks(3, count), load, REQUESTS, 3)
    columns = simulate(Setup(LIMITS, cost, overlap=host is not None, leaps=False), traffic).columns
    assert cost.shapes == shapes_of(done.steps) and cost.alike(done.steps) == len(cost.shapes)
    order = np.argsort(columns["start"])
    for name in ("first", "last"):
        real = [getattr(times, name) - done.begin for times in done.seen.values()]
        np.testing.assert_allclose(columns["end" if name == "last" else name][order], real, atol=2e-5, err_msg=name)


def test_a_replay_that_goes_another_way_is_told():
    steps = [StepTrace(float(i), 0.1, 0.8, 0.0, 0.1, 1, 1, 1, 0, 0.1) for i in range(3)]
    cost = replayed(steps, [0.0, 1.0, 2.0], [0.9, 1.9, 2.9], [0.0], True)
    assert cost.taken == pytest.approx([1.0, 1.0, 0.9])
    assert [cost.seconds(Work(1, 1, 0, 0.0, 1, 0.1), i) for i in range(2)] == cost.taken[:2]
    assert cost.alike(steps) == 2
    assert cost.seconds(Work(2, 2, 0, 0.0, 2, 0.1), 5) == cost.taken[-1]
    assert cost.alike(steps) == 2


def test_a_cpu_tells_a_step_at_once():
    """Nothing runs while it is settled: to launch another one first would only make every token late."""
    firsts = []
    for overlap in (False, True):
        with virtual_time() as clock:
            model = Model(clock, lambda plan, number: seconds(plan))
            seen = run(clock, LIMITS, model, asks(5, 60), Load(4.0), 5, overlap).seen.values()
            firsts.append(np.percentile([times.first - times.start for times in seen], 90))
    assert firsts[0] < 0.85 * firsts[1]


def test_prompts_that_take_longer_to_launch_than_to_compute_are_foretold(tmp_path):
    """The decodes beside them wait for the host, and no turn waits for the device: with one time of the host for all steps the
    median of TTFT was 19 % short, and the 99th percentile of TPOT 17 % long."""

    def card(plan: StepPlan, number: int) -> float:
        return 0.005 + 3e-5 * plan.num_decodes + (plan.num_tokens > len(plan)) * (3e-4 + 1.2e-5 * plan.num_tokens)

    found = compare(tmp_path / "trace.json", lambda clock, seed: Model(clock, card, 4e-4, 8e-3), 0.8, 2)
    for name, (real, foretold) in found.items():
        assert foretold == pytest.approx(real, rel=0.1), (name, found)


def test_slow_spells_make_the_queues_that_they_make(tmp_path):
    """As many slow steps here and there would leave the 99th percentile of TPOT at less than two thirds of what it is. Which spells
    come when is chance on both sides: with other seeds the percentiles are up to a third apart, and equal on average."""
    found = compare(tmp_path / "trace.json", lambda clock, seed: Model(clock, slow_spells(0.15, 1000 + seed)), 0.7, 6)
    for name, (real, foretold) in found.items():
        assert foretold == pytest.approx(real, rel=0.25), (name, found)


def test_requests_leave_no_garbage_that_is_looked_for_among_steps():
    """A full prefix index is new objects all the time: 8 ms of a collection for every 800 requests, on a card 15 steps of one row."""
    limits = Limits(max_num_seqs=64, max_num_batched_tokens=4096, max_model_len=4096, block_size=16, num_blocks=3000)
    seen: list[int] = []

    def told(phase: str, info: dict) -> None:
        seen.append(info["collected"])

    thresholds = gc.get_threshold()
    with virtual_time() as clock:
        model = Model(clock, lambda plan, number: 1e-3, 1e-4)
        core = EngineCore(Scheduler(limits), model, vocab_size=2**31)  # type: ignore[arg-type]
        client = Client(clock, asks(2, 1500), Load(max_concurrency=32), 2)
        loop = CoreLoop(core, client, client.send)  # type: ignore[arg-type]
        gc.collect()
        try:
            spare_collections()
            gc.callbacks.append(told)
            loop.run()
            assert not seen and core.scheduler.tree.num_nodes > 2900
            gc.collect()
            assert sum(seen) < 200
        finally:
            gc.callbacks.remove(told)
            gc.set_threshold(*thresholds)
