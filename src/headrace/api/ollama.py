"""POST /api/chat, /api/generate, /api/embed and /api/embeddings: Ollama's API over the same chat template and engine."""

from __future__ import annotations

import json
import time
from array import array
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headrace.api.body import read_json
from headrace.api.chat_completions import prompt_of
from headrace.api.checks import check_bookkeeping, check_fan_out
from headrace.api.context import ApiContext, for_sample, new_id
from headrace.api.errors import ApiError, bad_request, invalid
from headrace.api.generation import Answer, Generation
from headrace.api.logprobs import ChatLogprobs, LogprobFormat
from headrace.api.ollama_input import (
    ChatRequest,
    EmbedRequest,
    GenerateRequest,
    GeneratingRequest,
    OldEmbedRequest,
    check_generate,
    conversation,
    model_of,
    renamed,
    sampling,
    structure,
    thinking_kwargs,
)
from headrace.api.service import json_response, vectors_of
from headrace.api.sse import LINES
from headrace.api.structured import constrain
from headrace.api.tool_choice import AnswerReader, ToolPolicy, check_tools
from headrace.conversation.events import CallArguments, CallBegin, Event, Reasoning, Text
from headrace.errors import ParameterError
from headrace.sampling.params import SamplingParams
from headrace.text.stream import Delta

encode = msgspec.json.encode


async def chat(ctx: ApiContext, request: Request) -> Response:
    body = await read_json(request, ChatRequest, ctx.config)
    model, params = _checked(ctx, request, body)
    messages = conversation(body.messages or [])
    check_tools(body.tools, None)
    policy = ToolPolicy(ctx, body.tools, None, None)
    kwargs = thinking_kwargs(ctx, body, model)
    if not messages:
        return _loaded(model, {"message": _message("")})
    ids, end = await prompt_of(ctx, messages, policy.tools, kwargs)
    return await _answered(ctx, request, body, (model, ids, end, "messages"), policy, kwargs, params)


async def generate(ctx: ApiContext, request: Request) -> Response:
    body = await read_json(request, GenerateRequest, ctx.config)
    model, params = _checked(ctx, request, body)
    check_generate(body)
    policy, prompt = ToolPolicy(ctx, None, None, None), body.prompt or ""
    kwargs = thinking_kwargs(ctx, body, model)
    if not prompt:
        return _loaded(model, {"response": ""})
    for name, text in (("prompt", prompt), ("system", body.system or "")):
        ctx.check_length(text, name)
    if body.raw:
        [ids] = await ctx.tokenize([prompt], special=True, field="prompt")
        return await _answered(ctx, request, body, (model, ids, "", "prompt"), None, {}, params)
    messages = [{"role": "system", "content": body.system}] if body.system else []
    ids, end = await prompt_of(ctx, [*messages, {"role": "user", "content": prompt}], None, kwargs)
    return await _answered(ctx, request, body, (model, ids, end, "prompt"), policy, kwargs, params)


def _checked(ctx: ApiContext, request: Request, body: GeneratingRequest) -> tuple[str, SamplingParams]:
    """The model's name and the parameters; what an answer needs of the body is filled in."""
    model = model_of(ctx, body.model)
    check_bookkeeping(ctx, body)
    body.stream = body.stream is not False
    ignored: list[str] = []
    params = sampling(ctx, body, ignored)
    if ignored:
        request.state.ignored = [*getattr(request.state, "ignored", ()), *ignored]
    return model, params


def _loaded(model: str, said: dict[str, Any]) -> Response:
    """Who sends nothing wants the model to be loaded, which it is."""
    return json_response({"model": model, "created_at": now(), **said, "done": True, "done_reason": "load"})


