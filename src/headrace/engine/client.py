"""The engine as the HTTP process sees it: one core in a process of its own, supervised, and streams that survive its death.

When the core dies, or its heartbeat stops, another one takes over and every stream goes on where it was: the request is
sent again as prompt + tokens so far with the same seed, and counted randomness gives it the very tokens it would have had.
A standby process that has imported everything already waits for this, so that a restart costs the loading of the weights.
The request that kills the core is found and failed (`engine.probation`); the rest go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from functools import partial

import zmq.asyncio

from headrace.config import EngineConfig
from headrace.engine.core_process import CoreProcess, remove_stale_directories
from headrace.engine.core_supply import StandbySupply
from headrace.engine.interface import EngineStatus
from headrace.engine.messages import EngineOutput, EngineRequest
from headrace.engine.observers import DrainRate, Observers
from headrace.engine.options import check_options
from headrace.engine.probation import Probation
from headrace.engine.stats import CoreStats
from headrace.engine.streams import Stream
from headrace.engine.supervision import Core, CoreSupply, SupervisionConfig, Supervisor
from headrace.engine.wire import Abort, Add, FromCore, News, Ready
from headrace.errors import EngineClosedError, EngineDeadError, HeadraceError, ParameterError
from headrace.extras import is_installed
from headrace.model.checkpoint import Checkpoint, resolve_checkpoint
from headrace.model.families import model_config_from_hf
from headrace.model.tokenizer import Tokenizer
from headrace.sampling.checks import packed
from headrace.sampling.params import SamplingParams

logger = logging.getLogger(__name__)
STANDBY_DELAY = 2.0  # seconds after the first core is ready: its first requests have the machine for themselves


class EngineClient:
    """Starts, feeds, watches and restarts a core. All methods belong to one event loop."""

    supports_structured = is_installed("llguidance")

    def __init__(
        self,
        config: EngineConfig,
        supervision: SupervisionConfig | None = None,
        *,
        checkpoint: Checkpoint | None = None,
        builder: str = "headrace.engine.build:build_engine",
        log_level: str = "warning",
        log_format: str = "text",
        on_give_up: Callable[[str], None] | None = None,
        traced: bool = False,
        supplies: Callable[[zmq.asyncio.Context], CoreSupply] | None = None,
    ):
        """`supplies` makes what a core comes from, of other machines too; None: processes of this one."""
        self.config, self.supervision = config, supervision or SupervisionConfig()
        # what the layers above must know of the model: read here, without torch, while the core loads the weights
        self.checkpoint = checkpoint or resolve_checkpoint(config)
        self.model_name = self.checkpoint.name
        self.tokenizer = Tokenizer.from_checkpoint(self.checkpoint)
        self.generation_defaults = dict(self.checkpoint.generation_defaults)
        model_config = model_config_from_hf(self.checkpoint.config)
        check_options(config, self.checkpoint, model_config, here=supplies is None)
        self.model_config = replace(model_config, eos_token_ids=self.checkpoint.end_token_ids(self.tokenizer.end_token_ids))
        self.info: Ready | None = None
        self.stats = CoreStats()  # of the present core
        self.restarts = self.num_poisonous = 0
        self.draining = False
        self.dead: str | None = None  # why there is no engine any more
        self._closed = False  # because its owner wanted so
        self.observers = Observers()
        self._past = CoreStats()  # counters of the cores before
        self._on_give_up = on_give_up or (lambda why: None)
        self._streams: dict[str, Stream] = {}
        self._leaving: dict[str, Stream] = {}  # aborted, and the core has not said so yet
        self._waiting_tokens = 0  # prompts of streams without any output
        self._probation = Probation(self._submit)
        self._context = zmq.asyncio.Context()
        spawn = partial(CoreProcess.spawn, self._context, builder, log_level, log_format, traced)
        supply = StandbySupply(spawn) if supplies is None else supplies(self._context)
        self._supervisor = Supervisor(config, self.supervision, supply, self)
        self._loaded = asyncio.Event()
        self._drain = DrainRate()

    @property
    def _core(self) -> Core | None:
        return self._supervisor.core

    @property
    def max_model_len(self) -> int:
        if self.info is None:
            raise EngineDeadError("the model has not been loaded yet")
        return self.info.max_model_len

    # ---------------------------------------------------------------- life

    async def start(self) -> None:
        """Start the core and return at once; `wait_loaded` waits for the model."""
        remove_stale_directories()
        self._supervisor.start()

    async def wait_loaded(self) -> Ready:
        """Raises EngineDeadError with the reason if the core cannot start."""
        await self._loaded.wait()
        if self.info is None:
            raise EngineDeadError(self.dead or "the engine did not start")
        return self.info

    async def drain(self, timeout: float) -> None:
        """Take nothing new; return when all streams have ended, or after `timeout` seconds."""
        self.draining = True
        end = time.monotonic() + timeout
        while self._streams and time.monotonic() < end and self.dead is None:
            await asyncio.sleep(0.05)

    async def close(self, grace: float = 2.0) -> None:
        """End the core, which has `grace` seconds to do so by itself. Streams still open get an EngineClosedError."""
        self.draining = True
        await self._supervisor.stop()
        if self.dead is None:
            self._closed = True
            self._end_all("it was closed")
        await self._supervisor.end(grace)
        self._context.destroy(linger=0)

    @property
    def num_requests(self) -> int:
        """In flight: waiting, running, or interrupted by the death of a core."""
        return len(self._streams)

    def status(self) -> EngineStatus:
        core = self._core
        return EngineStatus(
            loaded=self.info is not None,
            alive=self.dead is None or self._closed,
            draining=self.draining,
            progressing=core is not None and core.ready is not None and self.supervision.fault(core) is None,
            num_running=self.stats.running,
            num_waiting=max(0, len(self._streams) - self.stats.running),
            waiting_tokens=self._waiting_tokens,
            drain_rate=self._drain.rate(),
        )

    def counters(self) -> CoreStats:
        """The present core's gauges, and counters over all cores that there have been: these never go back."""
        return self.stats.added_to(self._past)

    # ---------------------------------------------------------------- requests

    def generate(
        self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams, *, priority: int = 0, cache_salt: str = ""
    ) -> AsyncGenerator[EngineOutput, None]:
        """News of one sample until it ends; closing the generator aborts it.

        Raises HeadraceError for a request that can never run, EngineDeadError when there is no engine any more.
        """
        seed = secrets.randbits(63) if params.seed is None else params.seed
        return self._run(EngineRequest(request_id, packed(prompt_ids), params, seed, priority, cache_salt, output_ids=[]))

    async def embed(
        self, request_id: str, prompt_ids: Sequence[int], pooling: str, *, priority: int = 0, cache_salt: str = ""
    ) -> list[float]:
        """The pooled, normalized hidden state of a prompt."""
        params = SamplingParams(max_tokens=1, temperature=0.0).resolved({})
        request = EngineRequest(request_id, packed(prompt_ids), params, 0, priority, cache_salt, output_ids=[], pooling=pooling)
        async with contextlib.aclosing(self._run(request)) as stream:
            async for news in stream:
                if news.embedding is not None:
                    return news.embedding
                if news.finish_reason is not None:
                    raise HeadraceError(news.error or f"the request ended with {news.finish_reason}")
        raise HeadraceError("the request ended without a vector")

    async def abort(self, request_id: str) -> None:
        stream = self._streams.get(request_id)
        if stream is not None:
            self._forget(stream)
            stream.push(EngineOutput(request_id, finish_reason="abort"))

    async def _run(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        self._check_lives()
        if request.id in self._streams or request.id in self._leaving:
            raise ParameterError("request_id", request.id, "an id that no live request has")
        stream = self._streams[request.id] = Stream(request)
        self._waiting_tokens += len(request.prompt_ids)
        try:
            if self._core is not None and self._core.ready is not None and not self._probation.active:
                self._submit(stream)
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
                self._forget(stream)

    def _check_lives(self) -> None:
        if self.dead is not None:
            raise (EngineClosedError if self._closed else EngineDeadError)(self.dead)

    def _submit(self, stream: Stream) -> None:
        if self._core is not None:
            self._core.send(Add(stream.request))
            stream.sent, stream.num_in_core = True, 0

    def _forget(self, stream: Stream) -> None:
        """Nobody waits for this any more."""
        self._end(stream)
        if stream.sent and self._core is not None:
            self._leaving[stream.request.id] = stream  # until the core says that it has let go
            self._core.send(Abort([stream.request.id]))
        else:
            self._gone(stream)
        self.tick()

    def _end(self, stream: Stream) -> None:
        stream.ended = True
        del self._streams[stream.request.id]
        if not stream.request.output_ids:
            self._waiting_tokens -= len(stream.request.prompt_ids)

    # ---------------------------------------------------------------- told by the supervisor

    def heard(self, message: FromCore) -> None:
        if isinstance(message, News):
            self._take(message)
        elif isinstance(message, Ready):
            self.info = message
            self._loaded.set()
            if not self._probation.active or self._probation.advance():
                self._send_rest()
            self._supervisor.prepare_standby(STANDBY_DELAY)

    def tick(self) -> None:
        """Whose turn it is may have changed."""
        ready = self._core is not None and self._core.ready is not None
        if ready and self._probation.active and self._probation.advance():
            self._send_rest()

    def died(self) -> bool:
        progressed = self.stats.steps > 0
        self._past, self.stats = self.counters(), CoreStats()
        return progressed

    def goes_on(self, why: str, killed: bool) -> None:
        logger.error("the engine core died (%s); starting another, %d requests go on", why, len(self._streams))
        self.restarts += 1
        culprit = self._probation.after_death([*self._streams.values(), *self._leaving.values()], killed)
        self._none_leaves()
        for stream in self._streams.values():
            stream.interrupted = stream.interrupted or bool(stream.deaths or stream.kills)
        if culprit is not None:
            self.num_poisonous += 1
            name = culprit.request.id
            logger.error("request %s: the core died %d times on it; failing it", name, culprit.deaths + culprit.kills)
            self._fail(culprit, "this request ends the engine")

    def gave_up(self, why: str) -> None:
        self._end_all(why)
        self._on_give_up(why)

    # ---------------------------------------------------------------- news

    def _take(self, message: News) -> None:
        now, tokens, outputs, streams = time.monotonic(), 0, message.outputs, self._streams
        for name, token in zip(outputs.ids, outputs.tokens, strict=True):
            stream = streams.get(name)
            if stream is not None:
                tokens += self._note(stream, 1, now)
                stream.push_token(token)
        for news in outputs.news:
            tokens += self._deliver(news, now)
        self._drain.add(tokens, now)
        if self._probation.active:
            self.tick()
        if message.stats is not None:
            self.stats = message.stats
        if message.steps:
            self.observers.steps(message.steps)

    def _deliver(self, news: EngineOutput, now: float) -> int:
        """Returns the tokens that this has cost, prompt and output."""
        stream, count, spent = self._streams.get(news.id), len(news.token_ids), 0
        if stream is None:
            stream = self._leaving.pop(news.id, None) if news.finish_reason is not None else None
        else:
            if news.finish_reason is not None:
                self._end(stream)
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
        if stream.first:
            return count
        stream.first = now
        if not stream.ended:
            self._waiting_tokens -= len(stream.request.prompt_ids)
        return count + len(stream.request.prompt_ids)

    # ---------------------------------------------------------------- ends

    def _send_rest(self) -> None:
        for stream in list(self._streams.values()):
            if not stream.sent:
                try:
                    self._submit(stream)
                except Exception as e:  # what cannot be sent is its own reader's affair
                    logger.exception("request %s cannot be sent to the core", stream.request.id)
                    self._fail(stream, f"{type(e).__name__}: {e}")

    def _end_all(self, why: str) -> None:
        """There is no engine any more: everybody who waits for it is told."""
        self.dead = self.dead or why
        self._loaded.set()
        self._none_leaves()
        self._probation = Probation(self._submit)
        for stream in list(self._streams.values()):
            self._fail(stream, why)

    def _fail(self, stream: Stream, why: str) -> None:
        news = EngineOutput(stream.request.id, finish_reason="error", error=why)
        self._end(stream)
        stream.push(news)
        self.observers.ended(stream, news, time.monotonic())

    def _none_leaves(self) -> None:
        """The core is gone, and with it what it had not let go of."""
        for stream in self._leaving.values():
            self._gone(stream)
        self._leaving.clear()

    def _gone(self, stream: Stream) -> None:
        """Aborted, and there is no core that could say so."""
        self.observers.ended(stream, EngineOutput(stream.request.id, finish_reason="abort"), time.monotonic())
