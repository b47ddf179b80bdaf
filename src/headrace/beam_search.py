"""Beam search as a small loop over an engine: each beam's next step is a request for one token with its best alternatives.

    beams of all prompts --submit--> engine --the K likeliest next tokens of each--> BeamSearch.advance --> new beams

Beams are prompts like any other: what they have in common is found in the prefix cache, block by block, so they share memory
until they part; only the last, unfilled block is computed again for each. All beams of all prompts run in one step. Results
are those of Hugging Face Transformers' `generate(num_beams=...)`, end of text, penalties and early stops included.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from headrace.engine.messages import EngineOutput, EngineRequest
from headrace.engine.sharing import Reader, SharedCore
from headrace.errors import HeadraceError, ParameterError
from headrace.sampling.checks import MAX_LOGPROBS, check_float, check_int, packed
from headrace.sampling.params import AtMost, SamplingParams
from headrace.text.inputs import GivenPrompt
from headrace.text.stream import continuation

if TYPE_CHECKING:
    from headrace.engine.interface import AsyncEngine
    from headrace.model.tokenizer import Tokenizer

NONE = -1.0e9  # the score of a beam that is not there yet, as in Transformers


class Candidates(NamedTuple):
    """The likeliest next tokens of a beam and their logprobs, best first."""

    tokens: list[int]
    logprobs: list[float]


class BeamSearchParams(msgspec.Struct, kw_only=True):
    """vLLM's fields, and those of Transformers. Raises ParameterError.

    A finished beam's score is its sum of logprobs / (output tokens, the end token too) ** length_penalty. `early_stopping`:
    True ends a prompt when `beam_width` beams have ended; False when the best running beam could not overtake at its length;
    "never" when it could not at any length.
    """

    beam_width: int
    max_tokens: int = AtMost(16)
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    num_return_sequences: int | None = None  # the best ones; None: beam_width
    ignore_eos: bool = False
    temperature: float = 0.0  # nothing is sampled: 0 is the only value

    def __post_init__(self) -> None:
        check_int("beam_width", self.beam_width, 1, MAX_LOGPROBS // 2)
        check_int("max_tokens", self.max_tokens, 1, 2**31 - 1)
        check_float("length_penalty", self.length_penalty, -100.0, 100.0)
        check_int("num_return_sequences", self.num_return_sequences, 1, self.beam_width, optional=True)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ParameterError("early_stopping", self.early_stopping, 'true, false or "never"')
        if not isinstance(self.ignore_eos, bool):
            raise ParameterError("ignore_eos", self.ignore_eos, "true or false")
        if self.temperature != 0:
            raise ParameterError("temperature", self.temperature, "0: beam search does not sample")

    def num_candidates(self, num_eos: int) -> int:
        """Alternatives to ask for: enough for beam_width beams to go on if all the others end. Raises ParameterError."""
        count = max(2, 1 + num_eos) * self.beam_width
        if count > MAX_LOGPROBS:
            allowed = f"at most {MAX_LOGPROBS // max(2, 1 + num_eos)} for a model with {num_eos} end tokens"
            raise ParameterError("beam_width", self.beam_width, allowed)
        return count


@dataclass(slots=True)
class BeamSearchSequence:
    """One result. `tokens`: prompt and output; `text`: of the output, without its end token."""

    tokens: list[int]
    token_ids: list[int]  # of the output
    cum_logprob: float
    score: float
    finish_reason: str  # stop | length
    text: str = ""


@dataclass(slots=True)
class BeamSearchOutput:
    """The best sequences of one prompt, best first."""

    prompt: str | None
    prompt_token_ids: list[int]
    sequences: list[BeamSearchSequence] = field(default_factory=list)


@dataclass(slots=True)
class _Beam:
    ids: list[int]  # of the output
    logprob: float
    score: float = NONE
    ended: bool = False


class BeamSearch:
    """State of one prompt. `running` are the beams to expand, `advance` takes their candidates."""

    def __init__(self, prompt_ids: list[int], params: BeamSearchParams, eos_token_ids: Sequence[int], cache_salt: str = ""):
        if not isinstance(params, BeamSearchParams):
            raise ParameterError("params", params, "BeamSearchParams")
        self.prompt_ids, self.params, self.cache_salt = prompt_ids, params, cache_salt
        self.eos = frozenset(() if params.ignore_eos else eos_token_ids)
        self.num_candidates = params.num_candidates(len(self.eos))
        self.running = [_Beam([], 0.0)]
        self.done = False
        self._finished: list[_Beam] = []  # best first, at most beam_width

    def prompts(self) -> list[list[int]]:
        """What the engine is to continue, one for each running beam."""
        return [self.prompt_ids + beam.ids for beam in self.running]

    def advance(self, candidates: Sequence[Candidates]) -> None:
        """Take the best tokens of each running beam."""
        params, width = self.params, self.params.beam_width
        every = (
            (beam.logprob + logprob, beam, token)
            for beam, (tokens, logprobs) in zip(self.running, candidates, strict=True)
            for token, logprob in zip(tokens, logprobs, strict=True)
        )
        best = sorted(every, key=lambda c: -c[0])[: self.num_candidates]
        length = len(self.running[0].ids) + 1
        last = length >= params.max_tokens
        running, new = [], []
        for rank, (logprob, beam, token) in enumerate(best):
            child = _Beam([*beam.ids, token], logprob)
            if not last and token not in self.eos:
                running.append(child)
            elif rank < width:  # one that ends below the best is not good enough
                child.score, child.ended = logprob / length**params.length_penalty, True
                new.append(child)
        self._finished = sorted([*self._finished, *new], key=lambda b: -b.score)[:width]
        self.running = running[:width]
        self.done = not self.running or not self._may_improve(length) or (params.early_stopping is True and self._full)

    @property
    def _full(self) -> bool:
        return len(self._finished) == self.params.beam_width

    def _may_improve(self, length: int) -> bool:
        """Whether the best running beam might still push out the worst finished one."""
        if not self._full:
            return True
        params = self.params
        longest = params.early_stopping == "never" and params.length_penalty > 0
        possible = self.running[0].logprob / (params.max_tokens if longest else length) ** params.length_penalty
        return possible > self._finished[-1].score

    def results(self) -> list[BeamSearchSequence]:
        count = self.params.num_return_sequences or self.params.beam_width
        return [
            BeamSearchSequence(
                self.prompt_ids + beam.ids, beam.ids, beam.logprob, beam.score, "stop" if beam.ids[-1] in self.eos else "length"
            )
            for beam in self._finished[:count]
        ]

    def step_params(self) -> SamplingParams:
        """Of the request that expands one beam."""
        params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=self.num_candidates, ignore_eos=True, detokenize=False)
        return params.resolved({})


def candidates_of(news: EngineOutput) -> Candidates:
    """The alternatives in the news of a beam's request. Raises HeadraceError if it failed."""
    if news.refused is not None:
        raise ParameterError(*news.refused)
    if not news.logprobs:
        raise HeadraceError(news.error or f"a beam ended with {news.finish_reason}")
    entry = news.logprobs[0]
    return Candidates(entry.ids[1:], entry.logprobs[1:])  # the sampled one comes first, and once more in its place


