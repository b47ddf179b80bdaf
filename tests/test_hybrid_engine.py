"""The laws for models whose layers keep a state: what a request generates does not depend on how it is scheduled."""

from __future__ import annotations

import pytest

from drafting import Guesser, drafting_core
from engine_driver import BLOCK, assert_all_same, complete, lonely_answers, make_core, make_requests, requests_of_all_kinds, run
from headrace.config import EngineConfig
from headrace.engine.build import build_engine
from headrace.engine.messages import EngineRequest
from headrace.errors import ParameterError
from headrace.sampling.params import SamplingParams
from prompt_graphs_driver import capture_prompts
from scheduler_driver import NoForecast
from tiny_models import VOCAB, write_tiny

SCHEDULES = {
    "together": {},
    "chunks of 7": {"max_num_batched_tokens": 7},
    "chunks of block + 1, not asynchronous": {"max_num_batched_tokens": BLOCK + 1, "async_scheduling": False},
    "no prefix cache": {"enable_prefix_caching": False},
    "tiny pool, chunks of 5": {"num_kv_blocks": 11, "max_num_batched_tokens": 5},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_tiny("qwen3_5", tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def make(model):
    return lambda **options: make_core(model, **options)


@pytest.fixture(scope="module")
def alone(make):
    return lonely_answers(make)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_any_schedule_gives_the_same_tokens(make, alone, schedule):
    core = make(**SCHEDULES[schedule])
    if "tiny pool" in schedule:  # admission learns to expect short outputs, then long ones come: preemption all the time
        short = complete(SamplingParams(max_tokens=1))
        run(core, [EngineRequest(f"short {i}", [i], short, i) for i in range(150)])
    assert_all_same(run(core, make_requests(1, 10, VOCAB)), alone(1, 10), schedule)
    if not SCHEDULES[schedule]:
        assert_all_same(run(core, make_requests(1, 10, VOCAB)), alone(1, 10), f"{schedule}, again")
    if "tiny pool" in schedule:
        assert core.scheduler.stats.num_preemptions > 0, "the pool was meant to be too small"


def test_captured_steps_with_prompts_keep_states(make, alone, monkeypatch):
    """Whoever comes next goes on from the snapshots that they left."""
    core, plain = make(), make(enable_prefix_caching=False)
    prompts, prompt = capture_prompts(core, monkeypatch), [(7 * i) % VOCAB for i in range(70)]
    assert_all_same(run(core, make_requests(1, 10, VOCAB)), alone(1, 10))
    for name in ("first", "again"):
        got, want = (run(one, [greedy(name, prompt, 6)])[name] for one in (core, plain))
        assert_all_same({name: got}, {name: want})
    assert got.cached == 64 and prompts.replays.total() > 5


def test_a_stream_goes_on_where_it_broke(make, alone):
    request = max(make_requests(1, 10, VOCAB), key=lambda r: len(alone(1, 10)[r.id].ids))
    want = alone(1, 10)[request.id]
    resumed = EngineRequest(request.id, request.prompt_ids, request.params, request.seed, output_ids=want.ids[:3])
    assert want.ids[:3] + run(make(), [resumed])[request.id].ids == want.ids


def test_all_kinds_of_requests_beside_each_other(make):
    requests = requests_of_all_kinds(VOCAB)[12:]
    one, together = make(async_scheduling=False), run(make(max_num_batched_tokens=20), requests)
    for request in requests:
        got, want = together[request.id], run(one, [request])[request.id]
        assert (got.ids, got.finish_reason) == (want.ids, want.finish_reason), request.id
        if want.embedding is not None:
            assert got.embedding == pytest.approx(want.embedding, abs=1e-5), request.id


def test_what_such_a_model_does_not_do_is_refused(model, tmp_path):
    other = str(write_tiny("qwen3", tmp_path))
    with pytest.raises(ParameterError, match="speculative_model"):
        build_engine(EngineConfig(model=other, device="cpu", speculative_method="draft_model", speculative_model=model))
    with pytest.raises(ParameterError, match="2 key heads of delta nets"):
        build_engine(EngineConfig(model=model, device="cpu", tensor_parallel_size=4))


def greedy(name: str, prompt: list[int], count: int) -> EngineRequest:
    params = complete(SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=0))
    return EngineRequest(name, prompt, params, 0)


def test_prefixes_are_gone_on_from_where_a_state_was_kept(make):
    """The same prompt again, a conversation's next turn, a prefix that two had before; by as few snapshots as there may be."""
    plain = make(enable_prefix_caching=False)
    prompt = [(7 * i) % VOCAB for i in range(70)]
    for options in ({}, {"max_num_batched_tokens": 24}, {"max_num_seqs": 1}):
        core = make(**options)
        # chunks of 24 leave a state at 48, and the end is too near for another
        asked = [(prompt, 20), (prompt, 20), (prompt[:40] + [5] * 30, 4), (prompt[:40] + [6] * 30, 4)]
        cached = [0, 48 if options.get("max_num_batched_tokens") == 24 else 64, 0, 40]
        for i, ((ids, count), hit) in enumerate(zip(asked, cached, strict=True)):
            got, want = (run(one, [greedy(f"{i}", ids, count)])[f"{i}"] for one in (core, plain))
            assert_all_same({"": got}, {"": want}, f"{options} {i}")
            assert got.cached == hit, (options, i)
        assert core.scheduler.stats.prefix_hit_tokens == sum(cached)


def test_a_long_answer_can_be_gone_on_from(make):
    core, plain = (make(max_model_len=256, enable_prefix_caching=caching) for caching in (True, False))
    first = run(core, [greedy("first", [3, 4, 5], 140)])["first"]
    turn = [3, 4, 5, *first.ids[:-1], 9, 9]
    got, want = (run(one, [greedy("next", turn, 10)])["next"] for one in (core, plain))
    assert_all_same({"": got}, {"": want})
    assert got.cached == 128


def test_preempted_ones_go_on_from_their_snapshots(make, alone):
    core = make(num_kv_blocks=15, max_num_batched_tokens=40)
    core.scheduler.admission.forecast = lambda running: NoForecast()
    requests = [greedy(f"{i}", [(11 * j + i) % VOCAB for j in range(40)], 40) for i in range(3)]
    want = {r.id: run(make(enable_prefix_caching=False), [r])[r.id] for r in requests}
    assert_all_same(run(core, requests), want)
    assert core.scheduler.stats.num_preemptions > 0


@pytest.mark.parametrize("quality", [0.0, 0.6])
def test_wrong_drafts_are_taken_back(make, alone, model, quality):
    """Also where the next step is launched before it is known which were right, and sequences are preempted."""
    want, requests = alone(1, 10), make_requests(1, 10, VOCAB)
    guesser = Guesser({name: result.ids for name, result in want.items()}, VOCAB, quality)
    for options in ({"overlap": True}, {"overlap": quality > 0, "num_kv_blocks": 12, "max_num_batched_tokens": 9}):
        core = drafting_core(model, guesser, **options)
        assert_all_same(run(core, requests), want, f"{options}")
        stats = core.speculator.stats
        assert (stats.num_accepted_tokens > 0) == (quality > 0) and stats.num_draft_tokens > 0
