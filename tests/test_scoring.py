"""Logprobs and perplexities of given texts against Transformers; long ones in windows; memory that does not grow with them."""

from __future__ import annotations

import math

import pytest
import torch
import transformers

from headrace import LLM
from headrace.errors import ParameterError
from headrace.sampling import logprobs as logprobs_module
from headrace.scoring import windows
from tiny_models import write_tiny


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(write_tiny("qwen3", tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def theirs(path):
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def ours(path):
    options = {"device": "cpu", "dtype": "float32", "max_num_batched_tokens": 37, "max_model_len": 120, "block_size": 8}
    with LLM(path, num_kv_blocks=64, max_num_seqs=4, debug_checks=True, **options) as llm:
        yield llm


def text(length: int, salt: int = 0) -> list[int]:
    return [(31 * i * i + 7 * i + salt) % 512 for i in range(length)]


@torch.no_grad()
def reference(model, ids: list[int]) -> list[float]:
    """Logprobs of ids[1:]."""
    logits = model(torch.tensor([ids])).logits[0].float()
    return torch.log_softmax(logits, -1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()


def test_scores_are_those_of_transformers(ours, theirs):
    """In chunks of 37 tokens, several texts at once, cold and with the prefix in the cache."""
    texts = [text(n, salt) for salt, n in enumerate((2, 8, 36, 37, 38, 75, 119))]
    for _ in range(2):
        for ids, score in zip(texts, ours.score(texts), strict=True):
            want = reference(theirs, ids)
            assert score.prompt_token_ids == ids
            assert score.logprobs[0] is None
            assert score.logprobs[1:] == pytest.approx(want, abs=1e-4)
            assert score.logprob == pytest.approx(sum(want), abs=1e-3)
            assert score.perplexity == pytest.approx(math.exp(-sum(want) / len(want)), rel=1e-4)


def test_a_text_is_tokenized_as_a_prompt_is(ours, theirs):
    score = ours.score("The quick brown fox")[0]
    assert score.prompt == "The quick brown fox"
    assert score.prompt_token_ids == ours.get_tokenizer().encode("The quick brown fox")
    assert score.logprobs[1:] == pytest.approx(reference(theirs, score.prompt_token_ids), abs=1e-4)


@pytest.mark.parametrize("stride", [None, 1, 30, 118])
def test_a_text_beyond_the_context_is_read_through_a_window(ours, theirs, stride):
    ids = text(120 if stride == 1 else 430)
    score = ours.score([ids], stride=stride)[0]
    step = stride or 59
    want: list[float] = []
    end = 119
    want += reference(theirs, ids[:119])
    while end < len(ids):
        new = min(step, len(ids) - end)
        window = ids[end + new - 119 : end + new]
        want += reference(theirs, window)[-new:]
        end += new
    assert score.logprobs[1:] == pytest.approx(want, abs=1e-4)
    assert score.num_scored == len(ids) - 1


@pytest.mark.parametrize(("length", "size", "stride"), [(1, 5, 2), (5, 5, 2), (6, 5, 2), (17, 5, 4), (100, 7, 1), (9, 5, 3)])
def test_windows_score_every_token_once(length, size, stride):
    scored = []
    for begin, first, end in windows(length, size, stride):
        assert 0 <= begin < first <= end <= length or length == 1
        assert end - begin <= size
        scored += range(first, end)
    assert scored == list(range(1, length))


def test_one_token_says_nothing(ours):
    score = ours.score([[5]])[0]
    assert score.logprobs == [None] and math.isnan(score.perplexity)


def test_logits_are_never_there_for_all_tokens(ours, monkeypatch):
    """The largest [rows, vocab] of a long text is that of the bound, whatever the text's length."""
    most = 5 * 4 * 512  # bytes: five rows
    monkeypatch.setattr(logprobs_module.prompt_logprobs, "__defaults__", (most,))
    rows = []
    decoder = ours.engine.core.runner.decoder
    plain = decoder.logits
    monkeypatch.setattr(decoder, "logits", lambda hidden: rows.append(len(hidden)) or plain(hidden))
    ours.score([text(400, 9)])
    assert max(rows) <= 5
    assert sum(rows) >= 400


@pytest.mark.parametrize(
    ("prompts", "stride"), [([[]], None), ([[512]], None), ([[1, 2]], 0), ([[1, 2]], 119), ([[1, 2]], True)]
)
def test_wrong_texts_are_refused(ours, prompts, stride):
    with pytest.raises(ParameterError):
        ours.score(prompts, stride=stride)
    assert not ours.engine.core.has_work
