"""Drafts under a grammar: what is forced is drafted, what the grammar forbids is not, and the output stays the same."""

from __future__ import annotations

import random

import pytest
import torch

from drafting import Guesser, capture_nothing, count_overlaps, drafting_core
from engine_driver import BLOCK, Result, assert_all_same, assert_same, complete, make_core, run
from headrace import LLM
from headrace.engine.core import EngineCore
from headrace.engine.messages import EngineRequest
from headrace.sampling.params import SamplingParams
from headrace.sampling.structured_outputs import StructuredOutputsParams
from headrace.scheduler.plan import StepPlan
from headrace.structured_output.llguidance_backend import Matcher
from structured_driver import EOS, encode
from tiny_models import write_tiny

SCHEMA = {
    "type": "object", "additionalProperties": False, "required": ["temperature_in_celsius", "description", "kind"],
    "properties": {
        "temperature_in_celsius": {"type": "integer"}, "description": {"type": "string", "maxLength": 9},
        "kind": {"enum": ["precipitation", "precipice"]},
    },
}  # fmt: skip
LONG = {"regex": "[ab] temperature_in_celsius[ab] precipitation[ab]"}
WISHES = [{"json": SCHEMA}, {"regex": "(abc|abd){3,9}x"}, {"choice": ["The quick brown fox", "The quick red fox"]}, {"json_object": True}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_tiny("llama", tmp_path_factory.mktemp("tiny"), max_position_embeddings=512))


def mixed() -> list[EngineRequest]:
    """Constrained and free requests, greedy and not, with edits of the logits besides."""
    requests = []
    for i in range(14):
        wish = StructuredOutputsParams(**WISHES[i % 5]) if i % 5 < len(WISHES) else None
        params = SamplingParams(
            temperature=[0.0, 1.0, 2.0][i % 3], max_tokens=60, min_tokens=[0, 7][i % 2], logprobs=1, structured_outputs=wish,
            repetition_penalty=[1.0, 1.2][i % 4 == 3], frequency_penalty=[0.0, 0.3][i % 3 == 2],
        )  # fmt: skip
        requests.append(EngineRequest(f"r{i}", encode(f"Say {i}: "), complete(params, eos_token_ids=[EOS]), 50 + i))
    return requests


def undrafted(core: EngineCore) -> EngineCore:
    core.speculator = None
    return core


