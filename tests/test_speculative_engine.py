"""Law 1 with speculation: the same tokens, ends and logprobs, whoever guesses and however the requests are scheduled."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from engine_driver import BLOCK, Result, assert_same, complete, make_core, make_requests, run
from headrace.engine.core import EngineCore
from headrace.engine.messages import EngineRequest
from headrace.engine.request import Request
from headrace.errors import ParameterError
from headrace.kernels.prepare import DecodeRows, prepare_decode, publish
from headrace.model.batch import ForwardBatch
from headrace.sampling.params import SamplingParams
from headrace.sampling.sampler import SampleInputs, choose
from headrace.worker.sampling import Tail
from scheduler_fake import NoForecast
from tiny_models import write_tiny

SEEDS, COUNT = (1, 2), 8


def write_eagle(path: Path, target: str, width: int = 96, guesses: int = 300) -> str:
    """A random EAGLE-3 head in the published layout, for a tiny target."""
    hidden = json.loads((Path(target) / "config.json").read_text())["hidden_size"]
    torch.manual_seed(5)
    shapes = {
        "fc": (width, 3 * hidden), "midlayer.self_attn.q_proj": (4 * 16, 2 * width), "midlayer.self_attn.k_proj": (2 * 16, 2 * width),
        "midlayer.self_attn.v_proj": (2 * 16, 2 * width), "midlayer.self_attn.o_proj": (width, 4 * 16),
        "midlayer.mlp.gate_proj": (128, width), "midlayer.mlp.up_proj": (128, width), "midlayer.mlp.down_proj": (width, 128),
        "midlayer.input_layernorm": (width,), "midlayer.hidden_norm": (width,), "midlayer.post_attention_layernorm": (width,),
        "norm": (width,), "lm_head": (guesses, width),
    }  # fmt: skip
    tensors = {f"{name}.weight": torch.randn(shape) * 0.2 for name, shape in shapes.items()}
    ids = torch.randperm(512)[:guesses].sort().values
    tensors |= {"d2t": ids - torch.arange(guesses), "t2d": torch.isin(torch.arange(512), ids)}
    save_file(tensors, path / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": width, "intermediate_size": 128,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 1, "vocab_size": 512,
        "draft_vocab_size": guesses, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, "eos_token_id": 2, "bos_token_id": 1,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


class Guesser:
    """Guesses right with probability `p_right` for each token; 0: always wrong, 1: never."""

    def __init__(self, expected: dict[str, list[int]], vocab: int, p_right: float, seed: int = 0):
        self.expected, self.vocab, self.p_right, self.rng = expected, vocab, p_right, random.Random(seed)

    def propose(self, request: Request, most: int) -> list[int]:
        rng, known = self.rng, len(request.output_ids)
        right = self.expected.get(request.id, [])[known : known + rng.randint(1, most)]
        return [t if rng.random() < self.p_right else (t + rng.randint(1, self.vocab - 1)) % self.vocab for t in right]

    def end(self, request_id: str) -> None:
        pass


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
def vocab(model):
    return make_core(model).vocab_size


@pytest.fixture(scope="module")
def alone(model, vocab):
    """The reference: no drafts, each request by itself."""
    core = make_core(model, enable_prefix_caching=False, async_scheduling=False)
    known = {}

    def answers(seed: int) -> dict[str, Result]:
        if seed not in known:
            known[seed] = {r.id: run(core, [r])[r.id] for r in make_requests(seed, COUNT, vocab)}
        return known[seed]

    return answers


def drafting_core(model: str, proposer=None, **options) -> EngineCore:
    """Drafts as many tokens as may be, whatever their worth, unless told otherwise."""
    lookup = {"speculative_method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 4}
    options = lookup | {"speculative_max_rows": 64} | options
    core = make_core(model, **options)
    assert core.speculator is not None
    core.speculator._lengths.best[:] = [options["num_speculative_tokens"]] * len(core.speculator._lengths.best)
    if proposer is not None:
        core.speculator.proposer = proposer
    return core


PROPOSERS = {"garbage": 0.0, "half right": 0.8, "perfect": 1.0, "ngram": None, "same model": None, "other model": None, "eagle": None}
SCHEDULES = {
    "together": {},
    "chunks of 1": {"max_num_batched_tokens": 1},
    "chunks of 7": {"max_num_batched_tokens": 7},
    "chunks of block + 1": {"max_num_batched_tokens": BLOCK + 1},
    "not asynchronous": {"async_scheduling": False},
    "no prefix cache": {"enable_prefix_caching": False},
    "blocks of 1": {"block_size": 1, "num_kv_blocks": 1024},
    "two slots": {"max_num_seqs": 2},
    "few rows": {"speculative_max_rows": 9},
    "tiny pool": {"num_kv_blocks": 12},
    "tiny pool, chunks of 5, not asynchronous": {"num_kv_blocks": 11, "max_num_batched_tokens": 5, "async_scheduling": False},
}


# every proposer under the schedules that are hardest for it, and two kinds of them under all others
HARD = ("together", "tiny pool, chunks of 5, not asynchronous")
CASES = [(s, p) for s in SCHEDULES for p in PROPOSERS if s in HARD or p in ("half right", "other model", "eagle")]


@pytest.mark.parametrize("schedule, proposer", CASES)
def test_any_proposer_and_schedule_give_the_same_tokens(model, drafts, vocab, alone, schedule, proposer):
    core = drafting_core(model, **SCHEDULES[schedule], **drafts.get(proposer, {}))
    if "tiny pool" in schedule:  # whoever finds a block is admitted: preemption all the time
        core.scheduler._admission._forecast = lambda running: NoForecast()
    for seed in SEEDS if schedule in HARD else SEEDS[:1]:
        expected = alone(seed)
        p_right = PROPOSERS[proposer]
        if p_right is not None:
            core.speculator.proposer = Guesser({name: r.ids for name, r in expected.items()}, vocab, p_right)
        results = run(core, make_requests(seed, COUNT, vocab))
        for name, want in expected.items():
            assert_same(results[name], want, f"{schedule}, {proposer}, seed {seed}, {name}")
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
    if "tiny pool" in schedule:
        assert core.scheduler.stats.num_preemptions > 0, "the pool was meant to be too small"
    assert not core.speculator._rates, "something is kept of requests that have ended"


class UncapturedGraphs:
    """What captured decode steps do (worker/cuda_graphs.py), done at once and without padding."""

    def __init__(self, forward, kv, state, most: int):
        self.forward, self.kv, self.state, self.sizes = forward, kv, state, [most]
        self.replays = 0

    def replay(self, numbers: np.ndarray, context: int, tail: Tail) -> SimpleNamespace:
        state, count = self.state, numbers.shape[1]
        assert numbers[1].max() < context
        rows = DecodeRows.empty(count, state.device)
        prepare_decode(
            torch.from_numpy(numbers), state.token_ids, state.block_tables, state.floats, state.ints, rows,
            block_size=state.block_size,
        )  # fmt: skip
        batch = ForwardBatch(
            rows.token_ids, rows.positions, rows.slot_mapping, state.block_tables, rows.seq_slots,
            torch.arange(count + 1, dtype=torch.int32), rows.seq_lens, count, [1] * count, rows.seq_lens.tolist(),
        )  # fmt: skip
        logits = self.forward(batch, self.kv)
        self.replays += 1
        if tail is Tail.LOGITS:
            return SimpleNamespace(token_ids=None, failed=None, logits=logits)
        token_ids, failed = choose(
            logits,
            SampleInputs(
                rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seed, rows.output_index, rows.sample_index,
                all_greedy=tail is Tail.GREEDY, any_top_k=tail is Tail.FILTERED, any_top_p=tail is Tail.FILTERED,
                any_min_p=tail is Tail.FILTERED,
            ),
        )  # fmt: skip
        publish(token_ids, rows, state.token_ids)
        return SimpleNamespace(token_ids=token_ids, failed=failed, logits=None)


@pytest.mark.parametrize("proposer", ["half right", "same model"])
def test_captured_steps_with_drafts_give_the_same_tokens(model, drafts, vocab, alone, proposer):
    core = drafting_core(model, **drafts.get(proposer, {}), block_size=2, num_kv_blocks=512)
    runner, drafter = core.runner, core.runner.drafter
    runner.graphs = UncapturedGraphs(
        lambda batch, kv: runner.decoder.logits(runner.decoder.forward(batch, kv)), runner.kv, runner.state, 40
    )
    if drafter is not None:
        decoder = drafter.decoder
        drafter.graphs = UncapturedGraphs(lambda b, kv: decoder.logits(decoder.forward(b, kv)), drafter.kv, runner.state, 8)
    expected = alone(1)
    if PROPOSERS[proposer] is not None:
        right = {name: r.ids for name, r in expected.items()}
        core.speculator.proposer = Guesser(right, vocab, PROPOSERS[proposer])
    results = run(core, make_requests(1, COUNT, vocab))
    for name, want in expected.items():
        assert_same(results[name], want, name)
    params = complete(SamplingParams(temperature=0.9, max_tokens=40, ignore_eos=True))
    plain = EngineRequest("a", [4, 5, 6], params, 7)
    want = run(make_core(model), [plain])["a"]
    core.speculator.proposer = core.speculator.proposer and Guesser({"a": want.ids}, vocab, PROPOSERS[proposer])
    assert_same(run(core, [plain])["a"], want)
    assert runner.graphs.replays > 15 and core.speculator.stats.num_draft_tokens > 50
    assert drafter is None or drafter.graphs.replays > 15


@pytest.fixture(scope="module")
def cores(model):
    """Cores that live through all examples: caches get warm, slots and blocks are reused."""
    return [
        drafting_core(model),
        drafting_core(model, num_kv_blocks=13, max_num_batched_tokens=9, max_num_seqs=4),
        drafting_core(model, num_kv_blocks=20, async_scheduling=False, max_num_batched_tokens=16),
    ]


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_arrivals_and_aborts_change_nobody_else(vocab, alone, cores, data):
    seed = data.draw(st.integers(0, 3), label="requests")
    core = data.draw(st.sampled_from(cores), label="core")
    requests, expected = make_requests(seed, COUNT, vocab), alone(seed)
    p_right = data.draw(st.sampled_from([0.5, 0.9, 1.0]), label="p_right")
    core.speculator.proposer = Guesser({name: r.ids for name, r in expected.items()}, vocab, p_right, seed)
    order = data.draw(st.permutations(range(8)), label="order")
    arrivals = data.draw(st.lists(st.integers(0, 12), min_size=8, max_size=8), label="arrivals")
    aborts = data.draw(
        st.dictionaries(st.sampled_from([r.id for r in requests]), st.integers(0, 30), max_size=4), label="aborts"
    )
    results = run(core, [requests[i] for i in order], arrivals=arrivals, aborts=aborts)
    for name, want in expected.items():
        got = results[name]
        if got.finish_reason == "abort":
            assert got.ids == want.ids[: len(got.ids)]
        else:
            assert_same(got, want, name)


def test_a_perfect_proposer_saves_steps(model, vocab):
    params = complete(SamplingParams(temperature=1.0, max_tokens=60, ignore_eos=True, logprobs=2))
    request = EngineRequest("a", [5, 6, 7], params, 11)
    plain = make_core(model)
    want = run(plain, [request])["a"]
    core = drafting_core(model, Guesser({"a": want.ids}, vocab, 1.0), num_speculative_tokens=4)
    assert_same(run(core, [request])["a"], want)
    assert core.steps < plain.steps / 2


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5, 6, 7])
def test_drafts_stop_at_max_tokens_and_at_the_context(model, vocab, max_tokens):
    params = complete(SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, logprobs=0))
    prompt = list(range(10, 30))
    want = run(make_core(model, max_model_len=64), [EngineRequest("a", prompt, params, 1)])["a"]
    core = drafting_core(model, Guesser({"a": want.ids}, vocab, 1.0), max_model_len=64, num_speculative_tokens=7)
    assert_same(run(core, [EngineRequest("a", prompt, params, 1)])["a"], want)
    assert len(want.ids) == 44 and want.finish_reason == "length"
    short = complete(SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True))
    got = run(core, [EngineRequest("a", prompt, short, 1)])["a"]
    assert got.ids == want.ids[:max_tokens] and got.finish_reason == "length"


def test_a_nan_after_the_drafts_fails_as_without_them(model, vocab):
    """The row that fails is not the first of its step: what came before it is delivered, then the request fails."""
    bad = 77
    params = complete(SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    want = run(make_core(model), [EngineRequest("a", [1, 2, 3], params, 1)])["a"].ids
    at = next(i for i in range(6, 40) if want[i] not in want[:i])
    bad = want[at]
    results = []
    for proposer in (None, Guesser({"a": want}, vocab, 1.0)):
        core = drafting_core(model, proposer) if proposer else make_core(model)
        core.runner.decoder.embedding = core.runner.decoder.embedding.clone()
        core.runner.decoder.embedding[bad] = float("nan")
        results.append(run(core, [EngineRequest("a", [1, 2, 3], params, 1)])["a"])
    assert results[0].ids == results[1].ids == want[: at + 1]
    assert results[0].finish_reason == results[1].finish_reason == "error"


@pytest.mark.parametrize("params", [
    dict(temperature=1.0, top_p=0.8), dict(temperature=1.2, top_k=5, presence_penalty=1.0, frequency_penalty=0.7),
])  # fmt: skip
def test_the_distribution_is_the_targets(model, vocab, params):
    """Chi-square of the third token over 6 ids, with wrong and right guesses before it, against runs without drafts."""
    ids = [11, 60, 123, 200, 301, 407]
    params = SamplingParams(max_tokens=4, ignore_eos=True, allowed_token_ids=ids, **params)
    count = 1000
    requests = [EngineRequest(f"r{i}", [3, 1, 4], complete(params), 10_000 + i) for i in range(count)]
    rng = random.Random(4)
    guesses = {r.id: [rng.choice(ids) for _ in range(4)] for r in requests}
    core = drafting_core(model, Guesser(guesses, vocab, 1.0), max_num_seqs=64, speculative_max_rows=512, num_kv_blocks=512)
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
def test_the_model_itself_as_draft_model_is_always_right(model, drafts, vocab, temperature, top_p):
    """With the target's own random numbers. Also after prefix hits, drafts refused in between, and plain steps."""
    core = drafting_core(model, **drafts["same model"], num_kv_blocks=64)
    params = complete(SamplingParams(temperature=temperature, top_p=top_p, max_tokens=40, ignore_eos=True, logprobs=0))
    prompts = [list(range(40)), list(range(40)), list(range(21)), [9, 9, 9], list(range(40, 80))]
    plain = make_core(model)
    for i, prompt in enumerate(prompts):
        request = EngineRequest("a", prompt, params, 100 + i)
        assert_same(run(core, [request])["a"], run(plain, [request])["a"])
        stats = core.speculator.stats
        assert stats.num_accepted_tokens == stats.num_draft_tokens >= 25 * (i + 1)


