"""Sampling from each rank's part of the vocabulary, in Triton's interpreter: the tokens of whole rows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from headrace.kernels import sample
from headrace.kernels.all_reduce import empty_mark
from headrace.kernels.prepare import Rows
from headrace.kernels.sample_ranks import WORDS, sample_parts
from headrace.model.shard import Shard
from headrace.sampling.params import GREEDY_EPS
from headrace.sampling.philox import PURPOSE_SAMPLE
from headrace.sampling.sampler import choose
from headrace.worker import captured_sampling
from headrace.worker.captured_sampling import sample_step
from headrace.worker.sampling import Tail
from push_ranks import push_spaces
from sampling_reference import Row
from test_sampling_sampler import inputs_of

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off where a card is")
INF, NAN = float("inf"), float("nan")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch) -> None:
    monkeypatch.setattr(sample, "BLOCK", 64)
    torch.manual_seed(0)


def sampled(logits: torch.Tensor, rows: list[Row], spaces: list, greedy: bool) -> list[tuple[list[int], list[bool]]]:
    """(ids, failed) of each rank."""
    size, inputs = len(spaces), inputs_of(rows)
    found: list[tuple] = [()] * size
    for stage in ("send", "draw", "finish"):
        for rank in range(size):
            shard = Shard(rank, size)
            ids, width = shard.vocab(logits.shape[1]), shard.vocab_rows(logits.shape[1])
            part = torch.full((len(logits), width), -INF)
            part[:, : len(ids)] = logits[:, ids.start : ids.stop]
            found[rank] = sample_parts(
                part, rank * width, spaces[rank], inputs.temperature, inputs.seed, inputs.output_index, inputs.sample_index,
                purpose=PURPOSE_SAMPLE, greedy_eps=GREEDY_EPS, all_greedy=greedy, stage=stage,
            )  # fmt: skip
    return [(ids.tolist(), failed.tolist()) for ids, failed in found]


def check(logits: torch.Tensor, rows: list[Row], spaces: list, greedy: bool = False) -> None:
    want = tuple(column.tolist() for column in choose(logits, inputs_of(rows)))
    assert sampled(logits, rows, spaces, greedy) == [want] * len(spaces)
    assert all((space.slots == empty_mark(torch.int32)).all() for space in spaces)


@pytest.mark.parametrize("size, vocab", [(2, 300), (3, 400), (4, 65)])
def test_the_tokens_of_whole_rows(size: int, vocab: int) -> None:
    """Step after step; greedy rows among others, and only greedy ones."""
    spaces = push_spaces(size, 6, WORDS, torch.float32)
    for step in range(3):
        logits = torch.randn(6 - 2 * step, vocab) * 3
        rows = [Row(temperature=(0.0, 0.7, 1.0, 2.0)[i % 4], seed=100 * step + i) for i in range(len(logits))]
        check(logits, rows, spaces)
        check(logits.round(), [Row(temperature=0.0)] * len(logits), spaces, greedy=True)


def test_rows_of_which_a_part_has_nothing() -> None:
    """A whole part of -inf, and in others ids that are -inf; the last part has rows of no id."""
    spaces = push_spaces(4, 3, WORDS, torch.float32)
    logits = torch.randn(3, 65)
    logits[0, :40], logits[1, 20:], logits[2, ::2] = -INF, -INF, -INF
    for seed in range(5):
        check(logits, [Row(temperature=2.0, seed=seed)] * 3, spaces)


@pytest.mark.parametrize("greedy", [False, True])
def test_broken_rows_fail_alone(greedy: bool) -> None:
    spaces = push_spaces(2, 5, WORDS, torch.float32)
    logits = torch.randn(5, 300)
    logits[0, 7], logits[1, 299], logits[2], logits[3, 200] = NAN, NAN, -INF, INF
    check(logits, [Row(temperature=0.0 if greedy else 1.0, seed=3)] * 5, spaces, greedy)
    check(torch.randn(5, 300), [Row(temperature=0.0 if greedy else 1.0, seed=4)] * 5, spaces, greedy)


@pytest.mark.parametrize(("rows", "tail", "parts"), [(3, Tail.RANDOM, True), (4, Tail.GREEDY, False), (3, Tail.FILTERED, False)])
def test_whole_rows_where_words_do_not_do(rows: int, tail: Tail, parts: bool, monkeypatch) -> None:
    """Filters, and more rows than wait at once on this card, though a space of hidden states in float32 has room for them."""
    monkeypatch.setattr(captured_sampling, "max_rows", lambda device: 3)
    for name in ("sample_parts", "sample_rows"):
        monkeypatch.setattr(captured_sampling, name, lambda logits, *rest, name=name, **options: (name, logits.shape[1]))
    (space, _) = push_spaces(2, 8, 64, torch.float32)
    group = SimpleNamespace(push_space=lambda *shape: space if space.takes(*shape) else None)
    part = SimpleNamespace(group=group, ids=range(10), whole=lambda logits: logits.repeat(1, 2))
    found = sample_step(torch.zeros(rows, 10), Rows.empty(rows, torch.device("cpu")), tail, part)
    assert found == (("sample_parts", 10) if parts else ("sample_rows", 20))
