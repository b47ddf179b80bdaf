"""Drives an EngineCore: requests in, ids and logprobs out, with arrivals and aborts at chosen steps; whether two runs
say the same."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np

from headrace.config import EngineConfig
from headrace.engine.build import build_engine
from headrace.engine.core import EngineCore
from headrace.engine.messages import EngineRequest, TokenLogprobs
from headrace.sampling.params import SamplingParams
from headrace.sampling.structured_outputs import StructuredOutputsParams

BLOCK = 8


@dataclass
class Result:
    ids: list[int] = field(default_factory=list)
    entries: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cached: int = 0
    prompt_logprobs: list | None = None
    embedding: list[float] | None = None

    @property
    def logprobs(self) -> list[float]:
        return [entry.logprobs[0] for entry in self.entries]

    @property
    def rows(self) -> list[np.ndarray]:
        """The logprobs [vocab] that each token was drawn from (before edits and temperature): of requests for all of them."""
        return [dense(entry) for entry in self.entries]


def make_core(model: str, **options) -> EngineCore:
    """A core with every check on; float32 on the CPU unless told otherwise."""
    small = {"max_num_seqs": 8, "max_model_len": 128, "num_kv_blocks": 256, "block_size": BLOCK}
    options = small | {"device": "cpu", "dtype": "float32", "debug_checks": True} | options
    engine = build_engine(EngineConfig(model=model, **options))
    if engine.preparation is not None:  # a pool that compiles for every core of the machine: nobody here waits for it
        engine.preparation.close()
    engine.core.async_scheduling = engine.config.async_scheduling  # on a CPU, too: what overlaps on a card is tested here
    return engine.core


def complete(params: SamplingParams, **changes) -> SamplingParams:
    return msgspec.structs.replace(params.resolved({}), **changes)


def plain_requests(count: int, max_tokens: int) -> list[EngineRequest]:
    """Two greedy ones, two that draw, two that draw from filtered rows, and so on; prompts of 3, 9, 15 tokens and more."""
    kinds = [{"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 0.8, "top_p": 0.9, "top_k": 20}]
    params = [SamplingParams(max_tokens=max_tokens, ignore_eos=True, **kinds[i // 2 % 3]) for i in range(count)]
    return [EngineRequest(f"{i}", [5 + i, 6, 7] * (1 + 2 * i), complete(params[i]), i) for i in range(count)]


def make_requests(seed: int, count: int, vocab: int) -> list[EngineRequest]:
    """Requests with all kinds of parameters; some share prefixes, some lengths lie at block edges."""
    rng = random.Random(seed)
    shared = [rng.randrange(vocab) for _ in range(3 * BLOCK)]
    requests = []
    for i in range(count):
        length = rng.choice([1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, rng.randint(1, 60)])
        prompt = [rng.randrange(vocab) for _ in range(length)]
        if rng.random() < 0.5:
            prompt = (shared[: rng.choice([BLOCK, 2 * BLOCK, 3 * BLOCK, 5])] + prompt)[:60]
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.0, 0.7, 1.5]),
            top_p=rng.choice([1.0, 0.8]),
            top_k=rng.choice([0, 20]),
            min_p=rng.choice([0.0, 0.05]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
            presence_penalty=rng.choice([0.0, 0.5]),
            frequency_penalty=rng.choice([0.0, 0.2]),
            logit_bias=rng.choice([None, {3: 5.0, 7: -5.0}]),
            allowed_token_ids=rng.choice([None, None, list(range(0, vocab, 2))]),
            min_tokens=rng.choice([0, 4]),
            max_tokens=rng.randint(4, 24),
            stop_token_ids=rng.choice([None, [5, 6, 7, 8]]),
            logprobs=0,
        )
        words = [[4], [rng.randrange(vocab), 9]] if rng.random() < 0.3 else []
        params = complete(params, bad_word_ids=words, eos_token_ids=[2])
        requests.append(EngineRequest(f"r{i}", prompt, params, rng.randrange(2**63), rng.randint(0, 2)))
    return requests


def requests_of_all_kinds(vocab: int) -> list[EngineRequest]:
    """Sampled in every way, with a grammar, a user's function, scores of the prompt; embeddings; and one that repeats itself."""
    requests = make_requests(5, 16, vocab)
    for i, kind in enumerate(("mean", "last")):
        requests.append(EngineRequest(f"pooled{i}", [9 + j for j in range(3 * BLOCK + i)], complete(SamplingParams()), 0, pooling=kind))
    scored = complete(SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=2, logprobs=3))
    requests.append(EngineRequest("scored", list(range(20, 50)), scored, 1))
    shape = StructuredOutputsParams(regex="(abc|xyz){2,5}")
    grammar = complete(SamplingParams(temperature=1.0, max_tokens=12, structured_outputs=shape), eos_token_ids=[2])
    requests.append(EngineRequest("grammar", [5, 6, 7], grammar, 3))
    banned = complete(SamplingParams(temperature=0.0, max_tokens=6, logits_processors=[ban_even]))
    requests.append(EngineRequest("user", [8, 9], banned, 4))
    repeated = complete(SamplingParams(temperature=0.0, max_tokens=20, frequency_penalty=0.1))
    requests.append(EngineRequest("repeated", [3, 4, 5, 6] * 8, repeated, 5))
    return requests