async def _answered(
    ctx: ApiContext, request: Request, body: GeneratingRequest, rendered: tuple[str, list[int], str, str],
    policy: ToolPolicy | None, kwargs: dict[str, Any], params: SamplingParams,
) -> Response:  # fmt: skip
    """`rendered`: the model's name, the prompt, its end and its field; `kwargs`: the template's switches. Without a policy all
    text is the answer."""
    model, ids, end, field = rendered
    spec = structure(body) if policy is None else policy.behind_reasoning(policy.joined(structure(body)), end, kwargs)
    params = constrain(ctx, params, spec)
    check_fan_out(ctx, 1, params)
    if params.max_tokens is not None and params.max_tokens > ctx.engine.max_model_len - len(ids):
        params = msgspec.structs.replace(params, max_tokens=None)  # the context ends the answer, as it does at Ollama
    try:
        packed, params = await ctx.check_prompt(ids, params, field=field)
    except ParameterError as error:
        raise renamed(error) from None
    params = for_sample(params, 0)
    if policy is None:
        reader = AnswerReader(ToolPolicy(ctx, None, None, None), None)
    else:
        params, reader = policy.with_special_tokens(params), policy.reader(end, structured=spec is not None)
    kind = ChatAnswer if isinstance(body, ChatRequest) else GenerateAnswer
    answer = kind(ctx, body, model, reader, packed, params, request.scope["state"]["arrival"])
    return await Generation(ctx, request, answer, spec).response()


def now() -> str:
    """RFC 3339, in nanoseconds."""
    seconds, rest = divmod(time.time_ns(), 10**9)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{rest:09d}Z"


def nanoseconds(seconds: float) -> int:
    return max(1, int(seconds * 1e9))