def test_a_draft_model_of_another_vocabulary_is_refused(model, tmp_path):
    other = str(write_tiny("llama", tmp_path, vocab_size=4096))
    with pytest.raises(ParameterError, match="speculative_model"):
        make_core(model, speculative_method="draft_model", speculative_model=other)


def test_drafts_are_given_up_where_they_are_wrong_and_tried_again(model, vocab):
    params = complete(SamplingParams(temperature=1.0, max_tokens=100, ignore_eos=True))
    request = EngineRequest("a", [5], params, 11)
    want = run(make_core(model), [request])["a"].ids

    def drafted(p_right: float) -> int:
        core = make_core(model, speculative_method="ngram", num_speculative_tokens=6)
        core.speculator.proposer = Guesser({"a": want}, vocab, p_right)
        assert run(core, [request])["a"].ids == want
        return core.speculator.stats.num_draft_tokens

    assert 2 <= drafted(0.0) < 30  # of 600
    assert drafted(1.0) > 50


def test_many_requests_switch_drafts_off(model, vocab):
    params = complete(SamplingParams(temperature=1.0, max_tokens=10, ignore_eos=True))
    requests = [EngineRequest(f"r{i}", [5, i], params, i) for i in range(8)]
    expected = {r.id: run(make_core(model), [r])[r.id].ids for r in requests}
    core = drafting_core(model, Guesser(expected, vocab, 1.0), speculative_max_rows=8)
    results = run(core, requests)
    assert {name: r.ids for name, r in results.items()} == expected
    assert core.speculator.stats.num_drafts == 0
