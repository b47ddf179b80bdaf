"""The engine on a card against the engine on the CPU: float32 token for token, bfloat16 within a tolerance of the logprobs."""

from __future__ import annotations

import random

import pytest

from engine_driver import assert_same, complete, make_core, make_requests, run
from headrace.engine.messages import EngineRequest
from headrace.sampling.params import SamplingParams
from tiny_models import TINY, write_tiny

pytestmark = pytest.mark.gpu

BF16_TOLERANCE = 2.0  # times the error of the CPU's bfloat16 against its float32


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    root = tmp_path_factory.mktemp("tiny")
    return {family: str(write_tiny(family, root / family)) for family in TINY}


@pytest.mark.parametrize("family", TINY)
@pytest.mark.parametrize("mode", ["graphs", "eager"])
def test_float32_tokens_equal_the_cpu(paths, family, mode):
    """Both decode paths, all sampling parameters, preemption: the same tokens and logprobs as on the CPU."""
    cpu = make_core(paths[family], enable_prefix_caching=False)
    card = make_core(paths[family], device="cuda", enforce_eager=mode == "eager", num_kv_blocks=40)
    for seed in (1, 2, 3):
        requests = make_requests(seed, 10, cpu.vocab_size)
        want, got = run(cpu, requests), run(card, requests)
        for request in requests:
            assert_same(got[request.id], want[request.id], f"{family}, {request.id}")


@pytest.mark.parametrize("family", TINY)
def test_bfloat16_logprobs_are_near_the_cpu(paths, family):
    """Rounding to bfloat16 moves the logprobs of these models by 1.5 to 5 % of their spread on the CPU, whose arithmetic is
    the reference's; the card may be off by twice as much as the CPU is."""
    exact = make_core(paths[family], enable_prefix_caching=False)
    rng = random.Random(7)
    params = complete(SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=20, logprobs=0))
    requests = [
        EngineRequest(f"r{i}", [rng.randrange(3, exact.vocab_size) for _ in range(n)], params, i)
        for i, n in enumerate((1, 17, 64, 100))
    ]
    want = run(exact, requests)
    errors = [
        worst_error(run(make_core(paths[family], device=device, dtype="bfloat16"), requests), want)
        for device in ("cpu", "cuda")
    ]
    assert errors[1] <= BF16_TOLERANCE * errors[0], family


def worst_error(got, want) -> float:
    """The largest difference of a prompt logprob, in units of the spread of its row's most likely ones."""
    worst = 0.0
    for name, result in want.items():
        for a, b in zip(result.prompt_logprobs[1:], got[name].prompt_logprobs[1:], strict=True):
            known = dict(zip(b.ids, b.logprobs, strict=True))
            spread = max(a.logprobs) - min(a.logprobs) + 1.0
            errors = [abs(known[t] - p) for t, p in zip(a.ids, a.logprobs, strict=True) if t in known]
            worst = max([worst, *(e / spread for e in errors)])
    return worst


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 9, 31, 64, 65, 100])
def test_padded_graph_sizes_touch_nobody(paths, count):
    """`count` running requests, padded up to the next captured size, each as it would be alone; float32."""
    core = make_core(paths["qwen3"], device="cuda", max_num_seqs=100, num_kv_blocks=2000)
    cpu = make_core(paths["qwen3"], max_num_seqs=100, num_kv_blocks=2000)
    params = [
        complete(SamplingParams(temperature=t, max_tokens=8, top_k=k, logprobs=None)) for t, k in ((0.0, 0), (1.0, 0), (0.9, 9))
    ]
    requests = [EngineRequest(f"r{i}", [3 + i, 5, 7 + i % 13], params[i % 3], i) for i in range(count)]
    got, want = run(core, requests), run(cpu, requests)
    for request in requests:
        assert_same(got[request.id], want[request.id], request.id)


def test_bfloat16_schedules_agree_until_a_near_tie(paths):
    """Alone against chunked, preempted and together: equal, or different first at a place where two logits nearly tie."""
    alone = make_core(paths["llama"], device="cuda", dtype="bfloat16", enable_prefix_caching=False, max_num_seqs=1)
    others = [
        make_core(paths["llama"], device="cuda", dtype="bfloat16", max_num_batched_tokens=7),
        make_core(paths["llama"], device="cuda", dtype="bfloat16", num_kv_blocks=12),
        make_core(paths["llama"], device="cuda", dtype="bfloat16", enforce_eager=True),
    ]
    params = complete(SamplingParams(temperature=0.0, max_tokens=24, logprobs=2))
    rng = random.Random(3)
    requests = [EngineRequest(f"r{i}", [rng.randrange(3, 500) for _ in range(rng.randint(1, 60))], params, i) for i in range(8)]

    def news_of(core):
        entries = {r.id: [] for r in requests}
        for r in requests:
            core.add(r)
        while core.has_work:
            for news in core.step():
                entries[news.id] += news.logprobs or []
        return entries

    want = news_of(alone)
    for core in others:
        for name, entries in news_of(core).items():
            for a, b in zip(entries, want[name], strict=True):
                if a.ids[0] != b.ids[0]:
                    assert b.logprobs[1] - b.logprobs[2] < 0.1, name
                    break


def test_random_mixed_steps(paths):
    """Thousands of steps with arrivals and aborts at any moment; the block accounting is checked after each."""
    core = make_core(
        paths["qwen3"], device="cuda", dtype="bfloat16", max_num_seqs=16, num_kv_blocks=60, max_num_batched_tokens=48
    )
    rng = random.Random(11)
    alive: list[str] = []
    ended = added = steps = 0
    while steps < 10000:
        if len(alive) < 40 and rng.random() < 0.5:
            request = make_requests(rng.randrange(1000), 1, core.vocab_size)[0]
            request.id = f"x{added}"
            core.add(request)
            alive.append(request.id)
            added += 1
        if alive and rng.random() < 0.05:
            core.abort(rng.choice(alive))
        for news in core.step():
            if news.finish_reason is not None:
                assert news.finish_reason != "error"
                alive.remove(news.id)
                ended += 1
        steps += 1
    while core.has_work:
        ended += sum(news.finish_reason is not None for news in core.step())
    assert ended == added and core.scheduler.kv_usage == 0.0
