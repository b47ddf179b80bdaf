"""--max-itl-ms: a step's prefill keeps its expected time under the bound, nobody starves, and nobody says anything else."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_driver import assert_all_same, complete, make_core, make_requests, run
from headrace.config import EngineConfig
from headrace.engine.messages import EngineRequest
from headrace.errors import ParameterError
from headrace.sampling.params import SamplingParams
from headrace.scheduler.config import Limits
from headrace.scheduler.prefill_budget import PrefillBudget
from scheduler_driver import SchedulerDriver

BLOCK, MOST = 16, 8192


@given(
    base=st.floats(1e-4, 0.1), slope=st.floats(1e-7, 1e-3), bound=st.floats(1e-3, 0.5), noise=st.floats(0.0, 0.05),
    idle=st.integers(0, 100), seed=st.integers(0, 1000),
)  # fmt: skip
@settings(max_examples=200, derandomize=True)
def test_steps_fit_the_bound_or_are_minimal(base, slope, bound, noise, idle, seed):
    """Between any number of steps without prefill, after the few in which it learns."""
    rng, pace = random.Random(seed), PrefillBudget(bound, BLOCK, MOST)

    def step(tokens: int) -> float:
        seconds = (base + slope * tokens) * (1 + rng.uniform(-noise, noise))
        pace.observe(tokens, seconds)
        return seconds

    sizes = []
    for i in range(120):
        tokens = pace.prefill_tokens()
        assert BLOCK <= tokens <= MOST
        sizes.append(tokens)
        seconds = step(tokens)
        if i > 40:
            assert tokens == BLOCK or seconds <= bound * (1 + 4 * noise + 0.02)
        for _ in range(idle if i % 20 == 0 else 0):
            step(0)
    best = max(BLOCK, min(MOST, (bound - base) / slope))
    if noise == 0.0:
        assert sizes[-1] >= 0.9 * best - 1, "what the bound leaves is used"


def test_the_estimate_follows_what_the_decodes_cost():
    pace = PrefillBudget(0.050, BLOCK, MOST)
    for base in (0.010, 0.040, 0.049, 0.060, 0.010):
        for _ in range(100):
            tokens = pace.prefill_tokens()
            pace.observe(tokens, base + 1e-5 * tokens)
        assert tokens == pytest.approx(max(BLOCK, (0.050 - base) / 1e-5), rel=0.05)


def test_a_step_is_at_most_twice_as_large_as_any_before():
    pace, sizes = PrefillBudget(1.0, BLOCK, 1000), []
    for _ in range(9):
        sizes.append(pace.prefill_tokens())
        pace.observe(sizes[-1], 0.001)
    assert sizes == [16, 32, 64, 128, 256, 512, 1000, 1000, 1000]


@pytest.mark.parametrize("depth", [0, 1])
def test_prompts_get_on_beside_decodes_and_have_the_whole_budget_without(depth):
    config = Limits(
        max_num_seqs=8, max_num_batched_tokens=256, max_model_len=1024, block_size=8, num_blocks=1024, max_itl=0.030
    )
    engine, rng = SchedulerDriver(config, depth), random.Random(depth)
    flight, mixed = [], []
    for i in range(24):
        engine.add(f"r{i}", [rng.randrange(50) for _ in range(rng.choice([3, 700]))], seed=i, max_tokens=60, ignore_eos=True)
    while engine.scheduler.has_unfinished:
        plan = engine.schedule()
        if plan is not None:
            engine.launch(plan)
            flight.append(plan)
        while len(flight) > (depth if plan is not None else 0):
            done = flight.pop(0)
            prefill = sum(c.num_tokens for c in done.others)
            seconds = 0.010 + 0.001 * done.num_decodes + 0.0001 * prefill
            engine.scheduler.took(done.plan, seconds)
            engine.settle()
            if done.num_decodes and prefill:
                mixed.append(seconds)
            elif prefill and any(not c.samples for c in done.others):
                assert prefill == 256, "nobody waits for a token: the whole budget"
    assert len(mixed) > 20 and max(mixed) < 0.035, "that four more decode was not foreseen"
    assert sum(seconds > 0.0305 for seconds in mixed) < len(mixed) / 4
    engine.assert_idle()


@pytest.mark.parametrize("milliseconds", [0.001, 5, 1e6])
def test_the_bound_changes_no_token(model, milliseconds):
    plain, paced = make_core(model), make_core(model, max_itl_ms=milliseconds)
    requests = make_requests(3, 12, plain.vocab_size)
    arrivals = [2 * i for i in range(12)]
    wanted = run(plain, requests, arrivals=arrivals)
    assert_all_same(run(paced, requests, arrivals=arrivals), wanted)


def test_a_long_prompt_comes_in_pieces_that_fit(model):
    """A device of 100 ms a step and 10 ms a prefill token, by a clock of its own."""
    core = make_core(model, max_itl_ms=300)
    launch, sizes, device = core.runner.launch, [], [0.0]

    def timed(plan):
        handle = launch(plan)
        prefill = int(plan.counts[plan.num_decodes :].sum())
        device[0] = max(device[0], time.perf_counter()) + 0.1 + 0.01 * prefill
        handle.finished = device[0]
        if plan.num_decodes and prefill:
            sizes.append(prefill)
        return handle

    core.runner.launch = timed
    params = complete(SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True))
    core.add(EngineRequest("watched", [5], params, 0))
    for _ in range(40):
        core.step()
    core.add(EngineRequest("long", [i % 50 for i in range(100)], complete(SamplingParams(max_tokens=2)), 0))
    while core.has_work:
        core.step()
    assert sum(sizes) == 100 and sizes[0] == 8 and max(sizes) in range(17, 22)


@pytest.mark.parametrize("bad", [0, -1.0, float("nan"), float("inf"), True, "10", 1e7])
def test_bad_bounds_are_refused(bad):
    with pytest.raises(ParameterError, match=r"max_itl_ms.*milliseconds in \(0, 1e6\]"):
        EngineConfig(max_itl_ms=bad)
