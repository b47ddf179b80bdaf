"""The application: which path is answered by what."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from headrace.api import adapters, anthropic, ollama, ollama_models, responses_stored, service
from headrace.api.chat_completions import chat_completions
from headrace.api.completions import completions
from headrace.api.config import ServerConfig
from headrace.api.context import ApiContext
from headrace.api.errors import ApiError, ClientGone, as_api_error, unknown_path
from headrace.api.generate import generate
from headrace.api.glass_hub import Glass
from headrace.api.limits import Limits
from headrace.api.middleware import OPEN_PATHS, Gate, shown
from headrace.api.page_api import KillCore, page_api
from headrace.api.page_files import page_routes
from headrace.api.rerank import rerank, score
from headrace.api.responses import input_tokens, responses
from headrace.api.sse import RAW_SEND
from headrace.engine.interface import AsyncEngine
from headrace.metrics.prometheus import HttpMetrics

logger = logging.getLogger(__name__)

Handler = Callable[[ApiContext, Request], Awaitable[Response]]


class Endpoint:
    """A handler as an ASGI application: whatever it raises becomes an answer of the one error shape."""

    def __init__(self, ctx: ApiContext, handler: Handler, needs_engine: bool):
        self.ctx, self.handler, self.needs_engine = ctx, handler, needs_engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.answer(scope, receive, send)
        except ClientGone:
            pass  # nobody is there to answer
        except Exception as error:
            known = as_api_error(error)
            if known.status == 500 and not isinstance(error, ApiError):
                logger.exception("%s %s failed", scope["method"], shown(scope["path"]))
            await known.response(scope)(scope, receive, send)

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.needs_engine:
            await self.ctx.limits.ready()
        response = await self.handler(self.ctx, Request(scope, receive, send))
        await response(scope, receive, send)


class Application(Starlette):
    """Starlette that keeps the server's own `send` at hand: streams write past the layers that only look at starts."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[RAW_SEND] = send
        await super().__call__(scope, receive, send)


def create_app(
    engine: AsyncEngine, config: ServerConfig | None = None, metrics: HttpMetrics | None = None, limits: Limits | None = None,
    glass: Glass | None = None, kill_core: KillCore | None = None,
    endpoint: Callable[[ApiContext, Handler, bool], Endpoint] = Endpoint,
) -> Starlette:
    """The server's application around a running (or still loading) engine. It does not own the engine.

    `metrics` and `limits`: where something else counts than this application. `glass`: what the page's engine is drawn from;
    `kill_core` ends a core for it. `endpoint`: how handlers are called.
    """
    ctx = ApiContext(engine, config or ServerConfig(), metrics, limits)

    def route(path: str, handler: Handler, method: str, *, needs_engine: bool = False) -> Route:
        return Route(path, endpoint(ctx, handler, needs_engine), methods=[method])

    def post(path: str, handler: Handler) -> Route:
        return route(path, handler, "POST", needs_engine=True)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await ctx.close()

    page = [*page_routes(), *(route(*asked) for asked in page_api(glass, kill_core))] if ctx.config.page else []
    app = Application(
        routes=[
            route("/v1/models", service.models, "GET"),
            route("/v1/models/{id:path}", service.one_model, "GET"),
            post("/v1/completions", completions),
            post("/v1/chat/completions", chat_completions),
            post("/v1/responses", responses),
            post("/v1/responses/input_tokens", input_tokens),
            route("/v1/responses/{id}", responses_stored.retrieve, "GET"),
            route("/v1/responses/{id}", responses_stored.delete, "DELETE"),
            route("/v1/responses/{id}", responses_stored.nothing, "POST"),
            route("/v1/responses/{id}/cancel", responses_stored.cancel, "POST"),
            route("/v1/responses/{id}/input_items", responses_stored.input_items, "GET"),
            post("/v1/messages", anthropic.messages),
            post("/v1/messages/count_tokens", anthropic.count_tokens),
            post("/v1/embeddings", service.embeddings),
            post("/v1/load_lora_adapter", adapters.load_adapter),
            post("/v1/unload_lora_adapter", adapters.unload_adapter),
            *(post(path, rerank) for path in ("/v1/rerank", "/v2/rerank", "/rerank")),
            *(post(path, score) for path in ("/v1/score", "/score")),
            post("/tokenize", service.tokenize),
            post("/detokenize", service.detokenize),
            post("/generate", generate),
            post("/api/chat", ollama.chat),
            post("/api/generate", ollama.generate),
            post("/api/embed", ollama.embed),
            post("/api/embeddings", ollama.old_embeddings),
            post("/api/show", ollama_models.show),
            post("/api/pull", ollama_models.pull),
            route("/api/tags", ollama_models.tags, "GET"),
            route("/api/ps", ollama_models.running, "GET"),
            route("/api/version", ollama_models.api_version, "GET"),
            *(route(path, ollama_models.not_here, method) for method, path in ollama_models.NOT_HERE),
            *(route(path, service.health, "GET") for path in sorted(OPEN_PATHS)),
            route("/ready", service.ready, "GET"),
            route("/version", service.server_version, "GET"),
            route("/metrics", service.metrics_page, "GET"),
            *page,
        ],
        middleware=middleware_of(ctx),
        exception_handlers={HTTPException: _http_error},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.api = ctx
    return app


def middleware_of(ctx: ApiContext) -> list[Middleware]:
    """The outermost first."""
    found = [Middleware(Gate, ctx=ctx)]
    if ctx.tracing is not None:
        found.append(Middleware(ctx.tracing.around))
    if ctx.config.cors_origins:  # before all: a preflight request carries no key
        cors = Middleware(
            CORSMiddleware, allow_origins=list(ctx.config.cors_origins), allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"], expose_headers=["x-request-id", "retry-after", "x-headrace-ignored"],
        )  # fmt: skip
        found.insert(0, cors)
    return found


async def _http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and wrong methods."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return unknown_path(request.scope).response(request.scope)
    known = error.status_code == 405
    text = "This method is not allowed here." if known else "The request cannot be answered."
    code = "method_not_allowed" if known else None
    return ApiError(error.status_code, text, code=code, headers=dict(error.headers or {})).response(request.scope)

