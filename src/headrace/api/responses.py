"""POST /v1/responses: items in, items out, without storage."""

from __future__ import annotations

import time
from array import array
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headrace.api.body import read_json
from headrace.api.chat_completions import effort_kwargs, prompt_of
from headrace.api.checks import check_common, check_fan_out, check_messages, check_stream_options
from headrace.api.context import ApiContext, for_sample, new_id, response_id
from headrace.api.errors import ApiError
from headrace.api.generation import Answer, Generation
from headrace.api.logprobs import ChatLogprobs, LogprobFormat
from headrace.api.responses_input import (
    LOGPROBS,
    ResponsesRequest,
    check_unserved,
    messages,
    nested_choice,
    nested_tools,
    structure,
)
from headrace.api.sse import named_event
from headrace.api.structured import constrain
from headrace.api.tool_choice import AnswerReader, ToolPolicy, check_tools
from headrace.conversation.events import CallArguments, CallBegin, Event, Text
from headrace.sampling.checks import check_int
from headrace.sampling.params import SamplingParams
from headrace.text.stream import Delta

encode = msgspec.json.encode
News = tuple[str, dict[str, Any]]  # type of a stream event, and what it says
# type of an output item -> prefix of its id, its fields when it begins, its part of content
ITEMS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "message": (
        "msg_", {"role": "assistant", "status": "in_progress", "content": []},
        {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
    ),
    "reasoning": ("rs_", {"summary": [], "content": []}, {"type": "reasoning_text", "text": ""}),
    "function_call": ("fc_", {"arguments": "", "status": "in_progress"}, {}),
}  # fmt: skip


async def responses(ctx: ApiContext, request: Request) -> Response:
    body = await read_json(request, ResponsesRequest, ctx.config)
    model = ctx.check_model(body.model)
    check_common(ctx, body)
    check_unserved(body)
    check_stream_options(body.stream, body.stream_options)
    conversation = messages(body.input, body.instructions)
    check_messages(conversation, "input")
    tools, choice = nested_tools(body.tools), nested_choice(body.tool_choice)
    check_tools(tools, choice)
    policy = ToolPolicy(ctx, tools, choice, body.parallel_tool_calls)
    spec = policy.joined(structure(body.text))
    params = constrain(ctx, _parameters(ctx, body), spec)
    check_fan_out(ctx, 1, params)
    effort = body.reasoning.effort if body.reasoning is not None else None
    kwargs = effort_kwargs(effort) | (body.chat_template_kwargs or {})
    given, end = await prompt_of(ctx, conversation, policy.tools, kwargs, truncated=body.truncate_prompt_tokens is not None)
    ids, params = await ctx.check_prompt(given, params, field="input", side=body.truncation_side, limit="max_output_tokens")
    params = policy.with_special_tokens(for_sample(params, 0))
    reader = policy.reader(end, structured=spec is not None)
    return await Generation(ctx, request, ResponsesAnswer(ctx, body, model, reader, ids, params), spec).response()


def _parameters(ctx: ApiContext, body: ResponsesRequest) -> SamplingParams:
    if body.top_logprobs is not None:
        check_int("top_logprobs", body.top_logprobs, 0, ctx.config.max_logprobs)
    if body.max_output_tokens is not None:
        check_int("max_output_tokens", body.max_output_tokens, 1, 2**31 - 1)
    wanted = bool(body.top_logprobs) or LOGPROBS in (body.include or ())
    return body.sampling(max_tokens=body.max_output_tokens, logprobs=(body.top_logprobs or 0) if wanted else None)


