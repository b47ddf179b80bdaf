"""`LLM.embed`: the vectors of prompts, as /v1/embeddings gives them; names and fields are vLLM's."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.engine.embedding import POOLINGS, embedding_request
from headrace.engine.sharing import Reader, SharedCore
from headrace.errors import HeadraceError, ParameterError
from headrace.progress import token_progress
from headrace.sampling.params import SamplingParams
from headrace.text.inputs import GivenPrompt


@dataclass(slots=True)
class EmbeddingOutput:
    """A vector of length 1."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """A prompt and its vector."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


def embed_in_core(
    shared: SharedCore, prompts: Sequence[tuple[GivenPrompt, array, SamplingParams]], pooling: str, use_tqdm: bool
) -> list[EmbeddingRequestOutput]:
    """The vectors of prepared prompts, which run together. Raises ParameterError, and HeadraceError where there is none."""
    if pooling not in POOLINGS:
        raise ParameterError("pooling", pooling, " or ".join(POOLINGS))
    found: dict[int, EmbeddingRequestOutput] = {}
    with Reader(shared) as reader:
        for i, (given, ids, _) in enumerate(prompts):
            reader.add(embedding_request(shared.new_name(), ids, pooling, cache_salt=given.cache_salt), i)
        with token_progress(len(prompts), reader.num_tokens, use_tqdm) as progress:
            for i, news in reader.news(progress):
                if news.finish_reason is None:
                    continue
                if news.embedding is None or not all(map(math.isfinite, news.embedding)):
                    raise HeadraceError(news.error or f"prompt {i} has no vector of finite numbers: {news.finish_reason}")
                vector = EmbeddingOutput(news.embedding)
                found[i] = EmbeddingRequestOutput(news.id, vector, prompts[i][0].ids, news.num_cached_tokens)
                if progress is not None:
                    progress(1)
    return [found[i] for i in range(len(prompts))]
