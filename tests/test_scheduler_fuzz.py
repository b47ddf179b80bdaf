"""Thousands of steps without a model: everything adds up, every read is right, everyone ends, and says the same as alone."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.scheduler.config import Limits
from headrace.scheduler.request import Request, Status
from scheduler_driver import EOS, VOCAB, SchedulerDriver, reference


def random_config(rng: random.Random) -> Limits:
    block_size = rng.choice([1, 2, 3, 4, 8, 16])
    max_model_len = rng.randint(8, 64)
    least = -(-(max_model_len - 1) // block_size)
    caching = rng.random() < 0.8
    return Limits(
        max_num_seqs=rng.choice([1, 2, 4, 8]),
        max_num_batched_tokens=rng.choice([1, 2, 7, 16, 64, 80]),
        max_model_len=max_model_len,
        block_size=block_size,
        num_blocks=least + rng.choice([0, 1, 2, least, 4 * least]),
        enable_prefix_caching=caching,
        num_snapshots=rng.choice([0, 0, 1, 2, 9]) * caching,
        policy=rng.choice(["fcfs", "priority"]),
    )


class Fuzz:
    """Random arrivals, aborts and failures at every phase of a random engine."""

    def __init__(self, seed: int, aborts: bool = True):
        self.rng = rng = random.Random(seed)
        self.config = random_config(rng)
        self.engine = SchedulerDriver(self.config, depth=rng.choice([0, 1, 1]))
        if rng.random() < 0.6:
            self.engine.admit_greedily()
        self.requests: list[Request] = []
        # one that repeats itself, so that a block's tokens stand at many depths
        self.stems = [[rng.randrange(VOCAB) for _ in range(64)], [5] * 64]
        self.rate = rng.choice([0.1, 0.5, 1.5])
        self.p_abort = rng.choice([0.0, 0.02, 0.1]) if aborts else 0.0
        self.p_fail = rng.choice([0.0, 0.0, 0.02]) if aborts else 0.0
        self.waited: dict[Request, int] = {}

    def arrive(self) -> None:
        rng = self.rng
        length = rng.randint(1, min(rng.choice([6, 20, 63]), self.config.max_model_len - 1))
        shared = rng.choice([0, length // 2, length, length])
        prompt = rng.choice(self.stems)[:shared]
        prompt = prompt + [rng.randrange(VOCAB) for _ in range(length - len(prompt))]
        max_tokens = rng.choice([None, None, 1, 2, rng.randint(1, 40), rng.randint(1, 40)])
        request = self.engine.add(
            f"r{len(self.requests)}", prompt, seed=rng.randrange(3), max_tokens=max_tokens,
            ignore_eos=rng.random() < 0.5, priority=rng.randint(0, 2), cache_salt=rng.choice(["", "", "a"]),
            min_tokens=min(rng.choice([0, 0, 5]), max_tokens or 5),
            stop_token_ids=rng.choice([None, [3, 4], [EOS]]) if max_tokens else None,
            prompt_logprobs=rng.choice([None, None, None, 0]),
        )  # fmt: skip
        self.requests.append(request)

    def maybe_abort(self) -> None:
        if self.requests and self.rng.random() < self.p_abort:
            request = self.rng.choice(self.requests[-20:])
            was_live = request.status is not Status.FINISHED
            before = list(request.output_ids)
            answer = self.engine.scheduler.abort(request.id)
            assert (answer is request) if was_live else (answer is None)
            assert request.output_ids == before
            self.engine.check()

    def step(self) -> None:
        """schedule, launch and settle with aborts in between."""
        rng, engine = self.rng, self.engine
        oldest = min((e for e in engine.scheduler.blocks.live.values() if e.slot >= 0), key=lambda e: e.rank, default=None)
        self.maybe_abort()
        plan = engine.schedule()
        self.maybe_abort()
        if plan is not None:
            engine.launch(plan)
            self.maybe_abort()
        else:
            assert engine.device.flight or not engine.scheduler.has_unfinished, "stuck"
        while len(engine.device.flight) > (engine.depth if plan is not None else 0):
            count = len(engine.device.flight[0][0].chunks)
            engine.settle(frozenset(i for i in range(count) if rng.random() < self.p_fail))
            self.maybe_abort()
        if oldest is not None and not oldest.finished and not oldest.retired:
            moved = plan is not None and any(chunk.request is oldest for chunk in plan.chunks)
            self.waited = {oldest: 0 if moved else self.waited.get(oldest, 0) + 1}
            # it may wait for those who part, never longer than the steps in flight, and for its last token to settle
            assert self.waited[oldest] <= engine.depth + 1, "the oldest does not progress"

    def run(self, steps: int) -> None:
        for _ in range(steps):
            arrivals = int(self.rate) + (self.rng.random() < self.rate % 1)
            if self.engine.scheduler.num_waiting < 20:
                for _ in range(arrivals):
                    self.arrive()
            self.step()
        for _ in range(100_000):
            if not self.engine.scheduler.has_unfinished:
                break
            self.step()
        while self.engine.device.flight:
            self.engine.settle()
        self.engine.assert_idle()
        self.verify()

    def verify(self) -> None:
        for request in self.requests:
            assert request.status is Status.FINISHED
            assert request.slot == -1 and request.block_ids == [] and request.num_pending == 0
            expected, reason = reference(request.prompt_ids, request.seed, request.params, self.config.max_model_len)
            if request.finish_reason in ("abort", "error"):
                assert request.output_ids == expected[: len(request.output_ids)]
            else:
                assert (request.output_ids, request.finish_reason) == (expected, reason), request.id


@pytest.mark.parametrize("seed", range(60))
def test_random_engines(seed):
    Fuzz(seed).run(steps=120)


@given(st.integers(min_value=1000, max_value=10**9), st.booleans())
@settings(max_examples=60, derandomize=True)
def test_random_engines_found_by_hypothesis(seed, aborts):
    Fuzz(seed, aborts).run(steps=40)
