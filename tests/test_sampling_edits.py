"""Edits of the logits against simple loops and against Transformers' processors."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from headrace.errors import ParameterError
from headrace.sampling.logprobs import LogprobsRequest
from headrace.sampling.params import SamplingParams
from headrace.sampling.penalties import (
    IN_PROMPT,
    BadWords,
    LogitsEdits,
    Penalties,
    TokenMask,
    UserProcessor,
    apply_bad_words,
    apply_edits,
    apply_penalties,
    count_tokens,
    load_counts,
    pack_mask,
    token_counts,
)
from headrace.sampling.sampler import sample
from sampling_reference import sample_inputs

INF = float("inf")
VOCAB = 37
IDS = st.lists(st.integers(0, VOCAB - 1), max_size=30)


def floats(*values):
    return torch.tensor(values, dtype=torch.float32)


def longs(*values):
    return torch.tensor(values, dtype=torch.int64)


def load(counts, slot, prompt, output):
    ids = (np.asarray(part, np.int32) for part in (prompt, output))
    load_counts(counts, slot, torch.from_numpy(token_counts(*ids, counts.shape[1])))


@settings(max_examples=100)
@given(
    st.lists(st.tuples(IDS, IDS, st.sampled_from([1.0, 0.5, 1.3]), st.sampled_from([0.0, 1.5, -2.0]),
                       st.sampled_from([0.0, 0.7, -0.1])), min_size=1, max_size=5),
    st.integers(0, 2**32),
)  # fmt: skip
def test_penalties_equal_a_loop_and_transformers(rows, seed):
    logits = torch.tensor(np.random.default_rng(seed).standard_normal((len(rows), VOCAB)) * 3).float()
    logits[:, 3] = -INF
    counts = torch.full((len(rows) + 2, VOCAB), 99, dtype=torch.int32)  # a slot's former owner
    slots = torch.arange(len(rows)).flip(0) + 1
    got, want = logits.clone(), logits.clone()
    for i, (prompt, output, repetition, presence, frequency) in enumerate(rows):
        load(counts, int(slots[i]), prompt, output)
        seen = prompt + output
        if seen:
            want[i] = RepetitionPenaltyLogitsProcessor(repetition)(torch.tensor([seen]), want[i : i + 1].clone())[0]
        for token in set(output):
            want[i, token] -= presence + frequency * output.count(token)
    columns = [floats(*(r[c] for r in rows)) for c in (2, 3, 4)]
    apply_penalties(got, Penalties(counts, slots, *columns))
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-5)
    neutral = [i for i, r in enumerate(rows) if r[2:] == (1.0, 0.0, 0.0)]
    assert torch.equal(got[neutral], logits[neutral])


@given(IDS, st.lists(st.tuples(st.integers(0, VOCAB - 1), st.integers(0, VOCAB - 1)), max_size=20), IDS)
def test_counting_step_by_step_equals_loading(prompt, steps, other):
    counts = torch.zeros(3, VOCAB, dtype=torch.int32)
    load(counts, 0, prompt, [])
    load(counts, 2, other, [])
    for a, b in steps:
        count_tokens(counts, longs(0, 2), torch.tensor([a, b], dtype=torch.int32))
    again = torch.zeros_like(counts)
    load(again, 0, prompt, [a for a, _ in steps])
    load(again, 2, other, [b for _, b in steps])
    assert torch.equal(counts, again)
    for token in range(VOCAB):
        assert int(counts[0, token]) & (IN_PROMPT - 1) == [a for a, _ in steps].count(token)
        assert bool(counts[0, token] & IN_PROMPT) == (token in prompt)


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 64, 1000])
def test_masks(vocab):
    rng = np.random.default_rng(vocab)
    chosen = [sorted(set(rng.integers(0, vocab, size=1 + vocab // 3).tolist())) for _ in range(2)]
    chosen[1] = sorted({*chosen[1], vocab - 1, min(31, vocab - 1)})
    bits = torch.from_numpy(np.stack([pack_mask(c, vocab) for c in chosen]))
    logits = torch.randn(3, vocab)
    got = logits.clone()
    apply_edits(got, LogitsEdits(masks=[TokenMask(bits, longs(2, 0))]))
    for row, allowed in ((2, chosen[0]), (0, chosen[1])):
        keep = torch.zeros(vocab, dtype=torch.bool)
        keep[allowed] = True
        assert torch.equal(got[row], logits[row].masked_fill(~keep, -INF))
    assert torch.equal(got[1], logits[1])


WORDS = st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=4), min_size=1, max_size=6)


@settings(max_examples=200)
@given(st.lists(st.tuples(st.lists(st.integers(0, 3), max_size=5), st.lists(st.integers(0, 3), max_size=6), WORDS),
                min_size=1, max_size=4))  # fmt: skip
def test_bad_words_equal_a_loop(rows):
    logits = torch.randn(len(rows), 4)
    history = torch.full((len(rows) + 1, 12), 2, dtype=torch.int32)  # stale ids lie beyond the end
    want = logits.clone()
    flat = []
    for i, (prompt, output, words) in enumerate(rows):
        history[i + 1, : len(prompt + output)] = torch.tensor(prompt + output, dtype=torch.int32)
        for word in words:
            if word[:-1] == output[len(output) - len(word) + 1 :] and len(output) >= len(word) - 1:
                want[i, word[-1]] = -INF
            flat.append((i, [-1] * (3 - len(word[:-1])) + word[:-1], word[-1], i + 1, len(prompt), len(prompt + output)))
    columns = list(zip(*flat, strict=True))
    apply_bad_words(
        logits,
        BadWords(
            rows=longs(*columns[0]),
            prefixes=torch.tensor(columns[1], dtype=torch.int32),
            last=longs(*columns[2]),
            history=history,
            slots=longs(*columns[3]),
            prompt_lens=longs(*columns[4]),
            lengths=longs(*columns[5]),
        ),
    )
    assert torch.equal(logits, want)


def test_stages_run_in_order_and_bans_hold():
    """Bias comes before penalties (so a biased logit is penalized), and nothing lifts a ban."""
    logits = floats(1.0, 2.0, 3.0, 4.0)[None].clone()
    counts = torch.zeros(1, 4, dtype=torch.int32)
    load(counts, 0, [0, 1, 2, 3], [])

    def add_length(output_ids, row):
        return row + len(output_ids)

    def lift_bans(output_ids, row):
        return row.masked_fill(row == -INF, 50.0)

    edits = LogitsEdits(
        masks=[TokenMask(torch.from_numpy(pack_mask([0, 1, 2], 4))[None], longs(0))],
        banned=(longs(0), longs(2)),
        bias=(longs(0, 0, 0), longs(0, 2, 3), floats(9.0, 100.0, 100.0)),
        processors=[UserProcessor(0, [add_length, lift_bans], [7, 7], pytest.fail)],
        penalties=Penalties(counts, longs(0), floats(2.0), floats(0.0), floats(0.0)),
    )
    apply_edits(logits, edits)
    assert logits.tolist() == [[(1 + 9 + 2) / 2, (2 + 2) / 2, -INF, -INF]]


def test_user_processors_see_their_own_row_only():
    logits = torch.randn(3, 8)
    seen = []

    def only_five(output_ids, row):
        seen.append((list(output_ids), row.clone()))
        out = torch.full_like(row, -INF)
        out[5] = 0.0
        return out

    got = logits.clone()
    apply_edits(got, LogitsEdits(processors=[UserProcessor(1, [only_five], [4, 2], pytest.fail)]))
    assert torch.equal(got[[0, 2]], logits[[0, 2]])
    assert int(got[1].argmax()) == 5
    assert seen[0][0] == [4, 2] and torch.equal(seen[0][1], logits[1])
    for wrong, error in ((lambda ids, row: row[:3], ParameterError), (lambda ids, row: None, ParameterError), (lambda: 1, TypeError)):
        errors, got = [], logits.clone()
        apply_edits(got, LogitsEdits(processors=[UserProcessor(0, [wrong], [], errors.append)]))
        assert [type(e) for e in errors] == [error] and got[0].isnan().all() and torch.equal(got[1:], logits[1:])


def test_edits_reach_the_sampler_but_not_the_logprobs():
    logits = torch.randn(2, 50)
    raw = logits.clone()
    edits = LogitsEdits(banned=(longs(0), logits[0].argmax()[None]))
    params = [SamplingParams(temperature=0.0).resolved({})] * 2
    inputs = sample_inputs(params, [0, 0], [0, 0], edits=edits, logprobs=LogprobsRequest(longs(0, 1), 2))
    out = sample(logits, inputs)
    assert out.token_ids.tolist() == [int(raw[0].topk(2).indices[1]), int(raw[1].argmax())]
    assert out.logprobs is not None
    torch.testing.assert_close(out.logprobs.logprobs, raw.log_softmax(-1)[longs(0, 1), out.token_ids.long()])
    assert out.logprobs.ranks.tolist() == [2, 1]
    assert torch.equal(logits, raw)


def test_a_row_with_everything_banned_is_reported():
    logits = torch.randn(2, 4)
    edits = LogitsEdits(masks=[TokenMask(torch.zeros(1, 1, dtype=torch.int32), longs(1))])
    params = [SamplingParams(temperature=0.7).resolved({})] * 2
    out = sample(logits, sample_inputs(params, [1, 2], [0, 0], edits=edits))
    assert out.failed.tolist() == [False, True] and int(out.token_ids[1]) == 0
