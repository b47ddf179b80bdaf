"""POST /v1/embeddings: pooled hidden states of the loaded model, normalized."""

from __future__ import annotations

import base64
import math
from array import array

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from headrace.api.body import read_json
from headrace.api.context import ApiContext, new_id
from headrace.api.errors import ApiError, bad_request
from headrace.api.generation import run_all, seconds_left
from headrace.api.lifeline import Lifeline
from headrace.api.limits import Ticket
from headrace.api.options import check_priority, check_text
from headrace.api.protocol import EmbeddingRequest, prompts
from headrace.api.service import json_response
from headrace.sampling.params import SamplingParams


async def embeddings(ctx: ApiContext, request: Request) -> Response:
    body = await read_json(request, EmbeddingRequest, ctx.config)
    model = ctx.check_model(body.model)
    check_priority(ctx, body.priority)
    check_text("cache_salt", body.cache_salt)
    size = ctx.engine.model_config.hidden_size
    if body.dimensions is not None and body.dimensions != size:
        raise bad_request(f"dimensions: got {body.dimensions}, allowed: {size}.", "dimensions", "invalid_value")
    batch = await _prompts(ctx, body)
    vectors: list[list[float]] = [[]] * len(batch)
    name = new_id("embd-")

    tokens = sum(map(len, batch))

    async def one(i: int, ids: array, ticket: Ticket) -> None:
        vectors[i] = await _vector(ctx, f"{name}-{i}", ids, body)
        ticket.started(len(ids))
        ticket.ended()

    async with Lifeline(request.receive, seconds_left(request)):
        with ctx.limits.admit(len(batch), tokens) as ticket:
            await run_all([one(i, ids, ticket) for i, ids in enumerate(batch)])
    data = [{"object": "embedding", "index": i, "embedding": _encoded(body, v)} for i, v in enumerate(vectors)]
    return json_response(
        {"object": "list", "model": model, "data": data, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}
    )


async def _prompts(ctx: ApiContext, body: EmbeddingRequest) -> list[array]:
    special, cut = body.add_special_tokens is not False, body.truncate_prompt_tokens is not None
    given = prompts(body.input, "input", ctx.config.max_prompts)
    params = SamplingParams(max_tokens=1, truncate_prompt_tokens=body.truncate_prompt_tokens)
    batch = await ctx.tokenize(given, special=special, field="input", truncated=cut)
    return [(await ctx.check_prompt(ids, params, field="input"))[0] for ids in batch]


async def _vector(ctx: ApiContext, request_id: str, ids: array, body: EmbeddingRequest) -> list[float]:
    pooling, salt = ctx.config.embedding_pooling, body.cache_salt or ""
    vector = await ctx.engine.embed(request_id, ids, pooling, priority=body.priority or 0, cache_salt=salt)
    if not all(map(math.isfinite, vector)):
        raise ApiError(500, "The model produced values that are not finite.", code="engine_error")
    return vector


def _encoded(body: EmbeddingRequest, vector: list[float]) -> list[float] | str:
    if body.encoding_format != "base64":
        return vector
    return base64.b64encode(np.asarray(vector, dtype="<f4").tobytes()).decode()
