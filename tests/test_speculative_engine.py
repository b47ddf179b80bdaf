"""Law 1 with speculation: the same tokens, ends and logprobs, whoever guesses and however the requests are scheduled."""

from __future__ import annotations

import itertools
import random
from functools import partial

import pytest

from drafting import Guesser, UncapturedGraphs, capture_nothing, count_overlaps, draft_always, drafting_core
from engine_driver import BLOCK, assert_all_same, assert_same, complete, lonely_answers, make_core, make_requests, run
from headrace import LLM
from headrace.engine.messages import EngineRequest
from headrace.errors import ParameterError
from headrace.sampling.params import SamplingParams
from scheduler_driver import admit_greedily
from tiny_models import VOCAB, write_eagle, write_tiny

SEEDS, COUNT = (1, 2), 8


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_tiny("qwen3", tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def drafts(model, tmp_path_factory):
    """Draft models: the target itself, and one of another family with other random weights."""
    other = str(write_tiny("llama", tmp_path_factory.mktemp("draft"), seed=1, num_hidden_layers=1))
    head = write_eagle(tmp_path_factory.mktemp("eagle"), model)
    return {
        "eagle": {"speculative_method": "eagle3", "speculative_model": head},
        "same model": {"speculative_method": "draft_model", "speculative_model": model},
        "other model": {"speculative_method": "draft_model", "speculative_model": other},
    }


@pytest.fixture(scope="module")
def alone(model):
    return lonely_answers(partial(make_core, model))


PROPOSERS = {"garbage": 0.0, "half right": 0.8, "perfect": 1.0, "ngram": None, "same model": None, "other model": None, "eagle": None}
OVERLAP = {"overlap": True}
SCHEDULES = {
    "together": OVERLAP,
    "settled first": {},
    "chunks of 1": OVERLAP | {"max_num_batched_tokens": 1},
    "chunks of 7": OVERLAP | {"max_num_batched_tokens": 7},
    "chunks of block + 1": OVERLAP | {"max_num_batched_tokens": BLOCK + 1},
    "not asynchronous": {"async_scheduling": False},
    "no prefix cache": OVERLAP | {"enable_prefix_caching": False},
    "blocks of 1": OVERLAP | {"block_size": 1, "num_kv_blocks": 1024},
    "two slots": OVERLAP | {"max_num_seqs": 2},
    "few rows": OVERLAP | {"speculative_max_rows": 9},
    "tiny pool": OVERLAP | {"num_kv_blocks": 12},
    "tiny pool, chunks of 5": OVERLAP | {"num_kv_blocks": 11, "max_num_batched_tokens": 5},
    "tiny pool, chunks of 5, not asynchronous": {"num_kv_blocks": 11, "max_num_batched_tokens": 5, "async_scheduling": False},
}


# every proposer under the schedules that are hardest for it, and two kinds of them under all others
HARD = ("together", "tiny pool, chunks of 5")
OTHERS = [("half right", ("other model", "eagle")[i % 2]) for i in range(len(SCHEDULES))]
CASES = [(s, p) for s, others in zip(SCHEDULES, OTHERS, strict=True) for p in (PROPOSERS if s in HARD else others)]


@pytest.mark.parametrize("schedule, proposer", CASES)
def test_any_proposer_and_schedule_give_the_same_tokens(model, drafts, alone, schedule, proposer):
    core = drafting_core(model, **SCHEDULES[schedule], **drafts.get(proposer, {}))
    overlaps = count_overlaps(core)
    if "tiny pool" in schedule:  # whoever finds a block is admitted: preemption all the time
        admit_greedily(core.scheduler)
    for seed in SEEDS if schedule in HARD or "pool" in schedule else SEEDS[:1]:
        expected = alone(seed, COUNT)
        p_right = PROPOSERS[proposer]
        if p_right is not None:
            core.speculator.proposer = Guesser({name: r.ids for name, r in expected.items()}, VOCAB, p_right)
        results = run(core, make_requests(seed, COUNT, VOCAB))
        assert_all_same(results, expected, f"{schedule}, {proposer}, seed {seed}")
    stats = core.speculator.stats
    if SCHEDULES[schedule].get("max_num_batched_tokens") != 1:
        assert stats.num_draft_tokens >= stats.num_drafts > 0
    if proposer == "garbage":
        assert stats.num_accepted_tokens == 0
    elif proposer == "perfect":
        assert stats.num_accepted_tokens == stats.num_draft_tokens
    elif proposer == "same model" and "pool" not in schedule and schedule != "chunks of 1":
        # wrong where penalties, biases and masks move the target, which the drafts know nothing of
        assert stats.num_accepted_tokens > 0.3 * stats.num_draft_tokens
    assert stats.num_accepted_tokens == sum(stats.accepted_per_position)
    if "overlap" in SCHEDULES[schedule] and schedule not in ("chunks of 1", "tiny pool, chunks of 5"):
        assert overlaps[1] > 0, f"{overlaps} steps overlap"
    elif "overlap" not in SCHEDULES[schedule]:
        assert overlaps == [0, 0]
    if "tiny pool" in schedule:
        assert core.scheduler.stats.num_preemptions > 0, "the pool was meant to be too small"
    assert not core.speculator._rates, "something is kept of requests that have ended"


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("proposer", ["half right", "same model", "eagle"])
def test_captured_steps_with_drafts_give_the_same_tokens(model, drafts, alone, proposer, overlap):
    core = drafting_core(model, **drafts.get(proposer, {}), block_size=2, num_kv_blocks=512, overlap=overlap)
    overlaps = count_overlaps(core)
    graphs, drafter = capture_nothing(core), core.runner.drafter
    if proposer == "same model":
        decoder = drafter.decoder
        drafter.graphs = UncapturedGraphs(lambda b, kv: decoder.logits(decoder.forward(b, kv)), drafter.kv, core.runner.state, 8)
    expected = alone(1, COUNT)
    if PROPOSERS[proposer] is not None:
        right = {name: r.ids for name, r in expected.items()}
        core.speculator.proposer = Guesser(right, VOCAB, PROPOSERS[proposer])
    results = run(core, make_requests(1, COUNT, VOCAB))
    assert_all_same(results, expected)
    params = complete(SamplingParams(temperature=0.9, max_tokens=40, ignore_eos=True))
    plain = EngineRequest("a", [4, 5, 6], params, 7)
    want = run(make_core(model), [plain])["a"]
    core.speculator.proposer = core.speculator.proposer and Guesser({"a": want.ids}, VOCAB, PROPOSERS[proposer])
    assert_same(run(core, [plain])["a"], want)
    assert graphs.replays > 15 and core.speculator.stats.num_draft_tokens > 50
    assert proposer != "same model" or drafter.graphs.replays > 15
    assert (overlaps[1] > 5) is overlap


@pytest.mark.parametrize("overlap", [True, False])
def test_a_perfect_proposer_saves_steps(model, overlap):
    params = complete(SamplingParams(temperature=1.0, max_tokens=60, ignore_eos=True, logprobs=2))
    request = EngineRequest("a", [5, 6, 7], params, 11)
    plain = make_core(model)
    want = run(plain, [request])["a"]
    core = drafting_core(model, Guesser({"a": want.ids}, VOCAB, 1.0), overlap=overlap, num_speculative_tokens=4)
    assert_same(run(core, [request])["a"], want)
    assert core.steps < plain.steps / 2


@pytest.mark.parametrize("overlap", [True, False])
def test_drafts_stop_at_max_tokens_and_at_the_context(model, overlap):
    params = complete(SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, logprobs=0))
    prompt = list(range(10, 30))
    want = run(make_core(model, max_model_len=64), [EngineRequest("a", prompt, params, 1)])["a"]
    core = drafting_core(model, Guesser({"a": want.ids}, VOCAB, 1.0), overlap=overlap, max_model_len=64, num_speculative_tokens=7)
    assert_same(run(core, [EngineRequest("a", prompt, params, 1)])["a"], want)
    assert len(want.ids) == 44 and want.finish_reason == "length"
    for max_tokens in (1, 2, 3, 4, 5, 6, 7, 15, 16, 17, 18):
        short = complete(SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True))
        got = run(core, [EngineRequest("a", prompt, short, 1)])["a"]
        assert got.ids == want.ids[:max_tokens] and got.finish_reason == "length"


