"""Steps with prompts one by one: the first token of a lone prompt, and prompts that are computed beside decodes."""

from __future__ import annotations

import random
import statistics
import time
from array import array
from typing import Any

from headrace.engine.core import EngineCore
from headrace.engine.messages import EngineRequest
from headrace.sampling.params import SamplingParams

FIRST_TOKENS = (128, 1024)  # prompts of which the first token is waited for
MIXED = (64, 512)  # decodes, tokens of each prompt beside them
CONTEXT = 128  # of the decodes, at first
STEPS, WARM = 24, 6


def mixed_step_seconds(core: EngineCore, vocab_size: int, decodes: int, tokens: int) -> tuple[float, list[int]]:
    """The median time of a step of so many decodes and one new prompt, each such step behind another; and the tokens that each
    decode has before it in the middle of the steps. The core must be idle, and is so again."""
    rng = random.Random(7)

    def add(name: str, length: int, outputs: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=outputs, ignore_eos=True).resolved({})
        core.add(EngineRequest(name, array("i", (rng.randrange(vocab_size) for _ in range(length))), params, 1))

    for i in range(decodes):
        add(f"decode {i}", CONTEXT, STEPS + WARM + decodes)
    while len(core.scheduler.decoding) < decodes:
        core.step()
    seconds = []
    for i in range(WARM + STEPS):
        add(f"prompt {i}", tokens, 1)
        began = time.perf_counter()
        core.step()
        seconds.append(time.perf_counter() - began)
    contexts = [request.num_tokens - STEPS // 2 for request in core.scheduler.decoding[:decodes]]
    for i in range(decodes):
        core.abort(f"decode {i}")
    while core.has_work:
        core.step()
    return statistics.median(seconds[WARM:]), contexts


class PromptBench:
    """Of an LLM of which nobody else asks anything."""

    def __init__(self, bench: Any):
        self._bench, self._llm = bench, bench.llm
        self._longest = bench.llm.engine.config.max_model_len

    def results(self, repeat: int) -> list[dict[str, Any]]:
        """Of all that fits the model's length, and of mixed steps where a prompt has a seat beside the decodes."""
        found = [self.first_token(tokens, repeat) for tokens in FIRST_TOKENS if tokens < self._longest]
        seats = self._llm.engine.config.max_num_seqs
        if max(MIXED[1] + 1, CONTEXT + STEPS + WARM + MIXED[0]) <= self._longest and MIXED[0] < seats:
            found.append(self.mixed(*MIXED))
        return found

    def first_token(self, tokens: int, repeat: int) -> dict[str, Any]:
        """Milliseconds from a call with one prompt to its first token."""
        seconds = statistics.median(
            self._bench.timed(self._bench.prompts_of(1, tokens), [1], 0.0) for _ in range(max(repeat, 3) + 2)
        )
        return self._bench.result(
            f"first token of {tokens}", 0.0, 1e3 * seconds, "ms", lambda limits: 1e3 * limits.mixed_seconds([], tokens),
            input_len=tokens, host_ms_per_step=self._bench.host_milliseconds(),
        )  # fmt: skip

    def mixed(self, decodes: int, tokens: int) -> dict[str, Any]:
        """Milliseconds of a step."""
        self._llm.reset_prefix_cache()
        core = self._llm.engine.core
        core.times.recent_host.clear()
        seconds, contexts = mixed_step_seconds(core, self._llm.engine.model.vocab_size, decodes, tokens)
        return self._bench.result(
            f"mixed {decodes} + {tokens}", 0.0, 1e3 * seconds, "ms",
            lambda limits: 1e3 * limits.mixed_seconds(contexts, tokens), decodes=decodes, input_len=tokens,
            host_ms_per_step=self._bench.host_milliseconds(),
        )  # fmt: skip
