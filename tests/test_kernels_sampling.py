"""The sampling kernels, in Triton's interpreter or on the card: the reference's tokens, whatever path a row takes.

In the interpreter the tiles are small, so that few ids suffice to take every path.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.kernels import sample as kernels
from headrace.kernels.sample import add_mask_reference, add_mask_triton, sample_rows, uniform_rows
from headrace.sampling.params import GREEDY_EPS
from headrace.sampling.philox import PURPOSE_SAMPLE, uniform
from headrace.sampling.sampler import choose
from sampling_reference import DRAWN, Row, chi_square, kept, tokens
from test_sampling_sampler import ROWS, inputs_of

ON_CARD = torch.cuda.is_available()
DEVICE = "cuda" if ON_CARD else "cpu"
INF = float("inf")
SIZES = {"BLOCK": 256, "FEW_CHUNKS": 8, "MANY_CHUNKS": 16, "ROW_TILE": 512, "SECTIONS": 64}
if ON_CARD:
    pytestmark = pytest.mark.gpu
    SIZES = {name: getattr(kernels, name) for name in SIZES}
FEW, MANY = SIZES["FEW_CHUNKS"], SIZES["MANY_CHUNKS"]


@pytest.fixture(autouse=True, scope="module")
def small_tiles():
    with pytest.MonkeyPatch.context() as patch:
        for name, size in SIZES.items():
            patch.setattr(kernels, name, size)
        yield


@pytest.fixture
def fallbacks(monkeypatch):
    """The rows with filters that each call read whole."""
    seen: list[list[int]] = []
    kernel = kernels._filter

    class Spy:
        def __getitem__(self, grid):
            def launch(*args, **options):
                kernel[grid](*args, **options)
                candidates = [a for a in args if isinstance(a, torch.Tensor)][-1]
                seen.append((candidates[:, 0] == -1).nonzero()[:, 0].tolist())

            return launch

    monkeypatch.setattr(kernels, "_filter", Spy())
    return seen


def run(logits: torch.Tensor, rows: list[Row], **flags) -> tuple[list[int], list[bool]]:
    inputs = inputs_of(rows, device=DEVICE)
    columns = ("temperature", "top_k", "top_p", "min_p", "seed", "output_index", "sample_index")
    options = {
        "all_greedy": inputs.all_greedy,
        "any_filter": inputs.any_top_k or inputs.any_top_p or inputs.any_min_p,
        **flags,
    }
    ids, failed = sample_rows(
        logits.to(DEVICE),
        *(getattr(inputs, c) for c in columns),
        purpose=PURPOSE_SAMPLE,
        greedy_eps=GREEDY_EPS,
        **options,
    )
    return ids.tolist(), failed.tolist()


def make_logits(rng, rows: int, vocab: int, scale: float, ties: bool, holes: bool) -> np.ndarray:
    logits = rng.standard_normal((rows, vocab)) * scale
    if ties:
        logits = np.round(logits)
    if holes:
        logits[rng.random(logits.shape) < 0.6] = -np.inf
        logits[np.arange(rows), rng.integers(vocab, size=rows)] = 0.0
    return logits.astype(np.float32)


@settings(max_examples=15 if not ON_CARD else 100)
@given(
    st.lists(ROWS, min_size=1, max_size=3),
    st.sampled_from([1, 5, 33, 700, 1500] if not ON_CARD else [1, 33, 2048, 2049, 5000, 151936]),
    st.sampled_from([0.01, 1.0, 5.0, 1e30]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**32),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_equals_the_reference(rows, vocab, scale, ties, holes, seed, dtype):
    logits = torch.tensor(make_logits(np.random.default_rng(seed), len(rows), vocab, scale, ties, holes)).to(dtype)
    ids, failed = run(logits, rows)
    assert not any(failed)
    for i, row in enumerate(rows):
        assert ids[i] in tokens(logits[i].float().numpy(), row)


# name: parameters, scale of the logits (0: all equal), whether the candidates must fall short
PATHS = {
    "temperature": (Row(), 3.0, False),
    "few candidates, top-k": (Row(top_k=FEW // 4), 3.0, False),
    "few candidates, all filters": (Row(top_k=FEW // 2, top_p=0.8, min_p=0.01), 3.0, False),
    "few candidates, too many ties": (Row(top_k=FEW // 4), 0.0, True),
    "many candidates, top-k": (Row(top_k=MANY // 2), 3.0, False),
    "many candidates, top-p": (Row(top_p=0.5), 6.0, False),
    "many candidates, min-p": (Row(min_p=0.1), 10.0, False),
    "many candidates, min-p and top-p": (Row(min_p=0.1, top_p=0.9), 10.0, False),
    "whole row, top-p": (Row(top_p=0.9), 0.1, True),
    "whole row, tiny top-p, ties": (Row(top_p=1e-9), 0.0, True),
    "whole row, top-p rounded to 0": (Row(top_p=1e-300), 0.0, True),
    "whole row, min-p": (Row(min_p=1e-4), 0.5, True),
    "whole row, min-p and top-p": (Row(min_p=1e-4, top_p=0.7), 0.5, True),
    "whole row, large top-k": (Row(top_k=MANY * 6, top_p=0.99), 1.0, True),
}


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_path_equals_the_torch_sampler(name, dtype, fallbacks):
    row, scale, short = PATHS[name]
    vocab = 32 * (MANY + 24) + 7  # more chunks than any row has candidates
    logits = torch.tensor(make_logits(np.random.default_rng(3), 2, vocab, scale, False, False)).to(dtype)
    rows = [Row(**{**row.__dict__, "seed": i, "output_index": 5 * i}) for i in range(2)]
    ids, _ = run(logits, rows)
    assert fallbacks == ([] if name == "temperature" else [[0, 1] if short else []])
    assert ids == choose(logits, inputs_of(rows))[0].tolist()
    for i, r in enumerate(rows):
        assert kept(logits[i].float().numpy(), r)[ids[i]]


def test_uniforms_have_the_same_bits():
    """Over equal logits the token is floor(u * V): 20 bits of u, for seeds and positions with high bits."""
    vocab = 64
    rng = np.random.default_rng(0)
    rows = [
        Row(seed=int(s), output_index=int(p), sample_index=int(i))
        for s, p, i in zip(rng.integers(-(2**63), 2**63, 16), rng.integers(0, 2**40, 16), range(16), strict=True)
    ]
    inputs = inputs_of(rows)
    seed, index, sample = (t.numpy() for t in (inputs.seed, inputs.output_index, inputs.sample_index))
    u = torch.from_numpy(uniform(seed, index, sample_index=sample))
    assert run(torch.zeros(16, vocab), rows)[0] == (u * vocab).floor().int().tolist()
    columns = (t.to(DEVICE) for t in (inputs.seed, inputs.output_index, inputs.sample_index))
    assert torch.equal(uniform_rows(*columns, PURPOSE_SAMPLE).cpu(), u)


def test_rows_do_not_touch_each_other():
    rng = np.random.default_rng(1)
    rows = [Row(temperature=0.0), Row(seed=1), Row(top_k=5, seed=2), Row(top_p=0.9, seed=3), Row(top_p=0.5, min_p=0.1, seed=4)]
    logits = torch.tensor(make_logits(rng, 5, 1000, 2.0, False, False))
    together = run(logits, rows)[0]
    assert together == [run(logits[i : i + 1], [r])[0][0] for i, r in enumerate(rows)]
    order = [3, 0, 4, 2, 1]
    assert [together[i] for i in order] == run(logits[order], [rows[i] for i in order])[0]
    # stages that are on without need change nothing
    assert run(logits[:2], rows[:2], any_filter=True)[0] == together[:2]
    assert run(logits[:1], rows[:1], all_greedy=False, any_filter=True)[0] == together[:1]


@pytest.mark.parametrize("where, bad", [(0, math.nan), (255, INF), (256, math.nan), (1299, math.nan), (1299, INF)])
def test_broken_rows(where, bad):
    rows = [Row(top_k=5), Row(temperature=0.0), Row(top_p=0.9), Row(), Row(temperature=0.0), Row(temperature=0.6)]
    logits = torch.tensor(make_logits(np.random.default_rng(2), 6, 1300, 2.0, False, False))
    clean, failed = run(logits, rows)
    assert not any(failed)
    logits[[0, 1, 2], where] = bad
    logits[3] = -INF
    ids, failed = run(logits, rows)
    assert failed == [True] * 4 + [False] * 2
    assert ids == [0, 0, 0, 0, *clean[4:]]


def test_greedy_takes_the_lowest_of_equals():
    logits = torch.zeros(4, 5000)
    logits[1, [2500, 4999, 2600]] = 3.0
    logits[2] = -INF
    logits[2, [4100, 4999]] = -5.0
    logits[3, 4999] = 1.0
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert run(logits.to(dtype), [Row(temperature=0.0)] * 4)[0] == [0, 2500, 4100, 4999]


def test_rows_may_be_strided():
    logits = torch.randn(4, 700)
    rows = [Row(top_k=9, seed=i) for i in range(2)]
    assert run(logits[::2], rows)[0] == run(logits[::2].contiguous(), rows)[0]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replays_of_a_cuda_graph(dtype):
    """Bit-identical in every replay, also with other parameters written into the same tensors; padded rows do no harm."""
    rng = np.random.default_rng(0)
    rows = [
        Row(temperature=float(rng.choice([0.0, 0.7, 1.0])), top_k=int(rng.choice([0, 5, 50, 900])),
            top_p=float(rng.choice([1.0, 0.9, 0.5])), min_p=float(rng.choice([0.0, 0.05])), seed=i)
        for i in range(61)
    ] + [Row(temperature=0.0)] * 3  # fmt: skip
    logits = torch.tensor(make_logits(rng, 64, 151936, 3.0, False, False)).to(dtype).cuda()
    inputs = inputs_of(rows, device="cuda")
    choose(logits, inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = choose(logits, inputs)[0]
    wide = logits.float().cpu().numpy()
    for step in range(20):
        inputs.output_index.fill_(step)
        graph.replay()
        first = captured.clone()
        graph.replay()
        assert torch.equal(first, captured), f"step {step}: two replays differ"
        for i in range(0, 64, 1 if step == 0 else 16):
            row = Row(**{**rows[i].__dict__, "output_index": step})
            allowed = tokens(wide[i], row)
            assert int(first[i]) in allowed, f"step {step}, {row}: {int(first[i])} is not in {allowed}"


@pytest.mark.gpu
@pytest.mark.parametrize("row", DRAWN)
def test_distribution_on_the_card(row):
    logits = torch.tensor(np.random.default_rng(1).standard_normal(12) * 1.5).float()
    rows = [Row(**{**row.__dict__, "seed": 99, "output_index": i}) for i in range(200_000)]
    assert chi_square(run(logits.repeat(len(rows), 1), rows)[0], logits.numpy(), row) < 40  # 1e-4 at 11 degrees of freedom


@pytest.mark.gpu
def test_offsets_beyond_2_to_the_31():
    logits = torch.zeros(9000, 262144, dtype=torch.bfloat16, device="cuda")
    logits[8999, 200_000] = 5.0
    rows = [Row(temperature=0.0)] * 8999 + [Row(top_k=1)]
    assert run(logits, rows)[0][-1] == 200_000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 33, 4096, 5000])
def test_masks_are_added_as_the_reference_does(vocab, dtype):
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(5, vocab, generator=generator).to(dtype)
    logits[2, 0], logits[4, vocab // 2], logits[4, -1] = math.nan, INF, -INF
    words = torch.randint(-(2**31), 2**31, (3, -(-vocab // 32)), generator=generator).int()
    rows = torch.tensor([4, 0, 2])
    want = logits.clone()
    add_mask_reference(want, words, rows)
    got = logits.to(DEVICE)
    add_mask_triton(got, words.to(DEVICE), rows.to(DEVICE))
    assert torch.equal(got.cpu().nan_to_num(7.0), want.nan_to_num(7.0))
