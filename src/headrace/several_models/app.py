"""The application of several models: the same endpoints, each request with the model that its body names.

A body is read here as far as `model`; the model is loaded if it is not; and the handler that one model has answers, in that
model's context, while it cannot be unloaded. What says something of the server, or of all models, is in listing.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from headrace.api.app import Endpoint, Handler, create_app
from headrace.api.body import check_media_type, decode, from_validation, read_body
from headrace.api.config import ServerConfig
from headrace.api.context import ApiContext
from headrace.api.errors import bad_request, invalid, unavailable
from headrace.api.generation import seconds_left
from headrace.api.lifeline import Lifeline, when_over
from headrace.api.ollama import now
from headrace.api.service import json_response
from headrace.several_models.listing import OwnAnswers
from headrace.several_models.metrics import ModelsMetrics
from headrace.several_models.models import Models, chosen
from headrace.several_models.switch import Entry, LoadFailedError, TooManyWaitError

_DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:ns|us|µs|ms|s|m|h))+")
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
# what an answer without words has, of requests that only ask for a model to be unloaded
EMPTY: Mapping[str, dict[str, Any]] = MappingProxyType({
    "/api/chat": {"message": {"role": "assistant", "content": ""}}, "/api/generate": {"response": ""},
})  # fmt: skip
BUSY_RETRY = 5  # seconds: loading takes about as long


class Named(msgspec.Struct):
    """What of a body decides where it goes."""

    model: str | None = None
    lora_name: str | None = None  # of an adapter that is to come or go
    name: str | None = None  # of the model, in older clients of /api/show
    keep_alive: Any = None  # Ollama's, and what is empty where a model is only to be loaded or unloaded
    prompt: Any = None
    messages: Any = None


def create_models_app(models: Models, config: ServerConfig, metrics: ModelsMetrics) -> Starlette:
    """It does not own the models."""
    own = OwnAnswers(models)

    def endpoint(ctx: ApiContext, handler: Handler, needs_engine: bool) -> Endpoint:
        if instead := own.instead_of(handler):
            return Endpoint(ctx, instead, needs_engine)
        return ModelEndpoint(ctx, handler, models) if needs_engine else Endpoint(ctx, handler, False)

    app = create_app(models, config, metrics, glass=own.glass, endpoint=endpoint)  # type: ignore[arg-type]
    for model in models.served:
        model.front = app.state.api
    return app


class ModelEndpoint(Endpoint):
    """A handler in the context of the model that the request names."""

    def __init__(self, ctx: ApiContext, handler: Handler, models: Models):
        super().__init__(ctx, handler, needs_engine=True)
        self.models = models

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.ctx.limits.check_ready()
        request = Request(scope, receive, send)
        check_media_type(request)  # a page of somebody else's must not have models loaded
        data = await read_body(request, self.ctx.config)
        ollama = scope["path"].startswith("/api/")
        named = read_named(data)
        asked = named.name if ollama and named.model is None else named.model
        if asked is None and named.lora_name in self.models.adapters():
            asked = named.lora_name
        number = chosen(self.models, asked, ollama)
        model, entry = self.models.served[number], self.models.entries[number]
        seconds = keep_alive_seconds(named.keep_alive) if ollama else None
        if seconds == 0 and scope["path"] in EMPTY and not (named.prompt or named.messages):
            self.models.switch.keep(entry, 0.0)  # when nobody uses it
            await unloaded(named.model or entry.name, EMPTY[scope["path"]])(scope, receive, send)
            return
        async with Lifeline(receive, seconds_left(request)):
            await enter(self.models, entry)
        with self.models.switch.entered(entry, partial(when_over, scope)):
            ctx = model.ctx
            if ctx is None:  # it has died since
                raise unavailable(f"The model {entry.name} has just ended.", BUSY_RETRY, "model_ended")
            if seconds is not None:
                self.models.switch.keep(entry, math.inf if seconds < 0 else seconds)
            await Endpoint(ctx, self.handler, True).answer(scope, again(data, receive), send)


async def enter(models: Models, entry: Entry) -> None:
    """Until the model is loaded and stays. Raises ApiError."""
    try:
        await models.switch.enter(entry)
    except LoadFailedError as error:
        seconds = max(1, round(error.seconds))
        raise unavailable(f"{str(error)[0].upper()}{str(error)[1:]}", seconds, "model_load_failed") from None
    except TooManyWaitError as error:
        raise unavailable(f"{str(error)[0].upper()}{str(error)[1:]}.", BUSY_RETRY, "model_queue_full") from None


def read_named(data: bytes) -> Named:
    try:
        return msgspec.json.decode(data, type=Named)
    except msgspec.ValidationError as error:
        raise from_validation(error, Named) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        decode(data, dict)  # says what is wrong
        raise bad_request("The body is not valid JSON.", code="invalid_json") from None


def keep_alive_seconds(value: Any) -> float | None:
    """Ollama's: seconds, or "5m"; negative: for ever. None: it does not say."""
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e9:
        return float(value)
    if isinstance(value, str):
        text = value.strip().lower()
        sign, text = (-1.0, text[1:]) if text.startswith("-") else (1.0, text)
        if re.fullmatch(r"\d{1,9}(\.\d{1,9})?", text):
            return sign * float(text)
        if len(text) <= 40 and _DURATION.fullmatch(text):
            parts = re.findall(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)", text)
            return sign * min(1e9, sum(float(number) * _SECONDS[unit] for number, unit in parts))
    raise invalid("keep_alive", 'seconds, or a time as "5m"; negative: for ever.')


def unloaded(model: str, said: dict[str, Any]) -> Response:
    return json_response({"model": model, "created_at": now(), **said, "done": True, "done_reason": "unload"})


def again(data: bytes, receive: Receive) -> Receive:
    """The body once more, then what comes."""
    given = False

    async def receive_again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": data, "more_body": False}

    return receive_again
