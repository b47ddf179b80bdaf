"""POST /v1/responses: items in, items out; and the count of the tokens that go in."""

from __future__ import annotations

import time
from array import array
from functools import partial
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headrace.api.body import read_json
from headrace.api.chat_completions import effort_kwargs, prompt_of
from headrace.api.checks import check_common, check_fan_out, check_messages, check_stream_options
from headrace.api.context import ApiContext, for_sample, response_id
from headrace.api.errors import ApiError, invalid, too_many
from headrace.api.generation import Generation
from headrace.api.logprobs import ChatLogprobs, LogprobFormat
from headrace.api.response_store import Stored
from headrace.api.responses_background import BackgroundAnswer, in_background
from headrace.api.responses_input import (
    ENCRYPTED,
    LOGPROBS,
    InputTokensRequest,
    ResponsesFields,
    ResponsesRequest,
    check_unserved,
    structure,
)
from headrace.api.responses_items import Events, Items
from headrace.api.responses_messages import as_items, left_out, messages, tools_in
from headrace.api.responses_stored import Held, check_kept, continued, dereferenced, give_back, owner, with_ids
from headrace.api.responses_tools import ResponseTools
from headrace.api.structured import Structure, constrain
from headrace.api.tool_choice import AnswerReader, ToolPolicy, check_tools
from headrace.api.tool_choice_input import of_responses
from headrace.sampling.checks import check_int
from headrace.sampling.params import SamplingParams
from headrace.text.stream import Delta

encode = msgspec.json.encode
MESSAGE_CHARS = 500  # of the error of a response that failed
FAILURE_BYTES = 4096  # such an error as JSON, and more


async def responses(ctx: ApiContext, request: Request) -> Response:
    body = await read_json(request, ResponsesRequest, ctx.config)
    model = ctx.check_model(body.model)
    items = dereferenced(ctx, request, as_items(body.input))
    asked = await _asked(ctx, request, body, items, truncated=body.truncate_prompt_tokens is not None)
    policy, spec = asked.policy, asked.spec
    ids, params = await ctx.check_prompt(
        asked.ids, asked.params, field="input", side=body.truncation_side, limit="max_output_tokens"
    )
    params = policy.with_special_tokens(for_sample(params, 0))
    reader = policy.reader(asked.end, structured=spec is not None)
    answer = ResponsesAnswer(ctx, body, model, asked.tools, reader, ids, params)
    generation = Generation(ctx, request, answer, spec)
    if body.store is False:
        return await generation.response()
    return await _kept(generation, answer, items, asked.previous)


async def input_tokens(ctx: ApiContext, request: Request) -> Response:
    """POST /v1/responses/input_tokens: how long the prompt of such a response is, also where it is too long for one."""
    body = await read_json(request, InputTokensRequest, ctx.config)
    ctx.check_model(body.model)
    items = [] if body.input is None else dereferenced(ctx, request, as_items(body.input))
    asked = await _asked(ctx, request, body, items, truncated=True)
    num_tokens = len(ctx.inputs.cut(asked.ids, asked.params, body.truncation_side))
    return Response(encode({"object": "response.input_tokens", "input_tokens": num_tokens}), media_type="application/json")


class Asked(NamedTuple):
    """A request up to its prompt."""

    previous: Stored | None
    tools: ResponseTools
    policy: ToolPolicy
    spec: Structure | None
    params: SamplingParams
    ids: list[int]
    end: str  # of the prompt's text


async def _asked(
    ctx: ApiContext, request: Request, body: ResponsesFields, items: list[dict[str, Any]], *, truncated: bool
) -> Asked:
    check_common(ctx, body)
    check_unserved(body)
    if body.background:
        check_kept(ctx, "background", "wait for the response, or ask for a stream")
    check_stream_options(body.stream, body.stream_options)
    previous, before = continued(ctx, request, body.previous_response_id)
    tools = _tools(ctx, request, body, items, before)
    conversation = messages(items, body.instructions, tools.name, before)
    check_messages(conversation, "input")
    choice = of_responses(body.tool_choice, tools)
    check_tools(tools.functions, choice)
    policy = ToolPolicy(ctx, tools.functions, choice, body.parallel_tool_calls)
    spec = policy.joined(structure(body.text))
    params = _parameters(ctx, body)
    check_fan_out(ctx, 1, params)
    effort = body.reasoning.effort if body.reasoning is not None else None
    kwargs = effort_kwargs(effort) | (body.chat_template_kwargs or {})
    ids, end = await prompt_of(ctx, conversation, policy.tools, kwargs, truncated=truncated)
    spec = policy.behind_reasoning(spec, end, kwargs)
    return Asked(previous, tools, policy, spec, constrain(ctx, params, spec), ids, end)


