"""POST /v1/chat/completions: messages in, through template and tokenizer; text, reasoning and tool calls out.

Stop strings are looked for in all that the model writes: in reasoning and in tool calls too.
"""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headrace.api.beams import BeamGeneration, beam_params
from headrace.api.body import read_json
from headrace.api.chat_tools import CustomInputs, tools_of, with_functions
from headrace.api.checks import check_fan_out, check_generation, check_messages
from headrace.api.context import ApiContext, for_sample
from headrace.api.errors import allowed_only, bad_request, unsupported
from headrace.api.generation import ChoicesAnswer, Generation
from headrace.api.logprobs import ChatLogprobs, prompt_logprobs
from headrace.api.protocol import ChatRequest, Thinking
from headrace.api.responses_tools import ResponseTools
from headrace.api.structured import constrain, spec_of
from headrace.api.tool_choice import AnswerReader, ToolPolicy, check_tools
from headrace.api.tool_choice_input import of_chat
from headrace.conversation.events import CallArguments, CallBegin, Event, Reasoning, Text
from headrace.conversation.tool_grammar import Tool
from headrace.conversation.tool_prompt import shown_to
from headrace.sampling.checks import check_int
from headrace.sampling.params import SamplingParams
from headrace.text.stream import Delta

encode = msgspec.json.encode
BEGUN = ("prefix", "partial")  # true of a last message: go on with it (Mistral's and DeepSeek's word, Moonshot's and Qwen's)


async def chat_completions(ctx: ApiContext, request: Request) -> Response:
    body = await read_json(request, ChatRequest, ctx.config)
    model = ctx.check_model(body.model)
    check_generation(ctx, body)
    check_messages(body.messages)
    tools = tools_of(body.tools)
    choice = of_chat(body.tool_choice, tools)
    check_tools(tools.functions, choice)
    if body.echo:
        raise unsupported("echo", "not supported for chat; continue_final_message continues the last message")
    policy = ToolPolicy(ctx, tools.functions, choice, body.parallel_tool_calls)
    spec = policy.joined(spec_of(body.response_format, body.structured_outputs))
    params = _parameters(ctx, body)
    beams = beam_params(ctx, body)
    check_fan_out(ctx, params.n, params)
    kwargs = thinking_kwargs(body) | (body.chat_template_kwargs or {})
    special, cut = bool(body.add_special_tokens), body.truncate_prompt_tokens is not None
    history = with_functions(body.messages, tools)
    ending = prompt_end(body)
    rendered, end = await prompt_of(ctx, history, policy.tools, kwargs, special=special, truncated=cut, **ending)
    spec = spec if ending["continue_final_message"] else policy.behind_reasoning(spec, end, kwargs)
    params = constrain(ctx, params, spec)
    limit = "max_tokens" if body.max_completion_tokens != params.max_tokens else "max_completion_tokens"
    ids, params = await ctx.check_prompt(rendered, params, field="messages", side=body.truncation_side, limit=limit)
    answer = ChatAnswer(ctx, body, model, tools, policy, ids, end, policy.with_special_tokens(params))
    if beams is not None:
        return await BeamGeneration(ctx, request, answer, beams).response()
    return await Generation(ctx, request, answer, spec).response()


def _parameters(ctx: ApiContext, body: ChatRequest) -> SamplingParams:
    if body.top_logprobs is not None:
        check_int("top_logprobs", body.top_logprobs, 0, ctx.config.max_logprobs)
        if body.top_logprobs and not body.logprobs:
            raise allowed_only("top_logprobs", "when logprobs is true")
    if body.max_completion_tokens is not None:
        check_int("max_completion_tokens", body.max_completion_tokens, 1, 2**31 - 1)
    most = min((m for m in (body.max_completion_tokens, body.max_tokens) if m is not None), default=None)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return body.sampling(max_tokens=most, logprobs=logprobs)


def effort_kwargs(effort: str | None) -> dict[str, Any]:
    """`reasoning_effort` as the switches that templates know; a template without them ignores it."""
    if effort is None:
        return {}
    return {"reasoning_effort": effort, "enable_thinking": effort != "none"}


def thinking_kwargs(body: ChatRequest) -> dict[str, Any]:
    """What the request says of thinking, in whatever words. Raises ApiError where they contradict each other."""
    reasoning, thinking = body.reasoning, body.thinking
    if reasoning is not None and reasoning.max_tokens is not None:
        raise unsupported("reasoning.max_tokens", "not supported by this server; max_completion_tokens bounds the whole answer")
    effort = reasoning.effort if reasoning is not None and body.reasoning_effort is None else body.reasoning_effort
    kwargs = effort_kwargs(effort)
    wanted = {
        "reasoning.enabled": None if reasoning is None else reasoning.enabled,
        "thinking": thinking.type != "disabled" if isinstance(thinking, Thinking) else thinking,
        "enable_thinking": body.enable_thinking,
    }
    for name, value in wanted.items():
        if value is None:
            continue
        if kwargs.setdefault("enable_thinking", value) != value:
            raise bad_request(f"{name} contradicts what else the request says of thinking.", name, "invalid_value")
        kwargs["thinking"] = value
    return kwargs


