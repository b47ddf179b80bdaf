"""All models of a server, as one engine in the eyes of what runs it: started, drained, closed, counted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from functools import partial, reduce

from headrace.api.context import spellings
from headrace.api.errors import ApiError, bad_request
from headrace.engine.interface import CoreStatus, EngineStatus
from headrace.engine.stats import CoreStats
from headrace.lora.version import Version
from headrace.several_models.served import ServedModel
from headrace.several_models.switch import Entry, State, Switch


class Models:
    """Raises nothing when it is made: the models fit, and their names differ, for whoever made them has seen to that."""

    def __init__(
        self, served: Sequence[ServedModel], sizes: Sequence[int], budget: int, *, default: str | None = None,
        any_name: bool = False, max_waiting: int = 256, patience: float = 10.0,
    ):  # fmt: skip
        """`default`: the name of the model of requests that name none; with `any_name` also of those that name another."""
        self.served, self.any_name = tuple(served), any_name
        self.entries = [
            Entry(model.spec.names[0], size, model, model.spec.pinned, model.spec.keep_alive)
            for model, size in zip(served, sizes, strict=True)
        ]
        self.switch = Switch(self.entries, budget, max_waiting, patience)
        self._by_name = {name: i for i, model in enumerate(self.served) for name in model.spec.names}
        self.default = None if default is None else self._by_name[default]
        for number, (model, entry) in enumerate(self):
            model.on_death, model.elsewhere = partial(self.switch.died, entry), partial(self._beside, number)
        self.model_name, self.config = self.served[0].model_name, self.served[0].spec.engine
        self.draining = False
        self.dead: str | None = None  # never: a model that has died is loaded again

    def __iter__(self) -> Iterator[tuple[ServedModel, Entry]]:
        return iter(zip(self.served, self.entries, strict=True))

    @property
    def names(self) -> list[str]:
        return list(self._by_name)

    @property
    def all_names(self) -> list[str]:
        """Of models and adapters."""
        return [name for model in self.served for name in (*model.spec.names, *model.adapters())]

    def find(self, name: str | None) -> int | None:
        """The number of the model that a request means; None: it is not here, or none was named and there is no default."""
        if name is None:
            return self.default
        # an adapter's name means its model
        known = {own: i for i, model in enumerate(self.served) for own in model.adapters()} | self._by_name
        found = next((known[form] for form in spellings(name) if form in known), None)
        return self.default if found is None and self.any_name else found

    def adapters(self) -> dict[str, Version]:
        """Of all models, by name."""
        return {name: version for model in reversed(self.served) for name, version in model.adapters().items()}

    def _beside(self, number: int) -> list[str]:
        """Names that mean other models than this one, or their adapters."""
        others = [model for i, model in enumerate(self.served) if i != number]
        return [name for model in others for name in (*model.spec.names, *model.adapters())]

    def latest(self) -> int | None:
        """The one that is loaded and was used last."""
        loaded = [i for i, entry in enumerate(self.entries) if entry.state is State.LOADED]
        return max(loaded, key=lambda i: (self.entries[i].users > 0, self.entries[i].turn), default=None)

    @property
    def ready(self) -> bool:
        """What is to be loaded always is, and makes progress; the rest comes when it is asked for."""
        return not self.draining and all(
            entry.state is State.LOADED and model.status().progressing for model, entry in self if entry.pinned
        )

    # ---------------------------------------------------------------- life

    async def start(self) -> None:
        self.switch.start()

    async def wait_loaded(self) -> None:
        """They are loaded when they are asked for: there is nothing to wait for."""

    @property
    def num_requests(self) -> int:
        return max(sum(entry.users for entry in self.entries), sum(model.num_requests for model in self.served))

    async def drain(self, timeout: float) -> None:
        """Take nothing new; return when all that was let in has ended, or after `timeout` seconds."""
        self.draining = True
        self.switch.stop()
        end = time.monotonic() + timeout
        while self.num_requests and time.monotonic() < end:
            await asyncio.sleep(0.05)

    async def close(self, grace: float = 2.0) -> None:
        self.draining = True
        await self.switch.close()
        await asyncio.gather(*(model.close() for model in self.served), return_exceptions=True)

    # ---------------------------------------------------------------- as an engine

    def status(self) -> EngineStatus:
        each = [model.status() for model in self.served]
        return EngineStatus(
            loaded=True, alive=True, draining=self.draining, progressing=self.ready,
            num_running=sum(one.num_running for one in each), num_waiting=sum(one.num_waiting for one in each),
            waiting_tokens=sum(one.waiting_tokens for one in each), drain_rate=sum(one.drain_rate for one in each),
            num_cores=sum(one.num_cores for one in each),
        )  # fmt: skip

    def counters(self) -> CoreStats:
        return reduce(_added, (model.counters() for model in self.served))

    @property
    def restarts(self) -> int:
        return sum(model.restarts for model in self.served)

    @property
    def num_poisonous(self) -> int:
        return sum(model.num_poisonous for model in self.served)

    def cores(self) -> list[CoreStatus]:
        return [core for model in self.served for core in model.cores()]


def _added(first: CoreStats, second: CoreStats) -> CoreStats:
    """Counters and gauges of both; of the shares of two caches the larger."""
    total = second.added_to(first)
    total.running, total.waiting = first.running + second.running, first.waiting + second.waiting
    total.kv_usage = max(first.kv_usage, second.kv_usage)
    return total


def chosen(models: Models, name: str | None, tagged: bool = False) -> int:
    """As `Models.find`. Raises ApiError: 404 for a model that is not here, 400 where one must be named."""
    number = models.find(name)
    if number is not None:
        return number
    if name is None:
        text = "model: a name is needed, this server has several: " + ", ".join(models.all_names[:50])
        raise bad_request(text, "model", "missing_required_parameter")
    shown = name if len(name) <= 200 else name[:200] + "..."
    served = ", ".join(models.all_names[:50])
    text = f"model '{shown}' not found" if tagged else f"The model `{shown}` does not exist; served here: {served}"
    raise ApiError(404, text, param="model", code="model_not_found")