def test_a_nan_after_the_drafts_fails_as_without_them(model):
    """The row that fails is not the first of its step: what came before it is delivered, then the request fails. Drafts that
    are broken themselves cost their step and no more, also with another step behind it."""
    bad = 77
    params = complete(SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    want = run(make_core(model), [EngineRequest("a", [1, 2, 3], params, 1)])["a"].ids
    at = next(i for i in range(6, 40) if want[i] not in want[:i])
    bad = want[at]
    results = []
    broken = Guesser({"a": want[: at - 3] + [bad] * 9}, VOCAB, 1.0)
    for proposer, overlap in [(None, False), *itertools.product([Guesser({"a": want}, VOCAB, 1.0), broken], [False, True])]:
        core = drafting_core(model, proposer, overlap=overlap) if proposer else make_core(model)
        core.runner.decoder.embedding = core.runner.decoder.embedding.clone()
        core.runner.decoder.embedding[bad] = float("nan")
        results.append(run(core, [EngineRequest("a", [1, 2, 3], params, 1)])["a"])
    for result in results:
        assert (result.ids, result.finish_reason) == (want[: at + 1], "error")


@pytest.mark.parametrize("params", [
    dict(temperature=1.0, top_p=0.8), dict(temperature=1.2, top_k=5, presence_penalty=1.0, frequency_penalty=0.7),
])  # fmt: skip
def test_the_distribution_is_the_targets(model, params):
    """Chi-square of the third token over 6 ids, with wrong and right guesses before it, against runs without drafts."""
    ids = [11, 60, 123, 200, 301, 407]
    params = SamplingParams(max_tokens=4, ignore_eos=True, allowed_token_ids=ids, **params)
    count = 1000
    requests = [EngineRequest(f"r{i}", [3, 1, 4], complete(params), 10_000 + i) for i in range(count)]
    rng = random.Random(4)
    guesses = {r.id: [rng.choice(ids) for _ in range(4)] for r in requests}
    core = drafting_core(model, Guesser(guesses, VOCAB, 1.0), overlap=True, max_num_seqs=64, speculative_max_rows=512, num_kv_blocks=512)
    drafted = run(core, requests)
    others = [EngineRequest(f"r{i}", [3, 1, 4], complete(params), 90_000 + i) for i in range(count)]
    plain = run(make_core(model, max_num_seqs=64, num_kv_blocks=512), others)
    assert 0.05 < core.speculator.stats.num_accepted_tokens / core.speculator.stats.num_draft_tokens < 0.95
    for place in (1, 2, 3):
        a = [sum(r.ids[place] == i for r in drafted.values()) for i in ids]
        b = [sum(r.ids[place] == i for r in plain.values()) for i in ids]
        chi = sum((x - y) ** 2 / (x + y) for x, y in zip(a, b, strict=True) if x + y)
        assert chi < 20.5, f"token {place}: {a} against {b}"  # 0.001 of the distribution with 5 degrees of freedom


@pytest.mark.parametrize("temperature, top_p", [(0.0, 1.0), (1.0, 1.0), (0.8, 0.7)])
def test_the_model_itself_as_draft_model_is_always_right(model, drafts, temperature, top_p):
    """With the target's own random numbers. Also after prefix hits, drafts refused in between, and plain steps."""
    core = drafting_core(model, overlap=True, **drafts["same model"], num_kv_blocks=64)
    params = complete(SamplingParams(temperature=temperature, top_p=top_p, max_tokens=40, ignore_eos=True, logprobs=0))
    prompts = [list(range(40)), list(range(40)), list(range(21)), [9, 9, 9], list(range(40, 80))]
    plain = make_core(model)
    for i, prompt in enumerate(prompts):
        request = EngineRequest("a", prompt, params, 100 + i)
        assert_same(run(core, [request])["a"], run(plain, [request])["a"])
        stats = core.speculator.stats
        assert stats.num_accepted_tokens == stats.num_draft_tokens >= 25 * (i + 1)


@pytest.mark.parametrize("method", ["ngram", "same model", "eagle"])
def test_samples_of_one_request_are_those_of_the_plain_run(model, drafts, method):
    """n = 4, which share the prompt's blocks; the core guesses on while steps are in flight."""
    params = SamplingParams(n=4, temperature=0.9, top_p=0.95, seed=7, max_tokens=24, ignore_eos=True)
    options = {"model": model, "max_model_len": 128, "num_kv_blocks": 64, "block_size": BLOCK, "skip_tokenizer_init": True}
    lookup = drafts.get(method, {"speculative_method": "ngram", "prompt_lookup_min": 1})
    prompts = [[4, 5, 6, 4, 5, 6] * 3, [9, 8, 7]]
    with LLM(**options) as plain, LLM(**options, **lookup) as drafted:
        core = drafted.engine.core
        core.async_scheduling = True  # on a CPU, too
        draft_always(core, 4, overlap=True)
        overlaps = count_overlaps(core)
        want, got = (
            [[list(o.token_ids) for o in r.outputs] for r in llm.generate(prompts, params, use_tqdm=False)]
            for llm in (plain, drafted)
        )
        assert got == want and len(set(map(tuple, want[0]))) == 4
        assert core.speculator.stats.num_drafts > 0 and overlaps[0] > 0


def test_ids_that_a_draft_model_does_not_have(model, tmp_path):
    """The target's vocabulary may be padded further than the draft model's."""
    smaller = str(write_tiny("llama", tmp_path, vocab_size=VOCAB - 100))
    request = EngineRequest("a", [4, VOCAB - 1, 6], complete(SamplingParams(temperature=0.9, max_tokens=20, ignore_eos=True)), 7)
    core = drafting_core(model, speculative_method="draft_model", speculative_model=smaller)
    assert_same(run(core, [request])["a"], run(make_core(model), [request])["a"])
    assert core.speculator.stats.num_drafts > 0


def test_a_draft_model_of_another_vocabulary_is_refused(model, tmp_path):
    other = str(write_tiny("llama", tmp_path, vocab_size=4096))
    with pytest.raises(ParameterError, match="speculative_model"):
        make_core(model, speculative_method="draft_model", speculative_model=other)


def test_drafts_are_given_up_where_they_are_wrong_and_tried_again(model):
    params = complete(SamplingParams(temperature=1.0, max_tokens=100, ignore_eos=True))
    request = EngineRequest("a", [5], params, 11)
    want = run(make_core(model), [request])["a"].ids

    def drafted(p_right: float) -> int:
        core = make_core(model, speculative_method="ngram", num_speculative_tokens=6)
        core.speculator.proposer = Guesser({"a": want}, VOCAB, p_right)
        assert run(core, [request])["a"].ids == want
        return core.speculator.stats.num_draft_tokens

    assert 2 <= drafted(0.0) < 30  # of 600
    assert drafted(1.0) > 50


def test_many_requests_switch_drafts_off(model):
    params = complete(SamplingParams(temperature=1.0, max_tokens=10, ignore_eos=True))
    requests = [EngineRequest(f"r{i}", [5, i], params, i) for i in range(8)]
    expected = {r.id: run(make_core(model), [r])[r.id].ids for r in requests}
    core = drafting_core(model, Guesser(expected, VOCAB, 1.0), speculative_max_rows=8)
    results = run(core, requests)
    assert {name: r.ids for name, r in results.items()} == expected
    assert core.speculator.stats.num_drafts == 0
