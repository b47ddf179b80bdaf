"""Law 1 across ranks: an engine of several gives every request the tokens, ends and logprobs of one, whatever it asks for."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from drafting import draft_always
from engine_driver import Result, assert_all_same, complete, make_core, make_requests, requests_of_all_kinds, run
from headrace.engine.messages import EngineRequest
from headrace.sampling.params import SamplingParams
from rank_threads import ranked_core
from scheduler_driver import admit_greedily
from test_ranks_decoder import HEADS, VARIANTS
from tiny_models import VOCAB, write_eagle, write_tiny

TINY_POOL = {"num_kv_blocks": 12, "max_num_batched_tokens": 7}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(write_tiny("qwen3", tmp_path_factory.mktemp("tiny"), **HEADS))


@pytest.fixture(scope="module")
def expected(model):
    """What one rank gives, on the same path: torch."""
    requests = requests_of_all_kinds(VOCAB)
    return requests, run(make_core(model, enforce_eager=True), requests)


def assert_same_everywhere(got: dict[str, Result], want: dict[str, Result]) -> None:
    assert_all_same(got, want)
    for name, result in want.items():
        if result.embedding is not None:
            np.testing.assert_allclose(got[name].embedding, result.embedding, rtol=1e-4, atol=1e-4)
        if result.prompt_logprobs is not None:
            for mine, theirs in zip(got[name].prompt_logprobs, result.prompt_logprobs, strict=True):
                assert (mine is None) == (theirs is None)
                if mine is not None:
                    assert mine.ids == theirs.ids and mine.rank == theirs.rank
                    np.testing.assert_allclose(mine.logprobs, theirs.logprobs, atol=1e-4)


@pytest.mark.parametrize("size, options", [(2, {}), (4, {}), (2, TINY_POOL), (2, {"async_scheduling": False})])
def test_requests_of_all_kinds(model, expected, size: int, options: dict):
    """Filters, penalties, bans, logprobs, prompt logprobs, embeddings, grammars, users' functions, speculated or not."""
    requests, want = expected
    with ranked_core(model, size, **options) as core:
        if options is TINY_POOL:
            admit_greedily(core.scheduler)
        got = run(core, requests)
    assert_same_everywhere(got, want)


@functools.cache
def plain(temperature: float) -> list[EngineRequest]:
    """Requests that never need whole rows."""
    params = complete(SamplingParams(temperature=temperature, max_tokens=12, ignore_eos=True))
    return [EngineRequest(f"r{i}", [7 * i + j for j in range(5 + i)], params, seed=i) for i in range(4)]


@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if variant not in ("deepseek_v2", "glm4_moe_lite")])
def test_every_family(variant: str, tmp_path):
    """Of two ranks; the logits of four are looked at in test_ranks_decoder.py."""
    family, overrides = VARIANTS[variant]
    path = str(write_tiny(family, tmp_path / "model", **overrides))
    kinds = [*plain(0.0)[:2], *plain(1.0)[2:]], make_requests(3, 3, VOCAB)
    one = make_core(path, enforce_eager=True)
    expected = [run(one, requests) for requests in kinds]
    with ranked_core(path, 2) as core:
        for requests, want in zip(kinds, expected, strict=True):
            assert_all_same(run(core, requests), want, variant)


def test_plain_steps_gather_no_rows(model, monkeypatch):
    """What grows with the vocabulary travels only where a row asks for it."""
    gathered = []

    def gather(group, part):
        gathered.append(part.numel())
        return original(group, part)

    from rank_threads import ThreadGroup

    original = ThreadGroup.gather
    with ranked_core(model, 2) as core:
        monkeypatch.setattr(ThreadGroup, "gather", gather)
        for temperature in (0.0, 1.0):
            run(core, plain(temperature))
    assert gathered and max(gathered) <= 3 * 4


@pytest.mark.parametrize("method", ["ngram", "draft_model", "eagle3"])
def test_speculation(model, expected, method: str, tmp_path):
    """Drafts of rank 0's draft model are everybody's."""
    draft = {"draft_model": lambda: str(write_tiny("llama", tmp_path, seed=1, num_hidden_layers=1)),
             "eagle3": lambda: write_eagle(tmp_path, model), "ngram": lambda: None}[method]()  # fmt: skip
    options = {
        "speculative_method": method,
        "speculative_model": draft,
        "num_speculative_tokens": 4,
        "speculative_max_rows": 64,
    }
    requests, want = expected
    with ranked_core(model, 2, **options) as core:
        draft_always(core, 4, overlap=True)
        got = run(core, requests)
    assert_same_everywhere(got, want)
