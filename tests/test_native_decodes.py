"""Plain decodes in one native call: the tokens that the general runner gives, and nobody else's memory."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.model.vocabulary import TokenlessIds
from headrace.native.forward import NativeDecoder
from headrace.native.runner import NativeRunner
from headrace.worker.model_runner import ModelRunner
from tiny_models import VOCAB, write_tiny

pytest.importorskip("headrace.native._step", reason="no compiler: the native step was not built")
SLOTS, LENGTH = 4, 96


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    path = write_tiny("llama", tmp_path_factory.mktemp("tiny"))
    # 14 blocks: requests are preempted and begin again
    with LLM(str(path), device="cpu", max_num_seqs=SLOTS, max_model_len=LENGTH, num_kv_blocks=14, debug_checks=True) as llm:
        assert type(llm.engine.core.runner) is NativeRunner
        yield llm


@pytest.fixture
def calls(monkeypatch):
    """How many rows each native call of plain decodes had."""
    seen: list[int] = []
    decode = NativeDecoder.decode_slots
    monkeypatch.setattr(
        NativeDecoder, "decode_slots", lambda self, slots, at: seen.append(len(slots)) or decode(self, slots, at)
    )
    return seen


def some_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.0, 0.7, 1.3]), top_k=rng.choice([0, 0, 5]), top_p=rng.choice([1.0, 1.0, 0.8]),
        min_p=rng.choice([0.0, 0.0, 0.1]), seed=rng.randrange(2**63), max_tokens=rng.randrange(2, 40),
        logprobs=rng.choice([None] * 6 + [1]), repetition_penalty=rng.choice([1.0] * 6 + [1.2]), n=rng.choice([1, 1, 2]),
        ignore_eos=rng.random() < 0.5, stop_token_ids=rng.sample(range(VOCAB), 20),
    )  # fmt: skip


def generated(llm: LLM, kind: type[ModelRunner], seed: int) -> list[tuple[tuple[int, ...], str | None]]:
    """The tokens of 24 requests of all kinds, as a runner has them; nothing is left in the prefix cache before."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 40))] for _ in range(24)]
    params = [some_params(rng) for _ in prompts]
    llm.reset_prefix_cache()
    llm.engine.core.runner.__class__ = kind
    found = llm.generate(prompts, params, use_tqdm=False)
    llm.engine.core.runner.__class__ = NativeRunner
    return [(tuple(o.token_ids), o.finish_reason) for out in found for o in out.outputs]


@pytest.mark.parametrize(("seed", "overlap"), [(0, False), (1, True), (2, True)])
def test_the_tokens_are_those_of_the_general_runner(llm, calls, monkeypatch, seed, overlap):
    """`overlap`: a place that gets free is taken a step later, so steps have fewer rows, too."""
    monkeypatch.setattr(llm.engine.core, "async_scheduling", overlap)
    wanted = generated(llm, ModelRunner, seed)
    assert not calls
    assert generated(llm, NativeRunner, seed) == wanted
    assert ({2, 3, SLOTS} if overlap else {SLOTS}) <= set(calls)


@pytest.mark.parametrize("stop", [VOCAB, VOCAB - 30])
def test_ids_without_a_token_are_never_drawn(llm, calls, stop):
    runner, valid = llm.engine.core.runner, np.zeros(VOCAB, np.bool_)
    valid[np.arange(1, stop, 7)] = True
    runner.decoder.tokenless = TokenlessIds(valid, torch.device("cpu")).cut(VOCAB)
    runner.decoder.read_slots(runner.state.tables, runner.kv)
    try:
        wanted = generated(llm, ModelRunner, 7)
        assert generated(llm, NativeRunner, 7) == wanted and calls
        assert valid[[token for ids, _ in wanted for token in ids]].all()
    finally:
        runner.decoder.tokenless = None
        runner.decoder.read_slots(runner.state.tables, runner.kv)


def test_logits_that_are_not_numbers_end_their_own_request(llm, calls, monkeypatch):
    runner, decode = llm.engine.core.runner, NativeDecoder.decode_slots
    llm.reset_prefix_cache()

    def spoil(self, slots, positions):
        if len(calls) == 5:  # the first block of whoever has the first row
            runner.kv.k[0][runner.state.block_tables[slots[0], 0]] = torch.nan
        return decode(self, slots, positions)

    monkeypatch.setattr(NativeDecoder, "decode_slots", spoil)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    first, second = (out.outputs[0] for out in llm.generate([[5, 6, 7], [8, 9, 10, 11]], params, use_tqdm=False))
    assert (first.finish_reason, second.finish_reason) == ("error", "length")
    assert len(first.token_ids) < len(second.token_ids) == 12


I32 = np.int32


@pytest.mark.parametrize(("slots", "positions", "why"), [
    ([SLOTS + 1], [5], "slots holds 5"), ([-1], [5], "slots holds -1"), ([0], [-1], "positions holds -1"), ([0], [LENGTH], "positions"),
    ([0], [2**31 - 1], "positions"), ([0, 1], [5], "positions has 1"), ([], [], "without rows"), ([1], [5], "block_tables|slot_mapping"),
])  # fmt: skip
def test_what_has_no_place_is_refused_and_changes_nothing(llm, slots, positions, why):
    state, decoder = llm.engine.core.runner.state, llm.engine.core.runner.decoder
    state.block_tables[1, 0] = 999
    before = state.token_ids.clone()
    with pytest.raises(ValueError, match=why):
        decoder.decode_slots(np.array(slots, I32), np.array(positions, I32))
    assert torch.equal(state.token_ids, before)
