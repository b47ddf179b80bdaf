"""The engine as the HTTP process sees it: one core in a process of its own, supervised, and streams that survive its death.

When the core dies, or its heartbeat stops, a new one is started and every stream goes on where it was: the request is sent
again as prompt + tokens so far with the same seed, and counted randomness gives it the very tokens it would have had.

After a death the interrupted requests are sent again one by one, the next when the one before has made progress. A request
that is alone in making no progress when the core dies again is the one that kills it: it is failed, the rest go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from headrace.config import EngineConfig
from headrace.engine.inputs import end_token_ids
from headrace.engine.messages import (
    Abort,
    Add,
    CoreStats,
    EngineOutput,
    EngineRequest,
    Fatal,
    FromCore,
    Heartbeat,
    News,
    Ready,
    Shutdown,
)  # fmt: skip
from headrace.errors import EngineDeadError, HeadraceError, ParameterError
from headrace.model.checkpoint import Checkpoint, resolve_checkpoint
from headrace.model.families import model_config_from_hf
from headrace.model.tokenizer import Tokenizer
from headrace.sampling.params import SamplingParams
from headrace.structured_output.params import StructuredOutputsParams

logger = logging.getLogger(__name__)
BUILDER = "headrace.engine.build:build_engine"


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisionConfig:
    """When a core counts as dead, and when to give up. Seconds."""

    heartbeat_timeout: float = 15.0  # without any sign of the process
    step_timeout: float = 300.0  # inside one step: longer than the longest prefill chunk on a slow machine
    max_restarts: int = 30  # within `restart_window`: one more ends the server
    restart_window: float = 60.0
    restart_backoff: float = 0.05  # before the second restart in a row without progress; doubles up to 5 s


@dataclass(slots=True)
class EngineStatus:
    """A snapshot for /ready, admission and metrics."""

    loaded: bool
    alive: bool
    draining: bool
    progressing: bool
    num_running: int
    num_waiting: int
    waiting_tokens: int
    drain_rate: float


class _Stream:
    """A request in flight: what is needed to send it again, and the news that its reader has not taken yet."""

    __slots__ = ("deaths", "news", "progressed", "request", "sent", "wake")

    def __init__(self, request: EngineRequest):
        self.request = request
        self.news: EngineOutput | None = None  # merged: a slow reader costs one entry, bounded by max_tokens
        self.wake = asyncio.Event()
        self.sent = False  # to the present core
        self.progressed = True  # since it was last sent after a death
        self.deaths = 0  # of the core while this was in it, without progress in between

    def push(self, news: EngineOutput) -> None:
        self.request.output_ids.extend(news.token_ids)
        if news.prompt_logprobs is not None:  # delivered: not to be computed again
            self.request.params = msgspec.structs.replace(self.request.params, prompt_logprobs=None)
        self.progressed, self.deaths = True, 0
        self.news = news if self.news is None else merged(self.news, news)
        self.wake.set()

    async def next(self) -> EngineOutput:
        await self.wake.wait()
        self.wake.clear()
        news, self.news = self.news, None
        assert news is not None
        return news


def merged(a: EngineOutput, b: EngineOutput) -> EngineOutput:
    """Two pieces of news of one request as one."""
    logprobs = None if a.logprobs is None and b.logprobs is None else (a.logprobs or []) + (b.logprobs or [])
    return msgspec.structs.replace(
        b,
        token_ids=a.token_ids + b.token_ids,
        logprobs=logprobs,
        prompt_logprobs=a.prompt_logprobs if b.prompt_logprobs is None else b.prompt_logprobs,
    )


@dataclass(slots=True)
class _Core:
    """One incarnation of the core's process with its sockets."""

    process: asyncio.subprocess.Process
    inbox: zmq.asyncio.Socket
    outbox: zmq.asyncio.Socket
    directory: Path
    last_sign: float = field(default_factory=time.monotonic)
    busy_seconds: float = 0.0
    ready: Ready | None = None
    fatal: Fatal | None = None


