"""How likely a model finds given texts: the logprob of every token, and the perplexity, also of texts beyond the context.

A text that fits the context is one prompt. A longer one is read through a window that moves on by `stride` tokens; what the
window before has scored already is context only (the method of Hugging Face's page on perplexity). Logits exist for a bounded
number of rows at a time (sampling/logprobs.py); what is kept of a token is one number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headrace.engine.messages import EngineRequest
from headrace.engine.sharing import Reader, SharedCore
from headrace.errors import HeadraceError
from headrace.sampling.checks import check_int, packed
from headrace.sampling.params import SamplingParams
from headrace.text.inputs import GivenPrompt


@dataclass(slots=True)
class ScoreOutput:
    """`logprobs[i]` is that of token i after the tokens before it; the first has none."""

    prompt: str | None
    prompt_token_ids: list[int]
    logprobs: list[float | None]

    @property
    def num_scored(self) -> int:
        return len(self.logprobs) - 1

    @property
    def logprob(self) -> float:
        """Of the whole text after its first token."""
        return math.fsum(p for p in self.logprobs if p is not None)

    @property
    def perplexity(self) -> float:
        """exp of the mean negative logprob; NaN for a text of one token, of which nothing is said."""
        if self.num_scored < 1:
            return math.nan
        mean = -self.logprob / self.num_scored
        return math.exp(mean) if mean < 709 else math.inf


def windows(length: int, size: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(begin, first token that is scored here, end) of each window over a text of `length` tokens."""
    scored, end = 1, min(size, length)
    while True:
        yield max(0, end - size), scored, end
        if end == length:
            return
        scored, end = end, min(end + stride, length)


def score_in_core(
    shared: SharedCore, texts: Sequence[GivenPrompt], max_model_len: int, stride: int | None = None
) -> list[list[float | None]]:
    """Logprobs for each text; all windows of all texts run together."""
    size = max_model_len - 1  # the engine samples one token behind the prompt, which is left out
    check_int("stride", stride, 1, size - 1, optional=True)
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False).resolved({})
    results: list[list[float | None]] = [[None] * len(text.ids) for text in texts]
    with Reader(shared) as reader:
        for t, (_, ids, salt) in enumerate(texts):
            if len(ids) == 1:
                continue
            for begin, first, end in windows(len(ids), size, stride or max(1, size // 2)):
                request = EngineRequest(shared.new_name(), packed(ids[begin:end]), params, 0, cache_salt=salt)
                reader.add(request, (t, begin, first))
        for (t, begin, first), news in reader.news():
            entries = news.prompt_logprobs
            if entries is None:
                raise HeadraceError(news.error or f"a text could not be scored: {news.finish_reason}")
            new = [None if e is None else e.logprobs[0] for e in entries[first - begin :]]
            results[t][first : first + len(new)] = new
    return results
