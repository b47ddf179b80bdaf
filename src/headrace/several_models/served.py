"""One of several models: the client of its engine, which is made anew each time that it is loaded, and what survives that."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import msgspec

from headrace.api.config import ServerConfig
from headrace.api.context import ApiContext
from headrace.api.glass_hub import GlassHub
from headrace.config import EngineConfig
from headrace.engine.interface import CoreStatus, EngineStatus
from headrace.engine.stats import CoreStats
from headrace.lora.version import Version
from headrace.metrics.prometheus import PrometheusMetrics

NOTHING = EngineStatus(
    loaded=False, alive=True, draining=False, progressing=False, num_running=0, num_waiting=0, waiting_tokens=0, drain_rate=0.0,
    num_cores=0,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """What is known of a model before it is loaded. The first of its names is reported."""

    names: tuple[str, ...]
    engine: EngineConfig
    server: ServerConfig
    generation_defaults: dict[str, Any] = field(default_factory=dict)
    pinned: bool = False
    keep_alive: float = math.inf
    memory_bytes: int | None = None  # its share; None: see memory.shares


class ServedModel:
    """A `Runtime`. Its counters are over all that it has run in, and never go back."""

    def __init__(self, spec: ModelSpec, make: Callable[[EngineConfig, Callable[[str], None]], Any], prefix: str = "headrace"):
        """`make`: an EngineClient of these options, not started, which tells when it has given up. The first is made here: what
        can be known to be wrong is known before anything is served."""
        self.spec, self._make = spec, make
        self.client = make(spec.engine, self._died)
        self.server = replace(spec.server, served_model_names=spec.names)
        self.model_name: str = self.client.model_name
        self.restarts_before = self.poisonous_before = 0
        self._past = CoreStats()
        self._used = self._active = False
        self.ctx: ApiContext | None = None  # of the present client, while it is loaded
        self.hub: GlassHub | None = None
        self.front: ApiContext | None = None  # of all models
        self.on_death: Callable[[str], None] = lambda why: None
        self.elsewhere: Callable[[], Collection[str]] = tuple  # names that the other models and their adapters have
        self.metrics = PrometheusMetrics(self, prefix, spec.names[0])  # type: ignore[arg-type]

    # ---------------------------------------------------------------- the switch's Runtime

    async def load(self) -> None:
        if self._used:
            before = self.client
            self.client = await asyncio.to_thread(self._make, before.config, self._died)
            self.client.keep_adapters(before.adapters())
            before.tokenizer = before.checkpoint = None  # large, and in cycles that nobody collects for long
        self._used = True
        client = self.client
        client.generation_defaults |= self.spec.generation_defaults
        client.observers.append(self.metrics)
        self._active = True
        try:
            await client.start()
            await client.wait_loaded()
        except BaseException:
            await self.unload(0.0)
            raise
        self.ctx = self._context(client)
        self.hub = GlassHub(client) if self.server.page else None

    def adapters(self) -> Mapping[str, Version]:
        """By name, whether it is loaded or not."""
        return self.client.adapters()

    async def unload(self, grace: float = 2.0) -> None:
        self._active = False
        client, ctx = self.client, self.ctx
        self.ctx = self.hub = None
        try:
            await client.close(grace)
        finally:
            self._past = msgspec.structs.replace(client.counters().added_to(self._past), running=0, waiting=0, kv_usage=0.0)
            self.restarts_before += client.restarts
            self.poisonous_before += client.num_poisonous
            if ctx is not None:
                ctx.tracing = None  # it is everybody's
                await ctx.close()

    def _died(self, why: str) -> None:
        self.on_death(why)

    async def close(self) -> None:
        """At the end of the server: what has never been loaded has a client, too."""
        if not self._used:
            await self.client.close(0.0)

    @cached_property
    def unloaded(self) -> ApiContext:
        """For those who ask what it is like, for which nobody needs to load it."""
        return self._context(Unloaded(self))

    def _context(self, engine: Any) -> ApiContext:
        """With what all models share."""
        ctx = ApiContext(engine, self.server, self.metrics)
        if self.front is not None:
            ctx.responses, ctx.tracing, ctx.created = self.front.responses, self.front.tracing, self.front.created
        ctx.elsewhere = self.elsewhere
        return ctx

    # ---------------------------------------------------------------- what metrics ask an engine

    @property
    def restarts(self) -> int:
        return self.restarts_before + (self.client.restarts if self._active else 0)

    @property
    def num_poisonous(self) -> int:
        return self.poisonous_before + (self.client.num_poisonous if self._active else 0)

    @property
    def num_requests(self) -> int:
        return self.client.num_requests if self._active else 0

    def status(self) -> EngineStatus:
        return self.client.status() if self._active else NOTHING

    def counters(self) -> CoreStats:
        return self.client.counters().added_to(self._past) if self._active else self._past

    def cores(self) -> list[CoreStatus]:
        if not self._active:
            return []
        return [
            replace(core, stats=core.stats.added_to(self._past), restarts=core.restarts + self.restarts_before)
            for core in self.client.cores()
        ]


class Unloaded:
    """What is known of a model without loading it, as its engine says it. A context of what it would be at most."""

    def __init__(self, model: ServedModel):
        self._model = model
        client = model.client
        self.config, self.model_config, self.tokenizer = model.spec.engine, client.model_config, client.tokenizer
        self.generation_defaults = client.generation_defaults | model.spec.generation_defaults
        self.model_name, self.info, self.supports_structured = client.model_name, None, client.supports_structured
        self.max_model_len: int = self.config.max_model_len or self.model_config.max_position

    def status(self) -> EngineStatus:
        return NOTHING

    def adapters(self) -> Mapping[str, Version]:
        return self._model.adapters()