def _message(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


class OllamaAnswer(Answer):
    """Lines of pieces, then one with the counts; or one object with everything. It is its own only choice."""

    media_type = LINES

    def __init__(
        self, ctx: ApiContext, body: GeneratingRequest, model: str, reader: AnswerReader, ids: array, params: SamplingParams,
        arrival: float,
    ):  # fmt: skip
        super().__init__(ctx, body, new_id("ollama-"))
        self.model, self.reader, self.arrival = model, reader, arrival
        form = LogprobFormat(ctx.engine.tokenizer, skip_special_tokens=params.skip_special_tokens)
        self.logprobs = ChatLogprobs(form, body.top_logprobs or 0) if body.logprobs else None
        self.content: list[str] = []
        self.thinking: list[str] = []
        self.calls: list[dict[str, Any]] = []
        self.done_reason = "stop"
        self._open: CallBegin | None = None
        self._arguments: list[str] = []  # of the open call
        self._begun = time.monotonic()
        self._first: float | None = None  # tokens
        self.add(ids, params, self)
        self.usage.prompt_tokens = len(ids)

    def said(self, content: str, thinking: str = "", calls: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        """As this endpoint shows a piece, or everything."""
        raise NotImplementedError

    def push(self, delta: Delta) -> bytes:
        if self._first is None:
            self._first = time.monotonic()
        if self.logprobs is not None and delta.logprobs:
            self.logprobs.add(delta.logprobs)
        found = self.reader.push(delta.text)
        if delta.finish_reason is not None:
            found += self.reader.finish()
        pieces = [piece for event in found for piece in self._take(event)]
        if delta.finish_reason is not None:
            pieces += self._close()
            self.done_reason = "length" if delta.finish_reason == "length" else "stop"
        if not self.body.stream:
            return b""
        return b"".join(self._line({**self.said(**piece), "done": False}) for piece in pieces)

    def _take(self, event: Event) -> list[dict[str, Any]]:
        """What can be shown of it now, as arguments of said(); a call when it is whole."""
        if isinstance(event, CallArguments):
            self._arguments.append(event.text)
            return []
        shown = self._close()
        if isinstance(event, CallBegin):
            self._open, self._arguments = event, []
        elif isinstance(event, Reasoning):
            self.thinking.append(event.text)
            shown.append({"content": "", "thinking": event.text})
        else:
            shown.append(self._text(event))
        return shown

    def _text(self, event: Text) -> dict[str, Any]:
        self.content.append(event.text)
        return {"content": event.text}

    def _close(self) -> list[dict[str, Any]]:
        """End the open call. One whose arguments are no object, because it was cut off, is shown as the text that it is."""
        call, self._open = self._open, None
        if call is None:
            return []
        text = "".join(self._arguments)
        arguments = _object(text)
        if arguments is None:
            return [self._text(Text(f'{{"name": {json.dumps(call.name, ensure_ascii=False)}, "arguments": {text}'))]
        function = {"index": len(self.calls), "name": call.name, "arguments": arguments}
        self.calls.append({"id": call.id, "function": function})
        return [{"content": "", "calls": self.calls[-1:]}]

    def _line(self, fields: dict[str, Any]) -> bytes:
        return encode(self._dated(fields)) + b"\n"

    def _dated(self, fields: dict[str, Any]) -> dict[str, Any]:
        found = {"model": self.model, "created_at": now(), **fields}
        if self.logprobs is not None and (entries := self.logprobs.take()):
            found["logprobs"] = entries
        return found

    def _counts(self) -> dict[str, Any]:
        """Until the prompt is rendered is loading, for want of any; then the prompt, with the time in the queue."""
        end = time.monotonic()
        first = self._first or end
        return {
            "done": True, "done_reason": self.done_reason, "total_duration": nanoseconds(end - self.arrival),
            "load_duration": nanoseconds(self._begun - self.arrival),
            "prompt_eval_count": self.usage.prompt_tokens, "prompt_eval_duration": nanoseconds(first - self._begun),
            "eval_count": self.usage.completion_tokens, "eval_duration": nanoseconds(end - first),
        }  # fmt: skip

    def silence(self) -> bytes:
        return b" "  # before the next line's JSON

    def closing(self) -> bytes:
        return self._line({**self.said(""), **self._counts()})

    def failure(self, error: ApiError) -> bytes:
        return error.ollama() + b"\n"

    def whole(self) -> bytes:
        said = self.said("".join(self.content), "".join(self.thinking), self.calls)
        return encode(self._dated({**said, **self._counts()}))


class ChatAnswer(OllamaAnswer):
    def said(self, content: str, thinking: str = "", calls: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        more: dict[str, Any] = {"thinking": thinking} if thinking else {}
        return {"message": _message(content, **more, **({"tool_calls": calls} if calls else {}))}


class GenerateAnswer(OllamaAnswer):
    def said(self, content: str, thinking: str = "", calls: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        return {"response": content, **({"thinking": thinking} if thinking else {})}


def _object(text: str) -> dict[str, Any] | None:
    """A call's arguments."""
    try:
        value = json.loads(text or "{}", strict=False)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


async def embed(ctx: ApiContext, request: Request) -> Response:
    """Pooled hidden states of the loaded model, normalized."""
    body = await read_json(request, EmbedRequest, ctx.config)
    texts = [body.input] if isinstance(body.input, str) else body.input
    if texts is None:
        raise bad_request("input: a text or a list of texts is needed.", "input", "missing_required_parameter")
    size = ctx.engine.model_config.hidden_size
    if body.dimensions not in (None, 0, size):
        raise invalid("dimensions", f"got {body.dimensions}, allowed: {size}.")
    model, vectors, tokens = await _vectors(ctx, request, body, texts, "input", body.truncate is not False)
    passed = nanoseconds(time.monotonic() - request.scope["state"]["arrival"])
    counts = {"total_duration": passed, "load_duration": 1, "prompt_eval_count": tokens}
    return json_response({"model": model, "embeddings": vectors, **counts})


async def old_embeddings(ctx: ApiContext, request: Request) -> Response:
    body = await read_json(request, OldEmbedRequest, ctx.config)
    _, vectors, _ = await _vectors(ctx, request, body, [body.prompt or ""], "prompt", True)
    return json_response({"embedding": vectors[0] if vectors else []})


async def _vectors(
    ctx: ApiContext, request: Request, body: EmbedRequest | OldEmbedRequest, texts: list[str], field: str, cut: bool
) -> tuple[str, list[list[float]], int]:
    """The model's name, the vectors, the tokens in all. One empty text is none; `cut` keeps what fits of a long one."""
    model = model_of(ctx, body.model)
    ctx.refuse_adapter(body.model)
    check_bookkeeping(ctx, body)
    if texts in ([], [""]):
        return model, [], 0
    if len(texts) > ctx.config.max_prompts:
        raise invalid(field, f"{len(texts)} texts; at most {ctx.config.max_prompts} in one request.")
    params = SamplingParams(max_tokens=1, truncate_prompt_tokens=-1 if cut else None)
    given = await ctx.tokenize(texts, special=True, field=field, truncated=cut)
    batch = [(await ctx.check_prompt(ids, params, field=field, side="right", limit=""))[0] for ids in given]
    return model, await vectors_of(ctx, request, batch, body), sum(map(len, batch))
