"""The scheduler with drafts, without a model: any guesses, right or wrong, change nothing that a request says."""

from __future__ import annotations

import dataclasses
import random

import pytest

from headrace.scheduler.config import Limits
from scheduler_driver import VOCAB, PlanView, SchedulerDriver, reference
from test_scheduler_fuzz import Fuzz


class DraftingEngine(SchedulerDriver):
    """Before each step some requests get drafts: a right beginning of random length, then garbage."""

    def __init__(self, limits: Limits, depth: int = 0, *, seed: int = 0, p_right: float = 0.7, most: int = 9):
        super().__init__(limits, depth)
        self.rng, self.p_right, self.most = random.Random(seed), p_right, most
        self.num_drafts = self.num_accepted = self.num_ahead = 0
        self.p_broken, self.p_settle = 0.0, 0.5
        self.device.breaks = lambda: self.rng.random() < self.p_broken

    def guesses(self, chunk) -> list[int]:
        """For the positions from chunk.start + 1 on, which may be followed by those that the step in flight verifies."""
        request, count = chunk.request, chunk.unverified + chunk.num_drafts
        expected, _ = reference(request.prompt_ids, request.seed, request.params, self.scheduler.limits.max_model_len)
        right = expected[chunk.start + 1 - len(request.prompt_ids) :][:count]
        while right and self.rng.random() > self.p_right ** len(right):
            right.pop()
        return right + [self.rng.randrange(VOCAB) for _ in range(count - len(right))]

    def schedule(self) -> PlanView | None:
        if self.rng.random() < self.p_settle:  # as for guesses that need what was sampled last
            while self.device.flight:
                self.settle()
        for request in self.scheduler.decoding:
            request.num_drafts = self.rng.randint(0, self.most)
        plan = super().schedule()
        if plan is None:
            return None
        rows = sum(1 + chunk.num_drafts for chunk in plan.chunks if chunk.num_drafts)
        for chunk in plan.chunks:
            if chunk.num_drafts:
                assert chunk.num_drafts <= chunk.request.num_drafts and chunk.num_tokens == 1 + chunk.num_drafts
                assert rows <= self.scheduler.limits.max_draft_rows
                chunk.drafts = self.guesses(chunk)
                self.num_drafts += chunk.num_drafts
                self.num_ahead += chunk.unverified > 0
        assert plan.num_drafts == sum(chunk.num_drafts for chunk in plan.chunks)
        return plan

    def settle(self, failed=frozenset()):
        plan, _, sampled = self.device.flight[0]
        chunks = zip(plan.chunks, sampled, strict=True)
        self.num_accepted += sum(max(0, len(ids) - 1) for chunk, ids in chunks if chunk.num_drafts)
        return super().settle(failed)


class DraftFuzz(Fuzz):
    def __init__(self, seed: int):
        super().__init__(seed)
        rng = random.Random(seed + 1)
        self.config = dataclasses.replace(self.config, num_snapshots=0, max_draft_rows=rng.choice([2, 5, 16, 64]))
        greedy = "forecast" in vars(self.engine.scheduler.admission)
        self.engine = DraftingEngine(
            self.config, self.engine.depth, seed=seed, p_right=rng.choice([0.0, 0.5, 0.9, 1.0]), most=rng.choice([1, 3, 20])
        )
        self.engine.p_broken, self.engine.p_settle = rng.choice([0.0, 0.0, 0.1]), rng.choice([0.0, 0.3, 0.9])
        if greedy:
            self.engine.admit_greedily()


@pytest.mark.parametrize("seed", range(60))
def test_random_engines_with_drafts(seed):
    DraftFuzz(seed).run(steps=100)


def engine(p_right: float, depth: int = 0, **changes) -> DraftingEngine:
    fields = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64, "block_size": 4, "num_blocks": 32}
    return DraftingEngine(Limits(**(fields | {"max_draft_rows": 16} | changes)), depth, p_right=p_right)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("p_right", [0.0, 1.0])
def test_right_drafts_save_steps_and_wrong_ones_cost_none(p_right, depth):
    driven = engine(p_right, depth)
    request = driven.add("a", [1, 2, 3], max_tokens=50, ignore_eos=True)
    steps = driven.run()
    assert len(request.output_ids) == 50
    if p_right:
        assert driven.num_drafts == driven.num_accepted and steps < 30
    else:
        assert driven.num_accepted < 6 and steps > 45  # a random guess may be right


@pytest.mark.parametrize("p_right, block_size", [(0.0, 1), (0.6, 4), (0.9, 3), (1.0, 2)])
def test_steps_with_drafts_follow_one_another_unsettled(p_right, block_size):
    driven = engine(p_right, depth=1, block_size=block_size, num_blocks=256 // block_size)
    driven.p_settle, driven.p_broken = 0.0, 0.1
    requests = [driven.add(f"r{i}", [i, 2, 3], max_tokens=50, min_tokens=20, stop_token_ids=[3, 4, 5]) for i in range(3)]
    driven.run()
    assert driven.num_ahead > 5
    for request in requests:
        assert (request.output_ids, request.finish_reason) == reference(request.prompt_ids, 0, request.params, 64)


def test_accepted_tokens_enter_the_prefix_index_and_rejected_ones_do_not():
    for p_right in (0.0, 1.0):
        driven = engine(p_right)
        first = driven.add("a", [1, 2, 3, 4, 5], max_tokens=30, ignore_eos=True)
        driven.run()
        again = driven.add("b", [*first.prompt_ids, *first.output_ids], max_tokens=3, ignore_eos=True)
        driven.run()
        assert again.num_cached == 32  # all but the last of 35 tokens were computed: 8 full blocks


def test_a_stop_inside_the_accepted_drafts_ends_the_request_there():
    expected, _ = reference([1, 2, 3], 0, engine(1.0).add("x", [1, 2, 3], max_tokens=30, ignore_eos=True).params, 64)
    at = next(i for i in range(5, 30) if expected[i] not in expected[:i])
    driven = engine(1.0)
    request = driven.add("a", [1, 2, 3], max_tokens=30, ignore_eos=True, stop_token_ids=[expected[at]])
    driven.run()
    assert request.output_ids == expected[: at + 1]
    assert (request.finish_reason, request.stop_reason) == ("stop", expected[at])


def test_many_decodes_leave_no_room_for_drafts():
    driven = engine(1.0, max_num_seqs=4, max_draft_rows=4)
    for i in range(4):
        driven.add(f"r{i}", [i, 2], max_tokens=20 if i else 40, ignore_eos=True)
    driven.step()
    while driven.scheduler.num_running == 4:
        assert driven.num_drafts == 0
        driven.step()
    driven.run()
    assert driven.num_drafts > 0


def test_drafts_take_at_most_half_of_what_the_decodes_leave():
    driven = engine(1.0, max_num_batched_tokens=9)
    driven.add("a", [1, 2], max_tokens=40, ignore_eos=True)
    driven.step()
    driven.add("long", list(range(40)), max_tokens=2, ignore_eos=True)
    for _ in range(6):
        plan = driven.step()
        assert plan.num_drafts <= 4
        if len(plan.chunks) == 2:
            assert plan.chunks[1].num_tokens >= 4
