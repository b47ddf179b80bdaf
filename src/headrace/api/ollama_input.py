"""What Ollama's API takes: its bodies, and its options and messages as the parameters and messages that all others have.

Source: Ollama's API. Its conversation differs from OpenAI's in that arguments of calls are objects, results of tools name the
tool and no call, and everything about sampling stands in `options`.
"""

from __future__ import annotations

from typing import Any

from headrace.api.context import ApiContext
from headrace.api.errors import ApiError, allowed_only, invalid, unsupported
from headrace.api.protocol import Body
from headrace.api.structured import Structure
from headrace.api.unknown_fields import MATTERS, nearest
from headrace.api.whole_numbers import whole
from headrace.conversation.tool_grammar import Tool
from headrace.errors import ParameterError
from headrace.sampling.checks import check_int, check_strings
from headrace.sampling.params import SamplingParams

ROLES = ("system", "user", "assistant", "tool")
EFFORTS = ("low", "medium", "high", "max")
# option -> our parameter
OPTIONS = {
    "num_predict": "max_tokens", "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "seed": "seed", "stop": "stop", "repeat_penalty": "repetition_penalty", "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}  # fmt: skip
WHOLE = ("num_predict", "top_k", "seed", "num_ctx")  # numbers that some clients write with a point
DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}  # this API's, where the model has none of its own
NEUTRAL: dict[str, Any] = {"mirostat": 0, "typical_p": 1, "tfs_z": 1}  # these ask for nothing
# of loading and running a model, or of the penalties' window: left out and named
LEFT_OUT = (
    "numa", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "logits_all", "vocab_only", "use_mmap", "use_mlock",
    "embedding_only", "num_thread", "num_keep", "draft_num_predict", "mirostat_tau", "mirostat_eta", "repeat_last_n",
    "penalize_newline",
)  # fmt: skip
_KNOWN = (*OPTIONS, "num_ctx", *NEUTRAL, *LEFT_OUT)
Chat = list[dict[str, Any]]


class CallFunction(Body, kw_only=True):
    name: str
    arguments: dict[str, Any] | None = None
    index: int | None = None
    description: str | None = None


class Call(Body, kw_only=True):
    function: CallFunction
    id: str | None = None
    type: str | None = None


class Message(Body, kw_only=True):
    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[Call] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    name: str | None = None


class ModelRequest(Body, kw_only=True):
    """What all bodies have."""

    model: str | None = None
    options: dict[str, Any] | None = None
    keep_alive: Any = None  # ignored: the one model of a server stays loaded (of several: several_models/app.py)


class GeneratingRequest(ModelRequest, kw_only=True):
    """What /api/chat and /api/generate share."""

    stream: bool | None = None  # null is true
    format: str | dict[str, Any] | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    # ignored: prompts are never cut here, and what does not fit is refused; an answer ends where the context does
    truncate: bool | None = None
    shift: bool | None = None
    # ours, as everywhere
    priority: int | None = None
    cache_salt: str | None = None


class ChatRequest(GeneratingRequest, kw_only=True):
    """POST /api/chat."""

    messages: list[Message] | None = None
    tools: list[Tool] | None = None


class GenerateRequest(GeneratingRequest, kw_only=True):
    """POST /api/generate. What a text must not be for is here to be refused by name."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    suffix: str | None = None
    template: str | None = None
    context: list[int] | None = None
    images: list[Any] | None = None


class EmbedRequest(ModelRequest, kw_only=True):
    """POST /api/embed."""

    input: str | list[str] | None = None
    truncate: bool | None = None  # null is true
    dimensions: int | None = None
    priority: int | None = None
    cache_salt: str | None = None


class OldEmbedRequest(ModelRequest, kw_only=True):
    """POST /api/embeddings."""

    prompt: str | None = None
    priority: int | None = None
    cache_salt: str | None = None


class ShowRequest(Body, kw_only=True):
    """POST /api/show."""

    model: str | None = None
    name: str | None = None  # of the model, in older clients
    verbose: bool | None = None


def model_of(ctx: ApiContext, name: str | None) -> str:
    """The name to report: as it was asked for. Raises the 404 of this API."""
    try:
        return ctx.check_model(name)
    except ApiError as error:
        if error.status == 404:
            error.message = f"model '{str(name)[:200]}' not found"
        raise


def sampling(ctx: ApiContext, body: GeneratingRequest, ignored: list[str]) -> SamplingParams:
    """The options as parameters; the names of those without effect are added to `ignored`. Raises ApiError or ParameterError
    with the option's name."""
    options = {name: value for name, value in (body.options or {}).items() if value is not None}
    given = {name: whole(value) if name in WHOLE else value for name, value in options.items()}
    ignored += _without_effect(ctx, given)
    values: dict[str, Any] = {k: v for k, v in DEFAULTS.items() if ctx.engine.generation_defaults.get(k) is None}
    for name, ours in OPTIONS.items():
        if name in given:
            values[ours] = given[name]
    most = values.setdefault("max_tokens", None)
    if most in (-2, -1, 0) and most is not False:
        values["max_tokens"] = None  # no limit but the context
    if values.get("seed") == -1:
        del values["seed"]  # a random one
    if isinstance(values.get("stop"), list):
        check_strings("options.stop", values["stop"], 64)
        values["stop"] = values["stop"] or None
    try:
        return SamplingParams(**values, logprobs=_logprobs(ctx, body))
    except ParameterError as error:
        raise renamed(error) from None


