"""Options of `serve` for several cores and for other fleets: by what rule a core is chosen, where its blocks are told of."""

from __future__ import annotations

import argparse
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from headrace.cli.parser import text
from headrace.config import EngineConfig
from headrace.errors import ParameterError

logger = logging.getLogger("headrace.server")

if TYPE_CHECKING:
    from headrace.distributed.kv_events import Publisher
    from headrace.engine.interface import Balancer


def add_routing_arguments(group) -> None:
    group.add_argument(
        "--router", choices=("prefix", "least-loaded", "round-robin"), default="prefix",
        help="where a request goes; prefix: to the core that holds most of it, unless another has that much less to do",
    )  # fmt: skip
    for name, metavar, words in (
        ("kv-events", "ADDRESS", "publish which blocks the caches hold, prompts included, as vLLM does: tcp://*:5557"),
        ("kv-events-replay", "ADDRESS", "where subscribers ask for events that they have missed"),
        ("kv-events-topic", "NAME", "of the events: what some subscribers tell servers by (default: empty)"),
    ):
        group.add_argument(f"--{name}", type=text, metavar=metavar, help=words)


class Routing:
    """What those options come to. Raises ParameterError for an address that is none."""

    def __init__(self, args: argparse.Namespace, config: EngineConfig, several: bool):
        """`several`: there are, or may come to be, several cores."""
        from headrace.distributed.balancers import balancer_named

        self.balancer: Balancer = balancer_named(args.router)
        self.publisher: Publisher | None = None
        events = config.kv_cache_events
        if several and args.router == "prefix":
            events = "hashes"
        for name in ("kv_events_replay", "kv_events_topic"):
            if getattr(args, name) is not None and args.kv_events is None:
                raise ParameterError(name, getattr(args, name), "nothing without --kv-events")
        if args.kv_events is not None:
            if not config.enable_prefix_caching:
                raise ParameterError("kv_events", args.kv_events, "nothing without prefix caching: no block is held for others")
            from headrace.distributed.kv_events import Published, Publisher

            events = "tokens"
            self.publisher = Publisher(args.kv_events, args.kv_events_replay, args.kv_events_topic or "")
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
