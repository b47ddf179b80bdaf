"""The endpoints that do not generate: models, health, readiness, version, metrics, tokens, embeddings."""

from __future__ import annotations

import base64
import math
import time
from array import array
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from headrace.api.body import read_json
from headrace.api.chat_completions import prompt_end, prompt_of
from headrace.api.chat_tools import tools_of, with_functions
from headrace.api.checks import check_bookkeeping, check_messages, check_neutral
from headrace.api.completions import prompts
from headrace.api.context import ApiContext, new_id
from headrace.api.errors import ApiError, allowed_only, bad_request, invalid, unsupported
from headrace.api.generation import run_all, seconds_left
from headrace.api.lifeline import Lifeline
from headrace.api.limits import Ticket
from headrace.api.protocol import Body, ChatTool
from headrace.sampling.checks import checked_ids
from headrace.sampling.params import SamplingParams

Found = TypeVar("Found")


def json_response(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def model_card(ctx: ApiContext, name: str) -> dict[str, Any]:
    found = {"id": name, "object": "model", "created": ctx.created, "owned_by": "headrace", "root": ctx.engine.model_name}
    if adapter := ctx.adapter_of(name):
        found |= {"root": ctx.engine.adapters()[adapter].path, "parent": ctx.model_names[0]}
    if ctx.engine.status().loaded:
        found["max_model_len"] = ctx.engine.max_model_len
    return found


def anthropic_card(ctx: ApiContext, name: str) -> dict[str, Any]:
    created = datetime.fromtimestamp(ctx.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    most = ctx.engine.max_model_len if ctx.engine.status().loaded else None
    return {
        "type": "model", "id": name, "display_name": name, "created_at": created, "lifecycle": "active",
        "max_input_tokens": most, "max_tokens": most,
    }  # fmt: skip


async def models(ctx: ApiContext, request: Request) -> Response:
    """GET /v1/models, in Anthropic's form for its clients. `models` is what Codex asks for."""
    names = ctx.all_names
    if "anthropic-version" in request.headers:
        data = [anthropic_card(ctx, name) for name in names]
        return json_response({"data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]})
    return json_response({"object": "list", "data": [model_card(ctx, name) for name in names], "models": []})


async def one_model(ctx: ApiContext, request: Request) -> Response:
    """GET /v1/models/{id}; ids may hold slashes."""
    form = anthropic_card if "anthropic-version" in request.headers else model_card
    return json_response(form(ctx, ctx.check_model(request.path_params["id"])))


async def health(ctx: ApiContext, request: Request) -> Response:
    """Liveness: 503 only when a restart of this process would help."""
    return Response(status_code=200 if ctx.engine.status().alive else 503)


async def ready(ctx: ApiContext, request: Request) -> Response:
    """Readiness: send requests here."""
    status = ctx.engine.status()
    state = {"loaded": status.loaded, "alive": status.alive, "progressing": status.progressing, "draining": status.draining}
    good = status.loaded and status.alive and status.progressing and not status.draining
    words = "ready" if good else "draining" if status.draining else status.doing if status.alive else "given up"
    return json_response({"ready": good, "state": words, **state}, 200 if good else 503)


@cache
def package_version() -> str:
    try:
        return version("headrace")
    except PackageNotFoundError:
        return "unknown"


async def server_version(ctx: ApiContext, request: Request) -> Response:
    return json_response({"version": package_version()})


async def metrics_page(ctx: ApiContext, request: Request) -> Response:
    data, media_type = await ctx.metrics.page()
    return Response(data, headers={"content-type": media_type})


class EmbeddingRequest(Body, kw_only=True):
    """POST /v1/embeddings."""

    input: str | list[Any]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    # neutral only: vLLM's
    normalize: Any = None
    use_activation: Any = None
    softmax: Any = None
    embed_dtype: Any = None
    endianness: Any = None


NEUTRAL = {
    "normalize": (True,), "use_activation": (True,), "softmax": (True,), "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
}  # fmt: skip


class TokenizeRequest(Body, kw_only=True):
    """POST /tokenize: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[ChatTool] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None  # default: true for a text, false for a conversation
    return_token_strs: bool | None = None
    chat_template: Any = None  # refused
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Body, kw_only=True):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None


async def tokenize(ctx: ApiContext, request: Request) -> Response:
    """POST /tokenize."""
    body = await read_json(request, TokenizeRequest, ctx.config)
    ctx.check_model(body.model, optional=True)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("Give prompt or messages: one of them.", "prompt", "invalid_value")
    if body.chat_template is not None:
        raise unsupported("chat_template", "a request may not bring its own template.")
    if body.prompt is not None:
        for name in ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
            if getattr(body, name):
                raise allowed_only(name, "with messages")
        special = body.add_special_tokens is not False
        [ids] = await ctx.tokenize([body.prompt], special=special, field="prompt", truncated=True)
    else:
        assert body.messages is not None
        check_messages(body.messages)
        kwargs, special, tools = body.chat_template_kwargs, bool(body.add_special_tokens), tools_of(body.tools)
        history = with_functions(body.messages, tools)
        ids, _ = await prompt_of(
            ctx, history, tools.functions, kwargs, special=special, truncated=True, **prompt_end(body)
        )  # fmt: skip
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": ctx.engine.max_model_len, "tokens": ids, "token_strs": None}
    if body.return_token_strs:
        answer["token_strs"] = [ctx.engine.tokenizer.token_to_text(i) for i in ids]
    return json_response(answer)


async def detokenize(ctx: ApiContext, request: Request) -> Response:
    """POST /detokenize."""
    body = await read_json(request, DetokenizeRequest, ctx.config)
    ctx.check_model(body.model, optional=True)
    tokenizer = ctx.engine.tokenizer
    checked_ids(body.tokens, tokenizer.vocab_size, "tokens", tokenizer.valid_ids(tokenizer.vocab_size))
    text = await ctx.in_thread(lambda: tokenizer.decode(body.tokens, skip_special_tokens=False))
    return json_response({"prompt": text})


async def embeddings(ctx: ApiContext, request: Request) -> Response:
    """POST /v1/embeddings: pooled hidden states of the loaded model, normalized."""
    body = await read_json(request, EmbeddingRequest, ctx.config)
    model = ctx.check_model(body.model)
    ctx.refuse_adapter(body.model)
    check_bookkeeping(ctx, body)
    check_neutral(body, NEUTRAL)
    size = ctx.engine.model_config.hidden_size
    if body.dimensions is not None and body.dimensions != size:
        raise invalid("dimensions", f"got {body.dimensions}, allowed: {size}.")
    batch = await _ids_of(ctx, body)
    vectors = await vectors_of(ctx, request, batch, body)
    tokens = sum(map(len, batch))
    data = [{"object": "embedding", "index": i, "embedding": _encoded(body, v)} for i, v in enumerate(vectors)]
    return json_response(
        {"object": "list", "model": model, "data": data, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}
    )


async def vectors_of(ctx: ApiContext, request: Request, batch: list[array], body: Any) -> list[list[float]]:
    """Of each prompt. `body` may have a priority and a cache_salt."""
    return await of_each(ctx, request, batch, new_id("embd-"), lambda name, ids: _vector(ctx, name, ids, body))


async def of_each(
    ctx: ApiContext, request: Request, batch: list[array], name: str, compute: Callable[[str, array], Awaitable[Found]]
) -> list[Found]:
    """What `compute` finds of each prompt, by an id of the engine's requests and the prompt: all are admitted together, and end
    together with the client."""
    found: dict[int, Found] = {}
    tokens, began = sum(map(len, batch)), time.monotonic()

    async def one(i: int, ids: array, ticket: Ticket) -> None:
        found[i] = await compute(f"{name}-{i}", ids)
        ticket.started(len(ids))
        ticket.ended()

    async with Lifeline(request.receive, seconds_left(request)):
        with await ctx.limits.admit(len(batch), tokens) as ticket:
            request.state.body.release()
            await run_all([one(i, ids, ticket) for i, ids in enumerate(batch)])
    if ctx.tracing is not None:
        ctx.tracing.prompts_ended(request.scope["path"], began, tokens, ctx.model_names[0])
    return [found[i] for i in range(len(batch))]


async def _ids_of(ctx: ApiContext, body: EmbeddingRequest) -> list[array]:
    special, cut = body.add_special_tokens is not False, body.truncate_prompt_tokens is not None
    given = prompts(body.input, "input", ctx.config.max_prompts)
    params = SamplingParams(max_tokens=1, truncate_prompt_tokens=body.truncate_prompt_tokens)
    batch = await ctx.tokenize(given, special=special, field="input", truncated=cut)
    return [(await ctx.check_prompt(ids, params, field="input", limit=""))[0] for ids in batch]


async def _vector(ctx: ApiContext, request_id: str, ids: array, body: Any) -> list[float]:
    pooling, salt = ctx.config.embedding_pooling, body.cache_salt or ""
    vector = await ctx.engine.embed(request_id, ids, pooling, priority=body.priority or 0, cache_salt=salt)
    if not all(map(math.isfinite, vector)):
        raise ApiError(500, "The model produced values that are not finite.", code="engine_error")
    return vector


def _encoded(body: EmbeddingRequest, vector: list[float]) -> list[float] | str:
    if body.encoding_format != "base64":
        return vector
    return base64.b64encode(np.asarray(vector, dtype="<f4").tobytes()).decode()
