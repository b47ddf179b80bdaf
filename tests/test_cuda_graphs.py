"""Which decode graphs are captured, and when: with a stand-in for the capture, so without a card."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.kernels.prepare import POSITION, UNVERIFIED
from headrace.scheduler.plan import StepPlan
from headrace.worker import captured, cuda_graphs
from headrace.worker.captured import COVERING, MISSES, SETTLED_SECONDS, Captured
from headrace.worker.cuda_graphs import FEW_ROWS, DecodeGraphs, Key, context_buckets, graph_sizes
from headrace.worker.decode_numbers import decode_numbers
from headrace.worker.memory_plan import MAX_GRAPHS
from headrace.worker.sampling import Tail


class Noted(DecodeGraphs):
    """Notes what is captured, and when a replay had to wait for it."""

    def __init__(self, max_num_seqs: int, max_model_len: int, max_draft_rows: int = 0, max_graphs: int = MAX_GRAPHS):
        self.max_num_seqs, self.max_draft_rows, self.max_graphs = max_num_seqs, max_draft_rows, max_graphs
        self.sizes = graph_sizes(max(max_num_seqs, max_draft_rows))
        self.few_buckets, self.buckets = context_buckets((256, 512), max_model_len), context_buckets((2048,), max_model_len)
        self._graphs, self._todo, self._wanted = {}, [], set()
        self._prepared, self._missed, self._stand_ins = None, Counter(), {}
        self.replayed: Key | None = None
        self._mailbox = SimpleNamespace(post=lambda numbers, size, slot: numbers)
        self.state, self._rows = SimpleNamespace(dummy_slot=0), None
        self.captured: list[Key] = []

    def _capture(self, key: Key) -> Captured:
        assert key not in self._graphs and len(self._graphs) < self.max_graphs
        self.captured.append(key)
        self._graphs[key] = Captured(SimpleNamespace(replay=lambda: setattr(self, "replayed", key)), None)
        self._stand_ins.clear()
        return self._graphs[key]

    def waits(self, rows: int, context: int, related: bool = False, tail: Tail = Tail.RANDOM) -> list[Key]:
        before = len(self.captured)
        self.replay(np.zeros((4, rows), np.int32), self.key_for(rows, context, tail, related))
        return self.captured[before:]

    def rest(self) -> None:
        while self.capture_next():
            pass


@pytest.mark.parametrize(("first", "longest", "expected"), [
    ((256, 512), 40960, [256, 512, 2048, 8192, 32768, 40960]), ((256, 512), 512, [256, 512]), ((256, 512), 300, [256, 300]),
    ((256, 512), 100, [100]), ((2048,), 2048, [2048]), ((2048,), 676, [676]), ((2048,), 4352, [2048, 4352]),
])  # fmt: skip
def test_context_buckets(first, longest, expected) -> None:
    assert context_buckets(first, longest) == expected


def test_after_an_idle_moment_nobody_waits() -> None:
    """A first step captures its own graph. After that: all sizes, and for few rows all contexts, so that a stream that grows
    past a bucket's end meets no capture; the sizes that are likely next come first."""
    graphs = Noted(64, 4352)
    assert graphs.waits(3, 200) == [Key(4, 256, Tail.RANDOM, False)]
    graphs.rest()
    assert [key.rows for key in graphs.captured[:3]] == [4, 2, 1]
    for rows in (1, 2, 5, 16, 17, 64):
        for context in (1, 256, 257, 513, 2048, *([2049, 4352] if rows <= FEW_ROWS else [])):
            assert graphs.waits(rows, context) == []
    assert graphs.waits(64, 2049) == [Key(64, 4352, Tail.RANDOM, False)]


def test_graphs_with_drafts_are_captured_ahead_for_as_many_rows_as_such_steps_have() -> None:
    graphs = Noted(64, 2048, max_draft_rows=16)
    graphs.waits(4, 200, related=True)
    graphs.rest()
    assert max(key.rows for key in graphs.captured) == 16
    assert graphs.waits(40, 200, related=True) == [Key(40, 2048, Tail.RANDOM, True)]


def test_steps_with_drafts_are_captured_beside_few_slots() -> None:
    """One request and its drafts are more rows than there are slots; plain steps are not captured for so many."""
    graphs = Noted(1, 2048, max_draft_rows=64)
    assert graphs.sizes[-1] == 64
    assert graphs.waits(7, 200, related=True) == [Key(8, 256, Tail.RANDOM, True)]
    graphs.rest()
    assert graphs.waits(64, 200, related=True) == [] and graphs.waits(1, 2048, related=True) == []
    graphs.waits(1, 200)
    graphs.rest()
    assert {key.rows for key in graphs.captured if not key.related} == {1}


