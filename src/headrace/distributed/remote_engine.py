"""An engine in another process, as an AsyncEngine: requests go out with a number, tokens come in one message for each step."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from headrace.config import EngineConfig
from headrace.distributed.remote_wire import Cancel, EngineState, FromEngine, Submit, ToEngine, Tokens
from headrace.engine.interface import CoreStatus, EngineStatus
from headrace.engine.messages import EngineOutput, EngineRequest
from headrace.engine.stats import CoreStats
from headrace.engine.streams import Offers, Stream, Taker
from headrace.errors import EngineDeadError, HeadraceError, ParameterError
from headrace.extras import is_installed
from headrace.lora.version import Version
from headrace.model.config import ModelConfig
from headrace.sampling.checks import packed
from headrace.sampling.params import SamplingParams


class RemoteEngine:
    """All methods belong to one event loop. `say` sends to the engine's EngineHost, whose words go to `heard`.

    `lost`: whether the other process gives no sign any more, which its owner finds out.
    """

    def __init__(
        self, say: Callable[[ToEngine], None], state: EngineState, config: EngineConfig, *, model_name: str, tokenizer: Any,
        model_config: ModelConfig, generation_defaults: dict[str, Any], supports_structured: bool | None = None,
    ):  # fmt: skip
        self.config, self.model_name, self.tokenizer = config, model_name, tokenizer
        self.model_config, self.generation_defaults = model_config, generation_defaults
        self.supports_structured = is_installed("llguidance") if supports_structured is None else supports_structured
        self._say, self.lost = say, False
        self._numbers = itertools.count()
        self._offers = Offers()
        self._streams: dict[int, Stream] = {}  # that have not ended
        self._failures: dict[int, HeadraceError] = {}  # of those whose reader has not been told yet
        self._know(state)

    def _know(self, state: EngineState) -> None:
        self._state = state
        self.info, self.restarts, self.num_poisonous = state.info, state.restarts, state.num_poisonous

    @property
    def max_model_len(self) -> int:
        if self._state.max_model_len is None:
            raise EngineDeadError("the model has not been loaded yet")
        return self._state.max_model_len

    def status(self) -> EngineStatus:
        """As the engine was when it last said so: half a second ago at most."""
        status = self._state.status
        return replace(status, alive=False, progressing=False) if self.lost else status

    def counters(self) -> CoreStats:
        return self._state.stats

    def cores(self) -> list[CoreStatus]:
        return self._state.cores

    def generate(
        self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams, *, priority: int = 0, cache_salt: str = "",
        taker: Taker | None = None,
    ) -> AsyncGenerator[EngineOutput, None]:  # fmt: skip
        request = EngineRequest(request_id, packed(prompt_ids), params, None, priority, cache_salt, output_ids=[])
        return self._run(request, taker)

    async def embed(
        self, request_id: str, prompt_ids: Sequence[int], pooling: str, *, priority: int = 0, cache_salt: str = ""
    ) -> list[float]:
        params = SamplingParams(max_tokens=1)
        request = EngineRequest(request_id, packed(prompt_ids), params, None, priority, cache_salt, [], pooling)
        async with contextlib.aclosing(self._run(request)) as stream:
            async for news in stream:
                if news.embedding is not None:
                    return news.embedding
        raise HeadraceError("the request ended without a vector")

    def adapters(self) -> Mapping[str, Version]:
        return self._state.adapters

    async def load_adapter(self, name: str, path: str, replace: bool = True) -> None:
        raise ParameterError("lora_name", name, "none here: adapters come and go only where one process serves HTTP")

    async def unload_adapter(self, name: str) -> None:
        await self.load_adapter(name, "")

    async def abort(self, request_id: str) -> None:
        for number, stream in list(self._streams.items()):
            if stream.request.id == request_id:
                del self._streams[number]
                self._say(Cancel(number))
                stream.push(EngineOutput(request_id, finish_reason="abort"))

    async def _run(self, request: EngineRequest, taker: Taker | None = None) -> AsyncGenerator[EngineOutput, None]:
        number = next(self._numbers)
        params = request.params if request.pooling is None else None
        self._say(Submit(number, request.id, request.prompt_ids, params, request.priority, request.cache_salt, request.pooling))
        stream = self._streams[number] = Stream(request, self._offers, taker)
        try:
            while True:
                news = await stream.next()
                if (failure := self._failures.pop(number, None)) is not None:
                    raise failure
                yield news
                if news.finish_reason is not None:
                    return
        finally:
            self._failures.pop(number, None)
            if self._streams.pop(number, None) is not None:
                self._say(Cancel(number))

    def heard(self, message: FromEngine) -> None:
        if isinstance(message, Tokens):
            self._take(message)
        elif isinstance(message, EngineState):
            self._know(message)
        elif (stream := self._streams.pop(message.number, None)) is not None:
            self._failures[message.number] = failure = message.exception()
            stream.push(EngineOutput(stream.request.id, finish_reason="error", error=str(failure)))

    def _take(self, message: Tokens) -> None:
        streams = self._streams
        for number, token in zip(message.numbers, message.tokens, strict=True):
            if (stream := streams.get(number)) is not None:
                stream.push_token(token)
        for number, news in message.news:
            if (stream := streams.get(number)) is not None:
                news.id = stream.request.id
                stream.push(news)
                if news.finish_reason is not None:
                    del streams[number]
