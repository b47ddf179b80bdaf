"""Captured steps with prompts, without a card: their rows, their attention in Triton's interpreter, which are captured, and that
an engine says the same with them."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_driver import BLOCK, assert_all_same, make_core, plain_requests, requests_of_all_kinds, run
from headrace.attention import triton_backend
from headrace.attention.triton_backend import FEW_TOKENS, TritonAttention
from headrace.engine.preparation import Preparation
from headrace.kernels.prepare import rows_on_host
from headrace.kernels.prompt_rows import END, NUMBERS, TokenRows, expand_on_host, launch_expand
from headrace.kernels.tables import SlotTables
from headrace.model.batch import ForwardBatch
from headrace.scheduler.plan import StepPlan
from headrace.worker import captured, prompt_graphs
from headrace.worker.captured import SETTLED_SECONDS
from headrace.worker.memory_plan import MOST_TOKENS
from headrace.worker.prompt_graphs import PromptKey, numbers_of, token_sizes
from headrace.worker.sampling import Tail
from kernel_cases import attention_reference, paged_case
from prompt_graphs_driver import UncapturedPrompts, capture_prompts
from tiny_models import write_tiny

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off where a card is")
SLOTS, LENGTH, SIZE = 200, 90, 16


def tables(rng: np.random.Generator) -> SlotTables:
    def numbers(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.integers(0, 1000, shape).astype(np.int32))

    floats, ints = torch.zeros((SLOTS, 6)), torch.zeros((SLOTS, 4), dtype=torch.int64)
    return SlotTables(numbers(SLOTS, LENGTH + 1), numbers(SLOTS, -(-LENGTH // SIZE)), floats, ints, numbers(SLOTS) % 4, SIZE)


def plan_of(counts, starts, samples=None, unverified=None, slots=None) -> StepPlan:
    count = len(counts)
    arrays = [range(count) if slots is None else slots, starts, counts, [0] * count, unverified or [0] * count]
    slots, starts, counts, drafts, unverified = (np.asarray(list(a), np.int32) for a in arrays)
    samples = np.asarray([True] * count if samples is None else samples)
    return StepPlan(0, 0, 0, [str(i) for i in range(count)], slots, starts, counts, drafts, unverified, samples)


@given(st.data())
@settings(max_examples=30)
def test_rows_are_those_of_the_sequences_one_by_one(data) -> None:
    """Chunks and decodes at any place, some of which sample, behind steps whose drafts nobody has counted yet."""
    rng = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    counts = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=20))
    starts = [data.draw(st.integers(0, LENGTH - n - 4)) for n in counts]
    samples = [data.draw(st.booleans()) for _ in counts]
    unverified = [data.draw(st.integers(0, 3)) for _ in counts]
    of = tables(rng)
    plan = plan_of(counts, starts, samples, unverified, rng.permutation(SLOTS - 1)[: len(counts)].tolist())
    seqs, num_rows = len(counts) + data.draw(st.integers(1, 5)), sum(counts) + data.draw(st.integers(0, 9))
    numbers = numbers_of(plan, num_rows, seqs, SLOTS - 1)
    ends = rows_on_host(torch.from_numpy(numbers[:END]), of)
    token_ids, positions, places, query_start, index = expand_on_host(numbers[END], of, ends, num_rows, seqs)
    row = 0
    for s, n in enumerate(counts):
        assert query_start[s] == row and query_start[s + 1] == row + n
        slot = int(plan.slots[s])
        first = starts[s] + (int(of.accepted[slot]) if unverified[s] else 0)
        assert int(ends.seq_slots[s]) == slot and int(ends.seq_lens[s]) == first + n
        for at in range(first, first + n):
            assert token_ids[row] == of.token_ids[slot, at] and positions[row] == at
            assert places[row] == int(of.block_tables[slot, at // SIZE]) * SIZE + at % SIZE
            row += 1
    assert (query_start[len(counts) : -1] == row).all() and query_start[-1] == num_rows
    assert (places[row:] == -1).all() and not positions[row:].any()
    sampling = np.flatnonzero(samples)
    assert (index[: len(sampling)] == np.cumsum(counts)[sampling] - 1).all()
    assert torch.equal(ends.seq_slots[seqs : seqs + len(sampling)], torch.from_numpy(plan.slots[sampling]))
    assert not ends.seq_lens[seqs + len(sampling) :].any() and (ends.seq_slots[seqs + len(sampling) :] == SLOTS - 1).all()


@interpreted
@pytest.mark.parametrize("count, seqs, num_rows", [(1, 8, 16), (5, 8, 32), (150, 160, 400), (128, 129, 130), (140, 144, 140)])
def test_the_kernel_makes_the_same_rows(count, seqs, num_rows) -> None:
    pytest.importorskip("triton")
    rng = np.random.default_rng(count)
    of = tables(rng)
    extra = rng.multinomial((num_rows - count) // 2, [1 / count] * count)
    counts = 1 + np.minimum(extra, 20)
    plan = plan_of(counts, rng.integers(0, LENGTH - 25, count), rng.random(count) < 0.7, None, rng.permutation(SLOTS - 1)[:count].tolist())
    numbers = numbers_of(plan, num_rows, seqs, SLOTS - 1)
    inbox = torch.full((4, NUMBERS, 2 * seqs + 3), -7, dtype=torch.int32)
    inbox[1, :, : 2 * seqs] = torch.from_numpy(numbers)
    ends = rows_on_host(torch.from_numpy(numbers[:END]), of)
    rows = TokenRows.empty(num_rows + 8, seqs + 2, torch.device("cpu")).part(num_rows, seqs)
    rows.query_start[0] = 77
    launch_expand(inbox, torch.tensor([2 + 4 * 3], dtype=torch.int32), of, ends, rows)
    want = expand_on_host(numbers[END], of, ends, num_rows, seqs)
    for name, expected in zip(("token_ids", "positions", "slot_mapping", "query_start", "index"), want, strict=True):
        assert getattr(rows, name).tolist() == expected.tolist(), name


@interpreted
@pytest.mark.parametrize("window, softcap", [(0, 0.0), (11, 0.0), (0, 3.0)])
@pytest.mark.parametrize("query_lens, context_lens, rows, launches", [
    ([1, 1, 40, 1, 2, 3, 17], [90, 1, 40, 33, 2, 70, 17], 80, 2), ([1, 1, 40, 1, 2, 3, 17], [90, 1, 40, 33, 2, 70, 17], 80, 1),
    ([1, 2, 1], [5, 70, 64], 5, 2), ([50], [81], 50, 1),
])  # fmt: skip
def test_attention_of_sequences_that_only_the_device_knows(
    monkeypatch, query_lens, context_lens, rows, launches, window, softcap
) -> None:  # fmt: skip
    """All in one batch with padded sequences and padded rows: each kernel takes its own, and nothing of the others."""
    pytest.importorskip("triton")
    monkeypatch.setattr(triton_backend, "ONE_LAUNCH", range(10, 11) if launches == 1 else ())
    seqs, pads = len(query_lens), 3
    padded = rows - sum(query_lens)  # rows of the last sequence, which has no context
    case = paged_case([*query_lens, *[0] * pads], [*context_lens, *[0] * pads], 4, 2, 16, 16)
    case.query_start[-1] = rows
    case.block_tables[case.seq_slots[seqs:].long()] = 2**31 - 1
    want = attention_reference(case, 0.3, window, softcap)
    q = torch.cat((case.q, torch.randn(padded, *case.q.shape[1:])))
    nothing = torch.zeros(len(q), dtype=torch.int32)
    decodes = len(case.query_lens) if min(query_lens) <= FEW_TOKENS else 0
    batch = ForwardBatch(nothing, nothing, nothing.long(), *case.tensors(), decodes, [], [], context_bound=128)
    shape = SimpleNamespace(num_heads=4, num_kv_heads=2, head_dim=16, kv_shapes=[SimpleNamespace(heads=2)])
    attention = TritonAttention(shape, torch.device("cpu"))
    kv = SimpleNamespace(k=[case.k_cache], v=[case.v_cache], scales=[(None, None)])
    attention.begin(batch, kv)
    out = attention.attend(q, 0, kv, batch, scale=0.3, window=window, softcap=softcap)
    torch.testing.assert_close(out[: len(want)].double(), want, rtol=1e-4, atol=2e-5)
    assert not out[len(want) :].any(), "padded rows are zeros"
    assert [run.kind for run in attention.runs] == ["split", "varlen"][-launches:]


class Noted(UncapturedPrompts):
    """Notes which step does for which."""

    def __init__(self, max_num_seqs: int, max_model_len: int, max_tokens: int):
        state = SimpleNamespace(device=torch.device("cpu"), dummy_slot=max_num_seqs)
        super().__init__(None, None, state, max_num_seqs, max_model_len, max_tokens)
        self.replayed: list[PromptKey] = []

    def _at_once(self, captured, key: PromptKey) -> None:
        self.replayed.append(key)


@pytest.mark.parametrize("most", [1, 16, 17, 500, MOST_TOKENS, 5000])
def test_token_sizes(most: int) -> None:
    sizes = token_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[-1] >= min(most, MOST_TOKENS) and len(sizes) < 30
    assert all(b <= max(32, 2 * a) for a, b in itertools.pairwise(sizes)) and not any(s % 16 for s in sizes)


@settings(max_examples=25)
@given(
    most=st.integers(1, 300), longest=st.sampled_from([100, 2048, 40960]), tokens=st.sampled_from([20, 2048, 16384]), data=st.data(),
    tail=st.sampled_from([Tail.GREEDY, Tail.RANDOM, Tail.FILTERED]),
)  # fmt: skip
def test_what_is_captured_before_the_first_request_does_for_all(most, longest, tokens, data, tail) -> None:
    """No step waits for a capture; the one that stands in has room for it; after an idle moment the one that fits is there."""
    graphs = Noted(most, longest, tokens)
    graphs.prepare()
    prepared = set(graphs._graphs)
    assert len(prepared) <= 21 and max(key.tokens for key in prepared) >= min(tokens, MOST_TOKENS)
    count = data.draw(st.integers(1, min(most, tokens)))
    rows = data.draw(st.integers(count, min(tokens, MOST_TOKENS, count - 1 + longest)))
    counts = [1] * (count - 1) + [rows - count + 1]
    plan = plan_of(counts, [data.draw(st.integers(0, longest - n)) for n in counts])
    graphs.replay(plan, graphs.key_of(plan, tail))
    context = int((plan.starts + plan.counts).max())
    key, fits = graphs.replayed[-1], graphs.key_for(rows, count, min(counts) <= FEW_TOKENS, context, tail)
    assert key in prepared and key.tokens >= rows and key.seqs > count and key.context >= min(context, longest)
    while graphs.capture_next():
        pass
    graphs.replay(plan, graphs.key_of(plan, tail))
    assert graphs.replayed[-1] == fits, "those that are only likely leave room for one that was missed"
    assert len(graphs._graphs) <= graphs.max_graphs


def test_under_load_a_step_that_is_much_padded_is_soon_captured(monkeypatch) -> None:
    """640 rows in a step of 1,024; 950, of which fewer are wasted, when they have been missed more often. None in the first minute."""
    graphs, now = Noted(8, 2048, 2048), [0.0]
    monkeypatch.setattr(captured, "time", SimpleNamespace(monotonic=lambda: now[0], perf_counter=lambda: now[0]))
    monkeypatch.setattr(prompt_graphs, "time", captured.time)
    graphs.prepare()

    def sizes(rows: int, times: int) -> list[int]:
        plan, graphs.replayed = plan_of([rows], [0]), []
        for _ in range(times):
            graphs.replay(plan, graphs.key_of(plan, Tail.FILTERED))
        return [key.tokens for key in graphs.replayed]

    assert sizes(640, 100) == [1024] * 100
    now[0] = SETTLED_SECONDS + 1
    assert sizes(640, 2) == [640, 640]
    assert sizes(700, 100)[-1] == 704 and sizes(950, 300) == [1024] * 300


def test_prompts_that_cannot_be_captured_are_computed(caplog) -> None:
    left: list[bool] = []
    broken = SimpleNamespace(prepare=lambda: 1 / 0)
    runner = SimpleNamespace(graphs=None, prompts=broken, leave_preparations=lambda: left.append(True))
    preparation = Preparation.__new__(Preparation)
    preparation._wanted, preparation._alone, preparation._compilation = True, True, None
    preparation.finish(runner, None, 100)
    assert runner.prompts is None and left == [True] and "failed" in caplog.text
    runner.prompts, preparation._alone = broken, False
    with pytest.raises(ZeroDivisionError):  # other ranks wait for this one
        preparation.finish(runner, None, 100)


def test_a_device_that_is_lost_before_the_first_request_ends_the_start(monkeypatch) -> None:
    """It was ready, and every request of every core that came next failed."""

    def lost() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    runner = SimpleNamespace(graphs=None, prompts=SimpleNamespace(prepare=lost), leave_preparations=lambda: None)
    preparation = Preparation.__new__(Preparation)
    preparation._wanted, preparation._alone, preparation._compilation = True, True, None
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        preparation.finish(runner, None, 100)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(write_tiny("qwen3", tmp_path_factory.mktemp("tiny")))


@pytest.mark.parametrize("options", [
    {}, {"max_num_batched_tokens": BLOCK + 1}, {"num_kv_blocks": 16, "max_num_batched_tokens": 13}, {"enable_prefix_caching": False},
], ids=["together", "chunks", "tiny pool", "no prefix cache"])  # fmt: skip
def test_an_engine_says_the_same(tiny, options, monkeypatch) -> None:
    """Requests of all kinds, some of which the captured step cannot do; it samples, or leaves logits to those who edit them."""
    core = make_core(tiny, enforce_eager=True, **options)
    requests = requests_of_all_kinds(core.vocab_size)
    want = run(core, requests)
    core = make_core(tiny, enforce_eager=True, **options)
    prompts = capture_prompts(core, monkeypatch)
    arrivals = [i // 3 for i in range(len(requests))]
    assert_all_same(run(core, requests, arrivals=arrivals), want, str(options))
    assert prompts.replays[Tail.LOGITS] > 5


@pytest.mark.parametrize(("family", "options"), [
    ("qwen3", {}), ("qwen3", {"max_num_batched_tokens": 25}), ("gemma2", {}), ("qwen3_5", {}),
], ids=["qwen3", "chunks", "gemma2", "qwen3_5"])  # fmt: skip
def test_steps_that_are_not_captured_sample_as_many_rows_as_those_that_are(family, options, tmp_path, monkeypatch) -> None:
    """Some row again and again, whose result nobody reads: all say the same, and libraries have met the numbers before."""
    model = str(write_tiny(family, tmp_path))
    core = make_core(model, enforce_eager=True)
    requests = requests_of_all_kinds(core.vocab_size) if family == "qwen3" else plain_requests(20, max_tokens=9)
    want = run(core, requests)
    core, counts = make_core(model, enforce_eager=True, **options), []
    prompts = capture_prompts(core, monkeypatch)
    monkeypatch.setattr(prompts, "takes", lambda plan: False)
    filled_up = prompts.filled_up

    def noted(sampled: np.ndarray, most: int) -> np.ndarray:
        found = filled_up(sampled, most)
        assert found[: len(sampled)].tolist() == sampled.tolist() and set(found[len(sampled) :]) <= set(sampled[-1:].tolist())
        counts.append((len(sampled), len(found), most))
        return found

    monkeypatch.setattr(prompts, "filled_up", noted)
    assert_all_same(run(core, requests, arrivals=[i // 3 for i in range(len(requests))]), want, "")
    assert sum(count < found for count, found, _ in counts) > 5
    assert all(found in prompts.seq_sizes for count, found, most in counts if count and most >= prompts.seq_sizes[-1])


def test_an_engine_samples_within_the_step(tiny, monkeypatch) -> None:
    """Plain requests, greedy and not, and with drafts behind which the host does not know where a sequence begins."""
    from drafting import Guesser, drafting_core

    requests = plain_requests(9, max_tokens=9)
    want = run(make_core(tiny, enforce_eager=True), requests)
    arrivals = [2 * i for i in range(9)]
    for core in (
        make_core(tiny, enforce_eager=True),
        drafting_core(tiny, Guesser({n: r.ids for n, r in want.items()}, 512, 0.7), overlap=True, enforce_eager=True),
    ):
        prompts = capture_prompts(core, monkeypatch)
        assert_all_same(run(core, requests, arrivals=arrivals), want, "")
        assert prompts.replays.total() >= 3 and not prompts.replays[Tail.LOGITS]
        if core.speculator is None:
            assert set(prompts.replays) == {Tail.GREEDY, Tail.RANDOM, Tail.FILTERED}
