"""Law 1, bit for bit in the native CPU step: what a request generates depends on weights, prompt, parameters and seed alone, however it is scheduled."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafting import drafting_core
from engine_driver import BLOCK, assert_all_same, assert_same, complete, lonely_answers, make_core, make_requests, run
from headrace.engine.messages import EngineRequest
from headrace.native.forward import NativeDecoder
from headrace.sampling.params import SamplingParams
from tiny_models import VOCAB, write_tiny

# The native CPU step gives the same bits in every schedule, torch's products of other row counts round otherwise.
STEPS = {
    "torch": ({"enforce_eager": True}, 1e-4),
    "native": ({"block_size": 16, "num_kv_blocks": 128}, 0.0),
}


@pytest.fixture(scope="module", params=STEPS)
def step(request):
    if request.param == "native":
        pytest.importorskip("headrace.native._step", reason="no compiler: the native step was not built")
    return request.param


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_tiny("qwen3", tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def make(model, step):
    """A core whose model runs by `step`; pools of blocks of 8 are halved where blocks are of 16."""

    def core(make=make_core, **options):
        settings = STEPS[step][0]
        if "block_size" in settings and "num_kv_blocks" in options:
            options["num_kv_blocks"] = options["num_kv_blocks"] // 2 + 1
        core = make(model, **settings | options)
        assert isinstance(core.runner.decoder, NativeDecoder) == (core.runner.kv.block_size % 16 == 0 and step == "native")
        return core

    return core


@pytest.fixture(scope="module")
def same(step):
    return partial(assert_same, tolerance=STEPS[step][1])


@pytest.fixture(scope="module")
def all_same(step):
    return partial(assert_all_same, tolerance=STEPS[step][1])


@pytest.fixture(scope="module")
def alone(make):
    return lonely_answers(make)


SCHEDULES = {
    "together": {},
    "chunks of 1": {"max_num_batched_tokens": 1},
    "chunks of 7": {"max_num_batched_tokens": 7},
    "chunks of block - 1": {"max_num_batched_tokens": BLOCK - 1},
    "chunks of a block": {"max_num_batched_tokens": BLOCK},
    "chunks of block + 1": {"max_num_batched_tokens": BLOCK + 1},
    "not asynchronous": {"async_scheduling": False},
    "no prefix cache": {"enable_prefix_caching": False},
    "blocks of 1": {"block_size": 1, "num_kv_blocks": 1024},
    "blocks of 64": {"block_size": 64},
    "two slots": {"max_num_seqs": 2},
    "tiny pool": {"num_kv_blocks": 12},
    "tiny pool, chunks of 5": {"num_kv_blocks": 11, "max_num_batched_tokens": 5},
    "tiny pool, not asynchronous": {"num_kv_blocks": 11, "async_scheduling": False},
    "by priority, tiny pool": {"scheduling_policy": "priority", "num_kv_blocks": 12},
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_any_schedule_gives_the_same_tokens(step, make, all_same, alone, schedule):
    if step == "native" and SCHEDULES[schedule].get("block_size", 16) % 16:
        pytest.skip("its blocks are multiples of 16 tokens")
    core = make(**SCHEDULES[schedule])
    if "tiny pool" in schedule:  # admission learns to expect short outputs, then long ones come: preemption all the time
        short = complete(SamplingParams(max_tokens=1))
        run(core, [EngineRequest(f"short {i}", [i], short, i) for i in range(150)])
    for seed in (1, 2):
        all_same(run(core, make_requests(seed, 10, VOCAB)), alone(seed, 10), f"{schedule}, seed {seed}")
    if "tiny pool" in schedule:
        assert core.scheduler.stats.num_preemptions > 0, "the pool was meant to be too small"


@pytest.fixture(scope="module")
def cores(model, make):
    """Cores that live through all examples: caches get warm, slots and blocks are reused."""
    itself = {"speculative_method": "draft_model", "speculative_model": model}
    return [
        make(),
        make(num_kv_blocks=13, max_num_batched_tokens=9, max_num_seqs=4),
        make(num_kv_blocks=20, async_scheduling=False, max_num_batched_tokens=16),
        make(drafting_core, overlap=True, **itself),
        make(drafting_core, overlap=True, **itself, num_kv_blocks=13, max_num_batched_tokens=9, max_num_seqs=4),
        make(drafting_core, num_kv_blocks=20, max_num_batched_tokens=16),
    ]


@settings(max_examples=20)
@given(data=st.data())
def test_arrivals_and_aborts_change_nobody_else(same, alone, cores, data):
    seed = data.draw(st.integers(0, 5), label="requests")
    core = data.draw(st.sampled_from(cores), label="core")
    requests = make_requests(seed, 8, VOCAB)
    order = data.draw(st.permutations(range(8)), label="order")
    arrivals = data.draw(st.lists(st.integers(0, 12), min_size=8, max_size=8), label="arrivals")
    aborts = data.draw(
        st.dictionaries(st.sampled_from([r.id for r in requests]), st.integers(0, 30), max_size=4), label="aborts"
    )
    results = run(core, [requests[i] for i in order], arrivals=arrivals, aborts=aborts)
    for name, want in alone(seed, 8).items():
        got = results[name]
        if got.finish_reason == "abort":
            assert got.ids == want.ids[: len(got.ids)]
        else:
            same(got, want, name)


def test_a_cached_prompt_gives_the_same_tokens(make, same):
    """Cold, warm, and with prompts of whole blocks, where every token but the last comes from the cache."""
    core = make()
    size = core.runner.kv.block_size
    params = complete(SamplingParams(temperature=0.0, max_tokens=6, logprobs=0))
    for length in (size - 1, size, size + 1, 2 * size, 5 * size):
        prompt = [(7 * i + length) % VOCAB for i in range(length)]
        cold = run(core, [EngineRequest("a", prompt, params, 1)])["a"]
        warm = run(core, [EngineRequest("a", prompt, params, 1)])["a"]
        assert cold.cached == 0
        assert warm.cached == (length - 1) // size * size
        same(warm, cold, f"length {length}")


@pytest.mark.parametrize("budget", [5, 23, 2048])
def test_requests_that_read_other_rows_change_nobody(step, make, all_same, alone, budget):
    """Prompt logprobs and embeddings need every row's hidden states, generation only the last one's: mixed in one batch."""
    scoring = complete(SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=1))
    prompts = [[(5 * i * i + n) % VOCAB for i in range(n)] for n in (40, 17)]
    readers = [EngineRequest(f"score {len(p)}", p, scoring, 1) for p in prompts]
    plain = complete(SamplingParams())
    readers += [EngineRequest(f"{how} {len(p)}", p, plain, 1, pooling=how) for p in prompts for how in ("mean", "last")]
    mixed = make(max_num_batched_tokens=budget)
    requests = make_requests(3, 8, VOCAB)
    results = run(mixed, [r for pair in zip(requests, readers, strict=False) for r in pair] + requests[len(readers) :])
    all_same(results, alone(3, 8))
    lonely = make(enable_prefix_caching=False)
    for reader in readers:
        got, want = results[reader.id], run(lonely, [reader])[reader.id]
        assert got.ids == want.ids
        rows = 1e-7 if reader.pooling == "mean" else 0.0  # the sum of a prompt's rows is one of its chunks' sums
        assert got.embedding == (want.embedding and pytest.approx(want.embedding, abs=max(rows, STEPS[step][1])))
        scored, expected = got.prompt_logprobs or [None], want.prompt_logprobs or [None]
        assert len(scored) == len(expected)
        for ours, theirs in zip(scored[1:], expected[1:], strict=True):
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=STEPS[step][1])


def test_samples_of_one_request_differ_and_repeat(make):
    core = make()
    prompt = [t % VOCAB for t in range(20)]

    def samples():
        requests = [
            EngineRequest(f"s{k}", prompt, complete(SamplingParams(temperature=1.5, max_tokens=12), sample_index=k), 42)
            for k in range(6)
        ]
        return [r.ids for r in run(core, requests).values()]

    first = samples()
    assert len(set(map(tuple, first))) > 1
    assert samples() == first


def test_a_stream_that_was_cut_off_goes_on(make):
    """What a restarted server does: prompt + tokens so far + the same seed."""
    core, fresh = make(), make(enable_prefix_caching=False)
    for request in make_requests(3, 8, VOCAB):
        whole = run(core, [request])[request.id]
        for cut in (c for c in (1, 3, 7) if c < len(whole.ids)):
            rest = EngineRequest(
                request.id, request.prompt_ids, request.params, request.seed, request.priority, output_ids=whole.ids[:cut]
            )
            got = run(fresh, [rest])[request.id]
            assert (whole.ids[:cut] + got.ids, got.finish_reason) == (whole.ids, whole.finish_reason)


def test_the_last_layer_runs_only_for_rows_that_are_sampled(make):
    core = make(max_num_batched_tokens=8)
    decoder, rows = core.runner.decoder, []
    plain = decoder.forward

    def forward(batch, kv, wanted=None):
        hidden = plain(batch, kv, wanted)
        rows.append((batch.num_rows, len(hidden)))
        return hidden

    decoder.forward = forward
    run(core, [EngineRequest("a", list(range(3, 23)), complete(SamplingParams(max_tokens=1, ignore_eos=True)), 7)])
    assert rows == [(8, 0), (8, 0), (4, 1)]
