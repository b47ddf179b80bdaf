"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API over the same chat template and engine."""

from __future__ import annotations

import json
from array import array
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headrace.api.anthropic_input import (
    MessagesRequest,
    check_generates,
    choice_of,
    conversation,
    split_tools,
    structure,
    thinking_kwargs,
)
from headrace.api.body import read_json
from headrace.api.chat_completions import prompt_of
from headrace.api.checks import check_bookkeeping, check_fan_out
from headrace.api.context import ApiContext, for_sample, new_id
from headrace.api.errors import ApiError
from headrace.api.generation import Answer, Generation
from headrace.api.sse import named_event
from headrace.api.structured import Structure, constrain
from headrace.api.tool_choice import AnswerReader, ToolPolicy, check_tools
from headrace.conversation.events import CallArguments, CallBegin, Event, Text
from headrace.conversation.tool_syntax import without_half_pairs
from headrace.sampling.params import AtMost, SamplingParams
from headrace.text.stream import Delta

encode = msgspec.json.encode
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
SIGNATURE = "headrace"  # of a thinking block: clients hand it back, and nobody checks it here


class Rendered(NamedTuple):
    """A request's prompt, and what its answer is read with."""

    ids: list[int]
    end: str
    policy: ToolPolicy
    spec: Structure | None


async def messages(ctx: ApiContext, request: Request) -> Response:
    body = await read_json(request, MessagesRequest, ctx.config)
    model = ctx.check_model(body.model)
    most = check_generates(body)
    rendered = await _render(ctx, request, body)
    ids, end, policy, spec = rendered
    params = constrain(ctx, body.sampling_fields().sampling(max_tokens=AtMost(most)), spec)
    check_fan_out(ctx, 1, params)
    if len(ids) >= ctx.engine.max_model_len:
        text = f"prompt is too long: {len(ids)} tokens > {ctx.engine.max_model_len - 1} maximum"
        raise ApiError(400, text, param="messages", code="context_length_exceeded")
    room = AtMost(min(most, ctx.engine.max_model_len - len(ids)))  # agents ask for more than any context holds
    packed, params = await ctx.check_prompt(ids, msgspec.structs.replace(params, max_tokens=room), field="messages")
    params = policy.with_special_tokens(for_sample(params, 0))
    reader = policy.reader(end, structured=spec is not None)
    return await Generation(ctx, request, MessagesAnswer(ctx, body, model, reader, packed, params), spec).response()


async def count_tokens(ctx: ApiContext, request: Request) -> Response:
    body = await read_json(request, MessagesRequest, ctx.config)
    ctx.check_model(body.model)
    rendered = await _render(ctx, request, body)
    return Response(encode({"input_tokens": len(rendered.ids)}), media_type="application/json")


async def _render(ctx: ApiContext, request: Request, body: MessagesRequest) -> Rendered:
    check_bookkeeping(ctx, body)
    tools, left_out = split_tools(body.tools)
    if left_out:
        request.state.ignored = [*getattr(request.state, "ignored", ()), *dict.fromkeys(left_out)]
    choice = choice_of(body.tool_choice, tools)
    check_tools(tools, choice)
    parallel = not (body.tool_choice is not None and body.tool_choice.disable_parallel_tool_use)
    policy = ToolPolicy(ctx, tools, choice, parallel)
    spec = policy.joined(structure(body))
    chat = conversation(body, ctx.chat_template.keeps_later_systems)
    continued = chat[-1]["role"] == "assistant" and "tool_calls" not in chat[-1]
    if continued:  # a model reads no white space that its words do not begin with
        chat[-1]["content"] = chat[-1]["content"].rstrip()
    kwargs = thinking_kwargs(body)
    ids, end = await prompt_of(
        ctx, chat, policy.tools, kwargs, truncated=True, add_generation_prompt=not continued,
        continue_final_message=continued,
    )  # fmt: skip
    return Rendered(ids, end, policy, spec if continued else policy.behind_reasoning(spec, end, kwargs))