async def _kept(
    generation: Generation, answer: ResponsesAnswer, items: list[dict[str, Any]], previous: Stored | None
) -> Response:
    """The answer, which is in the store from its beginning on, if there is room; in the background there must be."""
    store, key, taken = answer.ctx.responses, (owner(generation.request), answer.id), with_ids(items)
    stored, ticket = None, await generation.admit()  # for one that is not let in no other one goes
    generation.ticket = ticket
    try:
        reserve = len(encode(answer.resource())) + FAILURE_BYTES if answer.background else 0
        stored = store.begin(key, taken, previous, answer.resource, reserve)
        if stored is not None:
            answer.stored, stored.cancel = stored, partial(_cancel, generation, answer)
        if not answer.background:
            return Held(await generation.response(), store, stored, ticket)
        if stored is None:
            raise _no_room(answer, key, len(encode(taken)) + reserve)
        return in_background(generation, answer, stored, ticket)
    except BaseException:
        give_back(store, stored, ticket)
        raise


def _no_room(answer: ResponsesAnswer, key: tuple[int, str], size: int) -> ApiError:
    store = answer.ctx.responses
    if store.find(key) is not None:
        return invalid("request_id", "a response of this id is in progress.")
    if size > store.max_bytes:
        why = f"with the rest of the request it takes {size} bytes, and responses that are kept have {store.max_bytes}"
        return invalid("input", f"{why} (--responses-store-bytes).")
    text = "The responses that run leave no room for another one that is kept (--responses-store-bytes)."
    return too_many(text, answer.ctx.limits.retry_after(), "store_full")


def _cancel(generation: Generation, answer: ResponsesAnswer) -> bytes:
    """For somebody else than its own client, who is told so: what is kept, if there is room, says that it was cancelled."""
    answer.status = "cancelled"
    generation.line.end(ApiError(409, "The response was cancelled.", code="cancelled"))
    return answer.whole()


def _tools(
    ctx: ApiContext, request: Request, body: ResponsesFields, items: list[dict[str, Any]], before: list[dict[str, Any]]
) -> ResponseTools:
    """Those of the body and of its items; what is left out of either is named in the answer's header."""
    ignored: list[str] | None = [] if ctx.config.unknown_fields == "ignore" else None
    tools = ResponseTools(ignored)
    tools.add(body.tools or [], "tools")
    for place, more in [*tools_in(items), *tools_in(before)]:
        tools.add(more, place)
    if ignored is not None and (named := [*ignored, *left_out(items)]):
        request.state.ignored = list(dict.fromkeys([*getattr(request.state, "ignored", ()), *named]))
    return tools


def _parameters(ctx: ApiContext, body: ResponsesFields) -> SamplingParams:
    if body.top_logprobs is not None:
        check_int("top_logprobs", body.top_logprobs, 0, ctx.config.max_logprobs)
    if body.max_output_tokens is not None:
        check_int("max_output_tokens", body.max_output_tokens, 1, 2**31 - 1)
    wanted = bool(body.top_logprobs) or LOGPROBS in (body.include or ())
    return body.sampling(max_tokens=body.max_output_tokens, logprobs=(body.top_logprobs or 0) if wanted else None)


class ResponsesAnswer(BackgroundAnswer):
    """One response; it is its own only choice."""

    def __init__(
        self, ctx: ApiContext, body: ResponsesRequest, model: str, tools: ResponseTools, reader: AnswerReader, ids: array,
        params: SamplingParams,
    ):  # fmt: skip
        super().__init__(ctx, body, response_id("resp_", body.request_id))
        self.model, self.reader, self.params = model, reader, params
        form = LogprobFormat(ctx.engine.tokenizer, skip_special_tokens=params.skip_special_tokens)
        self.logprobs = ChatLogprobs(form, body.top_logprobs or 0) if params.logprobs is not None else None
        reasoning = body.reasoning
        self.summary = None if reasoning is None else reasoning.summary or reasoning.generate_summary
        summarized, seal = self.summary not in (None, "none"), ENCRYPTED in (body.include or ())
        self.events, self.items = Events(), Items(tools, summarized=summarized, seal=seal)
        self.tools = tools
        self.stored: Stored | None = None
        self.background, self.begun = bool(body.background), False
        self.streaming = self.background or bool(body.stream)
        self.status = "queued" if self.background else "in_progress"
        self.error: dict[str, str] | None = None
        self.add(ids, params, self)
        self.usage.prompt_tokens = len(ids)

    def push(self, delta: Delta) -> bytes:
        out = self._begin()
        if self.logprobs is not None and delta.logprobs:
            self.logprobs.add(delta.logprobs)
        found = self.reader.push(delta.text)
        if delta.finish_reason is not None:
            found += self.reader.finish()
        news = []
        for piece in found:
            news += self.items.push(piece, self._take_logprobs())
        if delta.finish_reason is not None:
            self.status = "incomplete" if delta.finish_reason == "length" else "completed"
            news += self.items.finish(self.status, self._take_logprobs())
        if self.streaming:
            out += [self.events.bytes(kind, fields) for kind, fields in news]
        return b"".join(out)

    def queued(self) -> bytes:
        return b"".join(self._tell("created", "queued"))

    def _begin(self) -> list[bytes]:
        if self.begun or not self.streaming:
            return []
        self.begun = True
        if not self.background:
            return self._tell("created", "in_progress")
        if self.status == "queued":
            self.status = "in_progress"
        return self._tell("in_progress")

    def _tell(self, *kinds: str) -> list[bytes]:
        shown = {"response": self.resource()}
        return [self.events.bytes(f"response.{kind}", shown) for kind in kinds]

    def silence(self) -> bytes:
        """An event, since there are clients that take comments for nothing and give up. In the background nobody waits."""
        if self.background:
            return b""
        return b"".join(self._begin()) or self.events.bytes("response.in_progress", {"response": self.resource()})

    def _take_logprobs(self) -> list[dict[str, Any]]:
        return self.logprobs.take() if self.logprobs is not None else []

    def closing(self) -> bytes:
        final = {"response": msgspec.Raw(self._final())}  # first, as it may say how it ends
        return self.events.bytes(f"response.{self.status}", final)

    def failure(self, error: ApiError) -> bytes:
        code = error.code or "server_error"
        fields = {"code": code, "message": error.message, "param": error.param}
        if self.status != "cancelled":
            self._fail(code, error.message)
        failed = {"response": msgspec.Raw(self._final())}
        return self.events.bytes("error", fields) + self.events.bytes("response.failed", failed)

    def whole(self) -> bytes:
        return self._final()

    def _final(self) -> bytes:
        """The response object at its end, as it is kept, or as it says that it is not."""
        data, stored, store = encode(self.resource()), self.stored, self.ctx.responses
        if stored is None or stored.now is None or store.end(stored, data):
            return data
        if self.background:  # there is nobody else to whom the answer could be given
            stored.recorder.drop()  # its events need more room than it, and are of less use
            if store.end(stored, data):
                return data
            text = f"The answer takes {len(data)} bytes, for which --responses-store-bytes has no room."
            self._fail("store_full", text)
            data = encode(self.resource())
            store.end(stored, data)
            return data
        store.release(stored)
        self.stored = None
        return encode(self.resource())

    def _fail(self, code: str, message: str) -> None:
        self.status, self.error = "failed", {"code": code, "message": message[:MESSAGE_CHARS]}

    def resource(self) -> dict[str, Any]:
        """The response object as it is now; fields of the request are given back as they are."""
        body, params = self.body, self.params
        ended = self.status in ("completed", "incomplete")
        incomplete = {"reason": "max_output_tokens"} if self.status == "incomplete" else None
        choice = body.tool_choice or ("auto" if self.tools.functions else "none")
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if self.status == "completed" else None,
            "status": self.status,
            "error": self.error,
            "incomplete_details": incomplete,
            "instructions": body.instructions,
            "metadata": body.metadata or {},
            "model": self.model,
            "output": self.items.output if ended else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "top_logprobs": body.top_logprobs or 0,
            "tool_choice": choice,
            "tools": self.tools.given,
            "text": {"format": (body.text.format if body.text else None) or {"type": "text"}},
            "truncation": "disabled",
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": self.summary},
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "store": self.stored is not None,
            "background": self.background,
            "service_tier": "default",
            "safety_identifier": body.safety_identifier,
            "prompt_cache_key": body.prompt_cache_key,
            "usage": self._usage() if ended else None,
        }

    def _reasoning_tokens(self) -> int:
        texts = [part["text"] for item in self.items.output if item["type"] == "reasoning" for part in item["content"]]
        return self.ctx.count_tokens("".join(texts))

    def _usage(self) -> dict[str, Any]:
        prompt, output = self.usage.prompt_tokens, self.usage.completion_tokens
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": self.usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": output,
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens()},
            "total_tokens": prompt + output,
        }
