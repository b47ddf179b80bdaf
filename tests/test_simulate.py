"""`headrace simulate`: the real scheduler in virtual time, its traffic, its costs of a step, its sizes of fleets."""

from __future__ import annotations

import json
import random
from bisect import bisect_left
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from headrace.api.config import ServerConfig
from headrace.cli import main
from headrace.engine.stats import StepTrace
from headrace.errors import ParameterError
from headrace.metrics.trace import TraceFile
from headrace.model.families import model_config_from_hf
from headrace.scheduler.config import Limits
from headrace.worker.prompt_graphs import token_sizes
from headrace_bench.load import Load
from headrace_bench.simulation.cards import CARDS, BlockSizes, num_blocks, roofline
from headrace_bench.simulation.core import Core
from headrace_bench.simulation.cost import Constant, Work
from headrace_bench.simulation.figures import COLUMNS, Outcome, attained, merged, summary
from headrace_bench.simulation.fleet import Setup, simulate
from headrace_bench.simulation.sizing import replicas_needed, shares
from headrace_bench.simulation.trace_fit import Step, fit_trace, hosts_of, size_of
from headrace_bench.simulation.traffic import DAY, MIXES, Ask, LogNormal, Mix, Quantiles, Traffic, day_curve, file_asks

ROOT = Path(__file__).parents[1]
SHAPES, RESULTS = ROOT / "benchmarks" / "shapes", ROOT / "benchmarks" / "results"
SMALL = Mix("", LogNormal(60, 0.8, 300), LogNormal(50, 0.9, 300), prefixes=3, prefix_len=40)
CHATS = Mix("", LogNormal(30, 0.8, 100), LogNormal(40, 0.6, 100), prefixes=2, prefix_len=20, mean_turns=3.0, think=2.0)
LIMITS = Limits(max_num_seqs=16, max_num_batched_tokens=256, max_model_len=4096, block_size=16, num_blocks=400)


def traffic(mix: Mix = SMALL, rate: float = 20.0, count: int = 70, **load) -> Traffic:
    return Traffic(mix.draw, Load(rate, **load), count, 7, mix.mean_turns)


def setup(limits: Limits = LIMITS, **kwargs) -> Setup:
    kwargs.setdefault("cost", Constant(0.004, 2e-5, host=1e-4, blocking=False))
    return Setup(limits, **kwargs)