def renamed(error: ParameterError) -> ParameterError:
    """Under the name that the option has here."""
    for name, ours in OPTIONS.items():
        if error.field == ours or error.field.startswith(f"{ours}["):
            return ParameterError(f"options.{name}{error.field[len(ours) :]}", error.value, error.allowed)
    return error


def _without_effect(ctx: ApiContext, given: dict[str, Any]) -> list[str]:
    """The rule of unknown_fields, for options."""
    found = []
    for name, value in given.items():
        path = f"options.{name}"
        if name == "num_ctx":
            check_int(path, value, 1, ctx.engine.max_model_len)
        elif name in NEUTRAL and value != NEUTRAL[name]:
            raise unsupported(path, f"not supported by this server (only {NEUTRAL[name]})")
        elif name in LEFT_OUT:
            found.append(path)
        elif name not in _KNOWN:
            near = next((o for o, ours in OPTIONS.items() if ours == name), None) or nearest(name, _KNOWN)
            if near or name in MATTERS or ctx.config.unknown_fields == "refuse":
                why = f"unknown option; is it {near}?" if near else "unknown option"
                raise invalid(path, why, "unknown_parameter")
            found.append(path)
    return found


def _logprobs(ctx: ApiContext, body: GeneratingRequest) -> int | None:
    if body.top_logprobs is not None:
        check_int("top_logprobs", body.top_logprobs, 0, ctx.config.max_logprobs)
        if body.top_logprobs and not body.logprobs:
            raise allowed_only("top_logprobs", "when logprobs is true")
    return (body.top_logprobs or 0) if body.logprobs else None


def structure(body: GeneratingRequest) -> Structure | None:
    form = body.format
    if form is None or form == "":
        return None
    if form == "json":
        return Structure("json_object", True, "format")
    if isinstance(form, str):
        raise invalid("format", f"got {form[:100]!r}, allowed: json or a JSON schema.")
    return Structure("json", form, "format")


def thinking_kwargs(ctx: ApiContext, body: GeneratingRequest, model: str) -> dict[str, Any]:
    """A model that can think does unless it is told not to."""
    think, able = body.think, ctx.answer_format.reasoning is not None
    if isinstance(think, str) and think not in EFFORTS:
        raise invalid("think", f"got {think[:100]!r}, allowed: true, false, {', '.join(EFFORTS)}.")
    if think and not able:
        raise invalid("think", f"{model!r} does not support thinking.", "unsupported_parameter")
    if not able:
        return {}
    on = think is not False
    return {"enable_thinking": on, "thinking": on} | ({"reasoning_effort": think} if isinstance(think, str) else {})


def conversation(messages: list[Message]) -> Chat:
    """As chat's messages. Results of tools get the ids of the calls that they answer. Raises ApiError naming the field."""
    chat: Chat = []
    open_calls: list[tuple[str, str]] = []  # (id, function) of those without a result
    count = 0
    for i, message in enumerate(messages):
        role = message.role.lower()
        if role not in ROLES:
            raise invalid(f"messages[{i}].role", f"allowed are {', '.join(ROLES)}.")
        refuse_images(message.images, f"messages[{i}].images")
        shown: dict[str, Any] = {"role": role, "content": message.content or ""}
        if role == "assistant":
            if message.thinking:
                shown["reasoning_content"] = message.thinking
            calls = [(call.id or f"call_{count + n}", call.function) for n, call in enumerate(message.tool_calls or ())]
            count += len(calls)
            if calls:
                shown["tool_calls"] = [
                    {"id": name, "type": "function", "function": {"name": f.name, "arguments": f.arguments or {}}}
                    for name, f in calls
                ]
            open_calls = [(name, f.name) for name, f in calls]
        elif role == "tool":
            name = message.tool_name or message.name
            shown["tool_call_id"] = message.tool_call_id or _answered(open_calls, name)
            if name:
                shown["name"] = name
        chat.append(shown)
    return chat


def _answered(calls: list[tuple[str, str]], name: str | None) -> str:
    """The id of the first call without a result, of this function if it is told; it has one now."""
    found = next((call for call in calls if name in (None, call[1])), None)
    if found is None:
        return "call_0"  # there are conversations that begin with a result
    calls.remove(found)
    return found[0]


def refuse_images(images: list[Any] | None, path: str) -> None:
    if images:
        raise unsupported(path, "this model takes text only")


def check_generate(body: GenerateRequest) -> None:
    if body.raw:
        for name in ("system", "template", "context"):
            if getattr(body, name):
                raise invalid(name, "a raw prompt is shown to the model as it is: nothing is allowed beside it.")
        if body.think:
            raise allowed_only("think", "without raw")
    if body.suffix:
        raise unsupported("suffix", "this model does not support insert; a raw prompt may hold its own markers for that")
    if body.template:
        raise unsupported("template", "a request may not bring its own template; raw is without any")
    if body.context:
        raise unsupported("context", "conversations are sent as messages to /api/chat")
    refuse_images(body.images, "images")
