"""What Ollama's API says of models: /api/tags, /api/ps, /api/show, /api/version; and what it would do with their files."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headrace.api.body import read_json
from headrace.api.context import LATEST, ApiContext
from headrace.api.errors import ApiError
from headrace.api.ollama_input import DEFAULTS, OPTIONS, ShowRequest, model_of
from headrace.api.protocol import Body
from headrace.api.service import json_response
from headrace.api.sse import LINES
from headrace.errors import ParameterError
from headrace.model.formats.gguf import gguf_parts
from headrace.sampling.params import SamplingParams

VERSION = "0.12.11"  # of Ollama, whose API this is: clients want one that knows what they use
NEVER = "9999-12-31T23:59:59Z"  # a model stays loaded
WEIGHTS = (".safetensors", ".gguf")
LEVELS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
NOT_HERE = (
    ("POST", "/api/push"), ("POST", "/api/create"), ("POST", "/api/copy"), ("DELETE", "/api/delete"),
    ("POST", "/api/blobs/{digest}"), ("GET", "/api/blobs/{digest}"),
)  # fmt: skip


class PullRequest(Body, kw_only=True):
    """POST /api/pull."""

    model: str | None = None
    name: str | None = None
    insecure: bool | None = None  # ignored: nothing is fetched
    stream: bool | None = None


async def api_version(ctx: ApiContext, request: Request) -> Response:
    return json_response({"version": VERSION})


async def tags(ctx: ApiContext, request: Request) -> Response:
    return json_response({"models": there(ctx)})


def there(ctx: ApiContext) -> list[dict[str, Any]]:
    """The model under each of its names."""
    known = {"capabilities": _capabilities(ctx)} if ctx.engine.status().loaded else {}
    return [{**_model(ctx, n), "modified_at": _since(ctx), **known} for n in ctx.all_names]


async def running(ctx: ApiContext, request: Request) -> Response:
    """GET /api/ps."""
    return json_response({"models": in_memory(ctx)})


def in_memory(ctx: ApiContext, expires_at: str = NEVER) -> list[dict[str, Any]]:
    """The model under each of its names, once it is loaded."""
    if not ctx.engine.status().loaded:
        return []
    on_card = ctx.engine.info is not None and ctx.engine.info.device.startswith("cuda")
    shown = []
    for name in ctx.all_names:
        model = _model(ctx, name)
        rest = {"size_vram": model["size"] if on_card else 0, "context_length": ctx.engine.max_model_len}
        shown.append({**model, "expires_at": expires_at, **rest})
    return shown


async def show(ctx: ApiContext, request: Request) -> Response:
    body = await read_json(request, ShowRequest, ctx.config)
    return await described(ctx, model_of(ctx, body.model or body.name))


async def described(ctx: ApiContext, name: str) -> Response:
    """The model as /api/show tells of it."""
    config, tokenizer = ctx.engine.model_config, ctx.engine.tokenizer
    kind = config.family
    info = {
        "general.architecture": kind, "general.basename": ctx.engine.model_name,
        f"{kind}.context_length": ctx.engine.max_model_len,
        f"{kind}.embedding_length": config.hidden_size, f"{kind}.block_count": config.num_layers,
        f"{kind}.feed_forward_length": config.intermediate_size, f"{kind}.attention.head_count": config.num_heads,
        f"{kind}.attention.head_count_kv": config.num_kv_heads, f"{kind}.vocab_size": config.vocab_size,
        "tokenizer.ggml.model": "gpt2" if tokenizer.byte_level else "llama",
    }  # fmt: skip
    return json_response(
        {
            "modelfile": f"FROM {name}\n", "parameters": _parameters(ctx),
            "template": _template(ctx), "details": _details(ctx), "model_info": info,
            "capabilities": _capabilities(ctx), "modified_at": _since(ctx),
        }
    )  # fmt: skip


async def pull(ctx: ApiContext, request: Request) -> Response:
    """There is nothing to fetch of a model that is served; any other is not for a request to choose."""
    body = await read_json(request, PullRequest, ctx.config)
    try:
        model_of(ctx, body.model or body.name)
    except ApiError as error:
        raise _refusal(f"{error.message}; this server does not fetch models") if error.status == 404 else error from None
    done = {"status": "success"}
    if body.stream is False:
        return json_response(done)
    return Response(msgspec.json.encode(done) + b"\n", media_type=LINES.decode())


async def not_here(ctx: ApiContext, request: Request) -> Response:
    raise _refusal(f"{request.scope['path']}: this server does not manage models; its operator chooses the one that is served")


def _refusal(text: str) -> ApiError:
    return ApiError(501, text, code="not_implemented")


def _parameters(ctx: ApiContext) -> str:
    """How a request samples that says nothing, by this API's names."""
    theirs = {ours: name for name, ours in OPTIONS.items()}
    own = {k: v for k, v in ctx.engine.generation_defaults.items() if v is not None}
    return "\n".join(f"{theirs[k]} {v:g}" for k, v in SamplingParams().resolved(DEFAULTS | own).told().items())


def _template(ctx: ApiContext) -> str:
    """The chat template, which is jinja2 here; "" where the model has none."""
    try:
        return ctx.chat_template.source(tools=True)
    except ParameterError:
        return ""


def _since(ctx: ApiContext) -> str:
    return datetime.fromtimestamp(ctx.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _model(ctx: ApiContext, name: str) -> dict[str, Any]:
    tagged = name if ":" in name.rpartition("/")[2] else name + LATEST
    digest = hashlib.sha256(ctx.engine.model_name.encode()).hexdigest()  # of the name: it only tells models apart
    return {"name": tagged, "model": tagged, "size": _size(ctx), "digest": digest, "details": _details(ctx)}


def _details(ctx: ApiContext) -> dict[str, Any]:
    path = ctx.engine.config.model
    form = "gguf" if path is None or path.endswith(".gguf") else "safetensors"
    details: dict[str, Any] = {
        "parent_model": "", "format": form, "family": "", "families": [], "parameter_size": "", "quantization_level": "",
    }  # fmt: skip
    if ctx.engine.status().loaded:
        config = ctx.engine.model_config
        details |= {
            "family": config.family, "families": [config.family], "context_length": ctx.engine.max_model_len,
            "embedding_length": config.hidden_size,
        }  # fmt: skip
        if form == "safetensors":  # a GGUF file has tensors of several
            details["quantization_level"] = LEVELS.get(config.dtype, "")
    return details


def _size(ctx: ApiContext) -> int:
    """Bytes of the weights' files; 0 where the model is not a path."""
    path = Path(ctx.engine.config.model or "?")
    files = gguf_parts(path) if path.is_file() else path.glob("*") if path.is_dir() else ()
    return sum(file.stat().st_size for file in files if file.suffix in WEIGHTS)


def _capabilities(ctx: ApiContext) -> list[str]:
    form = ctx.answer_format
    return ["completion", *(["tools"] if form.tools else []), *(["thinking"] if form.reasoning else [])]
