"""What bodies are checked for beyond the types of their fields, and before any work is done for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.api.context import ApiContext
from headrace.api.errors import allowed_only, bad_request, invalid, unsupported
from headrace.api.protocol import Body, GenerationFields, SamplingFields, StreamOptions
from headrace.conversation.message_forms import ROLES
from headrace.sampling.checks import check_int, check_strings
from headrace.sampling.params import SamplingParams

MAX_ID_CHARS = 128
MAX_STOP_CHARS = 2**17
# field -> the values that ask for nothing (null always does)
NEUTRAL: dict[str, tuple[Any, ...]] = {
    # OpenAI
    "functions": (), "function_call": ("none",), "audio": (), "modalities": (["text"],), "web_search_options": (),
    "moderation": (), "suffix": ("",),
    # vLLM
    "logprob_token_ids": (), "repetition_detection": (),
    "thinking_token_budget": (), "stream_interval": (1,), "kv_transfer_params": ({},), "vllm_xargs": ({},), "prompt_embeds": (),
    "documents": ([],), "mm_processor_kwargs": ({},), "media_io_kwargs": ({},), "return_prompt_text": (False,),
    "chat_template": (),
}  # fmt: skip


def check_common(ctx: ApiContext, body: SamplingFields) -> None:
    """n before any fan-out; what depends on the options of the server."""
    if body.n is not None:
        check_int("n", body.n, 1, ctx.config.max_n)
    if isinstance(body.stop, list):
        check_strings("stop", body.stop, 64)
    most = ctx.engine.model_config.vocab_size
    for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
        if len(getattr(body, name) or ()) > most:
            raise invalid(name, f"at most {most} entries, one for each token.")
    check_bookkeeping(ctx, body)


def check_generation(ctx: ApiContext, body: GenerationFields) -> None:
    """Raise ApiError or ParameterError for combinations and values that are not served."""
    check_common(ctx, body)
    check_neutral(body)
    check_stream_options(body.stream, body.stream_options)
    if body.prompt_logprobs is not None:
        check_int("prompt_logprobs", body.prompt_logprobs, 0, ctx.config.max_logprobs)
        if body.stream:
            raise bad_request("prompt_logprobs cannot be streamed.", "prompt_logprobs", "invalid_value")


def check_fan_out(ctx: ApiContext, num_samples: int, params: SamplingParams) -> None:
    """Prompts times n, and the memory of the automata that look for stop strings: one for each sample."""
    if num_samples > ctx.config.max_samples:
        raise invalid("n", f"prompts times n are {num_samples} samples; at most {ctx.config.max_samples} in one request.")
    chars = sum(map(len, params.stop or ())) * num_samples
    if chars > MAX_STOP_CHARS:
        raise invalid("stop", f"{chars} characters over all samples of the request; at most {MAX_STOP_CHARS}.")


def check_bookkeeping(ctx: ApiContext, body: Body) -> None:
    """What is not about the text: priority, cache_salt and, where there is one, request_id."""
    if priority := getattr(body, "priority", None):
        if ctx.engine.config.scheduling_policy != "priority":
            raise unsupported("priority", "only 0, unless the server runs with the scheduling policy `priority`")
        check_int("priority", priority, -(2**31), 2**31 - 1)
    for field in ("cache_salt", "request_id"):
        value = getattr(body, field, None)
        if value is not None and not (1 <= len(value) <= MAX_ID_CHARS and value.isprintable()):
            raise invalid(field, f"1 to {MAX_ID_CHARS} printable characters.")


def check_neutral(body: Body, neutral: Mapping[str, tuple[Any, ...]] = NEUTRAL) -> None:
    """Raise ApiError for an unserved field that asks for something."""
    for name in body.__struct_fields__:
        allowed = neutral.get(name)
        if allowed is not None and (value := getattr(body, name)) is not None and value not in allowed:
            raise unsupported(name, "not supported by this server" + (f" (only {allowed[0]!r})" if allowed else ""))


def check_stream_options(stream: bool | None, options: StreamOptions | None) -> None:
    if options is not None and not stream:
        raise allowed_only("stream_options", "when stream is true")
    if options is not None and options.include_obfuscation:
        raise unsupported("stream_options.include_obfuscation", "not supported by this server (only False)")
    if options is not None and options.continuous_usage_stats and not options.include_usage:
        raise allowed_only("stream_options.continuous_usage_stats", "when include_usage is true")


def check_messages(messages: Sequence[dict[str, Any]], field: str = "messages") -> None:
    """Roles of the API, and the id that a tool's answer needs; the rest is checked when the template is rendered."""
    if not messages:
        raise invalid(field, "an empty list; at least one message is needed.")
    for i, message in enumerate(messages):
        role = message.get("role")
        if role not in ROLES:
            raise invalid(f"{field}[{i}].role", f"allowed are {', '.join(ROLES)}.")
        if role == "tool" and not isinstance(message.get("tool_call_id"), str):
            why = "the id of the call that this answers is needed."
            raise invalid(f"{field}[{i}].tool_call_id", why, "missing_required_parameter")
        for name in ("function_call", "audio"):  # templates would drop them silently
            if message.get(name) is not None:
                raise unsupported(f"{field}[{i}].{name}", "not supported; calls are tool_calls, and contents are text")