def ban_even(ids: list[int], logits):
    logits[::2] = float("-inf")
    return logits


def run(core: EngineCore, requests: list[EngineRequest], *, arrivals=None, aborts=None, most_steps=20000) -> dict[str, Result]:
    """Run to the end. `arrivals[i]`: the step before which request i is added; `aborts`: {request id: step}."""
    arrivals, aborts = arrivals or [0] * len(requests), dict(aborts or {})
    todo = sorted(zip(arrivals, range(len(requests)), strict=True))
    results = {r.id: Result() for r in requests}
    for step in range(most_steps):
        while todo and todo[0][0] <= step:
            core.add(requests[todo.pop(0)[1]])
        for name in [n for n, at in aborts.items() if at <= step]:
            if results[name].finish_reason is None and any(r.id == name for r in requests):
                core.abort(name)
            del aborts[name]
        for news in core.step():
            take(results[news.id], news)
        if not todo and not core.has_work:
            break
    else:
        raise AssertionError(f"not finished after {most_steps} steps: {results}")
    pool = core.scheduler.pool
    assert core.scheduler.num_running == core.scheduler.num_waiting == 0
    assert core.scheduler.kv_usage == 0.0, f"blocks are still held: {pool}"
    return results


def lonely_answers(make: Callable[..., EngineCore]) -> Callable[[int, int], dict[str, Result]]:
    """What each of make_requests(seed, count) gives by itself: no cache, no chunks, nothing in flight."""
    core = make(enable_prefix_caching=False, async_scheduling=False)

    @functools.cache
    def answers(seed: int, count: int) -> dict[str, Result]:
        return {r.id: run(core, [r])[r.id] for r in make_requests(seed, count, core.vocab_size)}

    return answers


def take(result: Result, news) -> None:
    assert result.finish_reason is None, f"news of {news.id} after its end"
    result.ids += news.token_ids
    result.entries += news.logprobs or []
    result.finish_reason, result.stop_reason = news.finish_reason, news.stop_reason
    result.cached = news.num_cached_tokens
    result.prompt_logprobs = news.prompt_logprobs or result.prompt_logprobs
    result.embedding = news.embedding or result.embedding


def dense(entry: TokenLogprobs) -> np.ndarray:
    row = np.full(max(entry.ids[1:]) + 1, np.nan)
    row[entry.ids[1:]] = entry.logprobs[1:]
    return row


def assert_same(got: Result, want: Result, name: str = "", tolerance: float = 1e-4) -> None:
    """The same tokens, end and logprobs."""
    assert got.ids == want.ids, f"{name}: {got.ids} != {want.ids}"
    assert (got.finish_reason, got.stop_reason) == (want.finish_reason, want.stop_reason), name
    assert len(got.logprobs) == len(want.logprobs), name
    worst = max((abs(a - b) for a, b in zip(got.logprobs, want.logprobs, strict=True)), default=0.0)
    assert worst <= tolerance, f"{name}: logprobs differ by {worst}"


def assert_all_same(got: dict[str, Result], want: dict[str, Result], what: str = "", tolerance: float = 1e-4) -> None:
    for name, result in want.items():
        assert_same(got[name], result, f"{what} {name}", tolerance)