def forcing(core: EngineCore, *, overlap: bool = True, multiple: int = 16) -> EngineCore:
    """As on a GPU: steps overlap, and are padded up to a multiple."""
    assert core.speculator is not None and core.speculator.proposer is None
    core.speculator.overlap = overlap
    core.speculator.padded = lambda rows: -(-rows // multiple) * multiple
    return core


def constrained(name: str, seed: int = 1, temperature: float = 0.0, **params) -> EngineRequest:
    wish = StructuredOutputsParams(**params.pop("wish", {"json": SCHEMA}))
    params = SamplingParams(structured_outputs=wish, temperature=temperature, **({"max_tokens": 100} | params))
    return EngineRequest(name, encode(f"Say {name}: "), complete(params, eos_token_ids=[EOS]), seed)


def free(name: str, seed: int = 1, **params) -> EngineRequest:
    params = SamplingParams(**({"max_tokens": 40, "ignore_eos": True, "temperature": 1.0} | params))
    return EngineRequest(name, encode(f"Go {name}: "), complete(params), seed)


def watch(core: EngineCore) -> list[tuple[StepPlan, bool]]:
    """Every plan that is launched, and whether a step was in flight then."""
    seen, forward = [], core.runner.forward

    def seeing(plan: StepPlan, whole: bool = True):
        seen.append((plan, core._in_flight is not None))
        return forward(plan, whole)

    core.runner.forward = seeing  # launch calls it, too
    return seen


def new_of(plan: StepPlan) -> list[bool]:
    """Whether a sequence computes tokens of its prompt."""
    slots = {new.slot for new in plan.admitted}
    return [int(slot) in slots or count > 1 + drafts for slot, count, drafts in zip(plan.slots, plan.counts, plan.drafts, strict=True)]


@pytest.fixture(scope="module")
def alone(model) -> dict[str, Result]:
    core = undrafted(make_core(model, max_model_len=200, enable_prefix_caching=False, async_scheduling=False))
    found = {r.id: run(core, [r])[r.id] for r in mixed()}
    core.close()
    return found


@pytest.mark.parametrize("options", [
    {}, {"num_kv_blocks": 30, "overlap": True}, {"max_num_batched_tokens": 9, "num_kv_blocks": 64, "overlap": True}, {"async_scheduling": False, "speculative_max_rows": 10},
])  # fmt: skip
@pytest.mark.parametrize("p_right", [None, 0.7, 1.0])
def test_constrained_output_is_the_same(model, alone, options, p_right):
    core = drafting_core(model, max_model_len=200, **options)
    if p_right is not None:
        core.speculator.proposer = Guesser({name: r.ids for name, r in alone.items()}, core.vocab_size, p_right)
    results = run(core, mixed())
    assert_all_same(results, alone)
    assert core.speculator.stats.num_accepted_tokens > 20
    core.close()


def test_a_draft_model_leaves_constrained_requests_to_the_grammar(model, alone):
    core = drafting_core(model, overlap=True, max_model_len=200, speculative_method="draft_model", speculative_model=model)
    results = run(core, mixed())
    assert_all_same(results, alone)
    core.close()


@pytest.mark.parametrize("p_right", [None, 0.7])
def test_masks_of_drafts_in_captured_steps(model, alone, p_right):
    """The graph ends with the logits; masks, one for each draft, and the verification follow it."""
    core = drafting_core(model, overlap=True, max_model_len=200)
    if p_right is not None:
        core.speculator.proposer = Guesser({name: r.ids for name, r in alone.items()}, core.vocab_size, p_right)
    graphs = capture_nothing(core)
    masked: list[int] = []
    masks = core.structured.masks
    core.structured.masks = lambda rows: masked.append(sum(len(drafts) for _, _, drafts in rows)) or masks(rows)
    results = run(core, mixed())
    assert_all_same(results, alone)
    assert graphs.replays > 20 and sum(masked) > 20
    core.close()


# ---- what is forced, without anybody who guesses


@pytest.mark.parametrize("overlap, multiple, options", [
    (False, 1, {}), (False, 1, {"num_kv_blocks": 30}), (True, 1, {"async_scheduling": False, "speculative_max_rows": 10}),
    (True, 1, {"num_kv_blocks": 30}), (True, 3, {}), (True, 3, {"max_num_batched_tokens": 9, "num_kv_blocks": 64}),
    (True, 16, {"num_kv_blocks": 30}), (True, 16, {"enable_prefix_caching": False, "max_num_seqs": 3}),
])  # fmt: skip
def test_forced_drafts_change_nothing(model, alone, options, overlap, multiple):
    core = forcing(make_core(model, max_model_len=200, **options), overlap=overlap, multiple=multiple)
    results = run(core, mixed())
    assert_all_same(results, alone)
    stats = core.speculator.stats
    assert multiple == 1 or stats.num_accepted_tokens > 5
    assert not core.speculator._rates and not core.speculator._free and not core.speculator._broken
    core.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_stop_strings_and_samples_are_the_same(model, overlap):
    wishes = [StructuredOutputsParams(**w) for w in WISHES] + [None]
    params = [
        SamplingParams(n=3, seed=7, temperature=t, max_tokens=50, stop=["in_c", "brown", "bda"], logprobs=2, structured_outputs=w)
        for w in wishes for t in (0.0, 1.0)
    ]  # fmt: skip
    prompts = [f"Say {i}: " for i in range(len(params))]
    options = {"device": "cpu", "dtype": "float32", "max_model_len": 200, "num_kv_blocks": 128, "block_size": BLOCK, "debug_checks": True}
    found = []
    for drafts in (False, True):
        with LLM(model, **options) as llm:
            core = llm.engine.core
            forcing(core, overlap=overlap) if drafts else undrafted(core)
            outputs = [o for r in llm.generate(prompts, params, use_tqdm=False) for o in r.outputs]
            found.append([(o.text, list(o.token_ids), o.finish_reason, o.stop_reason, [len(p) for p in o.logprobs]) for o in outputs])
            assert not drafts or core.speculator.stats.num_accepted_tokens > 20
    assert found[0] == found[1]
    assert any(reason in ("in_c", "brown", "bda") for _, _, _, reason, _ in found[0])


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_what_a_grammar_forces_is_taken_at_once(model, count, overlap):
    """One of two long words: after its first different letter all is known."""
    bias = {encode("z")[0]: -100.0}
    requests = [constrained(f"r{i}", wish={"choice": ["x" * 60 + "y", "z"]}, logit_bias=bias) for i in range(count)]
    plain = undrafted(make_core(model))
    want = run(plain, requests)
    core = forcing(make_core(model, speculative_max_rows=64), overlap=overlap)
    results = run(core, requests)
    assert_all_same(results, want)
    stats = core.speculator.stats
    assert stats.num_accepted_tokens > 0.7 * sum(len(r.ids) for r in want.values())
    assert stats.num_accepted_tokens == stats.num_draft_tokens
    assert core.steps < 0.5 * plain.steps
    for each in (plain, core):
        each.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_required_keys_save_steps(model, overlap):
    keys = ["temperature_in_celsius", "precipitation", "chance_of_thunder", "wind_direction"]
    schema = {"type": "object", "additionalProperties": False, "required": keys, "properties": {k: {"enum": ["high", "low"]} for k in keys}}
    requests = [constrained(f"r{i}", i, temperature=1.0, wish={"json": schema}, max_tokens=200) for i in range(2)]
    plain, core = undrafted(make_core(model, max_model_len=256)), forcing(make_core(model, max_model_len=256), overlap=overlap)
    want, got = run(plain, requests), run(core, requests)
    assert_all_same(got, want)
    assert core.steps < 0.75 * plain.steps
    for each in (plain, core):
        each.close()


@pytest.mark.parametrize("padding", [1, 4, 5, 8])
@pytest.mark.parametrize("async_scheduling", [True, False])
def test_neighbours_pay_nothing(model, padding, async_scheduling):
    """Beside requests without a grammar no step has more rows than it is padded to, and none waits for the one before it."""
    requests = [r for i in range(3) for r in (constrained(f"c{i}", i, 1.0, wish=LONG), free(f"f{i}", i, max_tokens=90))]
    plain = undrafted(make_core(model, max_model_len=200))
    want = run(plain, requests)
    core = forcing(make_core(model, max_model_len=200, async_scheduling=async_scheduling), multiple=padding)
    run(core, [constrained("first", 0, 1.0, wish=LONG)])  # the grammar is there: else the neighbours may be done before it is
    seen = watch(core)
    got = run(core, requests)
    assert_all_same(got, want)
    drafted = 0
    for i, (plan, in_flight) in enumerate(seen):
        decoding = [name for name, new in zip(plan.ids, new_of(plan), strict=True) if not new]
        if any(name.startswith("f") for name in decoding):
            drafted += plan.num_drafts
            assert len(decoding) + plan.num_drafts <= core.speculator.padded(len(decoding))
            assert in_flight is (async_scheduling and i > 0)
    assert drafted > 5 if padding > 1 else drafted == 0
    for name in ("f0", "f1", "f2"):  # a row in each step, as long as it lives
        at = [i for i, (plan, _) in enumerate(seen) if name in plan.ids]
        assert at == list(range(at[0], at[0] + len(got[name].ids)))
    for each in (plain, core):
        each.close()


def test_forced_drafts_overlap(model):
    """Nobody waits for the ids of the step in flight, though the drafts stand behind them."""
    core = forcing(make_core(model, max_model_len=200))
    overlaps = count_overlaps(core)
    run(core, [constrained(f"r{i}", i, wish=LONG) for i in range(3)])
    assert overlaps[0] > 1 and core.speculator.stats.num_accepted_tokens > 20
    core.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_limits_that_forbid_what_is_forced(model, overlap):
    """There is no token left: the request ends with an error, at the same place, and its neighbours go on."""
    banned = encode("precipitation")[-3]
    limits = {"allowed_token_ids": [t for t in range(512) if t != banned]}
    requests = [constrained(f"r{i}", i, wish=LONG, **(limits if i % 2 else {})) for i in range(4)]
    plain, core = undrafted(make_core(model)), forcing(make_core(model), overlap=overlap)
    want, got = run(plain, requests), run(core, requests)
    assert_all_same(got, want)
    assert [r.finish_reason for r in want.values()] == ["stop", "error"] * 2 and all(len(r.ids) > 5 for r in want.values())
    assert core.speculator.stats.num_accepted_tokens > 20
    for each in (plain, core):
        each.close()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", ["shifted", "anything", "longer"])
def test_wrong_drafts_do_no_harm(model, alone, monkeypatch, kind, overlap):
    """Whatever is said to be forced: the output stays, and nobody is kept from drafts for it."""
    rng, forced = random.Random(3), Matcher.forced

    def lie(matcher: Matcher) -> list[int]:
        ids = forced(matcher)
        if kind == "shifted":
            return ids[rng.randint(0, 2) :]
        return [rng.randrange(512) for _ in range(4)] if kind == "anything" else ids + [rng.randrange(512) for _ in range(3)]

    monkeypatch.setattr(Matcher, "forced", lie)
    core = forcing(make_core(model, max_model_len=200), overlap=overlap)
    settled = core.speculator.settled
    broken: list[str] = []
    core.speculator.settled = lambda *args: settled(*args) or broken.extend(core.speculator._broken)
    results = run(core, mixed())
    assert_all_same(results, alone)
    assert not broken and core.speculator.stats.num_drafts > 10
    core.close()


def test_nobody_is_asked_without_grammars(model):
    core = make_core(model)
    asked: list[str] = []
    for name in ("choose", "settles_first", "fill"):
        method = getattr(core.speculator, name)
        setattr(core.speculator, name, lambda *args, _name=name, _method=method: asked.append(_name) or _method(*args))
    schedule = core.scheduler.schedule
    core.scheduler.schedule = lambda drafting: asked.extend(["schedule"] * drafting) or schedule(drafting)
    run(core, [free(f"r{i}", i) for i in range(4)])
    assert asked == []
    run(core, [constrained("c"), free("f")])
    assert "choose" in asked and "schedule" in asked
    asked.clear()
    run(core, [free("g", max_tokens=3)])
    assert asked in ([], ["choose"]), "the last wishes are forgotten once"
    core.close()


def test_without_grammars_there_is_nothing_to_draft(model):
    core = make_core(model, skip_tokenizer_init=True)
    assert core.speculator is None and core.scheduler.limits.max_draft_rows == 0
    core.close()


def test_user_processors_see_no_guesses(model):
    """A function of the user may count its calls: it is asked once for each token, with and without speculation."""
    calls: list[list[int]] = []

    def processor(ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        calls.append(list(ids))
        return logits + torch.tensor(random.Random(len(ids)).choices([0.0, 3.0], k=len(logits)))

    params = complete(SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logits_processors=[processor]))
    want = run(make_core(model), [EngineRequest("a", [1, 2, 1, 2, 1], params, 1)])["a"]
    seen, calls = calls, []
    core = drafting_core(model, Guesser({"a": want.ids}, 512, 1.0), overlap=True)
    assert_same(run(core, [EngineRequest("a", [1, 2, 1, 2, 1], params, 1)])["a"], want)
    assert calls == seen
