"""Runs the samples of one request and feeds what they bring to the choices of its answer, streamed or whole."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from array import array
from collections.abc import Awaitable, Sequence
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.api.context import ApiContext, new_id, response_id
from headrace.api.errors import ApiError, ClientGone, as_api_error, invalid
from headrace.api.lifeline import DeadlinePassed, Lifeline
from headrace.api.limits import Ticket
from headrace.api.logprobs import LogprobFormat
from headrace.api.protocol import GenerationFields
from headrace.api.sse import COMMENT, DONE, EVENTS, EventStream, event
from headrace.api.structured import Structure, renamed
from headrace.engine.messages import EngineOutput
from headrace.errors import ParameterError
from headrace.metrics.prometheus import SampleRecord
from headrace.sampling.params import SamplingParams
from headrace.text.stream import Delta, SampleStream

logger = logging.getLogger(__name__)


class Choice(Protocol):
    """One choice of an answer. It keeps what a whole answer needs, or returns the bytes that go out now."""

    def push(self, delta: Delta) -> bytes: ...


class Sample:
    """One run of the engine on one prompt, and the choice that it fills."""

    __slots__ = ("body", "cache_salt", "choice", "params", "priority", "prompt_ids", "request_id", "text")

    def __init__(self, answer: Answer, prompt_ids: array, params: SamplingParams, choice: Choice):
        self.request_id, self.prompt_ids, self.params, self.choice = new_id(f"{answer.id}-"), prompt_ids, params, choice
        self.body = body = answer.body
        self.priority, self.cache_salt = body.priority or 0, body.cache_salt or ""
        self.text = SampleStream(answer.ctx.engine.tokenizer, params, prompt_ids)

    @property
    def num_cached(self) -> int:
        """Tokens of the prompt that the prefix cache held; the engine counts those of an output that was handed over, too."""
        return min(self.text.num_cached_tokens, len(self.prompt_ids))

    def record(self, endpoint: str, reason: str, arrival: float, first: float | None) -> SampleRecord:
        """For the metrics, at its end. `first`: when its first tokens came."""
        until_first = None if first is None else first - arrival
        counts = len(self.prompt_ids), self.text.num_tokens, self.num_cached
        return SampleRecord(endpoint, reason, *counts, until_first, time.monotonic() - arrival, self.params.lora)


class Usage:
    """Token counts of an answer: each prompt once, whatever n; every sampled token that the answer took."""

    def __init__(self, samples: list[Sample], prompt_tokens: int):
        self.samples, self.prompt_tokens = samples, prompt_tokens
        self.reasoning_tokens = 0
        self.scoring = False  # the sampled token is not part of the answer

    @property
    def completion_tokens(self) -> int:
        return 0 if self.scoring else sum(s.text.num_tokens for s in self.samples)

    @property
    def cached_tokens(self) -> int:
        return sum(s.num_cached for s in self.samples if s.params.sample_index == 0)

    def json(self) -> bytes:
        prompt, completion = self.prompt_tokens, self.completion_tokens
        return msgspec.json.encode(
            {
                "prompt_tokens": prompt,
                "completion_tokens": completion,
                "total_tokens": prompt + completion,
                "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
                "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            }
        )


class Answer:
    """The answer of one endpoint to one request. `closing` and `failure` end a stream, `whole` is the other kind."""

    media_type = EVENTS  # of a stream

    def __init__(self, ctx: ApiContext, body: Any, answer_id: str):
        self.ctx, self.body, self.id = ctx, body, answer_id
        self.created = int(time.time())
        self.choices: list[Any] = []
        self.samples: list[Sample] = []
        self.usage = Usage(self.samples, 0)

    def add(self, prompt_ids: array, params: SamplingParams, choice: Choice) -> Sample:
        """One more choice, and the sample that fills it."""
        sample = Sample(self, prompt_ids, params, choice)
        self.choices.append(choice)
        self.samples.append(sample)
        return sample

    def closing(self) -> bytes:
        raise NotImplementedError

    def silence(self) -> bytes:
        """What a stream says when there has been nothing to say for long."""
        return COMMENT

    def failure(self, error: ApiError) -> bytes:
        return event(error.body()) + DONE

    def whole(self) -> bytes:
        raise NotImplementedError


class ChoicesAnswer(Answer):
    """What completions and chat share: all chunks begin alike, and the usage comes last."""

    def __init__(self, ctx: ApiContext, body: GenerationFields, prefix: str, kind: str, model: str):
        super().__init__(ctx, body, response_id(prefix, body.request_id))
        options = body.stream_options
        self.include_usage = bool(options and options.include_usage)
        self.continuous_usage = self.include_usage and bool(options and options.continuous_usage_stats)
        fields = msgspec.json.encode({"id": self.id, "object": kind, "created": self.created, "model": model})
        self.head = fields[:-1] + b',"choices":['

    def logprob_format(self, params: SamplingParams) -> LogprobFormat:
        as_ids = bool(self.body.return_tokens_as_token_ids)
        return LogprobFormat(self.ctx.engine.tokenizer, as_ids=as_ids, skip_special_tokens=params.skip_special_tokens)

    def usage_json(self) -> bytes:
        return self.usage.json()

    def closing(self) -> bytes:
        return (event(self._end(b"")) if self.include_usage else b"") + DONE

    def whole(self) -> bytes:
        return self._end(b",".join(c.whole() for c in self.choices))

    def _end(self, choices: bytes) -> bytes:
        return self.head + choices + b'],"usage":' + self.usage_json() + b"}"


async def run_sample(
    ctx: ApiContext, sample: Sample, ticket: Ticket, stream: EventStream | None, arrival: float, endpoint: str
) -> None:
    """Drive one sample to its end. A stop string found in its text ends it at once: closing the generator aborts it."""
    sample.params.lora = ctx.adapter_asked(sample.body.model)
    choice, taker = sample.choice, SampleTaker(sample, stream)
    num_prompt = len(sample.prompt_ids)
    first: float | None = None
    reason: str | None = None
    outputs = ctx.engine.generate(
        sample.request_id, sample.prompt_ids, sample.params, priority=sample.priority, cache_salt=sample.cache_salt,
        taker=taker.take,
    )  # fmt: skip
    try:
        async for news in outputs:
            delta = taker.delta(news)
            if first is None:
                first = time.monotonic()
                taker.begun = True
                ticket.started(num_prompt)
            reason = delta.finish_reason
            if reason in ("error", "abort"):
                raise sample_failure(delta)
            data = choice.push(delta)
            if data and stream is not None:
                await stream.write(data)
            if reason is not None:
                return
        raise ApiError(500, "The engine ended the request without a result.", code="internal_error")
    except Exception:
        reason = reason or "error"
        raise
    finally:
        if first is None:
            ticket.started(num_prompt)
        ticket.ended()
        await outputs.aclose()
        ctx.sample_ended(sample, endpoint, reason or "abort", arrival, first)


class SampleTaker:
    """Brings a sample's news to its choice, and as soon as they come where nobody has to wait: see `AsyncEngine.generate`."""

    __slots__ = ("_choice", "_end", "_stream", "_text", "begun")

    def __init__(self, sample: Sample, stream: EventStream | None):
        self._text, self._choice, self._stream = sample.text, sample.choice, stream
        self._end: Delta | None = None
        self.begun = False  # the sample's first tokens have been here

    def take(self, news: EngineOutput) -> bool:
        stream = self._stream
        if not self.begun or (stream is not None and not stream.free):
            return False
        delta = self._text.push(news)
        if delta.finish_reason is not None:  # a stop string, and more to be done about it
            self._end = delta
            return False
        data = self._choice.push(delta)
        if data and stream is not None:
            stream.write_now(data)
        return True

    def delta(self, news: EngineOutput) -> Delta:
        """What news has to say that was not taken."""
        delta, self._end = self._end, None
        return self._text.push(news) if delta is None else delta


