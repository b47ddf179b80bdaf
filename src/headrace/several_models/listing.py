"""What a server of several models says of itself and of all of them; nothing here loads one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from headrace.api import ollama_models, service
from headrace.api.app import Handler
from headrace.api.body import read_json
from headrace.api.context import ApiContext
from headrace.api.errors import unavailable
from headrace.api.glass import GlassRoutes
from headrace.api.ollama_input import ShowRequest
from headrace.api.page_api import SceneRoutes
from headrace.api.service import json_response
from headrace.several_models.models import Models, chosen
from headrace.several_models.served import ServedModel
from headrace.several_models.switch import Entry, State

FOR_EVER = 100 * 365 * 86400.0


class OwnAnswers:
    """The handlers that stand for those of a server with one model."""

    def __init__(self, models: Models):
        self.models = models
        self.glass = _Nobody()
        self._instead: Mapping[Any, Handler] = MappingProxyType({
            service.models: self.list, service.one_model: self.one, service.ready: self.ready, ollama_models.tags: self.tags,
            ollama_models.running: self.running, ollama_models.show: self.show, ollama_models.pull: ollama_models.pull,
            GlassRoutes.events: self.events, GlassRoutes.text: self.text, SceneRoutes.server: self.sizes,
        })  # fmt: skip

    def instead_of(self, handler: Handler) -> Handler | None:
        return self._instead.get(getattr(handler, "__func__", handler))

    def _context(self, model: ServedModel) -> ApiContext:
        return model.ctx or model.unloaded

    def _card(self, model: ServedModel, entry: Entry, name: str) -> dict[str, Any]:
        card = service.model_card(self._context(model), name)
        state = {"state": entry.state.value, "memory_bytes": entry.size, "pinned": entry.pinned}
        return {**card, **state, **({"error": entry.error} if entry.state is State.FAILED else {})}

    async def list(self, ctx: ApiContext, request: Request) -> Response:
        """GET /v1/models: each with its state."""
        each = [(model, entry, name) for model, entry in self.models for name in (*model.spec.names, *model.adapters())]
        if "anthropic-version" in request.headers:
            data = [service.anthropic_card(self._context(model), name) for model, _, name in each]
            names = self.models.all_names
            return json_response({"data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]})
        return json_response({"object": "list", "data": [self._card(*one) for one in each], "models": []})

    async def one(self, ctx: ApiContext, request: Request) -> Response:
        asked = request.path_params["id"]
        number = chosen(self.models, asked)
        model, entry = self.models.served[number], self.models.entries[number]
        name = asked if asked in (*model.spec.names, *model.adapters()) else entry.name
        if "anthropic-version" in request.headers:
            return json_response(service.anthropic_card(self._context(model), name))
        return json_response(self._card(model, entry, name))

    async def ready(self, ctx: ApiContext, request: Request) -> Response:
        """GET /ready: 200 while the pinned models are loaded and make progress; the others come when they are asked for."""
        good = self.models.ready
        states = {entry.name: entry.state.value for entry in self.models.entries}
        return json_response({"ready": good, "draining": self.models.draining, "models": states}, 200 if good else 503)

    async def tags(self, ctx: ApiContext, request: Request) -> Response:
        each = map(self._context, self.models.served)
        return json_response({"models": [one for ctx in each for one in ollama_models.there(ctx)]})

    async def running(self, ctx: ApiContext, request: Request) -> Response:
        loaded = [(model.ctx, entry) for model, entry in self.models if model.ctx is not None]
        return json_response({"models": [one for ctx, entry in loaded for one in ollama_models.in_memory(ctx, _expiry(entry))]})

    async def show(self, ctx: ApiContext, request: Request) -> Response:
        """POST /api/show. Editors ask this of every model that there is."""
        body = await read_json(request, ShowRequest, ctx.config)
        name = body.model or body.name
        found = self._context(self.models.served[chosen(self.models, name, tagged=True)])
        return await ollama_models.described(found, name or found.model_names[0])

    # ---------------------------------------------------------------- the page's engine

    def _shown(self, request: Request) -> ServedModel:
        """The model of `?model=`; without, the one that is loaded and was used last."""
        name = request.query_params.get("model")
        number = self.models.latest() if name is None else chosen(self.models, name)
        if number is None or self.models.served[number].hub is None:
            raise unavailable("The model is not loaded: it is when it is asked something.", 5, "not_loaded")
        return self.models.served[number]

    async def events(self, ctx: ApiContext, request: Request) -> Response:
        model = self._shown(request)
        assert model.hub is not None and model.ctx is not None
        return await GlassRoutes(model.hub).events(model.ctx, request)

    async def sizes(self, ctx: ApiContext, request: Request) -> Response:
        """GET /glass/server?model="""
        found = self._shown(request).ctx
        assert found is not None
        return await SceneRoutes(None).server(found, request)

    async def text(self, ctx: ApiContext, request: Request) -> Response:
        """Of a request of any model."""
        name = request.query_params.get("id", "")
        for model in self.models.served:
            if model.ctx is not None and model.hub is not None and model.hub.known_ids(name, 0, 1) is not None:
                return await GlassRoutes(model.hub).text(model.ctx, request)
        return await GlassRoutes(self.glass).text(ctx, request)


class _Nobody:
    """A Glass of no requests."""

    def look(self, core: int) -> Any:
        raise NotImplementedError("each model has its own")

    async def token_ids(self, request_id: str, start: int, stop: int) -> list[int] | None:
        return None


def _expiry(entry: Entry) -> str:
    """When it would go by itself if nobody asked for it any more, as Ollama writes it."""
    seconds = entry.keep_alive if entry.asked_keep_alive is None else entry.asked_keep_alive
    if entry.pinned or seconds == math.inf or seconds > FOR_EVER:
        return ollama_models.NEVER
    return (datetime.now(UTC) + timedelta(seconds=max(0.0, seconds - entry.idle_seconds()))).strftime("%Y-%m-%dT%H:%M:%SZ")
