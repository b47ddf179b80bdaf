"""How many cores there should be: bounds, hysteresis and delays, over all courses of demand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.distributed.autoscaler import SPARE, Autoscaler, Demand, ScalingConfig
from headrace.errors import ParameterError

PER_CORE = 10
DEMANDS = st.builds(Demand, st.integers(0, 200), st.just(PER_CORE), st.floats(0.0, 20.0))
CONFIGS = st.builds(
    lambda low, more, up, down: ScalingConfig(min_replicas=low, max_replicas=low + more, upscale_delay=up, downscale_delay=down),
    st.integers(1, 5), st.integers(0, 12), st.sampled_from([0.0, 1.0, 7.5]), st.sampled_from([0.0, 3.0, 30.0]),
)  # fmt: skip
COURSES = st.lists(st.tuples(st.floats(0.1, 10.0), DEMANDS), min_size=1, max_size=60)


def run(config: ScalingConfig, course, cores: int) -> list[tuple[float, Demand, int, int]]:
    """At each time: the demand, how many there were, how many were wanted and so are there next."""
    scaler, now, found = Autoscaler(config), 0.0, []
    for seconds, demand in course:
        now += seconds
        wanted = scaler.wanted(now, cores, demand)
        found.append((now, demand, cores, wanted))
        cores = wanted
    return found


@given(CONFIGS, COURSES, st.integers(1, 30))
def test_whatever_comes_the_bounds_hold_and_only_lasting_demand_moves_anything(config, course, cores):
    story = run(config, course, cores)
    moved = story[0][0]  # when the last decision was made, or the first question asked
    for i, (now, _, before, after) in enumerate(story):
        assert config.min_replicas <= after <= config.max_replicas
        if after == before:
            continue
        if config.min_replicas <= before <= config.max_replicas:
            delay = config.upscale_delay if after > before else config.downscale_delay
            assert now - moved >= delay or i == 0 or delay == 0.0
            for when, demand, there, _ in story[: i + 1]:
                if when >= now - delay and there == before and when > moved:
                    if after > before:
                        assert min(demand.cores(), config.max_replicas) >= after
                    else:
                        assert max(demand.cores(SPARE), config.min_replicas) <= after
        moved = now


@given(CONFIGS, DEMANDS, st.integers(1, 30), st.floats(0.1, 5.0))
def test_a_steady_demand_is_met_and_then_nothing_moves_any_more(config, demand, cores, tick):
    settle = int((config.upscale_delay + 2 * config.downscale_delay) / tick) + 6
    story = run(config, [(tick, demand)] * (2 * settle), cores)
    after = {wanted for *_, wanted in story[settle:]}
    assert len(after) == 1
    (found,) = after
    assert found >= min(demand.cores(), config.max_replicas)  # enough
    assert found <= max(demand.cores(SPARE), config.min_replicas)  # and no more than with room to spare


@given(CONFIGS, COURSES)
def test_nobody_there_in_the_end_the_least(config, course):
    idle = [(1.0, Demand(0, PER_CORE))] * int(2 * config.downscale_delay + config.upscale_delay + 6)  # the first time may have begun before
    assert run(config, [*course, *idle], config.min_replicas)[-1][-1] == config.min_replicas


def test_a_load_curve():
    config = ScalingConfig(min_replicas=1, max_replicas=4, upscale_delay=2.0, downscale_delay=10.0)
    course = [(1.0, Demand(n, PER_CORE)) for n in [5] * 5 + [35] * 10 + [12, 35] * 6 + [12] * 20 + [0] * 30]
    wanted = [w for *_, w in run(config, course, 1)]
    assert wanted[4] == 1 and wanted[7] == 4 and wanted[26] == 4  # what does not last changes nothing
    assert wanted[46] == 2 and wanted[-1] == 1


@pytest.mark.parametrize(
    "options", [{"min_replicas": 0}, {"min_replicas": 3, "max_replicas": 2}, {"max_replicas": True}, {"target_ongoing_requests": 0},
                {"upscale_delay": -1.0}, {"downscale_delay": float("nan")}, {"max_replicas": 1000}],
)  # fmt: skip
def test_bounds_that_make_no_sense_are_refused(options):
    with pytest.raises(ParameterError, match=next(iter(reversed(options)))):
        ScalingConfig(**options)
