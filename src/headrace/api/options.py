"""Checks that all generating endpoints share, beyond the types of their fields."""

from __future__ import annotations

from headrace.api.context import ApiContext
from headrace.api.errors import bad_request, unsupported
from headrace.api.protocol import Body, GenerationFields, SamplingFields, check_neutral, check_stream_options
from headrace.sampling.params import SamplingParams, check_int, check_strings

MAX_ID_CHARS = 128
MAX_STOP_CHARS = 2**17


def check_common(ctx: ApiContext, body: SamplingFields) -> None:
    """n before any fan-out; what depends on the options of the server."""
    if body.n is not None:
        check_int("n", body.n, 1, ctx.config.max_n)
    if isinstance(body.stop, list):
        check_strings("stop", body.stop, 64)
    most = ctx.engine.model_config.vocab_size
    for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
        if len(getattr(body, name) or ()) > most:
            raise bad_request(f"{name}: at most {most} entries, one for each token.", name, "invalid_value")
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
        text = f"n: prompts times n are {num_samples} samples; at most {ctx.config.max_samples} in one request."
        raise bad_request(text, "n", "invalid_value")
    chars = sum(map(len, params.stop or ())) * num_samples
    if chars > MAX_STOP_CHARS:
        text = f"stop: {chars} characters over all samples of the request; at most {MAX_STOP_CHARS}."
        raise bad_request(text, "stop", "invalid_value")


def check_bookkeeping(ctx: ApiContext, body: Body) -> None:
    """What is not about the text: priority, cache_salt and, where there is one, request_id."""
    if priority := getattr(body, "priority", None):
        if ctx.engine.config.scheduling_policy != "priority":
            raise unsupported("priority", "only 0, unless the server runs with the scheduling policy `priority`")
        check_int("priority", priority, -(2**31), 2**31 - 1)
    for field in ("cache_salt", "request_id"):
        value = getattr(body, field, None)
        if value is not None and not (1 <= len(value) <= MAX_ID_CHARS and value.isprintable()):
            raise bad_request(f"{field}: 1 to {MAX_ID_CHARS} printable characters.", field, "invalid_value")
