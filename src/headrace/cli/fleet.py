"""`headrace serve --ray`: what a server has besides when its cores are on the nodes of a Ray cluster."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
from typing import TYPE_CHECKING, Any

from headrace.cli.options import given
from headrace.config import EngineConfig
from headrace.distributed.autoscaler import ScalingConfig
from headrace.errors import ParameterError
from headrace.extras import require

if TYPE_CHECKING:
    import zmq.asyncio

    from headrace.cli.serve_options import ServeOptions
    from headrace.engine.client import EngineClient
    from headrace.engine.supervision import CoreSupply

logger = logging.getLogger("headrace.server.fleet")
LEAVE_SECONDS = 10.0


def ray_fleet(args: argparse.Namespace, options: ServeOptions) -> RayFleet | None:
    """What --ray asks for; None: nothing. Looks at all that the options say, and changes nothing yet."""
    scaling = given(ScalingConfig, args)
    if options.ray is None:
        for name in (*scaling, *({"placement_timeout"} & args.sources.keys())):
            raise ParameterError(name, getattr(args, name), "nothing without --ray")
        return None
    require("ray")
    if not scaling:
        return RayFleet(options.ray, None, options.placement_timeout)
    given_ones = ", ".join("--" + name.replace("_", "-") for name in scaling)
    if "data_parallel_size" in args.sources:
        raise ParameterError("data_parallel_size", args.data_parallel_size, f"nothing beside {given_ones}")
    if "max_replicas" not in scaling:
        raise ParameterError("max_replicas", None, f"an integer, with {given_ones}")
    return RayFleet(options.ray, ScalingConfig(**scaling), options.placement_timeout)


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

    def supply(self, config: EngineConfig, builder: str, args: ServeOptions, context: zmq.asyncio.Context) -> CoreSupply:
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