class ResponsesAnswer(Answer):
    """One response; it is its own only choice."""

    def __init__(
        self, ctx: ApiContext, body: ResponsesRequest, model: str, reader: AnswerReader, ids: array,
        params: SamplingParams,
    ):  # fmt: skip
        super().__init__(ctx, body, response_id("resp_", body.request_id))
        self.model, self.reader, self.params = model, reader, params
        form = LogprobFormat(ctx.engine.tokenizer, skip_special_tokens=params.skip_special_tokens)
        self.logprobs = ChatLogprobs(form, body.top_logprobs or 0) if params.logprobs is not None else None
        self.events, self.items = Events(), Items()
        self.streaming, self.begun = bool(body.stream), False
        self.status = "in_progress"
        self.add(ids, params, self)
        self.usage.prompt_tokens = len(ids)

    def push(self, delta: Delta) -> bytes:
        out: list[bytes] = []
        if not self.begun:
            self.begun = True
            if self.streaming:
                shown = {"response": self.resource()}
                out += [self.events.bytes(f"response.{k}", shown) for k in ("created", "in_progress")]
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

    def _take_logprobs(self) -> list[dict[str, Any]]:
        return self.logprobs.take() if self.logprobs is not None else []

    def closing(self) -> bytes:
        return self.events.bytes(f"response.{self.status}", {"response": self.resource()})

    def failure(self, error: ApiError) -> bytes:
        code = error.code or "server_error"
        fields = {"code": code, "message": error.message, "param": error.param}
        self.status = "failed"
        failed = self.resource() | {"error": {"code": code, "message": error.message}}
        return self.events.bytes("error", fields) + self.events.bytes("response.failed", {"response": failed})

    def whole(self) -> bytes:
        return encode(self.resource())

    def resource(self) -> dict[str, Any]:
        """The response object as it is now; fields of the request are given back as they are."""
        body, params = self.body, self.params
        ended = self.status in ("completed", "incomplete")
        incomplete = {"reason": "max_output_tokens"} if self.status == "incomplete" else None
        choice = body.tool_choice or ("auto" if body.tools else "none")
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if self.status == "completed" else None,
            "status": self.status,
            "error": None,
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
            "tools": body.tools or [],
            "text": {"format": (body.text.format if body.text else None) or {"type": "text"}},
            "truncation": "disabled",
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "store": False,
            "background": False,
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


class Events:
    """Numbers and encodes events."""

    def __init__(self) -> None:
        self.number = 0

    def bytes(self, kind: str, fields: dict[str, Any]) -> bytes:
        data = encode({"type": kind, "sequence_number": self.number, **fields})
        self.number += 1
        return named_event(kind.encode(), data)


class Items:
    """Output items from the events of an answer: one is open at a time; an event of another kind ends it and opens the next."""

    def __init__(self) -> None:
        self.output: list[dict[str, Any]] = []
        self._pieces: list[str] = []  # of the open item's text
        self._logprobs: list[dict[str, Any]] = []
        self._open = ""  # its type

    def push(self, part: Event, logprobs: list[dict[str, Any]]) -> list[News]:
        """`logprobs` go to the message if this is a part of it."""
        if isinstance(part, CallBegin):
            return self.close("completed") + self._start("function_call", call_id=part.id, name=part.name)
        events: list[News] = []
        if isinstance(part, CallArguments):
            name, fields = "function_call_arguments", self._place()
        else:
            kind = "message" if isinstance(part, Text) else "reasoning"
            if self._open != kind:
                events = self.close("completed") + self._start(kind)
            name, fields = ITEMS[kind][2]["type"], self._place(0)
        self._pieces.append(part.text)
        fields["delta"] = part.text
        if isinstance(part, Text):
            self._logprobs += logprobs
            fields["logprobs"] = logprobs
        return [*events, (f"response.{name}.delta", fields)]

    def _place(self, content_index: int | None = None) -> dict[str, Any]:
        place = {"item_id": self.output[-1]["id"], "output_index": len(self.output) - 1}
        return place if content_index is None else {**place, "content_index": content_index}

    def _start(self, kind: str, **given: str) -> list[News]:
        self._pieces, self._logprobs, self._open = [], [], kind
        prefix, begun, part = ITEMS[kind]
        item = {"type": kind, "id": new_id(prefix), **given, **begun}
        self.output.append(item)
        events: list[News] = [("response.output_item.added", {"output_index": len(self.output) - 1, "item": dict(item)})]
        return [*events, ("response.content_part.added", {**self._place(0), "part": part})] if part else events

    def close(self, status: str, logprobs: list[dict[str, Any]] | None = None) -> list[News]:
        """End the open item, if there is one."""
        kind, self._open = self._open, ""
        if not kind:
            return []
        item, text = self.output[-1], "".join(self._pieces)
        if "status" in item:
            item["status"] = status
        events: list[News]
        if kind == "function_call":
            item["arguments"] = text
            fields = {**self._place(), "name": item["name"], "arguments": text}
            events = [("response.function_call_arguments.done", fields)]
        else:
            said: dict[str, Any] = {"text": text}
            if kind == "message":
                said["logprobs"] = self._logprobs + (logprobs or [])
            part = {**ITEMS[kind][2], **said}
            item["content"] = [part]
            events = [
                (f"response.{part['type']}.done", {**self._place(0), **said}),
                ("response.content_part.done", {**self._place(0), "part": part}),
            ]
        return [*events, ("response.output_item.done", {"output_index": len(self.output) - 1, "item": item})]

    def finish(self, status: str, logprobs: list[dict[str, Any]]) -> list[News]:
        """End the output, which holds at least one item: an empty message, if the model said nothing."""
        events = [] if self.output else self._start("message")
        return events + self.close(status, logprobs)
