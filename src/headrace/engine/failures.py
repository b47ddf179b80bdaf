"""Why a request failed while its output grew, and which of its fields is to blame for that, if one is."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.sampling.checks import held_off
from headrace.sampling.params import SamplingParams
from headrace.scheduler.request import Request
from headrace.structured_output.manager import StructuredOutput


def why_failed(request: Request, structured: StructuredOutput | None) -> tuple[str, str | None]:
    """In words, and the field's name."""
    params, allowed = request.params, None
    if structured is not None and params.structured_outputs is not None:
        structured.follow(request.id, request.output_ids)
        if (why := structured.error(request.id)) is not None:
            return f"the output cannot follow its grammar any further: {why}", "structured_outputs"
        allowed = structured.allowed(request.id)
    if request.exception is not None:
        return f"a logits processor failed: {request.exception!r}", None
    if params.allowed_token_ids:
        allowed = set(params.allowed_token_ids) if allowed is None else allowed & set(params.allowed_token_ids)
    if allowed is not None and allowed <= banned(params, request.output_ids):
        limits = {
            "structured_outputs": params.structured_outputs, "allowed_token_ids": params.allowed_token_ids,
            "bad_words": params.bad_word_ids,
        }  # fmt: skip
        given = [field for field, limit in limits.items() if limit]
        return f"no token can follow the first {len(request.output_ids)}: {' and '.join(given)} leave none", given[-1]
    return "the model produced NaN logits for this request", None


def banned(params: SamplingParams, output_ids: Sequence[int]) -> set[int]:
    """The tokens that may not follow. Bad words are looked for in the output only."""
    early = held_off(params) if len(output_ids) < params.min_tokens else []
    words = (word for word in params.bad_word_ids if len(word) <= len(output_ids) + 1)
    return {*early, *(word[-1] for word in words if list(output_ids[len(output_ids) + 1 - len(word) :]) == word[:-1])}
