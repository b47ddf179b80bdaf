"""Adapters that come and go while the server runs: for its operator, who has a key of his own (middleware.py)."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headrace.api.body import read_json
from headrace.api.context import ApiContext
from headrace.api.errors import bad_request, invalid
from headrace.api.protocol import Body
from headrace.errors import CheckpointError


class LoadAdapterRequest(Body, kw_only=True):
    """POST /v1/load_lora_adapter."""

    lora_name: str
    lora_path: str
    model: str | None = None  # whose adapter it is; a name is needed where there are several
    load_inplace: bool | None = None  # false: refuse a name that is there; else it means the new content from now on


class UnloadAdapterRequest(Body, kw_only=True):
    """POST /v1/unload_lora_adapter."""

    lora_name: str
    model: str | None = None


async def load_adapter(ctx: ApiContext, request: Request) -> Response:
    """When this is answered, requests may name it."""
    body = await read_json(request, LoadAdapterRequest, ctx.config)
    ctx.check_model(body.model, optional=True)
    if body.lora_name in ctx.model_names:
        raise invalid("lora_name", "this is the name of the model itself.")
    if body.lora_name in ctx.elsewhere():
        raise invalid("lora_name", "another model of this server, or its adapter, has this name.")
    try:
        await ctx.engine.load_adapter(body.lora_name, body.lora_path, body.load_inplace is not False)
    except CheckpointError as error:
        raise bad_request(str(error), "lora_path", "invalid_value") from None
    return _answer(body.lora_name, "loaded")


async def unload_adapter(ctx: ApiContext, request: Request) -> Response:
    """When this is answered, the last request of it has ended."""
    body = await read_json(request, UnloadAdapterRequest, ctx.config)
    ctx.check_model(body.model, optional=True)
    await ctx.engine.unload_adapter(body.lora_name)
    return _answer(body.lora_name, "unloaded")


def _answer(name: str, status: str) -> Response:
    return Response(msgspec.json.encode({"id": name, "object": "model", "status": status}), media_type="application/json")
