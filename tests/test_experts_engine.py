"""Law 1 with a mixture of experts: which experts a row has, and what they make of it, depends on nothing but the row."""

from __future__ import annotations

import pytest

from drafting import drafting_core
from engine_driver import assert_all_same, complete, lonely_answers, make_core, make_requests, run
from headrace.engine.messages import EngineRequest
from headrace.sampling.params import SamplingParams
from tiny_gemma4 import EXPERTS, SMALL
from tiny_models import VOCAB, write_tiny

TOLERANCE = 1e-4  # torch's products of other row counts round otherwise
SCHEDULES = {
    "together": {},
    "chunks of 7": {"max_num_batched_tokens": 7},
    "tiny pool, chunks of 5": {"num_kv_blocks": 11, "max_num_batched_tokens": 5},
    "drafts": {"num_kv_blocks": 20, "max_num_batched_tokens": 16},
}


# with groups, a correction, a shared expert, and a layer without any; beside an MLP, in layers that read others' keys
MODELS = {"glm4_moe": {}, "gemma4": EXPERTS | SMALL}


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    return str(write_tiny(request.param, tmp_path_factory.mktemp("tiny"), **MODELS[request.param]))


@pytest.fixture(scope="module")
def alone(model):
    return lonely_answers(lambda **options: make_core(model, enforce_eager=True, **options))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_any_schedule_gives_the_same_tokens(model, alone, schedule):
    core = (drafting_core if schedule == "drafts" else make_core)(model, enforce_eager=True, **SCHEDULES[schedule])
    if "tiny pool" in schedule:  # admission learns to expect short outputs, then long ones come: preemption all the time
        short = complete(SamplingParams(max_tokens=1))
        run(core, [EngineRequest(f"short {i}", [i], short, i) for i in range(150)])
    assert_all_same(run(core, make_requests(1, 10, VOCAB)), alone(1, 10), schedule, tolerance=TOLERANCE)
    assert "tiny pool" not in schedule or core.scheduler.stats.num_preemptions > 0
    assert schedule != "drafts" or core.speculator.stats.num_accepted_tokens > 0


def test_the_native_step_says_why_it_does_not_run_them(model, caplog):
    with caplog.at_level("INFO"):
        make_core(model, block_size=16)
    assert "native CPU step does not run" in caplog.text and "a mixture of experts" in caplog.text
