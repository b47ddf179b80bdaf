"""A server of two models without models: engines that say which one they are, and load when the test says so."""

from __future__ import annotations

import asyncio
import math
from functools import partial

import httpx

from fake_engine import FakeEngine
from headrace.api.config import ServerConfig
from headrace.config import EngineConfig
from headrace.several_models.app import create_models_app
from headrace.several_models.metrics import ModelsMetrics
from headrace.several_models.models import Models
from headrace.several_models.served import ModelSpec, ServedModel


class FakeClient(FakeEngine):
    """EngineClient's life around a fake engine that says which model it is. `held`: it loads when that is set."""

    def __init__(self, config: EngineConfig, on_give_up, world: World):
        name = str(config.model)
        super().__init__(config=config, model_name=name, script=lambda ids, params: f"I am {name}{params.lora and ' with ' + params.lora}.")
        self.state.loaded = False
        self.on_give_up, self.world = on_give_up, world
        self.observers, self.spectator, self.draining, self.closed, self.watched = [], None, False, False, False
        world.clients.append(self)

    async def start(self) -> None:
        assert not self.closed and not self.state.loaded

    async def wait_loaded(self) -> None:
        await self.world.held.wait()
        if why := self.world.broken.get(self.model_name):
            raise RuntimeError(why)
        self.state.loaded = True

    def keep_adapters(self, names) -> None:
        assert not self.state.loaded
        self.loras = dict(names)

    async def close(self, grace: float = 2.0) -> None:
        assert not self.closed
        self.closed, self.draining, self.state.loaded = True, True, False

    @property
    def num_requests(self) -> int:
        return len(self.active)

    def watch(self, core: int, on: bool) -> None:
        """It shows that it is there, once."""
        if on and not self.watched:
            self.watched = True
            asyncio.get_running_loop().call_soon(self.spectator.loaded, core)

    def token_ids(self, request_id: str, start: int, stop: int) -> list[int] | None:
        return None


class World:
    """Two models, of which one fits at a time unless there is room; names a and b, a also as `alias:7b`."""

    def __init__(self, *, room: int = 1, pinned: str = "", keep_alive: float = math.inf, **options):
        self.clients: list[FakeClient] = []
        self.held, self.broken = asyncio.Event(), {}
        self.held.set()
        own = {name: options.pop(name) for name in ("default", "any_name", "max_waiting", "patience") if name in options}
        config = ServerConfig(served_model_names=("a", "alias:7b", "b"), any_model_name=own.get("any_name", False), **options)
        served = [
            ServedModel(
                ModelSpec(
                    names=names, engine=EngineConfig(model=names[0], max_num_seqs=8), pinned=names[0] in pinned, keep_alive=keep_alive,
                    server=ServerConfig(any_model_name=own.get("any_name", False) and own.get("default") in names, **options),
                ),
                partial(FakeClient, world=self),
            )
            for names in (("a", "alias:7b"), ("b",))
        ]  # fmt: skip
        self.models = Models(served, [1, 1], room, **own)
        self.app = create_models_app(self.models, config, ModelsMetrics(self.models))
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://test", timeout=20)

    def states(self) -> list[str]:
        return [entry.state.value for entry in self.models.entries]

    async def ok(self, path: str, body: dict) -> httpx.Response:
        answer = await self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer
