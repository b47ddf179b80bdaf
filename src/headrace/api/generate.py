"""POST /generate: the plainest way to a text, for scripts and benchmarks."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headrace.api.body import read_json
from headrace.api.checks import check_common, check_fan_out
from headrace.api.context import ApiContext, for_sample, new_id
from headrace.api.generation import Answer, Generation
from headrace.api.logprobs import CompletionLogprobs, LogprobFormat
from headrace.api.protocol import SamplingFields
from headrace.api.sse import DONE, event
from headrace.sampling.checks import check_int
from headrace.sampling.params import SamplingParams
from headrace.text.stream import Delta

encode = msgspec.json.encode


class GenerateRequest(SamplingFields, kw_only=True):
    """POST /generate: a plain endpoint for scripts; the prompt is text or ids."""

    prompt: str | list[int]
    model: str | None = None
    stream: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None


async def generate(ctx: ApiContext, request: Request) -> Response:
    """`{prompt, ...sampling parameters, stream}` -> `{id, outputs: [{index, text, token_ids, finish_reason}], usage}`.

    Streamed: an event per burst with one output's news, then one with the usage, then [DONE].
    """
    body = await read_json(request, GenerateRequest, ctx.config)
    ctx.check_model(body.model, optional=True)
    check_common(ctx, body)
    if body.logprobs is not None:
        check_int("logprobs", body.logprobs, 0, ctx.config.max_logprobs)
    params = body.sampling(logprobs=body.logprobs, max_tokens=body.max_tokens)
    check_fan_out(ctx, params.n, params)
    special, cut = body.add_special_tokens is not False, params.truncate_prompt_tokens is not None
    [given] = await ctx.tokenize([body.prompt], special=special, field="prompt", truncated=cut)
    ids, params = await ctx.check_prompt(given, params, field="prompt", side=body.truncation_side)
    return await Generation(ctx, request, GenerateAnswer(ctx, body, ids, params)).response()


class GenerateAnswer(Answer):
    def __init__(self, ctx: ApiContext, body: GenerateRequest, ids: array, params: SamplingParams):
        super().__init__(ctx, body, new_id("gen-"))
        self.usage.prompt_tokens = len(ids)
        for index in range(params.n):
            own = for_sample(params, index)
            self.add(ids, own, GenerateOutput(ctx, body, index, own, ids))

    def closing(self) -> bytes:
        return event(b'{"id":' + encode(self.id) + b',"usage":' + self.usage.json() + b"}") + DONE

    def whole(self) -> bytes:
        outputs = b",".join(encode(o.fields("".join(o.texts))) for o in self.choices)
        return b'{"id":' + encode(self.id) + b',"outputs":[' + outputs + b'],"usage":' + self.usage.json() + b"}"


class GenerateOutput:
    def __init__(self, ctx: ApiContext, body: GenerateRequest, index: int, params: SamplingParams, prompt_ids: array):
        self.index, self.streaming = index, bool(body.stream)
        self.texts: list[str] = []
        self.ids: list[int] = []
        self.num_sent = 0  # characters
        self.finish: tuple[str | None, int | str | None] = (None, None)
        form = LogprobFormat(ctx.engine.tokenizer, skip_special_tokens=params.skip_special_tokens)
        self.logprobs = CompletionLogprobs(form, prompt_ids) if body.logprobs is not None else None

    def push(self, delta: Delta) -> bytes:
        self.ids.extend(delta.token_ids)
        if self.logprobs is not None:
            self.logprobs.add(delta)
        if delta.finish_reason is not None:
            self.finish = (delta.finish_reason, delta.stop_reason)
        if self.streaming:
            return event(encode(self.fields(delta.text)))
        self.texts.append(delta.text)
        return b""

    def fields(self, text: str) -> dict[str, Any]:
        fields: dict[str, Any] = {"index": self.index, "text": text, "token_ids": self.ids, "finish_reason": self.finish[0]}
        if self.finish[1] is not None:
            fields["stop_reason"] = self.finish[1]
        num_waiting = 0  # the ids of an event are those of its logprobs
        self.num_sent += len(text)
        if self.logprobs is not None:
            fields["logprobs"] = self.logprobs.take(self.num_sent, whole=self.finish[0] is not None)
            num_waiting = self.logprobs.num_waiting
        count = len(self.ids) - num_waiting
        fields["token_ids"], self.ids = self.ids[:count], self.ids[count:]
        return fields
