"""Headrace as an application of Ray Serve, for those who run it: `serve run headrace.distributed.serve_app:app model=PATH`.

A replica is a whole server: HTTP application, engine's client and a core in a process of its own. Serve places and scales
replicas and passes HTTP through its proxy, which costs latency and breaks streams when it dies; a replica's death breaks its
streams too. `headrace serve --ray` has neither fault.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
from ray import serve

from headrace.api.app import create_app
from headrace.api.config import ServerConfig
from headrace.config import EngineConfig
from headrace.engine.client import EngineClient
from headrace.errors import ParameterError

NAME = "served_model_name"


@serve.deployment(name="Headrace", max_ongoing_requests=1024, health_check_period_s=5)
@serve.ingress()
class Replica:
    async def __init__(self, config: EngineConfig, served_model_name: str | None):  # type: ignore[misc]  # Serve awaits it
        self.name = served_model_name
        self.client = EngineClient(config)
        await self.client.start()
        await self.client.wait_loaded()

    def __serve_build_asgi_app__(self) -> Any:
        names = (self.name,) if self.name else ()
        # the next request may reach another replica: no responses are kept
        return create_app(self.client, ServerConfig(served_model_names=names, responses_store_bytes=0))

    async def check_health(self) -> None:
        if self.client.dead is not None:
            raise RuntimeError(self.client.dead)

    async def __del__(self) -> None:
        await self.client.close()


def app(args: dict[str, Any]) -> serve.Application:
    """`args`: EngineConfig's fields, as texts or as what they are, and `served_model_name`. Raises ParameterError."""
    known = [f.name for f in dataclasses.fields(EngineConfig)]
    for name, value in args.items():
        if name not in (*known, NAME):
            raise ParameterError(name, value, f"nothing: the options are {', '.join([*known, NAME])}")
    try:
        config = msgspec.convert({k: v for k, v in args.items() if k != NAME}, EngineConfig, strict=False)
    except msgspec.ValidationError as e:
        raise ParameterError("args", args, f"what the options take ({e})") from None
    if config.data_parallel_size != 1:
        raise ParameterError("data_parallel_size", config.data_parallel_size, "1: replicas are Serve's (num_replicas)")
    ranks = config.tensor_parallel_size
    resources = {"num_cpus": config.threads or ranks, "num_gpus": ranks if config.device == "cuda" else 0}
    deployment: Any = Replica
    return deployment.options(ray_actor_options=resources).bind(config, args.get(NAME))
