"""What `serve` does for several cores and for other fleets: by what rule a core is chosen, where its blocks are told of."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from headrace.config import EngineConfig
from headrace.errors import ParameterError

logger = logging.getLogger("headrace.server")

if TYPE_CHECKING:
    from headrace.cli.serve_options import ServeOptions
    from headrace.distributed.kv_events import Publisher
    from headrace.engine.interface import Balancer


class Routing:
    """What those options come to. Raises ParameterError for an address that is none, and for what would have no effect."""

    def __init__(self, options: ServeOptions, config: EngineConfig, several: bool):
        """`several`: there are, or may come to be, several cores."""
        from headrace.distributed.balancers import balancer_named

        if not several and options.router != "prefix":
            raise ParameterError("router", options.router, "nothing where there is one core: it chooses among several")
        self.balancer: Balancer = balancer_named(options.router)
        self.publisher: Publisher | None = None
        events = config.kv_cache_events
        if several and options.router == "prefix":
            events = "hashes"
        for name in ("kv_events_replay", "kv_events_topic"):
            if getattr(options, name) is not None and options.kv_events is None:
                raise ParameterError(name, getattr(options, name), "nothing without --kv-events")
        if options.kv_events is not None:
            if not config.enable_prefix_caching:
                without = "nothing without prefix caching: no block is held for others"
                raise ParameterError("kv_events", options.kv_events, without)
            from headrace.distributed.kv_events import Published, Publisher

            events = "tokens"
            self.publisher = Publisher(options.kv_events, options.kv_events_replay, options.kv_events_topic or "")
            self.balancer = Published(self.balancer, self.publisher)
            logger.info("KV events, with the token ids of all prompts, at %s", " and ".join(self.publisher.addresses))
        self.config = replace(config, kv_cache_events=events)

    def start(self) -> None:
        """In the event loop."""
        if self.publisher is not None:
            self.publisher.start()

    def close(self) -> None:
        if self.publisher is not None:
            self.publisher.close()