def prompt_end(body: Any) -> dict[str, bool]:
    """How the body wants the prompt to end, for prompt_of(). Raises ApiError."""
    last = body.messages[-1]
    begun = last.get("role") == "assistant" and any(last.get(name) is True for name in BEGUN)
    continued = begun if body.continue_final_message is None else body.continue_final_message
    if continued and body.add_generation_prompt:
        text = "continue_final_message and add_generation_prompt cannot both be true."
        raise bad_request(text, "continue_final_message", "invalid_value")
    return {
        "add_generation_prompt": body.add_generation_prompt is not False and not continued,
        "continue_final_message": continued,
    }


async def prompt_of(
    ctx: ApiContext, messages: list[dict[str, Any]], tools: list[Tool] | None, kwargs: dict[str, Any] | None, *,
    special: bool = False, truncated: bool = False, **end: Any,
) -> tuple[list[int], str]:  # fmt: skip
    """Render and tokenize: the ids, and the end of the text. Raises ParameterError or ApiError naming the field.

    `special`: with the tokenizer's special tokens around what the template has written already; `truncated`: the prompt
    will be cut to what fits.
    """

    def work() -> tuple[list[int], str]:
        template = ctx.chat_template
        shown, known_tools = shown_to(template, messages, [_without_nulls(t) for t in tools] if tools else None)
        if not ctx.template_knows_developers:  # many would drop such a message silently
            shown = [{**m, "role": "system"} if m.get("role") == "developer" else m for m in shown]
        text = template.render(shown, tools=known_tools, chat_template_kwargs=kwargs, **end)
        if (literal := template.literal) is None:
            return ctx.encode(text, special, "messages", truncated), text[-400:]
        plain = literal.shown(text)
        if not truncated:
            ctx.check_length(plain, "messages")
        return literal.tokenizer.encode(literal.spelled(text), special), plain[-400:]

    return await ctx.in_thread(work)


def _without_nulls(tool: Tool) -> dict[str, Any]:
    """A tool as its client wrote it: templates print what they are given."""
    return {"type": tool.type, "function": {k: v for k, v in msgspec.to_builtins(tool.function).items() if v is not None}}


class ChatAnswer(ChoicesAnswer):
    """One prompt, n choices."""

    def __init__(
        self, ctx: ApiContext, body: ChatRequest, model: str, tools: ResponseTools, policy: ToolPolicy, ids: array,
        prompt_end: str, params: SamplingParams,
    ):  # fmt: skip
        super().__init__(ctx, body, "chatcmpl-", "chat.completion.chunk" if body.stream else "chat.completion", model)
        self.prompt_ids, self.tools = ids, tools
        self.usage.prompt_tokens = len(ids)
        for index in range(params.n):
            own = for_sample(params, index)
            choice = ChatChoice(self, index, own, policy.reader(prompt_end, structured=params.structured_outputs is not None))
            self.add(ids, own, choice)

    def usage_json(self) -> bytes:
        self.usage.reasoning_tokens = sum(c.reasoning_tokens() for c in self.choices)
        return self.usage.json()

    def whole(self) -> bytes:
        fields: dict[str, Any] = {}
        entries = self.samples[0].text.prompt_logprobs
        if self.body.prompt_logprobs is not None and entries is not None:
            fields["prompt_logprobs"] = prompt_logprobs(entries, self.choices[0].form)
        if self.body.return_token_ids:
            fields["prompt_token_ids"] = self.prompt_ids.tolist()
        return super().whole()[:-1] + (b"," + encode(fields)[1:] if fields else b"}")


