"""The HTTP application over a RemoteEngine: two real pipes, and the server's side of them in the same process."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace
from typing import Any

import zmq

from headrace.api.app import create_app
from headrace.api.config import ServerConfig
from headrace.api.limits import Limits
from headrace.api_processes.counting import Questions, RemoteLimits, RemoteMetrics
from headrace.api_processes.desk import Desk
from headrace.api_processes.wire import FromChild, Granted, Page, Refused, ToChild
from headrace.distributed.pipe import Pipe, bounded
from headrace.distributed.remote_engine import RemoteEngine
from headrace.distributed.remote_wire import EngineState
from headrace.metrics.prometheus import PrometheusMetrics


class Pair:
    """Two ends of a pipe in one event loop; `handlers` may be set later."""

    names = itertools.count()

    def __init__(self, context: zmq.Context, near_kinds: Any, far_kinds: Any):
        addresses = [f"inproc://pair{next(self.names)}" for _ in range(2)]
        out, back = bounded(context, zmq.PUSH), bounded(context, zmq.PULL)
        far_in, far_out = bounded(context, zmq.PULL), bounded(context, zmq.PUSH)
        for socket, address in zip((out, back), addresses, strict=True):
            socket.bind(address)
        far_in.connect(addresses[0])
        far_out.connect(addresses[1])
        self.near_handler = self.far_handler = lambda message: None
        self.near = Pipe(back, out, near_kinds, lambda m: self.near_handler(m))
        self.far = Pipe(far_in, far_out, far_kinds, lambda m: self.far_handler(m))

    def close(self) -> None:
        self.near.close()
        self.far.close()


def remote_engine(engine: Any, say: Any) -> RemoteEngine:
    return RemoteEngine(
        say, EngineState.of(engine), engine.config, model_name=engine.model_name, tokenizer=engine.tokenizer,
        model_config=engine.model_config, generation_defaults=engine.generation_defaults,
        supports_structured=engine.supports_structured,
    )  # fmt: skip


class RemoteApp:
    """As `create_app`'s. Made in the event loop that calls it first; `limits` are those of the server's process."""

    def __init__(self, engine: Any, config: ServerConfig, context: zmq.Context):
        self.engine, self.config, self.context = engine, config, context
        self.metrics, self.limits = PrometheusMetrics(engine), Limits(engine, config)
        self.state = SimpleNamespace(api=SimpleNamespace(limits=self.limits))
        self.app: Any = None
        self.tells = True  # of the engine's state before every request

    def _make(self) -> None:
        self.pair = Pair(self.context, FromChild, ToChild)
        self.desk = Desk(self.engine, self.limits, self.metrics, self.pair.near, "0.")
        self.pair.near_handler, self.pair.far_handler = self.desk.heard, self._heard
        self.questions = Questions(self.pair.far.say)
        self.remote = remote_engine(self.engine, self.pair.far.say)
        limits = RemoteLimits(self.remote, self.config, self.questions)
        self.app = create_app(self.remote, self.config, RemoteMetrics(self.questions), limits)

    def _heard(self, message: Any) -> None:
        if isinstance(message, Granted | Refused | Page):
            self.questions.answered(message)
        else:
            self.remote.heard(message)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self.app is None:
            self._make()
        if self.tells:
            self.remote.heard(EngineState.of(self.engine))
        try:
            await self.app(scope, receive, send)
        finally:
            if scope["type"] == "lifespan":
                self.close()
            for _ in range(50):  # a caller without a network looks at once whether all has been given back
                if not self.desk.host.num_requests and not self.limits.active:
                    break
                await asyncio.sleep(0.001)

    def close(self) -> None:
        if self.app is not None:
            self.pair.close()
