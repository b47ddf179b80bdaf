"""Requests in changing company: cores of random options that are dropped at any time, requests that leave and go on later. What
each answers is compared with what it answers alone, to the last bit."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import msgspec

from engine_driver import Result, make_requests, run, take
from headrace.engine.core import EngineCore
from headrace.engine.messages import EngineRequest

MakeCore = Callable[..., EngineCore]
LIVE = 24  # requests that somebody waits for at once


def same_bits(got: Result, want: Result) -> bool:
    """Without what `cached` says: that depends on the company."""
    return (got.ids, got.finish_reason, got.stop_reason, got.logprobs) == (
        want.ids, want.finish_reason, want.stop_reason, want.logprobs
    )  # fmt: skip


class Soak:
    """`make_core` takes options over those that it has itself; blocks of 16 tokens, contexts of up to 128."""

    def __init__(self, make_core: MakeCore, seed: int, different: int, turns_to_kill: int):
        self._make_core, self._random, self._turns_to_kill = make_core, random.Random(seed), turns_to_kill
        alone = make_core(enable_prefix_caching=False, async_scheduling=False)
        requests = make_requests(seed, different, alone.vocab_size)
        for request in requests[::2]:  # logprobs make a step longer, and take another way through the sampler
            request.params = msgspec.structs.replace(request.params, logprobs=None)
        self._pool = [(request, run(alone, [request])[request.id]) for request in requests]
        alone.close()
        self._core = self._new_core()
        self._live: dict[str, tuple[EngineRequest, Result, Result]] = {}  # request, answer so far, answer alone
        self._num_names = 0
        self.counts: Counter[str] = Counter()
        self.differing: list[str] = []

    def run(self, count: int) -> None:
        """Until `count` requests have been answered."""
        while self.counts["answered"] < count:
            while len(self._live) < LIVE and self._random.random() < 0.5:
                request, alone = self._random.choice(self._pool)
                self._submit(request, Result(), alone)
            if not self._random.randrange(self._turns_to_kill):
                self._kill()
            elif self._live and not self._random.randrange(20):
                self._leave(self._random.choice(list(self._live)))
            self._step()
        self._core.close()

    def _new_core(self) -> EngineCore:
        choose = self._random.choice
        return self._make_core(
            num_kv_blocks=choose([12, 24, 400]), max_num_batched_tokens=choose([16, 64, 512]), max_num_seqs=choose([1, 5, LIVE]),
            enable_prefix_caching=choose([True, True, False]), async_scheduling=choose([True, False]),
            speculative_method=choose([None, None, "ngram"]),
        )  # fmt: skip

    def _submit(self, request: EngineRequest, so_far: Result, alone: Result) -> None:
        name = f"r{self._num_names}"
        self._num_names += 1
        self._live[name] = request, so_far, alone
        self._core.add(EngineRequest(
            name, request.prompt_ids, request.params, request.seed, request.priority, output_ids=list(so_far.ids)
        ))  # fmt: skip

    def _step(self) -> None:
        for news in self._core.step():
            if news.id not in self._live:  # it has left
                continue
            request, so_far, alone = self._live[news.id]
            take(so_far, news)
            self.counts["tokens"] += len(news.token_ids)
            if so_far.finish_reason is not None:
                del self._live[news.id]
                self.counts["answered"] += 1
                if not same_bits(so_far, alone):
                    self.differing.append(f"{request.id}: {so_far} != {alone}")

    def _leave(self, name: str) -> None:
        """Somebody loses his connection, and goes on with what he has got."""
        request, so_far, alone = self._live.pop(name)
        self._core.abort(name)
        self._submit(request, so_far, alone)
        self.counts["resumed"] += bool(so_far.ids)

    def _kill(self) -> None:
        """The core is gone with all it had in flight; another takes the requests over."""
        self._core.close()
        self._core = self._new_core()
        live, self._live = self._live, {}
        for request, so_far, alone in live.values():
            self._submit(request, so_far, alone)
            self.counts["resumed"] += bool(so_far.ids)
        self.counts["kills"] += 1
