"""Log-probabilities: values, ranks, ties, the bound on memory, and rows that cannot be answered."""

import math

import pytest
import torch

from headrace.sampling import logprobs
from headrace.sampling.logprobs import LogprobsRequest, logprobs_of, prompt_logprobs, rows_per_chunk, token_logprobs
from headrace.sampling.params import SamplingParams
from headrace.sampling.sampler import sample
from sampling_reference import sample_inputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_top", [0, 1, 5, 100, -1, 10**6])
def test_values_ranks_and_order(dtype, num_top):
    torch.manual_seed(0)
    logits = (torch.randn(4, 300) * 3).to(dtype)
    ids = torch.tensor([0, 299, int(logits[2].argmax()), 17])
    found = logprobs_of(logits, ids, num_top)
    exact = torch.log_softmax(logits.double(), -1)
    width = 300 if num_top < 0 else min(num_top, 300)
    assert found.top_ids.shape == found.top_logprobs.shape == (4, width)
    torch.testing.assert_close(found.logprobs.double(), exact[range(4), ids], rtol=1e-5, atol=1e-5)
    for i in range(4):
        assert int(found.ranks[i]) == 1 + sum(logits[i].float() > logits[i, ids[i]].float())
        torch.testing.assert_close(found.top_logprobs[i].double(), exact[i, found.top_ids[i].long()], rtol=1e-5, atol=1e-5)
        assert len(set(found.top_ids[i].tolist())) == width
        torch.testing.assert_close(found.top_logprobs[i].double(), exact[i].sort(descending=True).values[:width],
                                   rtol=1e-5, atol=1e-5)  # fmt: skip
    assert int(found.ranks[2]) == 1


def test_equal_logits_share_a_rank():
    found = logprobs_of(torch.tensor([[2.0, 1.0, 1.0, 0.0]]).repeat(4, 1), torch.arange(4), 0)
    assert found.ranks.tolist() == [1, 2, 2, 4]


def test_only_the_rows_that_ask():
    logits = torch.randn(5, 64)
    ids = torch.arange(5, dtype=torch.int32) * 3
    found = token_logprobs(logits, ids, LogprobsRequest(torch.tensor([4, 1]), 2))
    assert found.token_ids.tolist() == [12, 3]
    torch.testing.assert_close(found.logprobs, logits.log_softmax(-1)[torch.tensor([4, 1]), torch.tensor([12, 3])])


@pytest.mark.parametrize(("chunk_bytes", "most"), [(1, 1), (4 * 90 * 7, 7), (1 << 30, 20)])
def test_sampled_logprobs_in_chunks(chunk_bytes, most, monkeypatch):
    logits, ids, sizes = torch.randn(25, 90), torch.arange(25), []

    def seen(rows, *rest):
        sizes.append(len(rows))
        return logprobs_of(rows, *rest)

    monkeypatch.setattr(logprobs, "logprobs_of", seen)
    found = token_logprobs(logits, ids, LogprobsRequest(torch.arange(20), 2), chunk_bytes)
    assert sum(sizes) == 20 and max(sizes) == most
    torch.testing.assert_close(found.logprobs, logprobs_of(logits, ids, 2).logprobs[:20])


@pytest.mark.parametrize("chunk_bytes", [1, 4 * 90, 4 * 90 * 7, 1 << 30])
@pytest.mark.parametrize("count", [0, 1, 7, 20])
def test_prompt_logprobs_in_chunks(chunk_bytes, count):
    torch.manual_seed(1)
    hidden, head, ids = torch.randn(count, 16), torch.randn(16, 90), torch.randint(0, 90, (count,), dtype=torch.int32)
    sizes = []

    def to_logits(rows):
        sizes.append(len(rows))
        return rows @ head

    found = prompt_logprobs(hidden, ids, to_logits, 3, 90, chunk_bytes)
    want = logprobs_of(hidden @ head, ids, 3)
    assert max(sizes) * 90 * 4 <= max(chunk_bytes, 90 * 4) and max(sizes) <= rows_per_chunk(90, chunk_bytes)
    assert sum(sizes) == count
    torch.testing.assert_close(found.logprobs, want.logprobs)
    assert torch.equal(found.ranks, want.ranks) and torch.equal(found.top_ids, want.top_ids)
    assert found.top_logprobs.shape == (count, 3)


def test_a_row_whose_logprobs_are_nan_fails():
    """NaN that a mask hides from the sampler still spoils the normalizer: the row is refused, not answered with NaN."""
    from headrace.sampling.penalties import LogitsEdits

    logits = torch.zeros(2, 10)
    logits[1, 4] = math.nan
    edits = LogitsEdits(banned=(torch.tensor([1]), torch.tensor([4])))
    params = [SamplingParams(temperature=1.0).resolved({})] * 2
    wanted = LogprobsRequest(torch.tensor([0, 1]), 1)
    out = sample(logits, sample_inputs(params, [0, 0], [0, 0], edits=edits, logprobs=wanted))
    assert out.failed.tolist() == [False, True] and int(out.token_ids[1]) == 0
