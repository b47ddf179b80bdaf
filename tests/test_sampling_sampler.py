"""The CPU's samplers, torch's and the native ones: equal to the float64 reference, right in distribution, indifferent to batch mates and NaN."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.native.forward import draw_rows
from headrace.sampling import sampler
from headrace.sampling.params import SamplingParams
from headrace.sampling.sampler import SampleInputs, SampleOutput
from native_harness import libraries, sampling_model
from sampling_reference import DRAWN, Row, chi_square, sample_inputs, tokens

INF = float("inf")
LIBRARIES = libraries()
each_sampler = pytest.mark.parametrize("by", ["torch", *LIBRARIES])


def sample(logits: torch.Tensor, inputs: SampleInputs, by: str = "torch") -> SampleOutput:
    """`by` torch, or by the native step's library of an instruction set."""
    if by != "torch":
        model = sampling_model(LIBRARIES[by], logits.shape[1], threads=2)
        inputs.choose = lambda logits, inputs: draw_rows(model, logits, inputs)
    return sampler.sample(logits, inputs)


def inputs_of(rows: list[Row], **kwargs) -> SampleInputs:
    params = [
        SamplingParams(temperature=r.temperature, top_k=r.top_k, top_p=r.top_p, min_p=r.min_p, sample_index=r.sample_index)
        for r in rows
    ]
    return sample_inputs(params, [r.seed for r in rows], [r.output_index for r in rows], **kwargs)


ROWS = st.builds(
    Row,
    temperature=st.sampled_from([0.0, 1e-6, 1e-5, 1e-4, 0.3, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, -1, 1, 2, 7, 50, 10**9]),
    top_p=st.sampled_from([1.0, 0.999, 0.95, 0.5, 0.1, 1e-9]),
    min_p=st.sampled_from([0.0, 1e-6, 0.05, 0.5, 1.0]),
    seed=st.integers(-(2**63), 2**63 - 1),
    output_index=st.integers(0, 2**20),
    sample_index=st.integers(0, 127),
)


@st.composite
def batches(draw):
    """Rows of peaked, flat, tied, masked and huge logits."""
    rows = draw(st.lists(ROWS, min_size=1, max_size=6))
    vocab = draw(st.sampled_from([1, 2, 5, 31, 33, 512, 513, 1500]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    logits = rng.standard_normal((len(rows), vocab)) * np.array(
        [[draw(st.sampled_from([0.01, 1, 5, 1e4, 1e30]))] for _ in rows]
    )
    if draw(st.booleans()):
        logits = np.round(logits)  # many ties
    if draw(st.booleans()):
        logits[rng.random(logits.shape) < 0.6] = -np.inf
        logits[np.arange(len(rows)), rng.integers(vocab, size=len(rows))] = 0.0
    return rows, logits.astype(np.float32)


@each_sampler
@settings(max_examples=200)
@given(batch=batches())
def test_equals_the_reference(batch, by):
    rows, logits = batch
    out = sample(torch.tensor(logits), inputs_of(rows), by)
    assert not out.failed.any() and out.token_ids.dtype == torch.int32
    for i, row in enumerate(rows):
        assert int(out.token_ids[i]) in tokens(logits[i], row)


@each_sampler
@settings(max_examples=100)
@given(batch=batches())
def test_a_row_is_the_same_alone_and_among_others(batch, by):
    rows, logits = batch
    together = sample(torch.tensor(logits), inputs_of(rows), by).token_ids.tolist()
    alone = [int(sample(torch.tensor(logits[i : i + 1]), inputs_of([r]), by).token_ids[0]) for i, r in enumerate(rows)]
    order = np.random.default_rng(len(rows)).permutation(len(rows))
    shuffled = sample(torch.tensor(logits[order]), inputs_of([rows[i] for i in order]), by).token_ids.tolist()
    assert together == alone
    assert [together[i] for i in order] == shuffled


@pytest.mark.parametrize("row", DRAWN)
@pytest.mark.parametrize(("dtype", "by"), [(torch.bfloat16, "torch"), *((torch.float32, by) for by in ["torch", *LIBRARIES])])
def test_distribution(row, dtype, by):
    """10,000 draws over a small vocabulary."""
    logits = torch.tensor(np.random.default_rng(1).standard_normal(12) * 1.5).to(dtype)
    logits[5] = logits[2]  # a tie
    rows = [Row(**{**row.__dict__, "seed": 1234, "output_index": i}) for i in range(10_000)]
    ids = sample(logits.repeat(len(rows), 1), inputs_of(rows), by).token_ids
    # up to 11 degrees of freedom: a fair sampler exceeds it with probability 4e-5; the draws are fixed
    assert chi_square(ids.tolist(), logits.float().numpy(), row) < 40


@each_sampler
def test_filters_at_their_edges(by):
    logits = np.array([2.0, 2.0, 1.0, 1.0, 0.0, -INF], np.float32)
    cases = {
        (0, 1.0, 1.0): {0, 1},  # min_p 1: the largest and its equals
        (1, 1.0, 0.0): {0, 1},  # ties at the k-th value are kept
        (3, 1.0, 0.0): {0, 1, 2, 3},
        (0, 1e-9, 0.0): {0, 1},  # a tiny top_p keeps the largest
        (100, 1.0, 0.0): {0, 1, 2, 3, 4},  # top_k beyond the vocabulary is off; -inf is never drawn
        (5, 1.0, 0.0): {0, 1, 2, 3, 4},
        (6, 0.9999999, 0.0): {0, 1, 2, 3, 4},
    }
    for (top_k, top_p, min_p), want in cases.items():
        rows = [Row(top_k=top_k, top_p=top_p, min_p=min_p, output_index=i) for i in range(400)]
        got = set(sample(torch.tensor(logits).repeat(400, 1), inputs_of(rows), by).token_ids.tolist())
        assert got == want, (top_k, top_p, min_p)


@each_sampler
def test_greedy_takes_the_lowest_of_equals(by):
    logits = torch.zeros(4, 3000)
    logits[1, [700, 2999, 1500]] = 3.0
    logits[2, 2999] = 1.0
    logits[3] = -INF
    logits[3, [2100, 2999]] = -5.0
    assert sample(logits, inputs_of([Row(temperature=0.0)] * 4), by).token_ids.tolist() == [0, 700, 2999, 2100]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), INF])