def sample_failure(news: Delta | EngineOutput) -> ApiError:
    if news.finish_reason == "abort":
        return ApiError(503, "The request was aborted by the server.", code="aborted", headers={"retry-after": "1"})
    if isinstance(field := news.stop_reason, str):
        return invalid(field, news.error or "it cannot be had.")
    return ApiError(500, news.error or "The engine failed on this request.", code="engine_error")


async def run_all(jobs: Sequence[Awaitable[None]]) -> None:
    """Run jobs side by side; the first failure ends the others and is raised when they have ended. Each is a task of its own:
    whatever awaits inside one, layer by layer, is gone through for every token."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def seconds_left(request: Request) -> float | None:
    """Until the request's deadline; None: it has none."""
    state = request.scope["state"]
    return None if state["timeout"] is None else state["timeout"] - (time.monotonic() - state["arrival"])


class Generation:
    """One request being answered: admission, deadline, disconnect, and the two ways to answer."""

    def __init__(self, ctx: ApiContext, request: Request, answer: Answer, spec: Structure | None = None):
        self.ctx, self.answer, self.spec = ctx, answer, spec
        self.endpoint = request.url.path
        self.request = request
        self.arrival: float = request.scope["state"]["arrival"]
        self.line = Lifeline(request.receive, seconds_left(request))
        self.ticket: Ticket | None = None  # of a request that was admitted before it runs

    async def admit(self) -> Ticket:
        """Raises a 429."""
        samples = self.answer.samples
        return await self.ctx.limits.admit(len(samples), sum(len(s.prompt_ids) for s in samples))

    async def run(self, stream: EventStream | None) -> None:
        """Admit the samples and run them to their ends."""
        with self.ticket or await self.admit() as ticket:
            self.request.state.body.release()
            jobs = [run_sample(self.ctx, s, ticket, stream, self.arrival, self.endpoint) for s in self.answer.samples]
            try:
                await run_all(jobs)
            except ParameterError as error:
                raise renamed(error, self.spec) from None

    async def response(self) -> Response:
        """The answer as the body asks for it. Raises ApiError (504 past the deadline) or ClientGone."""
        if self.answer.body.stream:
            return StreamedAnswer(self)
        async with self.line:
            await self.run(None)
        return Response(self.answer.whole(), media_type="application/json")