class MessagesAnswer(Answer):
    """One message; it is its own only choice. Blocks are opened and closed one after the other."""

    def __init__(
        self, ctx: ApiContext, body: MessagesRequest, model: str, reader: AnswerReader, ids: array, params: SamplingParams
    ):
        super().__init__(ctx, body, new_id("msg_"))
        self.model, self.reader = model, reader
        self.streaming, self.begun = bool(body.stream), False
        self.content: list[dict[str, Any]] = []
        self.stop_reason: str | None = None
        self.stop_sequence: str | None = None
        self._open = False
        self._pieces: list[str] = []  # of the open block
        self.add(ids, params, self)
        self.usage.prompt_tokens = len(ids)

    def push(self, delta: Delta) -> bytes:
        found = self.reader.push(delta.text)
        if delta.finish_reason is not None:
            found += self.reader.finish()
        out = self._start()
        for piece in found:
            out += self._take(piece)
        if delta.finish_reason is not None:
            out += self._close()
            self._ended(delta)
        return b"".join(out) if self.streaming else b""

    def _start(self) -> list[bytes]:
        if self.begun:
            return []
        self.begun = True
        return [self._say("message_start", message=self._message([])), self._say("ping")]

    def silence(self) -> bytes:
        """An event: its clients wait for one, and the first tells them that the request was taken."""
        return b"".join(self._start()) or self._say("ping")

    def _ended(self, delta: Delta) -> None:
        reason = str(delta.finish_reason)
        if reason == "stop" and isinstance(delta.stop_reason, str):
            self.stop_reason, self.stop_sequence = "stop_sequence", delta.stop_reason
        elif reason == "stop" and self.reader.num_calls:
            self.stop_reason = "tool_use"  # of forced calls, too
        else:
            self.stop_reason = STOP_REASONS.get(reason, "end_turn")

    def _take(self, piece: Event) -> list[bytes]:
        if isinstance(piece, CallBegin):
            return [*self._close(), self._begin({"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}})]
        out: list[bytes] = []
        if isinstance(piece, CallArguments):
            delta = {"type": "input_json_delta", "partial_json": piece.text}
        else:
            kind = "text" if isinstance(piece, Text) else "thinking"
            if not self._open or self.content[-1]["type"] != kind:
                signed = {"signature": ""} if kind == "thinking" else {}
                out = [*self._close(), self._begin({"type": kind, kind: "", **signed})]
            delta = {"type": f"{kind}_delta", kind: piece.text}
        self._pieces.append(piece.text)
        return [*out, self._say("content_block_delta", index=len(self.content) - 1, delta=delta)]

    def _begin(self, block: dict[str, Any]) -> bytes:
        self.content.append(block)
        self._open, self._pieces = True, []
        return self._say("content_block_start", index=len(self.content) - 1, content_block=block)

    def _close(self) -> list[bytes]:
        if not self._open:
            return []
        self._open = False
        block, text, index = self.content[-1], "".join(self._pieces), len(self.content) - 1
        out: list[bytes] = []
        if block["type"] == "tool_use":
            block["input"] = _object(text)
        else:
            block[block["type"]] = text
        if block["type"] == "thinking":
            block["signature"] = SIGNATURE
            out = [self._say("content_block_delta", index=index, delta={"type": "signature_delta", "signature": SIGNATURE})]
        return [*out, self._say("content_block_stop", index=index)]

    def _say(self, kind: str, **fields: Any) -> bytes:
        return named_event(kind.encode(), encode({"type": kind, **fields})) if self.streaming else b""

    def closing(self) -> bytes:
        delta = {"stop_reason": self.stop_reason, "stop_sequence": self.stop_sequence}
        return self._say("message_delta", delta=delta, usage=self._usage()) + self._say("message_stop")

    def failure(self, error: ApiError) -> bytes:
        return named_event(b"error", error.anthropic())

    def whole(self) -> bytes:
        return encode(self._message(self.content))

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": content,
            "stop_reason": self.stop_reason, "stop_sequence": self.stop_sequence, "usage": self._usage(),
        }  # fmt: skip

    def _usage(self) -> dict[str, Any]:
        """Cached tokens are counted apart from the others of the prompt."""
        cached = self.usage.cached_tokens
        return {
            "input_tokens": self.usage.prompt_tokens - cached, "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0, "output_tokens": self.usage.completion_tokens,
        }  # fmt: skip


def _object(text: str) -> dict[str, Any]:
    """A call's arguments; of one that was cut off there may be no whole object."""
    try:
        value = json.loads(text or "{}", strict=False)
        value = json.loads(without_half_pairs(json.dumps(value, ensure_ascii=False)))
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
