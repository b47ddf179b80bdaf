"""The endpoints that do not generate: models, health, readiness, version, metrics."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headrace.api.context import ApiContext


def json_response(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _model(ctx: ApiContext, name: str) -> dict[str, Any]:
    found = {"id": name, "object": "model", "created": ctx.created, "owned_by": "headrace", "root": ctx.engine.model_name}
    if ctx.engine.status().loaded:
        found["max_model_len"] = ctx.engine.max_model_len
    return found


async def models(ctx: ApiContext, request: Request) -> Response:
    """GET /v1/models."""
    return json_response({"object": "list", "data": [_model(ctx, name) for name in ctx.model_names]})


async def one_model(ctx: ApiContext, request: Request) -> Response:
    """GET /v1/models/{id}; ids may hold slashes."""
    return json_response(_model(ctx, ctx.check_model(request.path_params["id"])))


async def health(ctx: ApiContext, request: Request) -> Response:
    """Liveness: 503 only when a restart of this process would help."""
    return Response(status_code=200 if ctx.engine.status().alive else 503)


async def ready(ctx: ApiContext, request: Request) -> Response:
    """Readiness: send requests here."""
    status = ctx.engine.status()
    state = {"loaded": status.loaded, "alive": status.alive, "progressing": status.progressing, "draining": status.draining}
    good = status.loaded and status.alive and status.progressing and not status.draining
    return json_response({"ready": good, **state}, 200 if good else 503)


@cache
def package_version() -> str:
    try:
        return version("headrace")
    except PackageNotFoundError:
        return "unknown"


async def server_version(ctx: ApiContext, request: Request) -> Response:
    return json_response({"version": package_version()})


async def metrics_page(ctx: ApiContext, request: Request) -> Response:
    data, media_type = ctx.metrics.render()
    return Response(data, headers={"content-type": media_type})