CASES = {
    "overlap": (setup(), traffic(rate=5.0)),
    "blocking": (setup(cost=Constant(0.004, 2e-5, host=1e-4)), traffic(rate=5.0)),
    "no overlap": (setup(overlap=False), traffic(rate=5.0)),
    "host-bound": (setup(cost=Constant(1e-4, host=0.003, blocking=False)), traffic(rate=5.0)),
    "few blocks": (setup(replace(LIMITS, num_blocks=45)), traffic(rate=60.0)),
    "few slots": (setup(replace(LIMITS, max_num_seqs=3)), traffic(rate=60.0)),
    "stops early": (setup(replace(LIMITS, num_blocks=60), max_tokens=600), traffic(rate=60.0)),
    "max_itl": (setup(replace(LIMITS, max_itl=0.006)), traffic()),
    "no caching": (setup(replace(LIMITS, enable_prefix_caching=False)), traffic()),
    "conversations": (setup(), traffic(CHATS)),
    "closed loop": (setup(), traffic(rate=float("inf"), max_concurrency=5)),
    "bursts": (setup(), traffic(burstiness=0.2)),
    "three by prefix": (setup(replicas=3), traffic(rate=60.0)),
    "three in turn": (setup(replicas=3, router="round-robin"), traffic(CHATS, rate=60.0)),
    "three by load": (setup(replicas=3, router="least-loaded"), traffic(rate=60.0)),
    "refusals": (setup(replace(LIMITS, max_num_seqs=2), server=ServerConfig(max_queued_requests=3)), traffic(rate=200.0)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_every_request_ends_tokens_add_up_and_leaps_change_nothing(case):
    """The blocks are checked after every turn (law 5), with leaps and without; and the answer is the same, bit for bit."""
    made, load = CASES[case]
    whole = simulate(replace(made, checks=True), load)
    step_by_step = simulate(replace(made, checks=True, leaps=False), load)

    columns = whole.columns
    refused = sum(whole.refusals.values())
    asks = [ask for _, ask in load.arrivals()]
    assert (refused > 0) == (case == "refusals")
    assert len(columns["start"]) + refused == sum(1 + len(ask.turns) for ask in asks)
    if not refused:
        wanted = [ask.output for ask in asks] + [turn.output for ask in asks for turn in ask.turns]
        assert sorted(columns["output"]) == sorted(wanted)
        assert whole.per_second.sum() == columns["output"].sum()
        assert whole.gaps.sum() == columns["output"].sum() - len(columns["output"])  # all but each first one
    assert (columns["start"] <= columns["admitted"]).all() and (columns["admitted"] < columns["first"]).all()
    assert (columns["first"] <= columns["end"]).all()
    gaps = columns["end"] - columns["first"]
    assert whole.gap_sums[0] == pytest.approx(gaps.sum())  # the gaps of a request are its time from first to last token

    same_requests(whole, step_by_step)
    assert whole.gap_sums == pytest.approx(step_by_step.gap_sums)
    assert np.abs(np.cumsum(whole.gaps - step_by_step.gaps)).max() <= 2  # a logarithm at the edge of a bin
    assert step_by_step.turns >= step_by_step.steps
    if case in ("overlap", "blocking", "no overlap", "host-bound"):
        assert whole.turns < 0.6 * step_by_step.turns, "little was leapt over"


def same_requests(one: Outcome, other: Outcome) -> None:
    for name in COLUMNS:
        np.testing.assert_array_equal(one.columns[name], other.columns[name], err_msg=name)
    np.testing.assert_array_equal(one.per_second, other.per_second)
    for name in ("steps", "busy", "prefix_hits", "preemptions", "refusals"):
        assert getattr(one, name) == getattr(other, name), name


@pytest.mark.parametrize("case", ["three by prefix", "conversations"])
def test_the_same_seed_gives_the_same_answer(case):
    one, other = simulate(*CASES[case]), simulate(*CASES[case])
    same_requests(one, other)
    np.testing.assert_array_equal(one.gaps, other.gaps)
    assert one.gap_sums == other.gap_sums


def test_the_cases_have_what_they_are_for():
    assert simulate(*CASES["few blocks"]).preemptions > 0
    assert simulate(*CASES["conversations"]).prefix_hits > 1000
    hits = {name: simulate(*CASES[name]).prefix_hits for name in ("overlap", "no caching")}
    assert hits["overlap"] > 1000 and hits["no caching"] == 0


def test_other_seeds_are_other_runs_and_the_order_of_replicas_is_fair():
    made, load = CASES["three by load"]
    one, other = simulate(made, load), simulate(made, replace(load, seed=8))
    assert one.columns["end"].sum() != other.columns["end"].sum()
    few, many = (simulate(replace(made, replicas=n), load) for n in (1, 6))
    assert summary(few, [99], {})["p99_ttft_ms"] > summary(many, [99], {})["p99_ttft_ms"]


def test_one_request_takes_what_its_steps_take():
    """Prefill, then a step a token, on an idle core; with what is not the core's before it."""
    cost = Constant(0.01, 0.0, host=0.001)
    alone = Traffic(lambda seed, count: [Ask(100, 5)] * count, Load(), 1, 0)
    done = simulate(setup(cost=cost, overlap=False, front_seconds=0.5), alone)
    figures = summary(done, [50], {})
    assert figures["mean_ttft_ms"] == pytest.approx(511) and figures["mean_tpot_ms"] == pytest.approx(11)
    assert figures["mean_e2el_ms"] == pytest.approx(555) and figures["completed"] == 1
    assert figures["p50_itl_ms"] == pytest.approx(11, rel=0.002)
    in_turn = simulate(setup(cost=cost, overlap=False, front_seconds=0.5), replace(alone, count=3, load=Load(max_concurrency=1)))
    assert summary(in_turn, [50, 99], {})["p99_ttft_ms"] == pytest.approx(511)  # who waits for a place has the front before him, too
    assert in_turn.columns["end"].max() == pytest.approx(3 * 0.555)
    overlapped = simulate(setup(cost=replace(cost, blocking=False), front_seconds=0.5), alone)
    figures = summary(overlapped, [50], {})  # the host's work is hidden behind the device's, but for the first
    assert figures["mean_ttft_ms"] == pytest.approx(511) and figures["mean_tpot_ms"] == pytest.approx(10)


# ------------------------------------------------------------------------------------------------------------ cost of a step


def shape(name: str):
    return model_config_from_hf(json.loads((SHAPES / f"{name}.json").read_text()))


@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3-0.6b"])
def test_shares_of_the_limit_are_those_of_the_recorded_runs(name):
    document = json.loads((RESULTS / f"h100-{name}.json").read_text())
    model = shape(name)
    cost = roofline(CARDS["h100"], model, torch.bfloat16, 1)
    shares = dict(cost.shares)
    for result in document["results"]:
        if result["workload"].startswith("batch "):
            batch = int(result["workload"].split()[1])
            assert shares[batch] == pytest.approx(result["percent_of_limit"] / 100, abs=6e-4)
            context = batch * (result["input_len"] + result["output_len"] // 2)
            work = Work(batch, batch, context, 0.0, batch, 0.0)
            assert 1e3 * cost.seconds(work, 0) == pytest.approx(result["value"], rel=0.04)
    if name == "qwen3-8b":
        card = CARDS["h100"]
        measured = document["machine"]["bandwidth"] / card.bandwidth, document["machine"]["flops"] / card.flops
        assert measured == pytest.approx((card.measured.bandwidth, card.measured.flops), rel=1e-3)


def test_decodes_of_an_h200_take_what_was_measured_there():
    """And an unmeasured card what an H100 would with its rates."""
    measured = json.loads((RESULTS / "h200-two-cards.json").read_text())["captured_prompts"]
    cost = roofline(CARDS["h200"], shape("qwen3-8b"), torch.bfloat16, 1)
    assert (cost.bandwidth, cost.flops) == pytest.approx([measured["limits"]["one"][n] for n in ("bandwidth", "flops")], rel=1e-3)
    beside = json.loads((RESULTS / "h200-vllm-qwen3-8b-fp8.json").read_text())["beside bfloat16"]
    decodes = [r for r in beside["headrace, bfloat16"] if r["workload"].startswith("batch ")]
    assert len(decodes) == 4
    for result in decodes:
        batch = int(result["workload"].split()[1])
        work = Work(batch, batch, batch * (result["input_len"] + result["output_len"] // 2), 0.0, batch, 0.0)
        rel = 0.04 if batch < 256 else 0.1  # 256 rows' share is that of contexts of a few hundred tokens more
        assert 1e3 * cost.seconds(work, 0) == pytest.approx(result["value"], rel=rel)
    told = json.loads((RESULTS / "simulate-h200-qwen3-8b.json").read_text())["shares"]
    later = told["decodes_later"]
    assert {str(rows): share for rows, share in cost.shares} == told["decodes"] | later["decodes"] | {"16384": cost.shares[-1][1]}
    for rows, value in later["ms"].items():
        work = Work(int(rows), int(rows), int(rows) * (later["input_len"] + later["output_len"] // 2), 0.0, int(rows), 0.0)
        assert 1e3 * cost.seconds(work, 0) == pytest.approx(value, rel=2e-3)
    assert CARDS["b200"].measured is CARDS["h100"].measured


@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3-0.6b"])
def test_a_run_that_was_measured_on_an_h100_is_foretold_within_a_tenth(name, tmp_path, capsys):
    """offline-random of `headrace bench throughput`: no figure of the model was taken from it."""
    rng = random.Random(0)
    prompts = [[rng.randint(0, 10000) for _ in range(rng.randint(100, 1024))] for _ in range(256)]
    lines = [{"input_len": len(p), "output_len": rng.randint(100, 1024)} for p in prompts]
    file = tmp_path / "lengths.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    result = simulated(
        capsys, tmp_path, "--config", str(SHAPES / f"{name}.json"), "--dataset-name", "custom", "--dataset-path", str(file)
    )
    document = json.loads((RESULTS / f"h100-{name}.json").read_text())
    measured = next(r["value"] for r in document["results"] if r["workload"] == "offline-random")
    assert result["output_throughput"] == pytest.approx(measured, rel=0.1)


def test_launches_of_prompts_that_are_not_captured_have_a_time_of_their_own():
    """Found by a trace of an H200: 0.9 ms up to 1,024 tokens and 16 beyond, in which the loop waits and the decodes' tokens with it."""
    rng = random.Random(3)

    def step(tokens: int, seqs: int, host: float) -> Step:
        return Step(0.0, host * rng.uniform(0.8, 1.3) + 0.01, 0.01, tokens, seqs, seqs, 0.1)

    decodes = [step(8, 8, 1e-4) for _ in range(100)]
    captured, others = ([step(rng.randint(*of), 8, host) for _ in range(30)] for of, host in (((40, 1024), 9e-4), ((1025, 3000), 0.016)))
    host, hosts = hosts_of(decodes + captured + others)
    assert host == pytest.approx(1e-4, rel=0.1) and hosts == ((1024, pytest.approx(9e-4, rel=0.1)), (np.inf, pytest.approx(0.016, rel=0.1)))
    assert hosts_of(decodes + captured)[1] == ((np.inf, pytest.approx(9e-4, rel=0.1)),)
    assert hosts_of(decodes + captured[:5]) == (host, ())  # too few to know


def test_more_ranks_are_faster_and_less_than_in_proportion():
    model = shape("qwen3-8b")
    work = Work(8, 8, 8 * 500, 0.0, 8, 0.0)
    one, two, four = (roofline(CARDS["h100"], model, torch.bfloat16, n).seconds(work, 0) for n in (1, 2, 4))
    assert one / 2 < two < one and two / 2 < four < two
    prefill = Work(16384, 4, 0, 4 * 4096 * 4096 / 2, 4, 0.0)
    one, two = (roofline(CARDS["h100"], model, torch.bfloat16, n).seconds(prefill, 0) for n in (1, 2))
    assert one / 2 < two < one
    with pytest.raises(ParameterError, match="allowed: one of 1, 2, 4, 8, 16, 32"):
        roofline(CARDS["h100"], model, torch.bfloat16, 3)


def test_a_step_reads_the_experts_that_its_rows_choose():
    """Of 128 with 8 a row; all of them have to lie somewhere."""
    model, card = shape("qwen3-30b-a3b"), CARDS["h200"]
    cost = roofline(card, model, torch.bfloat16, 1)
    experts = 48 * 128 * 3 * 768 * 2048 * 2
    assert cost.expert_bytes == experts and cost.chosen == 8 / 128
    read = [cost._weights(rows) - cost.weight_bytes for rows in (1, 32, 10_000)]
    assert read == pytest.approx([experts / 16, experts * (1 - (15 / 16) ** 32), experts])
    sizes = BlockSizes(64, 256, 8192, 8192, 0.9)
    tokens = 64 * num_blocks(card, model, torch.bfloat16, 1, False, sizes)
    free = card.memory * 0.9 - 2 * 30.5e9
    assert 0.8 * free < tokens * 2 * 48 * 4 * 128 * 2 < free
    with pytest.raises(ParameterError, match="32 heads, 4 key-value heads and 128 experts must divide"):
        roofline(card, model, torch.bfloat16, 3)


def test_a_step_reads_keys_and_values_where_there_are_some():
    """Of Qwen3.5-4B eight layers of 32, and of latent attention a row for all heads: all layers with keys and values of their
    own were counted, and a quarter or half of the blocks had room."""
    hybrid, latent = (roofline(CARDS["h200"], shape(name), torch.bfloat16, 1) for name in ("qwen3.5-4b", "glm-4.7-flash"))
    assert hybrid.kv_bytes == 8 * 2 * 4 * 256 * 2 and hybrid.pair_flops == 4 * 8 * 16 * 256
    assert latent.kv_bytes == 47 * (512 + 64) * 2 and latent.pair_flops == 4 * 47 * 20 * (192 + 64 + 256) // 2


def test_many_steps_have_the_very_times_of_single_ones(tmp_path):
    model = shape("qwen3-0.6b")
    work = Work(12, 12, 5000, 0.0, 12, 0.3)
    fitted = fit_trace(str(recorded(tmp_path / "trace.json", lambda tokens, seqs, used: 0.004 + 1e-4 * seqs)), 0)
    for cost in (Constant(0.1), roofline(CARDS["l40s"], model, torch.bfloat16, 2), fitted):
        single = [cost.seconds(work._replace(context=work.context + 12 * i), 5 + i) for i in range(40)]
        np.testing.assert_array_equal(cost.many_seconds(work, 5, 40), single)


def test_blocks_are_what_the_card_has_beside_the_weights():
    model = shape("qwen3-8b")
    sizes = BlockSizes(64, 256, 16384, 40960, 0.9)
    small, large = (num_blocks(CARDS[card], model, torch.bfloat16, 1, False, sizes) for card in ("l40s", "h200"))
    split = num_blocks(CARDS["l40s"], model, torch.bfloat16, 2, False, sizes)
    block = 64 * 2 * 36 * 1024 * 2
    assert 0.5 * (0.9 * 48e9 - 16.4e9) < small * block < 0.9 * 48e9 - 16.4e9
    assert large > 3 * small and split > 2 * small


# ---------------------------------------------------------------------------------------------------------- recorded traces


def recorded(path: Path, seconds, count: int = 400) -> Path:
    """A trace as the server writes it, of steps of many shapes."""
    trace, rng, began = TraceFile(path), random.Random(1), 100.0
    steps = []
    for _ in range(count):
        seqs = rng.randint(1, 40)
        tokens = seqs + rng.choice([0, 0, 0, rng.randint(10, 700)])
        used = rng.random()
        took = seconds(tokens, seqs, used) * rng.uniform(0.97, 1.03)
        steps.append(StepTrace(began, 5e-5, took - 1e-4, 0.0, 5e-5, tokens, seqs, seqs, 0, used))
        began += took
    trace.steps(steps)
    trace.close()
    return path


def test_a_recorded_trace_is_fitted_and_its_error_told(tmp_path):
    def seconds(tokens: int, seqs: int, used: float) -> float:
        return 0.003 + 2e-4 * seqs + 1e-3 * max(0, seqs - 16) + 3e-5 * (tokens - seqs) + 0.002 * used

    fitted = fit_trace(str(recorded(tmp_path / "trace.json", seconds)), 0)
    assert fitted.blocking and fitted.host == 0.0 and sum(fitted.counts) > 390
    assert all(half < most < 0.05 for half, most in fitted.errors)
    for tokens, seqs, used in ((1, 1, 0.1), (20, 20, 0.5), (40, 40, 0.9), (530, 30, 0.2)):
        assert fitted.expected(Work(tokens, seqs, 0, 0.0, seqs, used)) == pytest.approx(seconds(tokens, seqs, used), rel=0.05)
    spread = fitted.many_seconds(Work(20, 20, 0, 0.0, 20, 0.5), 0, 2000) / seconds(20, 20, 0.5)
    assert spread.mean() == pytest.approx(1, abs=0.01) and 0.005 < spread.std() < 0.04


def test_rows_in_tiles_are_foretold_by_their_number(tmp_path):
    """A row more is nothing within a tile, and a third more where the next one begins: no line says that."""

    def seconds(tokens: int, seqs: int, used: float) -> float:
        return 0.001 + 0.0013 * -(-tokens // 3)

    fitted = fit_trace(str(recorded(tmp_path / "trace.json", seconds, count=2500)), 0)
    for seqs in (3, 4, 6, 7, 9, 10, 12, 13, 16, 30, 31):
        found = fitted.many_seconds(Work(seqs, seqs, 0, 0.0, seqs, 0.5), 0, 2000)
        assert found.mean() == pytest.approx(seconds(seqs, seqs, 0.5), rel=0.02), seqs


def test_prompts_that_are_padded_are_foretold_by_the_size_that_they_are_padded_to(tmp_path):
    """As on a card, where a step of 513 rows runs as the captured one of 1,024, and decodes beside a prompt cost more than alone."""

    def seconds(tokens: int, seqs: int, used: float) -> float:
        return 0.004 + 5e-5 * seqs if tokens == seqs else (0.012 if tokens <= 512 else 0.021) + 1.5e-4 * seqs

    fitted = fit_trace(str(recorded(tmp_path / "trace.json", seconds, count=1600)), 0)
    assert fitted.errors[1][0] < 0.06
    for tokens, seqs in ((100, 8), (300, 30), (440, 5), (500, 36), (530, 4), (530, 36), (700, 20)):
        found = fitted.many_seconds(Work(tokens, seqs, 0, 0.0, seqs, 0.5), 0, 2000)
        assert found.mean() == pytest.approx(seconds(tokens, seqs, 0.5), rel=0.08), (tokens, seqs)
        assert np.quantile(found, 0.99) < 1.16 * found.mean()


def test_sizes_that_steps_are_padded_to_are_those_of_captured_ones():
    sizes = token_sizes(4096)
    assert [-size_of(tokens, tokens - 1) for tokens in range(1, 4097)] == [sizes[bisect_left(sizes, n)] for n in range(1, 4097)]


@pytest.mark.parametrize(("stall", "every"), [(0.03, 50), (0.3, 300)])
def test_what_stalls_some_step_stalls_any_for_as_long(stall, every, tmp_path):
    """Whatever its kind, and however few steps of that were recorded: ten times a decode is half as much again as a prefill."""
    number = 0

    def seconds(tokens: int, seqs: int, used: float) -> float:
        nonlocal number
        number += 1
        return (0.06 if tokens > seqs else 0.003) + (stall if number % every == 0 else 0.0)

    fitted = fit_trace(str(recorded(tmp_path / "trace.json", seconds, count=1800)), 0)
    for tokens, seqs, alone in ((1, 1, 0.003), (9, 9, 0.003), (40, 40, 0.003), (420, 20, 0.06)):
        work = Work(tokens, seqs, 0, 0.0, seqs, 0.5)
        found = np.array([fitted.seconds(work, step) for step in range(1799)])
        assert np.median(found) == pytest.approx(alone, rel=0.03) and found.max() < 1.1 * (alone + stall)
        assert found.mean() == pytest.approx(alone + stall / every, rel=0.15), (tokens, seqs)


@pytest.mark.parametrize("blocking", [True, False])
def test_a_trace_of_a_known_cost_foretells_its_percentiles(blocking, tmp_path, monkeypatch):
    """The turns of a simulated core, written as a server writes them, fitted, and asked about another load."""
    cost = Constant(0.006, 3e-5, host=2e-4, blocking=blocking)
    made, steps, turn = setup(cost=cost, leaps=False), [], Core.turn

    def traced(core: Core, now: float) -> float | None:
        before, launched = core.steps, []
        monkeypatch.setattr(core, "_launch", lambda plan, at: launched.append(plan) or Core._launch(core, plan, at))
        after = turn(core, now)
        plan, end = (launched[0] if launched else None), core._settled if after is None else after
        tokens, seqs = (plan.num_tokens, len(plan)) if plan is not None and core.steps > before else (0, 0)
        host = end - now if blocking else min(end - now, cost.host)
        parts = (0.0, host, end - now - host, 0.0)
        steps.append(StepTrace(now, *parts, tokens, seqs, core.scheduler.num_running, 0, core.scheduler.kv_usage))
        return after

    monkeypatch.setattr(Core, "turn", traced)
    for number, rate in enumerate((3.0, 15.0, 40.0)):
        began = steps[-1].began + 10.0 if steps else 0.0
        first = len(steps)
        simulate(made, replace(traffic(rate=rate, count=80), seed=number))
        steps[first:] = [msgspec.structs.replace(s, began=s.began + began) for s in steps[first:]]
    monkeypatch.undo()
    trace = TraceFile(tmp_path / "trace.json")
    trace.steps(steps)
    trace.close()
    fitted = fit_trace(str(tmp_path / "trace.json"), 0)
    assert fitted.blocking == blocking
    load = replace(traffic(rate=20.0, count=150), seed=11)
    real, foretold = (summary(simulate(setup(cost=c), load), [90, 99], {}) for c in (cost, fitted))
    for key in ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms", "p99_itl_ms", "output_throughput"):
        assert foretold[key] == pytest.approx(real[key], rel=0.05), key


def test_what_is_no_trace_is_told(tmp_path):
    for words in ("{}", "[]", '{"traceEvents": 5}', "x", '{"traceEvents": [{"ph": "X", "name": "a"}]}'):
        file = tmp_path / "trace.json"
        file.write_text(words)
        with pytest.raises(ParameterError, match="headrace serve --trace FILE"):
            fit_trace(str(file), 0)
    with pytest.raises(ParameterError, match="at least 50 steps"):
        fit_trace(str(recorded(file, lambda *_: 0.01, count=20)), 0)


# ------------------------------------------------------------------------------------------------------------------- traffic


@pytest.mark.parametrize(("name", "own", "output"), [("chat", 1155, 211), ("code", 2048, 28)])
def test_azures_traffic_has_azures_means(name, own, output):
    asks = MIXES[name].draw("0", 20000)
    assert np.mean([ask.own for ask in asks]) == pytest.approx(own, rel=0.03)
    assert np.mean([ask.output for ask in asks]) == pytest.approx(output, rel=0.1)


def test_mixes_draw_about_as_many_requests_as_asked_and_the_same_for_a_seed():
    for mix in MIXES.values():
        asks = mix.draw("3", 3000)
        assert sum(1 + len(ask.turns) for ask in asks) == pytest.approx(3000, rel=0.1)
        assert asks == mix.draw("3", 3000) != mix.draw("4", 3000)
    assert set(Quantiles((0.0, 1.0), (1, 10)).draw(np.random.default_rng(0), 1000)) == set(range(1, 11))


def test_a_day_has_its_peak_at_noon():
    times = day_curve(np.linspace(0, 2 * DAY, 96000, endpoint=False).tolist(), 1.6)
    counts, _ = np.histogram(times, bins=48, range=(0, 2 * DAY))
    assert times == sorted(times) and counts.sum() == 96000
    assert counts[12] == pytest.approx(1.6 * 2000, rel=0.02) and counts[0] == pytest.approx(0.4 * 2000, rel=0.05)
    assert counts[36] == pytest.approx(counts[12], rel=0.02)


def test_parts_are_the_whole_in_pieces():
    load = traffic(count=1000, rate=40.0, max_concurrency=8)
    parts = [load.part(i, 0.25) for i in range(4)]
    assert sum(part.count for part in parts) == 1000 and sum(part.load.request_rate for part in parts) == 40.0
    assert len({part.arrivals()[5][0] for part in parts}) == 4
    assert [part.load.max_concurrency for part in parts] == [2] * 4
    assert shares(10, 4) == [2, 2, 3, 3]


def test_a_file_says_who_asks_when(tmp_path):
    file = tmp_path / "asks.jsonl"
    file.write_text(
        '{"arrival": 2.5, "input_len": 30, "output_len": 4, "prefix": "a", "prefix_len": 64}\n\n'
        '{"arrival": 0, "prompt": [1, 2, 3]}\n{"arrival": 1, "input_tokens": 9, "output_tokens": 2, "prefix": "a", "prefix_len": 64}\n'
    )
    asks = file_asks(str(file), 7, 1000)
    load = Traffic(lambda seed, count: asks, Load(), 3, 0)
    assert [at for at, _ in load.arrivals()] == [0, 1, 2.5]
    done = simulate(setup(), load)
    assert sorted(done.columns["prompt"]) == [3, 73, 94] and sorted(done.columns["output"]) == [2, 4, 7]
    assert done.prefix_hits == 64 and done.columns["start"].tolist() == [0, 1, 2.5]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "a JSON object"), ("[1]", "a JSON object"), ('{"input_len": 0}', "input_len: got 0"), ('{"input_len": 5, "output_len": 1.5}', "output_len: got 1.5"),
        ('{"input_len": 5, "outputs": 3}', "outputs: got 3"), ('{"prompt": "text"}', "texts are not tokenized"), ('{"prompt": [-1]}', "token ids"),
        ('{"input_len": 5, "arrival": -1}', "arrival: got -1"), ('{"output_len": 5}', "input_len: got None"), ('{"input_len": 5, "arrival": 1}', "in every line"),
        ('{"input_len": 5, "prefix": [1]}', "prefix: got"), ('{"input_len": 99999999}', "input_len: got 99999999"),
    ],
)  # fmt: skip
def test_a_broken_line_is_named(tmp_path, line, said):
    file = tmp_path / "asks.jsonl"
    file.write_text('{"input_len": 5}\n\n' + line + "\n")
    with pytest.raises(ParameterError) as error:
        file_asks(str(file), 7, 1000)
    assert f"line 3 of {file}" in str(error.value) and said in str(error.value)


# --------------------------------------------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize("needed", [1, 2, 3, 37, 64, 65, 1000, 54321])
def test_the_smallest_number_that_does_is_found(needed):
    asked: list[int] = []

    def share(number: int) -> float:
        asked.append(number)
        return 1.0 if number >= needed else number / needed * 0.9

    found, tried = replicas_needed(share, 0.99)
    assert needed <= found <= needed * (1 + 1 / 64) and (needed > 64 or found == needed)
    assert len(asked) == len(set(asked)) == len(tried) < 50  # nothing is asked twice
    assert replicas_needed(lambda number: 0.5, 0.99)[0] == 0
    found, tried = replicas_needed(share, 0.99, first=16)
    assert needed <= found <= needed * (1 + 1 / 64) and next(iter(tried)) == 16


def test_a_fleet_is_sized_and_a_run_that_cannot_keep_its_limits_is_cut_short():
    load, limits = traffic(rate=400.0, count=400), {"ttft": 60.0, "tpot": 12.0}
    kept = {}
    for replicas in (1, 2, 4, 8, 16, 32):
        made = setup(replicas=replicas, router="least-loaded")
        whole = simulate(made, load)
        kept[replicas] = attained(whole, limits)
        watched = simulate(replace(made, goodput=limits, share=0.95), load)
        assert (attained(watched, limits) >= 0.95) == (kept[replicas] >= 0.95)
        if kept[replicas] >= 0.95:
            assert attained(watched, limits) == kept[replicas] and watched.steps == whole.steps
        elif replicas == 1:
            assert watched.steps < whole.steps / 2
    assert kept[1] < 0.5 and kept[32] > 0.95
    assert all(kept[n] <= kept[2 * n] for n in (1, 2, 4, 8, 16))


def test_fronts_add_up():
    load = traffic(rate=60.0, count=300)
    parts = [simulate(setup(replicas=2, router="round-robin"), load.part(i, 1 / 3)) for i in range(3)]
    whole, one = merged(parts), summary(parts[0], [50], {}, scale=3.0)
    assert whole.replicas == 6 and len(whole.columns["start"]) == sum(len(p.columns["start"]) for p in parts)
    figures = summary(whole, [50], {})
    assert one["request_throughput"] == pytest.approx(figures["request_throughput"], rel=0.2)
    assert one["completed"] == 300 == figures["completed"]


# -------------------------------------------------------------------------------------------------------------- command line


def simulated(capsys, tmp_path: Path, *options: str) -> dict:
    file = tmp_path / "result.json"
    assert main(["simulate", "--save-result", str(file), *options]) == 0
    return json.loads(file.read_text())


CONFIG = ("--config", str(SHAPES / "qwen3-0.6b.json"))


def test_the_command_prints_what_bench_serve_prints(capsys, tmp_path):
    options = (
        *CONFIG,
        "--dataset-name",
        "system-prompt",
        "--replicas",
        "3",
        "--request-rate",
        "50",
        "100",
        "--num-prompts",
        "40",
    )
    results = simulated(capsys, tmp_path, *options, "--price-per-hour", "2", "--goodput", "ttft:1000", "--debug-checks")
    out = capsys.readouterr().out
    for words in (
        "Successful requests:",
        "P99 TTFT (ms):",
        "Median ITL (ms):",
        "Median queue (ms):",
        "Cost per million tokens:",
        "Client's",
    ):
        assert (words in out) == (words != "Client's"), words
    first, second = results
    assert first["request_rate"] == 50 and second["request_rate"] == 100 and first["completed"] == 40
    assert first["cost_per_hour"] == 6 and first["goodput_share"] == 1.0
    assert first["cost_per_million_output_tokens"] == pytest.approx(6 / 3600 / first["steady_output_throughput"] * 1e6)
    for result, other in zip(results, simulated(capsys, tmp_path, *options, "--no-leaps"), strict=True):
        assert all(result[key] == other[key] for key in other if "itl" not in key and "goodput" not in key)


def test_the_command_says_how_many_cards_it_takes(capsys, tmp_path):
    options = (
        *CONFIG,
        "--dataset-name",
        "chat",
        "--request-rate",
        "200",
        "--num-prompts",
        "300",
        "--goodput",
        "ttft:100",
        "tpot:4",
    )
    result = simulated(
        capsys, tmp_path, *options, "--goodput-share", "0.95", "--price-per-hour", "2.5", "--tensor-parallel-size", "2"
    )
    needed = result["replicas"]
    assert needed > 1 and result["cards"] == 2 * needed and result["goodput_share"] >= 0.95
    assert needed in result["tried"] and needed - 1 in result["tried"]
    given = simulated(capsys, tmp_path, *options, "--replicas", str(needed), "--tensor-parallel-size", "2")
    assert given["goodput_share"] == result["goodput_share"] and "tried" not in given


def test_a_recorded_trace_is_simulated(capsys, tmp_path):
    trace = recorded(tmp_path / "trace.json", lambda tokens, seqs, used: 0.004 + 1e-4 * seqs + 1e-5 * (tokens - seqs))
    options = (
        "--trace",
        str(trace),
        "--num-kv-blocks",
        "2000",
        "--request-rate",
        "5",
        "--num-prompts",
        "50",
        "--random-input-len",
        "100",
    )
    result = simulated(capsys, tmp_path, *options, "--front-ms", "0")
    assert "of them fitted within" in capsys.readouterr().err and result["block_size"] == 16
    assert 4 < result["median_tpot_ms"] < 7


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--card h1000", "--card: got 'h1000', allowed: one of a100"), ("--request-rate -1", "--request-rate: got [-1.0]"), ("--replicas 0", "--replicas: got 0"),
        ("--fronts 3 --replicas 2", "--fronts: got 3"), ("--duration 10", "--duration: got 10.0"), ("--duration 10 --request-rate 5 --num-prompts 5", "--duration"),
        ("--goodput ttft:x", "--goodput: got 'ttft:x'"), ("--goodput ttft:0.001", "idle replica"), ("--goodput-share 2", "--goodput-share: got 2.0"),
        ("--tensor-parallel-size 5", "--tensor-parallel-size: got 5"), ("--trace /nowhere", "--trace: got '/nowhere'"), ("--config /nowhere", "--config: got '/nowhere'"),
        ("--max-num-seqs 0", "--max-num-seqs: got 0"), ("--peak-to-mean 3", "--peak-to-mean: got 3.0"), ("--front-ms nan", "--front-ms: got nan"),
        ("--burstiness 0", "--burstiness: got [0.0]"), ("--dataset-name custom", "--dataset-path: got None"), ("--price-per-hour -1", "--price-per-hour: got -1.0"),
        ("--max-itl-ms 0", "--max-itl-ms"), ("--metric-percentiles x", "--metric-percentiles"), ("--request-rate nan", "--request-rate"),
    ],
)  # fmt: skip
def test_bad_input_is_told(capsys, line, said):
    few = () if "--duration" in line else ("--num-prompts", "5")
    assert main(["simulate", *CONFIG, *few, *line.split()]) == 1
    out, err = capsys.readouterr()
    assert said in err and err.count("\n") == 1 and not out


def test_the_head_of_a_gemma_is_its_embedding_where_its_config_is_silent(capsys, tmp_path):
    """As the loader has it: the card has room for as many blocks."""
    gemma = {
        "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "vocab_size": 256000, "hidden_size": 2304, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 9216, "max_position_embeddings": 8192,
    }  # fmt: skip
    file, counts = tmp_path / "config.json", []
    for more in ({}, {"tie_word_embeddings": True}, {"tie_word_embeddings": False}):
        file.write_text(json.dumps(gemma | more))
        options = ("--card", "l40s", "--max-num-seqs", "256", "--num-prompts", "2")
        counts.append(simulated(capsys, tmp_path, "--config", str(file), *options)["num_kv_blocks"])
    assert counts[0] == counts[1] > counts[2]


def test_a_model_too_large_for_a_card_is_told(capsys, tmp_path):
    config = json.loads((SHAPES / "qwen3-8b.json").read_text()) | {"num_hidden_layers": 200}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    assert main(["simulate", "--config", str(file)]) == 1
    assert "leave no room for a KV cache" in capsys.readouterr().err