def test_no_more_graphs_than_the_plan_counts_with() -> None:
    """Beyond that the one that was not used for longest makes room, and nothing is captured ahead."""
    graphs = Noted(64, 4352, max_graphs=3)
    assert graphs.waits(1, 100) == [Key(1, 256, Tail.RANDOM, False)]
    graphs.rest()
    assert len(graphs._graphs) == 3
    first, *others = list(graphs._graphs)
    assert graphs.waits(first.rows, first.context) == []  # used again: the next one is the oldest
    assert graphs.waits(64, 4000) == [Key(64, 4352, Tail.RANDOM, False)]
    assert list(graphs._graphs) == [others[1], first, Key(64, 4352, Tail.RANDOM, False)]
    assert not graphs.capture_next()


@given(
    most=st.integers(1, 300), longest=st.sampled_from([100, 512, 2048, 40960]), data=st.data(),
    tail=st.sampled_from([Tail.GREEDY, Tail.RANDOM, Tail.FILTERED]),
)  # fmt: skip
def test_what_is_captured_before_the_first_request_does_for_all(most, longest, data, tail) -> None:
    """No step waits for a capture, and the one that stands in has room for its rows and its context. After an idle moment the
    one that fits is there."""
    graphs = Noted(most, longest)
    graphs.prepare()
    few = len(graphs.captured)
    assert few <= 2 * (most.bit_length() + 1)
    for _ in range(3):
        rows, context = data.draw(st.integers(1, most)), data.draw(st.integers(1, longest))
        assert graphs.waits(rows, context, tail=tail) == []
        key = graphs.replayed
        assert key is not None and key.rows >= rows and key.context >= context and not key.related
        assert COVERING[key.tail] >= COVERING[tail]
        graphs.rest()
        size = graphs.size_for(rows)
        wanted = Key(size, graphs.bucket_for(context, size), tail, False)
        if wanted in graphs.captured:  # there is room for so many
            assert graphs.waits(rows, context, tail=tail) == [] and graphs.replayed == wanted


def test_logits_and_drafts_have_no_stand_in() -> None:
    graphs = Noted(8, 512, max_draft_rows=8)
    graphs.prepare()
    assert graphs.waits(2, 100, tail=Tail.LOGITS) == [Key(2, 256, Tail.LOGITS, False)]
    assert graphs.waits(2, 100, related=True) == [Key(2, 256, Tail.RANDOM, True)]


def test_under_load_what_fits_better_comes_when_it_is_worth_it(monkeypatch) -> None:
    """Not in the first minute, where a capture would show; nor for a step that is rare."""
    graphs, now = Noted(32, 512), [0.0]
    monkeypatch.setattr(captured, "time", SimpleNamespace(monotonic=lambda: now[0], perf_counter=lambda: now[0]))
    monkeypatch.setattr(cuda_graphs, "time", captured.time)
    graphs.prepare()
    assert not any(graphs.waits(24, 100) for _ in range(MISSES + 5))
    now[0] = SETTLED_SECONDS + 1
    assert graphs.waits(3, 100) == [] and graphs.waits(24, 100) == [Key(24, 512, Tail.RANDOM, False)]


@given(st.data())
def test_a_plan_has_the_key_of_its_rows(data) -> None:
    """Which several ranks are told before any of them has the rows: also with drafts, and behind drafts that nobody counted."""
    count = data.draw(st.integers(1, 12))
    drafts = np.asarray(data.draw(st.lists(st.integers(0, 4), min_size=count, max_size=count)), np.int32)
    starts = np.asarray(data.draw(st.lists(st.integers(0, 600), min_size=count, max_size=count)), np.int32)
    unverified = np.asarray(data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count)), np.int32)
    slots, samples = np.arange(count, dtype=np.int32), np.ones(count, np.bool_)
    plain = 0 if drafts.any() else count
    plan = StepPlan(0, 0, plain, ["r"] * count, slots, starts, 1 + drafts, drafts, unverified, samples)
    rows = decode_numbers(plan, None)
    graphs = Noted(64, 1024, max_draft_rows=64)
    context = int((rows[POSITION] + rows[UNVERIFIED]).max()) + 1
    key = graphs.key_for(rows.shape[1], context, Tail.GREEDY, bool(drafts.any()))
    assert graphs.key_of(plan, Tail.GREEDY) == key and key.rows >= rows.shape[1] and key.context >= context