@pytest.mark.parametrize("where", [0, 511, 700, 1299])
@each_sampler
def test_a_broken_row_is_reported_and_harms_nobody(temperature, bad, where, by):
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((4, 1300)).astype(np.float32)
    rows = [Row(temperature=t, top_k=20, top_p=0.9, min_p=0.01, seed=i) for i, t in enumerate([1.0, temperature, 0.0, 0.7])]
    clean = sample(torch.tensor(logits), inputs_of(rows), by)
    assert not clean.failed.any()
    broken = logits.copy()
    broken[1, where] = bad
    out = sample(torch.tensor(broken), inputs_of(rows), by)
    assert out.failed.tolist() == [False, True, False, False]
    assert int(out.token_ids[1]) == 0
    assert out.token_ids[[0, 2, 3]].tolist() == clean.token_ids[[0, 2, 3]].tolist()
    broken[1] = -INF
    assert sample(torch.tensor(broken), inputs_of(rows), by).failed.tolist() == [False, True, False, False]


@each_sampler
def test_flags_only_skip_work(by):
    """A stage that is run without need changes nothing."""
    rng = np.random.default_rng(5)
    logits = torch.tensor(rng.standard_normal((6, 900)) * 4).float()
    rows = [Row(temperature=t, seed=i) for i, t in enumerate([0.0, 1.0, 0.5, 2.0, 0.0, 1e-4])]
    lean = inputs_of(rows)
    assert not (lean.any_top_k or lean.any_top_p or lean.any_min_p or lean.all_greedy)
    full = inputs_of(rows)
    full.any_top_k = full.any_top_p = full.any_min_p = True
    assert sample(logits, lean, by).token_ids.tolist() == sample(logits, full, by).token_ids.tolist()
    greedy = inputs_of([Row(temperature=0.0)] * 6)
    assert greedy.all_greedy
    greedy_full = inputs_of([Row(temperature=0.0)] * 6)
    greedy_full.all_greedy = False
    assert sample(logits, greedy, by).token_ids.tolist() == sample(logits, greedy_full, by).token_ids.tolist()


def drawn(seed: int) -> list[int]:
    torch.manual_seed(seed)  # must not matter
    logits = torch.sin(torch.arange(8 * 5000).float().view(8, 5000) * 0.37) * 4
    rows = [Row(temperature=0.9, top_k=i * 9, top_p=0.95, seed=-7 + i, output_index=i) for i in range(8)]
    return sample(logits, inputs_of(rows)).token_ids.tolist()


def test_another_process_draws_the_same():
    program = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_sampling_sampler as t; print(t.drawn(1))"
    there = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert there == f"{drawn(2)}\n"


@each_sampler
def test_inputs_are_not_written(by):
    logits = torch.randn(3, 1000)
    before = logits.clone()
    sample(logits, inputs_of([Row(top_k=5, top_p=0.5, min_p=0.1)] * 3), by)
    assert torch.equal(logits, before)