def beams_in_core(
    shared: SharedCore, prompts: Sequence[tuple[GivenPrompt, array, SamplingParams]], params: BeamSearchParams,
    tokenizer: Tokenizer | None,
) -> list[BeamSearchOutput]:  # fmt: skip
    """All searches of prepared prompts, each with its own `max_tokens`; without a tokenizer beams have no text."""
    outputs, searches = [], []
    for given, _, complete in prompts:
        own = msgspec.structs.replace(params, max_tokens=complete.max_tokens)
        searches.append(BeamSearch(given.ids, own, complete.eos_token_ids, given.cache_salt))
        outputs.append(BeamSearchOutput(given.text, given.ids))
    search_in_core(shared, searches)
    for output, search in zip(outputs, searches, strict=True):
        output.sequences = search.results()
        if tokenizer is None:
            continue
        for sequence in output.sequences:
            shown = sequence.token_ids[:-1] if sequence.finish_reason == "stop" else sequence.token_ids
            sequence.text = continuation(tokenizer, output.prompt_token_ids, shown)
    return outputs


def search_in_core(shared: SharedCore, searches: Sequence[BeamSearch]) -> None:
    """Bring all searches to their ends, step by step together."""
    while active := [s for s in searches if not s.done]:
        found = [[Candidates([], [])] * len(s.running) for s in active]
        with Reader(shared) as reader:
            for i, search in enumerate(active):
                params = search.step_params()
                for b, prompt in enumerate(search.prompts()):
                    request = EngineRequest(shared.new_name(), packed(prompt), params, 0, cache_salt=search.cache_salt)
                    reader.add(request, (i, b))
            for (i, b), news in reader.news():
                found[i][b] = candidates_of(news)
        for search, candidates in zip(active, found, strict=True):
            search.advance(candidates)


async def run_in_engine(engine: AsyncEngine, search: BeamSearch, request_id: str, *, priority: int = 0) -> None:
    """Bring one search to its end in an engine that others use too."""
    params = search.step_params()

    async def expand(name: str, prompt: list[int]) -> Candidates:
        outputs = engine.generate(name, prompt, params, priority=priority, cache_salt=search.cache_salt)
        async with contextlib.aclosing(outputs):
            async for news in outputs:
                return candidates_of(news)
        raise HeadraceError("the engine ended a beam without a result")

    for step in itertools.count():
        if search.done:
            return
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(expand(f"{request_id}-{step}-{b}", p)) for b, p in enumerate(search.prompts())]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        search.advance([task.result() for task in tasks])
