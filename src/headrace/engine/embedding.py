"""The request that asks a core for the vector of a prompt: one sampled token, which nobody reads."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.engine.messages import EngineRequest
from headrace.sampling.checks import packed
from headrace.sampling.params import SamplingParams

POOLINGS = ("mean", "last")  # of the hidden states behind the last norm; the vector has length 1


def embedding_request(
    request_id: str, prompt_ids: Sequence[int], pooling: str, *, priority: int = 0, cache_salt: str = ""
) -> EngineRequest:
    params = SamplingParams(max_tokens=1, temperature=0.0).resolved({})
    return EngineRequest(request_id, packed(prompt_ids), params, 0, priority, cache_salt, pooling=pooling)
