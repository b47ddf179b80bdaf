"""What the page asks the server besides the APIs of everybody: its engine's events, what this server is, and a core's death."""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response

from headrace.api.context import ApiContext
from headrace.api.errors import ApiError, unavailable
from headrace.api.glass import GlassRoutes
from headrace.api.glass_hub import Glass
from headrace.api.service import json_response, package_version
from headrace.config import CPU_STEP, GPU_STEP
from headrace.engine.interface import seats_of_core

Handler = Callable[[ApiContext, Request], Awaitable[Response]]
KillCore = Callable[[int], bool]  # whether it was there to be killed


def page_api(glass: Glass | None, kill_core: KillCore | None) -> list[tuple[str, Handler, str]]:
    """Paths with their handlers and methods. `kill_core` None: nobody may."""
    scenes = SceneRoutes(kill_core)
    routes: list[tuple[str, Handler, str]] = [
        ("/glass/server", scenes.server, "GET"), ("/glass/kill-core", scenes.kill, "POST"),
    ]  # fmt: skip
    if glass is not None:
        shown = GlassRoutes(glass)
        routes += [("/glass/events", shown.events, "GET"), ("/glass/text", shown.text, "GET")]
    return routes


class SceneRoutes:
    """What the guided scenes need."""

    def __init__(self, kill_core: KillCore | None):
        self._kill_core = kill_core

    async def server(self, ctx: ApiContext, request: Request) -> Response:
        """GET /glass/server: the sizes and switches that explain what a scene shows, and counters to read before and after."""
        await ctx.limits.ready()
        engine, info, config = ctx.engine, ctx.engine.info, ctx.engine.config
        stats, model = engine.counters(), engine.model_config
        about: dict[str, Any] = {
            "version": package_version(), "cores": len(engine.cores()), "max_model_len": engine.max_model_len,
            "max_num_seqs": seats_of_core(engine), "prefix_caching": config.enable_prefix_caching,
            "speculative_method": config.speculative_method, "structured_output": engine.supports_structured,
            "kill_core": self._kill_core is not None,
            "num_blocks": None if info is None else info.num_blocks, "block_size": None if info is None else info.block_size,
            "kv_token_bytes": 2 * sum(of.heads * (of.k_dim + of.v_dim) for of in model.kv_shapes),  # of 16 bits
            "budget": config.max_num_batched_tokens
            or (GPU_STEP if info is not None and info.device.startswith("cuda") else CPU_STEP),
            "counters": {
                "steps": stats.steps, "preemptions": stats.preemptions, "drafts": stats.drafts,
                "draft_tokens": stats.draft_tokens, "accepted_tokens": stats.accepted_tokens, "restarts": engine.restarts,
            },
        }  # fmt: skip
        return json_response(about)

    async def kill(self, ctx: ApiContext, request: Request) -> Response:
        """POST /glass/kill-core: ends core 0. Only with --allow-kill-core, from this machine and from this server's page."""
        if self._kill_core is None:
            raise ApiError(403, "This server was started without --allow-kill-core.", code="kill_core_not_allowed")
        if not (_is_loopback(request.client.host if request.client else "") and _is_own_page(request)):
            raise ApiError(403, "Only the page of this server, on this machine, may do this.", code="kill_core_not_allowed")
        if not self._kill_core(0):
            raise unavailable("There is no core to kill at the moment.", 1, "no_core")
        return json_response({"killed": 0})


def _is_loopback(host: str | None) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False


def _is_own_page(request: Request) -> bool:
    """Not another site's script, nor one that has made its own name an address of this machine."""
    host = request.headers.get("host", "")
    origin = request.headers.get("origin")
    try:
        return _is_loopback(urlsplit(f"//{host}").hostname) and (origin is None or urlsplit(origin).netloc == host)
    except ValueError:  # no addresses at all
        return False