class StreamedAnswer(Response):
    """The answer piece by piece.

    Nothing is sent before the engine's first output or the first long silence, so an error until then has
    its own status. Later errors are an `error` event. Past the deadline an answer that has begun ends as one that
    reached max_tokens does: finish_reason "length".
    """

    def __init__(self, generation: Generation):
        self.generation = generation
        self.status_code = 200
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation, answer = self.generation, self.generation.answer
        ticker = generation.ctx.ticker
        lifeline = generation.line
        stream = EventStream(scope, send, lambda: lifeline.end(ClientGone()), answer.silence, answer.media_type)
        try:
            async with lifeline:
                ticker.add(stream)
                await generation.run(stream)
                await stream.end(answer.closing())
        except DeadlinePassed:
            if not stream.started:
                raise
            await self._end(stream, b"" if stream.ending else self._cut() + answer.closing())
        except ClientGone:
            raise
        except Exception as error:
            if not stream.started:
                raise
            known = as_api_error(error)
            if known.status == 500 and not isinstance(error, ApiError):
                logger.exception("a stream of %s failed", generation.endpoint)
            await self._end(stream, answer.failure(known))
        finally:
            ticker.remove(stream)

    async def _end(self, stream: EventStream, data: bytes) -> None:
        """The last bytes, for which a reader that takes nothing is not waited for long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.generation.ctx.config.write_timeout):
                await stream.end(data)

    def _cut(self) -> bytes:
        """Ends every choice that has not ended."""
        pieces = []
        for sample in self.generation.answer.samples:
            if not sample.text.done:
                pieces.append(sample.choice.push(sample.text.push(EngineOutput(sample.request_id, finish_reason="length"))))
        return b"".join(pieces)
