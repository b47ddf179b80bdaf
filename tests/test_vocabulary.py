"""Rows of the vocabulary without a token, padding behind the last and holes between: nothing ever gives one of their ids."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from drafting import drafting_core
from engine_driver import complete, make_core, run
from headrace import LLM, SamplingParams
from headrace.beam_search import BeamSearchParams
from headrace.engine.messages import EngineRequest
from headrace.model.vocabulary import TokenlessIds
from headrace.sampling.structured_outputs import StructuredOutputsParams
from tiny_models import VOCAB, write_eagle, write_tiny, write_tokenizer

OPTIONS = {"device": "cpu", "dtype": "float32", "max_num_seqs": 8, "debug_checks": True, "max_model_len": 128}
WILD = {"temperature": 2.0, "ignore_eos": True, "max_tokens": 60, "seed": 5}
GREEDY = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 24}
PROMPT = "The quick brown fox"


def punch_holes(path: Path) -> None:
    """Move the last hundred tokens up by seven ids."""
    file = path / "tokenizer.json"
    state = json.loads(file.read_text())
    vocab = state["model"]["vocab"]
    first = len(vocab) - 100
    state["model"]["vocab"] = {token: i + 7 * (i >= first) for token, i in vocab.items()}
    file.write_text(json.dumps(state))


@pytest.fixture(scope="module", params=["padding", "holes"])
def path(request, tmp_path_factory):
    """Half of the rows are for nothing, and each row would be sampled as often as any other."""
    path = write_tiny("llama", tmp_path_factory.mktemp(request.param), initializer_range=0.02)
    write_tokenizer(path, 390)
    if request.param == "holes":
        punch_holes(path)
    return path


@pytest.fixture(scope="module")
def llm(path):
    with LLM(str(path), **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def valid(llm):
    valid = llm.get_tokenizer().valid_ids(VOCAB)
    assert 380 < valid.sum() < 400 and not valid[-50:].any()
    return valid


def ids_of(outputs) -> list[int]:
    return [i for output in outputs for sample in output.outputs for i in sample.token_ids]


@pytest.mark.parametrize("extra", [
    {}, {"top_k": 500}, {"top_p": 0.999}, {"min_p": 0.001}, {"repetition_penalty": 1.3, "presence_penalty": -2.0},
    {"logit_bias": {5: 3.0}, "min_tokens": 10}, {"logits_processors": [lambda ids, row: torch.zeros_like(row)]},
    {"structured_outputs": StructuredOutputsParams(regex="(.|\\n){1,200}"), "ignore_eos": False},
], ids=lambda extra: "-".join(extra) or "plain")  # fmt: skip
def test_no_id_without_a_token_is_sampled(llm, valid, extra):
    params = SamplingParams(n=4, **WILD | extra)
    ids = ids_of(llm.generate([PROMPT, "0123"], params, use_tqdm=False))
    assert len(ids) > 100 and valid[ids].all()
    assert valid[ids_of(llm.generate(PROMPT, SamplingParams(**GREEDY | extra), use_tqdm=False))].all()


def test_logprobs_are_those_of_the_tokens_alone(llm, path, valid):
    """Against the same weights where nothing is masked: sampled, alternatives, prompt, and the whole vocabulary."""
    prompt = llm.get_tokenizer().encode(PROMPT)
    params = SamplingParams(logprobs=-1, prompt_logprobs=100, **GREEDY)
    output = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0]
    ids = output.outputs[0].token_ids
    with LLM(str(path), skip_tokenizer_init=True, **OPTIONS) as bare:
        raw = bare.generate(
            {"prompt_token_ids": prompt + ids}, SamplingParams(max_tokens=1, logprobs=-1, temperature=0.0), use_tqdm=False
        )[0]
    whole = {i: entry.logprob for i, entry in raw.outputs[0].logprobs[0].items()}
    assert set(whole) == set(range(VOCAB)), "without a tokenizer nobody knows what has a token"
    for entry in output.outputs[0].logprobs:
        assert set(entry) == set(np.flatnonzero(valid).tolist())
        assert math.isclose(sum(math.exp(v.logprob) for v in entry.values()), 1.0, rel_tol=1e-5)
    assert all(valid[list(entry)].all() for entry in output.prompt_logprobs[1:])
    mass = sum(math.exp(whole[i]) for i in np.flatnonzero(valid))
    following = llm.generate({"prompt_token_ids": prompt + ids}, SamplingParams(max_tokens=1, logprobs=3), use_tqdm=False)[0]
    for i, entry in following.outputs[0].logprobs[0].items():
        assert math.isclose(entry.logprob, whole[i] - math.log(mass), abs_tol=1e-4)


def test_beams_take_tokens_only(llm, valid):
    beams = llm.beam_search([{"prompt_token_ids": [5, 6, 7]}], BeamSearchParams(beam_width=8, max_tokens=6, ignore_eos=True))
    assert all(valid[sequence.tokens].all() for sequence in beams[0].sequences)


@pytest.mark.parametrize("method", ["ngram", "draft_model", "eagle3"])
def test_drafts_change_nothing(path, valid, tmp_path, method):
    """A draft model of the same padded vocabulary does not guess what the target cannot say."""
    options = {"speculative_method": method}
    if method == "draft_model":
        options["speculative_model"] = str(path)
    elif method == "eagle3":
        options["speculative_model"] = write_eagle(tmp_path, str(path))
    params = complete(SamplingParams(**WILD, logprobs=0))
    requests = [EngineRequest(f"r{i}", [5, 6, 7, 5, 6, 7, 5, 6], params, i) for i in range(3)]
    plain = run(make_core(str(path)), requests)
    core = drafting_core(str(path), **options)
    got = run(core, requests)
    assert {n: r.ids for n, r in got.items()} == {n: r.ids for n, r in plain.items()}
    assert all(valid[r.ids].all() for r in got.values())
    if method == "draft_model":  # the same weights, the same masks and random numbers: what it guesses is what comes
        stats = core.speculator.stats
        assert stats.num_accepted_tokens > 0.9 * stats.num_draft_tokens > 0


@pytest.mark.parametrize("vocab", [7, 390, 600])
def test_masks_for_models_of_other_sizes(vocab):
    valid = np.ones(390, np.bool_)
    valid[[3, 5, 380, 389]] = False
    mask = TokenlessIds(valid, torch.device("cpu")).cut(vocab)
    kept = mask.mask(torch.zeros(2, vocab)).isfinite()
    assert kept.equal(torch.tensor([[i < 390 and bool(valid[i]) for i in range(vocab)]] * 2))
    assert TokenlessIds.of(np.ones(5, np.bool_), torch.device("cpu")) is None and TokenlessIds.of(None, torch.device("cpu")) is None
