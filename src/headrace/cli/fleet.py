"""`headrace serve --ray`: the options, and what a server has besides when its cores are on the nodes of a Ray cluster."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
from typing import TYPE_CHECKING, Any

from headrace.cli.parser import text
from headrace.config import EngineConfig
from headrace.distributed.autoscaler import ScalingConfig
from headrace.errors import ParameterError
from headrace.extras import require

if TYPE_CHECKING:
    import zmq.asyncio

    from headrace.engine.client import EngineClient
    from headrace.engine.supervision import CoreSupply

logger = logging.getLogger("headrace.server.fleet")
LEAVE_SECONDS = 10.0
BESIDES = ("min_replicas", "max_replicas", "target_ongoing_requests", "upscale_delay", "downscale_delay", "placement_timeout")


def add_fleet_arguments(group) -> None:
    default = ScalingConfig()
    group.add_argument(
        "--ray", nargs="?", const="auto", type=text, metavar="ADDRESS",
        help="run the cores in a Ray cluster: HOST:PORT of its head, auto (this machine's, also if left out) or local",
    )  # fmt: skip
    for name, kind, metavar, words in (
        ("min-replicas", int, "N", "cores at least (default: 1)"),
        ("max-replicas", int, "N", "cores at most, as the load asks for"),
        ("target-ongoing-requests", int, "N", "of one core; more in flight ask for another (default: --max-num-seqs)"),
        ("upscale-delay", float, "SECONDS", f"of load before a core is added (default: {default.upscale_delay:g})"),
        ("downscale-delay", float, "SECONDS", f"without load before one is taken away (default: {default.downscale_delay:g})"),
        ("placement-timeout", float, "SECONDS", "until the cluster must have room for a core (default: 10)"),
    ):
        group.add_argument(f"--{name}", type=kind, metavar=metavar, help=words)


def ray_fleet(args: argparse.Namespace) -> RayFleet | None:
    """What --ray asks for; None: nothing. Looks at all that the options say, and changes nothing yet."""
    if args.ray is None:
        for name in BESIDES:
            if getattr(args, name) is not None:
                raise ParameterError(name, getattr(args, name), "nothing without --ray")
        return None
    require("ray")
    patience = 10.0 if args.placement_timeout is None else args.placement_timeout
    if not 0.0 <= patience <= 86400.0:
        raise ParameterError("placement_timeout", patience, "seconds in [0, 86400]")
    given = {name: value for name in BESIDES[:-1] if (value := getattr(args, name)) is not None}
    if not given:
        return RayFleet(args.ray, None, patience)
    if args.data_parallel_size is not None:
        raise ParameterError("data_parallel_size", args.data_parallel_size, f"nothing beside {', '.join(given)}")
    if "max_replicas" not in given:
        raise ParameterError("max_replicas", None, f"an integer, with {', '.join(given)}")
    return RayFleet(args.ray, ScalingConfig(**given), patience)


class RayFleet:
    """The cluster as a server has it."""

    def __init__(self, address: str, scaling: ScalingConfig | None, patience: float):
        self._address, self._scaling, self._patience = address, scaling, patience

    def join(self, options: dict[str, Any]) -> EngineConfig:
        """The engine's options, with what only the cluster knows. Raises HeadraceError in seconds if there is none to join."""
        if self._scaling is not None:
            options = options | {"data_parallel_size": self._scaling.min_replicas}
        for name in ("model", "tokenizer", "speculative_model"):
            if (path := options.get(name)) is not None and os.path.exists(path):  # under this name on every node
                options = options | {name: os.path.abspath(path)}
        EngineConfig(**options)
        from headrace.distributed import ray_cluster

        ray_cluster.join(self._address)
        device = options.get("device", "auto")
        if device == "auto":
            device = "cuda" if ray_cluster.has_gpus() else "cpu"
        threads = options.get("threads") or (options.get("tensor_parallel_size", 1) if device == "cpu" else None)
        return EngineConfig(**options | {"device": device, "threads": threads})

    def supply(self, config: EngineConfig, builder: str, args: argparse.Namespace, context: zmq.asyncio.Context) -> CoreSupply:
        from headrace.distributed.ray_supply import RaySupply

        ranks = config.tensor_parallel_size
        need = {"CPU": float(max(config.threads or 1, ranks))} | ({"GPU": float(ranks)} if config.device == "cuda" else {})
        return RaySupply(context, need, self._patience, builder, args.log_level, args.log_format, args.trace is not None)

    async def run(self, client: EngineClient, port: int) -> None:
        """Beside the server until it is cancelled: cores come and go, and `headrace ray update` is answered."""
        import ray

        from headrace.distributed.fleet import Fleet
        from headrace.distributed.ray_control import answer_asked

        fleet = Fleet(client, self._scaling)
        name = f"{ray.util.get_node_ip_address()}:{port}"
        answering = asyncio.create_task(answer_asked(name, fleet.update))
        try:
            await asyncio.gather(fleet.run(), answering)
        finally:
            answering.cancel()

    async def leave(self) -> None:
        from headrace.distributed import ray_cluster

        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.to_thread(ray_cluster.leave), LEAVE_SECONDS)
