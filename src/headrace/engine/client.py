"""The engine as the HTTP process sees it: cores in processes of their own, supervised, and streams that survive their deaths.

When a core dies, or its heartbeat stops, every stream goes on where it was, in another core at once or in its successor: the
request is sent again as prompt + tokens so far with the same seed, and counted randomness gives it the very tokens it would
have had. A standby process that has imported everything already waits for this, so that a restart costs the loading of the
weights. The request that kills cores is found and failed (`engine.probation`); the rest go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import msgspec
import zmq.asyncio

from headrace.config import EngineConfig
from headrace.engine.core_process import CoreProcess, EarlyCore
from headrace.engine.embedding import embedding_request
from headrace.engine.interface import Balancer, CoreStatus, EngineStatus, Spectator
from headrace.engine.messages import EngineOutput, EngineRequest
from headrace.engine.named_format import without_named_format
from headrace.engine.observers import DrainRate, Observers
from headrace.engine.options import check_options
from headrace.engine.placement import PlacedSupply, Placement
from headrace.engine.slot import Slot
from headrace.engine.slots import Slots
from headrace.engine.socket_pair import remove_stale_directories
from headrace.engine.stats import CoreStats
from headrace.engine.streams import Stream, Streams, Taker
from headrace.engine.supervision import BUILDER, Core, CoreSupply, SupervisionConfig
from headrace.engine.wire import LoadAdapter, News, Ready
from headrace.errors import EngineClosedError, EngineDeadError, HeadraceError, ParameterError
from headrace.extras import is_installed
from headrace.lora.names import meant, salted
from headrace.lora.served import ServedAdapters
from headrace.lora.version import Version
from headrace.model.checkpoint import Checkpoint, pinned, resolve_checkpoint
from headrace.model.families import model_config_from_hf
from headrace.model.tokenizer import Tokenizer
from headrace.sampling.checks import packed
from headrace.sampling.params import SamplingParams


class EngineClient:
    """Feeds cores, `data_parallel_size` of them at first, and reads what they say. All methods belong to one event loop."""

    supports_structured = is_installed("llguidance")

    def __init__(
        self,
        config: EngineConfig,
        supervision: SupervisionConfig | None = None,
        *,
        checkpoint: Checkpoint | None = None,
        builder: str = BUILDER,
        log_level: str = "warning",
        log_format: str = "text",
        on_give_up: Callable[[str], None] | None = None,
        traced: bool = False,
        supplies: Callable[[zmq.asyncio.Context], CoreSupply] | None = None,
        balancer: Balancer | None = None,
        early: EarlyCore | None = None,
    ):
        """`supplies` makes what cores come from, of other machines too; None: processes of this one, of which `early` is the
        first, if it has been started. `balancer` chooses where there are several; None: by their loads alone."""
        self.supervision = supervision or SupervisionConfig()
        # what the layers above must know of the model: read here, without torch, while the core loads the weights
        self.checkpoint = checkpoint or resolve_checkpoint(config)
        self.config = config = without_named_format(pinned(config, self.checkpoint), self.checkpoint)
        self.model_name = self.checkpoint.name
        self.tokenizer = Tokenizer.from_checkpoint(self.checkpoint)
        self.generation_defaults = dict(self.checkpoint.generation_defaults)
        model_config = model_config_from_hf(self.checkpoint.config)
        check_options(config, self.checkpoint, model_config, here=supplies is None)
        self.model_config = replace(model_config, eos_token_ids=self.checkpoint.end_token_ids(self.tokenizer.end_token_ids))
        self.draining = False
        self.dead: str | None = None  # why there is no engine any more
        self._closed = False  # because its owner wanted so
        self.observers = Observers()
        self.spectator: Spectator | None = None
        self._on_give_up = on_give_up or (lambda why: None)
        self._streams = Streams(self.observers.ended)
        self._context = zmq.asyncio.Context() if early is None else early.context
        spawn = partial(CoreProcess.spawn, self._context, builder, log_level, log_format, traced)
        first = None if early is None else early.core
        supply = PlacedSupply(spawn, Placement(config), first) if supplies is None else supplies(self._context)
        self._slots = Slots(config, self.supervision, supply, balancer, self._streams, self)
        self._adapters = ServedAdapters(config, model_config, self._slots, self._streams.with_adapter)
        self._loaded = asyncio.Event()
        self._drain = DrainRate()

    @property
    def info(self) -> Ready | None:
        return next((slot.info for slot in self._slots if slot.info is not None), None)

    @property
    def max_model_len(self) -> int:
        """What fits into every core."""
        lengths = [slot.info.max_model_len for slot in self._slots if slot.info is not None]
        if not lengths:
            raise EngineDeadError("the model has not been loaded yet")
        return min(lengths)

    @property
    def restarts(self) -> int:
        return self._slots.restarts

    @property
    def num_poisonous(self) -> int:
        return self._slots.num_poisonous

    # ---------------------------------------------------------------- life

    async def start(self) -> None:
        """Start the cores and return at once; `wait_loaded` waits for the model."""
        remove_stale_directories()
        self._slots.start()

    async def wait_loaded(self) -> Ready:
        """Until a core serves. Raises EngineDeadError with the reason if one of those it starts with cannot."""
        await self._loaded.wait()
        if self.info is None or self.dead is not None:
            raise EngineDeadError(self.dead or "the engine did not start")
        return self.info

    async def wait_settled(self) -> int:
        """Until each core has been ready once, or has been given up; how many that are there now are ready."""
        await self._slots.settled()
        return sum(slot.ready for slot in self._slots)

    async def add_core(self) -> int:
        """The number of one more core, when it takes requests. Raises EngineDeadError with the reason if it cannot start."""
        self._check_lives()
        return await self._slots.add()

    async def retire_core(self, number: int, timeout: float = math.inf) -> None:
        """Give a core nothing new, and end it when what it has is done; what is not after `timeout` seconds goes to others.

        See `Slots.retire`.
        """
        await self._slots.retire(number, timeout)

    async def drain(self, timeout: float) -> None:
        """Take nothing new; return when all streams have ended, or after `timeout` seconds."""
        self.draining = True
        end = time.monotonic() + timeout
        while self._streams and time.monotonic() < end and self.dead is None:
            await asyncio.sleep(0.05)

    async def close(self, grace: float = 2.0) -> None:
        """End the cores, which have `grace` seconds to do so by themselves. Streams still open get an EngineClosedError."""
        self.draining = True
        await self._slots.stop()
        if self.dead is None:
            self._closed = True
            self._end_all("it was closed")
        await self._slots.end(grace)
        self._context.destroy(linger=0)

    @property
    def num_requests(self) -> int:
        """In flight: waiting, running, or interrupted by the death of a core."""
        return len(self._streams)

    def status(self) -> EngineStatus:
        running = sum(slot.stats.running for slot in self._slots)
        return EngineStatus(
            loaded=self.info is not None,
            alive=self.dead is None or self._closed,
            draining=self.draining,
            progressing=any(slot.progressing for slot in self._slots),
            num_running=running,
            num_waiting=max(0, len(self._streams) - running),
            waiting_tokens=self._streams.waiting_tokens,
            drain_rate=self._drain.rate(),
            num_cores=self._slots.num_staying,
            doing=next((slot.doing for slot in self._slots if not slot.ready), "ready"),
        )

    def counters(self) -> CoreStats:
        return self._slots.counters()

    def cores(self) -> list[CoreStatus]:
        return self._slots.statuses()

    def core(self, number: int) -> Core | None:
        """The one of this number; None: there is none now."""
        return next((slot.core for slot in self._slots if slot.number == number), None)

    def watch(self, core: int, on: bool) -> None:
        """Have a core show the `spectator` what it does, from a snapshot on, or no longer."""
        self._slots.watch(core, on)

    def token_ids(self, request_id: str, start: int, stop: int) -> list[int] | None:
        """Of a request in flight, at these positions; None: there is no such one."""
        stream = self._streams.live.get(request_id)
        return None if stream is None else [*stream.request.prompt_ids, *stream.request.output_ids][start:stop]

    # ---------------------------------------------------------------- requests

    def generate(
        self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams, *, priority: int = 0, cache_salt: str = "",
        taker: Taker | None = None,
    ) -> AsyncGenerator[EngineOutput, None]:  # fmt: skip
        """News of one sample until it ends; closing the generator aborts it.

        Raises HeadraceError for a request that can never run, EngineDeadError when there is no engine any more.
        """
        seed = secrets.randbits(63) if params.seed is None else params.seed
        if digest := meant(params.lora, self._adapters.names):
            params = msgspec.structs.replace(params, lora=digest)
        salt = salted(cache_salt, digest)
        return self._run(EngineRequest(request_id, packed(prompt_ids), params, seed, priority, salt, output_ids=[]), taker)

    def adapters(self) -> Mapping[str, Version]:
        return self._adapters.names

    def keep_adapters(self, names: Mapping[str, Version]) -> None:
        """Before the start: those of a client of the same model that has been closed."""
        self._adapters.keep(names)

    async def load_adapter(self, name: str, path: str, replace: bool = True) -> None:
        self._check_lives()
        await self._adapters.load(name, path, replace)

    async def unload_adapter(self, name: str) -> None:
        self._check_lives()
        await self._adapters.unload(name)

    async def embed(
        self, request_id: str, prompt_ids: Sequence[int], pooling: str, *, priority: int = 0, cache_salt: str = ""
    ) -> list[float]:
        """The pooled, normalized hidden state of a prompt."""
        request = embedding_request(request_id, prompt_ids, pooling, priority=priority, cache_salt=cache_salt)
        async with contextlib.aclosing(self._run(request)) as stream:
            async for news in stream:
                if news.embedding is not None:
                    return news.embedding
                if news.finish_reason is not None:
                    raise HeadraceError(news.error or f"the request ended with {news.finish_reason}")
        raise HeadraceError("the request ended without a vector")

    async def abort(self, request_id: str) -> None:
        stream = self._streams.live.get(request_id)
        if stream is not None:
            self._streams.forget(stream)
            stream.push(EngineOutput(request_id, finish_reason="abort"))

    async def _run(self, request: EngineRequest, taker: Taker | None = None) -> AsyncGenerator[EngineOutput, None]:
        self._check_lives()
        stream = self._streams.add(request, taker)
        try:
            self._slots.submit(stream)
            while True:
                news = await stream.next()
                if news.finish_reason == "error":
                    self._check_lives()
                if news.refused is not None:
                    raise ParameterError(*news.refused)
                yield news
                if news.finish_reason is not None:
                    return
        finally:
            if not stream.ended:
                self._streams.forget(stream)

    def _check_lives(self) -> None:
        if self.dead is not None:
            raise (EngineClosedError if self._closed else EngineDeadError)(self.dead)

    # ---------------------------------------------------------------- told by the slots

    def loaded(self, slot: Slot) -> None:
        for version in self._adapters.held.values():
            if slot.core is not None:
                slot.core.send(LoadAdapter(version))
        self._loaded.set()
        if self.spectator is not None:
            self.spectator.loaded(slot.number)

    def lost(self, slot: Slot, why: str) -> None:
        if self.spectator is not None:
            self.spectator.died(slot.number, why)

    def gave_up(self, why: str) -> None:
        if self.dead is None:
            self._end_all(why)
            self._on_give_up(why)

    def _end_all(self, why: str) -> None:
        """There is no engine any more: everybody who waits for it is told."""
        self.dead = why
        self._loaded.set()
        for slot in self._slots:
            self._streams.core_gone(slot)
        for stream in list(self._streams.live.values()):
            self._streams.fail(stream, why)

    def take(self, slot: Slot, message: News) -> None:
        now, tokens, outputs, streams = time.monotonic(), 0, message.outputs, self._streams.live
        for name, token in zip(outputs.ids, outputs.tokens, strict=True):
            stream = streams.get(name)
            if stream is not None:
                tokens += self._note(stream, 1, now)
                stream.push_token(token)
        for news in outputs.news:
            tokens += self._deliver(news, now)
        self._drain.add(tokens, now)
        if message.steps:
            self.observers.steps(message.steps, slot.number)
        if message.glimpse is not None and self.spectator is not None:
            self.spectator.seen(slot.number, message.glimpse)

    def _deliver(self, news: EngineOutput, now: float) -> int:
        """Returns the tokens that this has cost, prompt and output."""
        stream, count, spent = self._streams.live.get(news.id), len(news.token_ids), 0
        if stream is None:
            stream = self._streams.leaving.pop(news.id, None) if news.finish_reason is not None else None
        else:
            if news.finish_reason is not None:
                self._streams.end(stream)
            if count:
                spent = self._note(stream, count, now)
            stream.push(news)
        if stream is not None and news.finish_reason is not None:
            self.observers.ended(stream, news, now)
        return spent

    def _note(self, stream: Stream, count: int, now: float) -> int:
        """Count a stream's tokens; what they have cost, with the prompt before the first."""
        self.observers.tokens(stream, count, now)
        stream.last = now
        if stream.num_in_core:
            return count
        if not stream.ended:
            stream.slot.began(stream)
        if stream.first:  # another core has been at it
            return count
        stream.first = now
        if not stream.ended:
            self._streams.waiting_tokens -= len(stream.request.prompt_ids)
        return count + len(stream.request.prompt_ids)