class ChatChoice:
    """One message. Streamed: the role first, then a chunk for each part, then one with the finish reason."""

    def __init__(self, answer: ChatAnswer, index: int, params: SamplingParams, reader: AnswerReader):
        body = answer.body
        self.answer, self.index, self.reader = answer, index, reader
        self.streaming = bool(body.stream)
        hidden = body.reasoning is not None and body.reasoning.exclude
        self.reasoning_shown = body.include_reasoning is not False and not hidden
        self.form = answer.logprob_format(params)
        self.logprobs = ChatLogprobs(self.form, body.top_logprobs or 0) if body.logprobs else None
        self.with_ids = bool(body.return_token_ids)
        self.begun = False
        self.ids: list[int] = []
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[dict[str, Any]] = []
        self.inputs = CustomInputs(answer.tools)
        self.finish: tuple[str | None, int | str | None] = (None, None)
        self.open = b"data: " + answer.head + b'{"index":%d,"delta":' % index
        self.plain = not (self.logprobs or self.with_ids or answer.continuous_usage) and reader.plain and self.streaming

    def push(self, delta: Delta) -> bytes:
        if self.plain and self.begun and delta.finish_reason is None:  # the common case, once per token
            text = delta.text
            return self.open + b'{"content":' + encode(text) + b'},"finish_reason":null}]}\n\n' if text else b""
        if self.logprobs is not None and delta.logprobs:
            self.logprobs.add(delta.logprobs)
        if self.with_ids:
            self.ids.extend(delta.token_ids)
        events = self.reader.push(delta.text)
        if delta.finish_reason is not None:
            events += self.reader.finish()
            reason = self.reader.policy.finish_reason(delta.finish_reason, self.reader.num_calls)
            self.finish = (reason, delta.stop_reason)
        events = self.inputs.read(events, last=delta.finish_reason is not None)
        for event in events:
            self._keep(event)
        if not self.streaming:
            return b""
        chunks = [self._chunk(b'{"role":"assistant","content":""}', False)] if not self.begun else []
        self.begun = True
        deltas = [d for event in events if (d := self._delta(event)) is not None]
        chunks += [self._chunk(encode(d), True) for d in deltas]
        if delta.finish_reason is not None:
            chunks.append(self._chunk(b"{}", True, last=True))
        return b"".join(chunks)

    def _delta(self, event: Event) -> dict[str, Any] | None:
        if isinstance(event, Text):
            return {"content": event.text}
        if isinstance(event, Reasoning):
            return {"reasoning": event.text, "reasoning_content": event.text} if self.reasoning_shown else None
        if isinstance(event, CallBegin):
            return {"tool_calls": [{"index": event.index, **self._call(event)}]}
        kind, field = self._kind(event)
        return {"tool_calls": [{"index": event.index, kind: {field: event.text}}]}

    def _kind(self, event: CallBegin | CallArguments) -> tuple[str, str]:
        """Of a call, and what its text is called."""
        return ("custom", "input") if event.index in self.inputs.customs else ("function", "arguments")

    def _call(self, event: CallBegin) -> dict[str, Any]:
        """As it begins."""
        kind, field = self._kind(event)
        return {"id": event.id, "type": kind, kind: {"name": self.answer.tools.origin(event.name).name, field: ""}}

    def _chunk(self, delta: bytes, with_extras: bool, last: bool = False) -> bytes:
        """`with_extras`: it takes along the logprobs and ids that wait for a chunk."""
        reason, stop_reason = self.finish if last else (None, None)
        fields: dict[str, Any] = {}
        if with_extras and self.logprobs is not None and (entries := self.logprobs.take()):
            fields["logprobs"] = {"content": entries, "refusal": None}
        fields["finish_reason"] = reason
        if stop_reason is not None:
            fields["stop_reason"] = stop_reason
        if with_extras and self.ids:
            fields["token_ids"], self.ids = self.ids, []
        tail = b',"usage":' + self.answer.usage_json() if self.answer.continuous_usage else b""
        if self.with_ids and not self.begun:
            tail += b',"prompt_token_ids":' + encode(self.answer.prompt_ids.tolist())
        return self.open + delta + b"," + encode(fields)[1:] + b"]" + tail + b"}\n\n"

    def _keep(self, event: Event) -> None:
        """For the whole answer; of a streamed one only what the usage needs."""
        if isinstance(event, Reasoning):
            self.reasoning.append(event.text)
        elif self.streaming:
            return
        elif isinstance(event, Text):
            self.content.append(event.text)
        elif isinstance(event, CallBegin):
            self.calls.append(self._call(event))
        elif isinstance(event, CallArguments):
            kind, field = self._kind(event)
            self.calls[event.index][kind][field] += event.text

    def reasoning_tokens(self) -> int:
        """Counted on the reasoning's text, when the choice has ended."""
        return self.answer.ctx.count_tokens("".join(self.reasoning)) if self.finish[0] else 0

    def whole(self) -> bytes:
        reason, stop_reason = self.finish
        content = "".join(self.content)
        message: dict[str, Any] = {
            "role": "assistant", "content": None if self.calls and not content else content,
            "refusal": None, "annotations": [],
        }  # fmt: skip
        if self.reasoning and self.reasoning_shown:
            message["reasoning"] = message["reasoning_content"] = "".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = self.calls
        choice: dict[str, Any] = {"index": self.index, "message": message, "logprobs": None, "finish_reason": reason}
        if self.logprobs is not None:
            choice["logprobs"] = {"content": self.logprobs.take(), "refusal": None}
        if stop_reason is not None:
            choice["stop_reason"] = stop_reason
        if self.with_ids:
            choice["token_ids"] = self.ids
        return encode(choice)
