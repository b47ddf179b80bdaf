"""The engine on a card: law 1 in float32 and bfloat16, padded graphs, speculation, ten thousand mixed steps.

Each test is one core after another with models of one shape: what takes time on a fresh card is to compile kernels.
"""

from __future__ import annotations

import random
import time

import pytest
import torch

from agreement import BF16_TOLERANCE, compare, with_rows
from drafting import Guesser, count_overlaps, drafting_core
from engine_driver import Result, assert_all_same, assert_same, complete, make_core, make_requests, run, take
from headrace.engine.messages import EngineRequest
from headrace.sampling.params import SamplingParams
from headrace.sampling.structured_outputs import StructuredOutputsParams
from scheduler_driver import admit_greedily
from test_engine_invariance import SCHEDULES
from tiny_models import write_eagle, write_tiny

pytestmark = pytest.mark.gpu
STEPS = 10_000


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_tiny("qwen3", tmp_path_factory.mktemp("tiny")))


def test_ten_thousand_random_mixed_steps(model):
    """Arrivals and aborts at any moment, a pool that is too small; the block accounting is checked after each step, nothing
    is lost, and those that ran to their end say what the CPU says."""
    core = make_core(model, device="cuda", max_num_seqs=16, num_kv_blocks=50, max_num_batched_tokens=48)
    admit_greedily(core.scheduler)  # whoever finds a block is admitted: preemptions
    rng = random.Random(11)
    requests: dict[str, EngineRequest] = {}
    results: dict[str, Result] = {}
    alive: list[str] = []
    began = time.perf_counter()
    for step in range(STEPS):
        # waves: in some decodes run alone and are captured, in others blocks are lacking
        if len(alive) < 24 and rng.random() < (0.1, 0.3, 0.9)[step // 50 % 3]:
            request = rng.choice(make_requests(rng.randrange(40), 10, core.vocab_size))  # some share a prefix
            request.id = f"x{len(requests)}"
            request.params.prompt_logprobs = rng.choice([None, None, None, 2])
            core.add(request)
            requests[request.id], results[request.id] = request, Result()
            alive.append(request.id)
        if alive and rng.random() < 0.02:
            core.abort(rng.choice(alive))
        for news in core.step():
            take(results[news.id], news)
            if news.finish_reason is not None:
                alive.remove(news.id)
    while core.has_work:
        for news in core.step():
            take(results[news.id], news)
    stats = core.scheduler.stats
    seconds = time.perf_counter() - began
    print(f"{STEPS} steps, {len(requests)} requests, {seconds:.0f} s, {stats}")
    assert {r.finish_reason for r in results.values()} == {"stop", "length", "abort"}
    assert core.scheduler.kv_usage == 0.0 and stats.num_preemptions > 0 and stats.prefix_hit_tokens > 0
    ended = [requests[name] for name, r in results.items() if r.finish_reason != "abort"]
    sample = rng.sample(ended, 64)
    want = run(make_core(model), sample)
    for request in sample:
        assert_same(results[request.id], want[request.id], request.id)


@pytest.mark.parametrize("part", ["chunks", "other"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_schedule_gives_the_same_tokens(model, dtype, part):
    """float32: those of the CPU. bfloat16: those of each request alone on the card, until the first near-tie."""
    reference = {"enable_prefix_caching": False, "async_scheduling": False}
    exact = dtype == "float32"
    alone = (
        make_core(model, **reference) if exact else make_core(model, device="cuda", dtype=dtype, max_num_seqs=1, **reference)
    )
    cases = [make_requests(seed, 10, alone.vocab_size) for seed in (1, 2)]
    cases = cases if exact else [with_rows(c) for c in cases]
    wanted = [run(alone, c) for c in cases]
    schedules = {n: o for n, o in SCHEDULES.items() if ("chunks" in n) == (part == "chunks")}
    if part == "other":
        schedules["eager"] = {"enforce_eager": True}
    problems = []
    for name, options in schedules.items():
        core = make_core(model, device="cuda", dtype=dtype, **options)
        for requests, want in zip(cases, wanted, strict=True):
            if exact:
                got = run(core, requests)
                assert_all_same(got, want, f"{name}")
            else:
                seen = compare(run(core, requests), want, BF16_TOLERANCE, name)
                print(f"{name}: {seen}")
                problems += seen.problems
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("proposer", ["half right", "draft model", "eagle"])
def test_speculation_gives_the_same_tokens(model, proposer, tmp_path):
    """float32; captured, eager, and in chunks with a pool that is too small. As many drafts as may be, worth it or not."""
    cpu = make_core(model)
    requests = make_requests(1, 8, cpu.vocab_size)
    want = run(cpu, requests)
    options = {
        "half right": {},
        "draft model": {"speculative_method": "draft_model", "speculative_model": model},
        "eagle": {"speculative_method": "eagle3", "speculative_model": write_eagle(tmp_path, model)},
    }[proposer]
    guesser = Guesser({name: r.ids for name, r in want.items()}, cpu.vocab_size, 0.8) if proposer == "half right" else None
    for more in ({}, {"enforce_eager": True}, {"max_num_batched_tokens": 13, "num_kv_blocks": 16}):
        core = drafting_core(model, guesser, overlap=True, device="cuda", **options, **more)
        overlaps = count_overlaps(core)
        got = run(core, requests)
        assert_all_same(got, want, f"{proposer}, {more}")
        assert core.speculator.stats.num_drafts > 0 and overlaps[0] > 0


def test_grammars_give_the_same_tokens(model):
    """Masks of the host on logits of captured and eager steps, among requests without a grammar; float32."""
    pytest.importorskip("llguidance")
    wishes = [
        {"regex": "[a-c]{3,12}"}, {"choice": ["wheel", "mill", "water"]}, {"json": {"type": "array", "items": {"type": "integer"}}},
        {"json": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}},
    ]  # fmt: skip
    requests = make_requests(6, 4, 512)
    for i, (wish, t) in enumerate((w, t) for w in wishes for t in (0.0, 0.9)):
        params = SamplingParams(temperature=t, max_tokens=20, structured_outputs=StructuredOutputsParams(**wish), logprobs=0)
        requests.append(EngineRequest(f"grammar {i}", [3, 5, 7 + i], complete(params, eos_token_ids=[2]), i))
    want = run(make_core(model), requests)
    for options in ({}, {"enforce_eager": True}):
        got = run(make_core(model, device="cuda", **options), requests)
        assert_all_same(got, want, f"{options}")


KINDS: dict[str, dict] = {
    "plain": {}, "filtered": {"top_k": 20, "top_p": 0.9, "min_p": 0.01}, "penalties": {"repetition_penalty": 1.2},
    "counts": {"presence_penalty": 0.5, "frequency_penalty": 0.5}, "bans": {"bad_word_ids": [[4], [5, 6]]},
    "bias": {"logit_bias": {3: 2.0, 9: -2.0}}, "allowed ids": {"allowed_token_ids": list(range(0, 512, 3))},
    "min tokens": {"min_tokens": 5, "stop_token_ids": [7, 8]}, "logprobs": {"logprobs": 5}, "all logprobs": {"logprobs": -1},
    "prompt logprobs": {"prompt_logprobs": 3}, "grammar": {"structured_outputs": StructuredOutputsParams(regex="[a-f]{40}")},
}  # fmt: skip


@pytest.mark.parametrize("method", [None, "ngram", "draft_model"])
def test_no_step_waits_for_the_device(model, method):
    """Law 4, watched by torch: while others decode, a request of each kind is admitted and runs to its end, in captured
    steps and in others; the only wait is that for a step's results, which is for an event."""
    pytest.importorskip("llguidance")
    options = {} if method is None else {"speculative_method": method}
    if method == "draft_model":
        options["speculative_model"] = model
    core = make_core(model, device="cuda", dtype="bfloat16", debug_checks=False, max_model_len=256, **options)

    def serve(name: str) -> dict[str, str | None]:
        ended: dict[str, str | None] = {}
        others = complete(SamplingParams(temperature=0.7, max_tokens=40, ignore_eos=True))
        core.add(EngineRequest("other", [3, 4, 5, 3, 4, 5, 3, 4], others, 1))
        for _ in range(4):
            core.step()
        ends = {"eos_token_ids": [2]}
        params = complete(SamplingParams(temperature=0.8, max_tokens=12, **KINDS[name] | ends))
        core.add(EngineRequest("one", [5, 6, 7, 8, 5, 6, 7, 8, 5, 6], params, 2))
        while core.has_work:
            ended |= {news.id: news.finish_reason for news in core.step() if news.finish_reason}
        return ended

    for name in KINDS:  # compiles and captures what is needed
        serve(name)
        core.scheduler.reset_prefix_cache()
    while core.idle():
        pass
    for name in KINDS:
        torch.cuda.set_sync_debug_mode("error")
        try:
            ended = serve(name)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        core.scheduler.reset_prefix_cache()
        assert set(ended.values()) <= {"length", "stop"} and "one" in ended, f"{name}: {ended}"


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A model that every attention backend takes, prompts of all sizes, and what the CPU says to them in float32."""
    shape = {
        "head_dim": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "vocab_size": 100,
    }
    path = str(write_tiny("qwen3", tmp_path_factory.mktemp("wide"), **shape))
    params = complete(SamplingParams(temperature=0.0, max_tokens=4, logprobs=-1, prompt_logprobs=100))
    rng = random.Random(5)
    lengths = (1024, 1500, 2048, 2048, 300, 40, 3)
    requests = [EngineRequest(f"r{i} of {n}", [rng.randrange(100) for _ in range(n)], params, i) for i, n in enumerate(lengths)]
    return path, requests, run(make_core(path, max_model_len=4096, num_kv_blocks=1200), requests)


@pytest.mark.parametrize("backend", ["auto", "cudnn", "triton"])
def test_long_prompts_through_each_attention_backend(wide, backend):
    """bfloat16: fresh prompts in one step, and in chunks behind a context."""
    path, requests, want = wide
    for batched in (16384, 700):
        core = make_core(
            path, device="cuda", dtype="bfloat16", attention_backend=backend, max_model_len=4096, block_size=64,
            num_kv_blocks=150, max_num_batched_tokens=batched,
        )  # fmt: skip
        seen = compare(run(core, requests), want, BF16_TOLERANCE, f"{backend}, {batched}")
        print(f"{backend} ({type(core.runner.decoder.attention).__name__}), {batched}: {seen}")
        assert not seen.problems and seen.total / seen.compared < BF16_TOLERANCE / 2, str(seen)


@pytest.mark.parametrize("dtype, counts", [("float32", (1, 2, 3, 5, 8, 9, 20)), ("bfloat16", (1, 2, 3, 5, 8, 9, 31, 64, 65, 100))])
def test_padded_graphs_touch_nobody(model, dtype, counts):
    """So many running requests, padded up to the next captured size, say what the CPU says; every kind of sampling."""
    most = counts[-1]
    core = make_core(model, device="cuda", dtype=dtype, max_num_seqs=most, num_kv_blocks=2000)
    cpu = make_core(model, max_num_seqs=most, num_kv_blocks=2000)
    settings = ((0.0, {}), (1.0, {}), (0.9, {"top_k": 9}))
    for tails in (settings[:1], settings[:2], settings):
        params = [complete(SamplingParams(temperature=t, max_tokens=6, **more)) for t, more in tails]
        requests = [EngineRequest(f"r{i}", [3 + i, 5, 7 + i % 13], params[i % len(params)], i) for i in range(most)]
        requests = requests if dtype == "float32" else with_rows(requests)
        want = run(cpu, requests)
        for count in counts:
            got = run(core, requests[:count])
            wanted = {name: want[name] for name in got}
            if dtype == "float32":
                assert_all_same(got, wanted, f"{count} of {most}")
            else:
                seen = compare(got, wanted, BF16_TOLERANCE, f"{count} of {most}")
                assert not seen.problems, str(seen)
        if dtype != "float32":
            break  # with logprobs the tails of the graphs are one
