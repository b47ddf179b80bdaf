"""Cores without processes, for tests of their client: real steps of a tiny model, taken when the test says so, and real messages.

What a test decides: when a turn of the core's loop comes, when a grammar has been compiled, when the core dies, and whether
there is another one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import Future
from dataclasses import replace

import msgspec

from engine_driver import BLOCK
from headrace.config import EngineConfig
from headrace.engine.build import build_engine
from headrace.engine.client import EngineClient
from headrace.engine.core import EngineCore
from headrace.engine.process import CoreLoop
from headrace.engine.supervision import SupervisionConfig
from headrace.engine.wire import FromCore, Ready, ToCore, to_wire
from headrace.errors import HeadraceError
from headrace.scheduler.scheduler import Scheduler
from headrace.speculative.speculator import Speculator
from headrace.structured_output.manager import StructuredOutput
from structured_driver import backend


class Grammars(StructuredOutput):
    """Compiles when it is told to."""

    def __init__(self, vocab_size: int):
        super().__init__(lambda _: backend(), vocab_size)
        self._backend = backend()
        self.held: list[tuple[object, Future]] = []

    def _submit(self, wish, end_token_ids):
        future: Future = Future()
        self.held.append((wish, future))
        return future

    def finish(self) -> None:
        for wish, future in self.held:
            future.set_result(self._backend.compile(wish))
        self.held = []


class Inbox:
    """A socket's reading end."""

    def __init__(self):
        self.messages: deque[bytes] = deque()

    def wait(self, _: int) -> None:
        pass

    def take(self) -> bytes | None:
        return self.messages.popleft() if self.messages else None


class Process:
    def __init__(self):
        self.returncode: int | None = None
        self._ended = asyncio.get_running_loop().create_future()

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def exit(self, code: int) -> None:
        if self.returncode is None:
            self.returncode = code
            self._ended.set_result(code)


class FakeCore:
    """An `engine.supervision.Core`."""

    def __init__(self, core: EngineCore, config: EngineConfig):
        self.core, self.config, self.inbox, self.process = core, config, Inbox(), Process()
        self.loop = CoreLoop(core, self.inbox, self._say)
        self.ready: Ready | None = None
        self.fatal = None
        self.broken = asyncio.get_running_loop().create_future()
        self.busy_seconds = 0.0
        self._handler = None
        self._encoder, self._decoder = msgspec.msgpack.Encoder(enc_hook=to_wire), msgspec.msgpack.Decoder(FromCore)

    @property
    def exited(self) -> bool:
        return self.process.returncode is not None

    @property
    def killed(self) -> bool:
        return self.process.returncode == -9

    async def wait(self) -> str:
        code = await self.process.wait()
        return self.fatal.error if self.fatal else f"exit code {code}"

    def begin(self, config: EngineConfig) -> None:
        pass

    def send(self, message: ToCore) -> None:
        self.inbox.messages.append(self._encoder.encode(message))

    def listen(self, handler) -> None:
        self._handler = handler

    def load(self) -> None:
        c = self.config
        self.ready = Ready(c.max_model_len, self.core.vocab_size, BLOCK, c.num_kv_blocks, c.max_num_seqs, "cpu", "float32", 0.0)
        self._say(self.ready)

    def _say(self, message: FromCore) -> None:
        if self._handler is not None and not self.exited:
            self._handler(self._decoder.decode(self._encoder.encode(message)))

    def silence(self) -> float:
        return 0.0

    async def end(self, grace: float) -> None:
        await self.kill()

    async def kill(self) -> None:
        self.process.exit(-9)
        self._handler = None


class FakeSupply:
    """An `engine.supervision.CoreSupply` of up to `most` cores at once. `failures` are raised, one for each that is asked for."""

    def __init__(self, model: str, most: int = 1, **options):
        small = {"max_num_seqs": 4, "max_model_len": 64, "num_kv_blocks": 64, "block_size": BLOCK}
        self.config = EngineConfig(model=model, device="cpu", dtype="float32", debug_checks=True, **small | options)
        self._engines = [build_engine(self.config) for _ in range(most)]
        self.failures: list[BaseException] = []
        self.core: FakeCore | None = None  # the latest

    async def take(self, number: int) -> FakeCore:
        if self.failures:
            raise self.failures.pop(0)
        if number >= len(self._engines):
            raise HeadraceError(f"there is no place for core {number}")
        self.core = FakeCore(self.new(number), self.config)
        return self.core

    def new(self, number: int = 0) -> EngineCore:
        """With nothing in it; whoever had this number has no use of it any more."""
        made = self._engines[number].core
        grammars = Grammars(made.vocab_size)
        return EngineCore(
            Scheduler(made.scheduler.limits), made.runner, vocab_size=made.vocab_size, debug_checks=True, structured=grammars,
            speculator=Speculator(0, 16, 0.1, structured=grammars),
        )

    def prepare(self, number: int, delay: float) -> None:
        pass

    def release(self, number: int) -> None:
        pass

    async def close(self) -> None:
        pass

    def client(self, cores: int = 1, balancer=None, **limits) -> EngineClient:
        """A client that this supplies with cores."""
        gave_up: list[str] = []
        client = EngineClient(
            replace(self.config, data_parallel_size=cores),
            SupervisionConfig(standby=False, **{"restart_backoff": 0.001, "max_restarts": 1000} | limits),
            checkpoint=self._engines[0].checkpoint, on_give_up=gave_up.append, supplies=lambda _: self, balancer=balancer,
        )
        client.gave_up_with = gave_up  # type: ignore[attr-defined]
        return client
