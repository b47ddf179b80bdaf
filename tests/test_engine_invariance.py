"""Law 1: what a request generates depends on weights, prompt, parameters and seed alone, however it is scheduled."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafting import drafting_core
from engine_driver import BLOCK, assert_all_same, assert_same, complete, make_core, make_requests, run
from headrace.engine.messages import EngineRequest
from headrace.sampling.params import SamplingParams
from tiny_models import write_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_tiny("qwen3", tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def vocab(model):
    return make_core(model).vocab_size


@pytest.fixture(scope="module")
def alone(model, vocab):
    """The reference: each request by itself, no cache, no chunks, nothing in flight."""
    core = make_core(model, enable_prefix_caching=False, async_scheduling=False)
    known = {}

    def answer(seed: int, count: int):
        if (seed, count) not in known:
            known[seed, count] = {r.id: run(core, [r])[r.id] for r in make_requests(seed, count, vocab)}
        return known[seed, count]

    return answer


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
def test_any_schedule_gives_the_same_tokens(model, vocab, alone, schedule):
    core = make_core(model, **SCHEDULES[schedule])
    if "tiny pool" in schedule:  # admission learns to expect short outputs, then long ones come: preemption all the time
        short = complete(SamplingParams(max_tokens=1))
        run(core, [EngineRequest(f"short {i}", [i], short, i) for i in range(150)])
    for seed in (1, 2):
        assert_all_same(run(core, make_requests(seed, 10, vocab)), alone(seed, 10), f"{schedule}, seed {seed}")
    if "tiny pool" in schedule:
        assert core.scheduler.stats.num_preemptions > 0, "the pool was meant to be too small"


@pytest.fixture(scope="module")
def cores(model):
    """Cores that live through all examples: caches get warm, slots and blocks are reused."""
    itself = {"speculative_method": "draft_model", "speculative_model": model}
    return [
        make_core(model),
        make_core(model, num_kv_blocks=13, max_num_batched_tokens=9, max_num_seqs=4),
        make_core(model, num_kv_blocks=20, async_scheduling=False, max_num_batched_tokens=16),
        drafting_core(model, overlap=True, **itself),
        drafting_core(model, overlap=True, **itself, num_kv_blocks=13, max_num_batched_tokens=9, max_num_seqs=4),
        drafting_core(model, num_kv_blocks=20, max_num_batched_tokens=16),
    ]


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_arrivals_and_aborts_change_nobody_else(vocab, alone, cores, data):
    seed = data.draw(st.integers(0, 5), label="requests")
    core = data.draw(st.sampled_from(cores), label="core")
    requests = make_requests(seed, 8, vocab)
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
            assert_same(got, want, name)


def test_a_cached_prompt_gives_the_same_tokens(model, vocab):
    """Cold, warm, and with prompts of whole blocks, where every token but the last comes from the cache."""
    core = make_core(model)
    params = complete(SamplingParams(temperature=0.0, max_tokens=6, logprobs=0))
    for length in (BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 5 * BLOCK):
        prompt = [(7 * i + length) % vocab for i in range(length)]
        cold = run(core, [EngineRequest("a", prompt, params, 1)])["a"]
        warm = run(core, [EngineRequest("a", prompt, params, 1)])["a"]
        assert cold.cached == 0
        assert warm.cached == (length - 1) // BLOCK * BLOCK
        assert_same(warm, cold, f"length {length}")


@pytest.mark.parametrize("budget", [5, 23, 2048])
def test_requests_that_read_other_rows_change_nobody(model, vocab, alone, budget):
    """Prompt logprobs and embeddings need every row's hidden states, generation only the last one's: mixed in one batch."""
    scoring = complete(SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=1))
    prompts = [[(5 * i * i + n) % vocab for i in range(n)] for n in (40, 17)]
    readers = [EngineRequest(f"score {len(p)}", p, scoring, 1) for p in prompts]
    plain = complete(SamplingParams())
    readers += [EngineRequest(f"{how} {len(p)}", p, plain, 1, pooling=how) for p in prompts for how in ("mean", "last")]
    mixed = make_core(model, max_num_batched_tokens=budget)
    requests = make_requests(3, 8, vocab)
    results = run(mixed, [r for pair in zip(requests, readers, strict=False) for r in pair] + requests[len(readers) :])
    assert_all_same(results, alone(3, 8))
    lonely = make_core(model, enable_prefix_caching=False)
    for reader in readers:
        got, want = results[reader.id], run(lonely, [reader])[reader.id]
        assert got.ids == want.ids
        assert got.embedding == (want.embedding and pytest.approx(want.embedding, abs=1e-4))
        scored, expected = got.prompt_logprobs or [None], want.prompt_logprobs or [None]
        assert len(scored) == len(expected)
        for ours, theirs in zip(scored[1:], expected[1:], strict=True):
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)


def test_samples_of_one_request_differ_and_repeat(model, vocab):
    core = make_core(model)
    prompt = [t % vocab for t in range(20)]

    def samples():
        requests = [
            EngineRequest(f"s{k}", prompt, complete(SamplingParams(temperature=1.5, max_tokens=12), sample_index=k), 42)
            for k in range(6)
        ]
        return [r.ids for r in run(core, requests).values()]

    first = samples()
    assert len(set(map(tuple, first))) > 1
    assert samples() == first


@pytest.mark.parametrize("cut", [1, 3, 7])
def test_a_stream_that_was_cut_off_goes_on(model, vocab, cut):
    """What a restarted server does: prompt + tokens so far + the same seed."""
    core, fresh = make_core(model), make_core(model, enable_prefix_caching=False)
    for request in make_requests(3, 8, vocab):
        whole = run(core, [request])[request.id]
        if len(whole.ids) <= cut:
            continue
        rest = EngineRequest(
            request.id, request.prompt_ids, request.params, request.seed, request.priority, output_ids=whole.ids[:cut]
        )
        got = run(fresh, [rest])[request.id]
        assert whole.ids[:cut] + got.ids == whole.ids
        assert got.finish_reason == whole.finish_reason


def test_the_last_layer_runs_only_for_rows_that_are_sampled(model):
    core = make_core(model, max_num_batched_tokens=8)
    decoder, rows = core.runner.decoder, []
    plain = decoder.forward

    def forward(batch, kv, wanted=None):
        hidden = plain(batch, kv, wanted)
        rows.append((batch.num_rows, len(hidden)))
        return hidden

    decoder.forward = forward
    run(core, [EngineRequest("a", list(range(3, 23)), complete(SamplingParams(max_tokens=2, ignore_eos=True)), 7)])
    assert rows == [(8, 0), (8, 0), (4, 1), (1, 1)]