class EngineClient:
    """Starts, feeds, watches and restarts a core. All methods belong to one event loop."""

    def __init__(
        self,
        config: EngineConfig,
        supervision: SupervisionConfig | None = None,
        *,
        checkpoint: Checkpoint | None = None,
        builder: str = BUILDER,
        log_level: str = "WARNING",
        on_give_up: Callable[[str], None] | None = None,
    ):
        self.config, self.supervision = config, supervision or SupervisionConfig()
        # what the layers above must know of the model: read here, without torch, while the core loads the weights
        self.checkpoint = checkpoint or resolve_checkpoint(config)
        self.model_name = self.checkpoint.name
        self.tokenizer = Tokenizer.from_checkpoint(self.checkpoint)
        self.generation_defaults = dict(self.checkpoint.generation_defaults)
        model_config = model_config_from_hf(self.checkpoint.config)
        self.model_config = replace(model_config, eos_token_ids=end_token_ids(self.checkpoint, self.tokenizer))
        self.info: Ready | None = None
        self.stats = CoreStats()
        self.restarts = 0
        self.draining = False
        self.dead: str | None = None  # why the client has given up
        self.on_news: Callable[[EngineOutput], None] = lambda news: None  # for metrics
        self._builder, self._log_level = builder, log_level
        self._on_give_up = on_give_up or (lambda why: None)
        self._streams: dict[str, _Stream] = {}
        self._probing: deque[_Stream] = deque()  # interrupted requests that wait for their turn
        self._probe: _Stream | None = None
        self._core: _Core | None = None
        self._context = zmq.asyncio.Context()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromCore)
        self._supervisor: asyncio.Task | None = None
        self._loaded = asyncio.Event()
        self._drain = _DrainRate()

    supports_structured = importlib.util.find_spec("llguidance") is not None

    @staticmethod
    def structured_spec(kind: str, value: Any) -> StructuredOutputsParams:
        """The engine's form of a wish. Raises ParameterError."""
        return StructuredOutputsParams(**{kind: value})

    @property
    def max_model_len(self) -> int:
        if self.info is None:
            raise EngineDeadError("the model has not been loaded yet")
        return self.info.max_model_len

    # ---------------------------------------------------------------- life

    async def start(self) -> None:
        """Start the core and return at once; `wait_loaded` waits for the model."""
        self._supervisor = asyncio.create_task(self._supervise())

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

    async def close(self) -> None:
        """End the core. Streams still open get an EngineDeadError."""
        self.draining = True
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
        if self._core is not None:
            core, self._core = self._core, None
            with contextlib.suppress(zmq.ZMQError):
                core.inbox.send(self._encoder.encode(Shutdown()), zmq.NOBLOCK)
            try:
                await asyncio.wait_for(core.process.wait(), 5)
            except TimeoutError:
                core.process.kill()
                await core.process.wait()
            self._discard(core)
        self._give_up("the server has ended")
        self._context.destroy(linger=0)

    def status(self) -> EngineStatus:
        core = self._core
        fresh = core is not None and core.ready is not None and self._fault(core) is None
        waiting = [s for s in self._streams.values() if not s.request.output_ids]
        return EngineStatus(
            loaded=self.info is not None,
            alive=self.dead is None,
            draining=self.draining,
            progressing=fresh,
            num_running=self.stats.running,
            num_waiting=max(0, len(self._streams) - self.stats.running),
            waiting_tokens=sum(len(s.request.prompt_ids) for s in waiting),
            drain_rate=self._drain.rate(),
        )

    # ---------------------------------------------------------------- requests

    async def generate(
        self, request_id: str, prompt_ids: list[int], params: SamplingParams, *, priority: int = 0, cache_salt: str = ""
    ) -> AsyncGenerator[EngineOutput, None]:
        """News of one sample until it ends; closing the generator aborts it.

        Raises HeadraceError for a request that can never run, EngineDeadError when there is no engine any more.
        """
        seed = secrets.randbits(63) if params.seed is None else params.seed
        request = EngineRequest(request_id, prompt_ids, params, seed, priority, cache_salt, output_ids=[])
        async with contextlib.aclosing(self._run(request)) as news:
            async for piece in news:
                yield piece

    async def embed(self, request_id: str, prompt_ids: list[int], pooling: str) -> list[float]:
        """The pooled, normalized hidden state of a prompt."""
        params = SamplingParams(max_tokens=1, temperature=0.0).resolved({})
        request = EngineRequest(request_id, prompt_ids, params, 0, output_ids=[], pooling=pooling)
        async with contextlib.aclosing(self._run(request)) as stream:
            async for news in stream:
                if news.embedding is not None:
                    return news.embedding
                if news.finish_reason is not None:
                    raise HeadraceError(news.error or f"the request ended with {news.finish_reason}")
        raise EngineDeadError("the engine ended")

    async def abort(self, request_id: str) -> None:
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            stream.push(EngineOutput(request_id, finish_reason="abort"))
            self._forget(stream)

    async def _run(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        if self.dead is not None:
            raise EngineDeadError(self.dead)
        stream = self._streams[request.id] = _Stream(request)
        self._submit(stream)
        ended = False
        try:
            while not ended:
                news = await stream.next()
                ended = news.finish_reason is not None
                if news.finish_reason == "error" and self.dead is not None:
                    raise EngineDeadError(self.dead)
                if news.refused is not None:
                    raise ParameterError(*news.refused)
                yield news
        finally:
            if self._streams.pop(request.id, None) is not None and not ended:
                self._forget(stream)

    def _forget(self, stream: _Stream) -> None:
        """Tell the core that nobody waits for this any more."""
        if stream.sent:
            self._send(Abort([stream.request.id]))
        if stream is self._probe:
            self._next_probe()

    def _submit(self, stream: _Stream) -> None:
        if self._core is not None and self._core.ready is not None:
            stream.sent = True
            self._send(Add(stream.request))
        # else: everything not sent is sent when a core is ready

    def _send(self, message: Any) -> None:
        if self._core is not None:
            with contextlib.suppress(zmq.ZMQError):  # a dying core: its death is handled where it is noticed
                self._core.inbox.send(self._encoder.encode(message), zmq.NOBLOCK)

    # ---------------------------------------------------------------- supervision

    async def _supervise(self) -> None:
        deaths: deque[float] = deque()
        backoff = 0.0
        while True:
            core = self._core = await self._spawn()
            why = await self._serve(core)
            permanent = core.fatal is not None and core.fatal.permanent
            steps = self.stats.steps
            self._core = None
            await self._bury(core)
            self.stats = CoreStats()
            now = time.monotonic()
            deaths.append(now)
            while deaths and deaths[0] < now - self.supervision.restart_window:
                deaths.popleft()
            if permanent or len(deaths) > self.supervision.max_restarts:
                self._give_up(why if permanent else f"{len(deaths)} deaths of the core within a minute; the last: {why}")
                self._on_give_up(self.dead or why)
                return
            logger.error("the engine core died (%s); restarting it, %d requests go on", why, len(self._streams))
            self.restarts += 1
            self._interrupted()
            backoff = 0.0 if steps else min(5.0, 2 * backoff or self.supervision.restart_backoff)
            await asyncio.sleep(backoff)

    async def _spawn(self) -> _Core:
        directory = Path(tempfile.mkdtemp(prefix="headrace-"))  # mode 0700
        inbox, outbox = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        for socket in (inbox, outbox):
            socket.set_hwm(0)
            socket.linger = 0
        addresses = [f"ipc://{directory}/in", f"ipc://{directory}/out"]
        inbox.bind(addresses[0])
        outbox.bind(addresses[1])
        command = [
            sys.executable,
            "-m",
            "headrace.engine.process",
            *addresses,
            str(os.getpid()),
            self._builder,
            self._log_level,
        ]
        process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.DEVNULL)
        await inbox.send(self._encoder.encode(self.config))
        return _Core(process, inbox, outbox, directory)

    async def _serve(self, core: _Core) -> str:
        """Take what the core says until it dies; returns why it did."""
        receiver = asyncio.create_task(self._receive(core))
        exited = asyncio.create_task(core.process.wait())
        try:
            while True:
                await asyncio.wait({receiver, exited}, timeout=0.25, return_when=asyncio.FIRST_COMPLETED)
                if exited.done():
                    await asyncio.wait({receiver}, timeout=0.05)  # its last words
                    return core.fatal.error if core.fatal else f"exit code {exited.result()}"
                if receiver.done():
                    return f"unreadable message ({receiver.exception()})"
                if fault := self._fault(core):
                    return fault
        finally:
            for task in (receiver, exited):
                task.cancel()

    def _fault(self, core: _Core) -> str | None:
        """What is wrong with a process that still lives."""
        silent = time.monotonic() - core.last_sign
        if silent > self.supervision.heartbeat_timeout and (core.ready is not None or silent > 120):
            return f"no heartbeat for {silent:.0f} s"
        if core.busy_seconds > self.supervision.step_timeout:
            return f"one step takes {core.busy_seconds:.0f} s"
        return None

    async def _receive(self, core: _Core) -> None:
        while True:
            message = self._decoder.decode(await core.outbox.recv())
            core.last_sign = time.monotonic()
            if isinstance(message, News):
                for news in message.outputs:
                    self._deliver(news)
                if message.stats is not None:
                    self.stats = message.stats
            elif isinstance(message, Heartbeat):
                core.busy_seconds = message.busy_seconds
            elif isinstance(message, Ready):
                core.ready = self.info = message
                self._loaded.set()
                self._resume()
            elif isinstance(message, Fatal):
                core.fatal = message

    def _deliver(self, news: EngineOutput) -> None:
        stream = self._streams.get(news.id)
        if stream is None:
            return
        self._drain.add(len(news.token_ids) + (0 if stream.request.output_ids else len(stream.request.prompt_ids)))
        if news.finish_reason is not None:
            del self._streams[news.id]
        self.on_news(news)
        stream.push(news)
        if stream is self._probe:
            self._next_probe()

    # ---------------------------------------------------------------- after a death

    def _interrupted(self) -> None:
        """Decide for every stream that the dead core had: to be sent again, or to be blamed."""
        again = []
        for stream in list(self._streams.values()):
            if stream.sent and not stream.progressed:
                stream.deaths += 1
            elif stream.sent:
                stream.deaths = 1
            if stream.deaths >= 2 and stream is self._probe:
                logger.error("request %s: the core died twice on it; failing it", stream.request.id)
                del self._streams[stream.request.id]
                stream.push(EngineOutput(stream.request.id, finish_reason="error", error="this request ends the engine"))
                continue
            if stream.sent:
                again.append(stream)
            stream.sent = False
            stream.progressed = False
        waiting = [s for s in self._probing if s.request.id in self._streams and s not in again]
        self._probe = None
        self._probing = deque([*again, *waiting])

    def _resume(self) -> None:
        """A core is ready: probe the interrupted requests one by one, or send all there is if nothing was interrupted."""
        if self._probing:
            self._next_probe()
        else:
            self._send_rest()

    def _next_probe(self) -> None:
        self._probe = None
        while self._probing:
            stream = self._probing.popleft()
            if stream.request.id in self._streams:
                self._probe = stream
                self._submit(stream)
                return
        self._send_rest()

    def _send_rest(self) -> None:
        for stream in self._streams.values():
            if not stream.sent:
                self._submit(stream)

    def _give_up(self, why: str) -> None:
        if self.dead is None:
            self.dead = why
        self._loaded.set()
        streams, self._streams = list(self._streams.values()), {}
        for stream in streams:
            stream.push(EngineOutput(stream.request.id, finish_reason="error", error=why))

    async def _bury(self, core: _Core) -> None:
        with contextlib.suppress(ProcessLookupError):
            core.process.kill()
        await core.process.wait()
        self._discard(core)

    @staticmethod
    def _discard(core: _Core) -> None:
        core.inbox.close(linger=0)
        core.outbox.close(linger=0)
        shutil.rmtree(core.directory, ignore_errors=True)


class _DrainRate:
    """Tokens per second over the last seconds."""

    WINDOW = 10.0

    def __init__(self) -> None:
        self._began, self._tokens, self._last = time.monotonic(), 0, 0.0

    def add(self, tokens: int) -> None:
        now = time.monotonic()
        if now - self._began > self.WINDOW:
            self._last = self._tokens / (now - self._began)
            self._began, self._tokens = now, 0
        self._tokens += tokens

    def rate(self) -> float:
        elapsed = time.monotonic() - self._began
        return self._tokens / elapsed if elapsed > 1.0 else self._last or self._tokens / max(elapsed, 0.1)
