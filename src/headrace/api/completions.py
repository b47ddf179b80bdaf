"""POST /v1/completions: text in, text out."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headrace.api.beams import BeamGeneration, beam_params
from headrace.api.body import read_json
from headrace.api.checks import check_fan_out, check_generation
from headrace.api.context import ApiContext, Prompt, for_sample
from headrace.api.errors import bad_request, invalid
from headrace.api.generation import ChoicesAnswer, Generation, Sample
from headrace.api.logprobs import CompletionLogprobs, Span, prompt_logprobs
from headrace.api.protocol import CompletionRequest
from headrace.api.structured import constrain, spec_of
from headrace.api.whole_numbers import whole
from headrace.errors import ParameterError
from headrace.sampling.checks import check_int
from headrace.sampling.params import SamplingParams
from headrace.text.stream import Delta

encode = msgspec.json.encode
DEFAULT_MAX_TOKENS = 16


async def completions(ctx: ApiContext, request: Request) -> Response:
    body = await read_json(request, CompletionRequest, ctx.config)
    model = ctx.check_model(body.model)
    check_generation(ctx, body)
    spec = spec_of(body.response_format, body.structured_outputs)
    params = constrain(ctx, _parameters(ctx, body), spec)
    given = prompts(body.prompt, "prompt", ctx.config.max_prompts)
    beams = beam_params(ctx, body, body.best_of)
    check_fan_out(ctx, len(given) * (params.n if beams is None else beams.beam_width), params)
    special, cut = body.add_special_tokens is not False, params.truncate_prompt_tokens is not None
    answer = CompletionAnswer(ctx, body, model)
    for prompt, ids in zip(given, await ctx.tokenize(given, special=special, field="prompt", truncated=cut), strict=True):
        await answer.add_prompt(prompt, ids, params)
    if beams is not None:
        return await BeamGeneration(ctx, request, answer, beams).response()
    return await Generation(ctx, request, answer, spec).response()


def prompts(value: str | list[Any] | None, field: str, most: int) -> list[str | list[int]]:
    """The prompts in a body's field: text, ids, or a list of either. Raises ApiError on anything else."""
    if value is None:
        raise bad_request(f"Missing required field `{field}`.", field, "missing_required_parameter")
    if isinstance(value, str):
        return [value]
    if not value:
        raise invalid(field, "an empty list; at least one prompt is needed.")
    if (ids := _ids(value)) is not None:
        return [ids]
    if len(value) > most:
        raise invalid(field, f"{len(value)} prompts; at most {most} in one request.")
    found: list[str | list[int]] = []
    for i, v in enumerate(value):
        one = v if isinstance(v, str) else _ids(v) if isinstance(v, list) else None
        if one is None:
            raise invalid(f"{field}[{i}]", "allowed are text, token ids, a list of texts or a list of lists of token ids.")
        found.append(one)
    if len(set(map(type, found))) > 1:
        raise invalid(field, "texts and token ids are mixed in one list.")
    return found


def _ids(value: list[Any]) -> list[int] | None:
    """Token ids, if the list holds nothing else (and something)."""
    kinds = set(map(type, value))
    if float in kinds and kinds <= {int, float}:
        value = list(map(whole, value))
        kinds = set(map(type, value))
    return value if kinds == {int} else None


def _parameters(ctx: ApiContext, body: CompletionRequest) -> SamplingParams:
    n = 1 if body.n is None else body.n
    if body.best_of is not None and body.best_of != n and not body.use_beam_search:
        raise invalid("best_of", f"got {body.best_of}, allowed: the value of n ({n}).")
    if body.logprobs is not None and not 0 <= body.logprobs <= ctx.config.max_logprobs:
        raise invalid("logprobs", f"got {body.logprobs}, allowed: an integer in [0, {ctx.config.max_logprobs}]")
    changes: dict[str, Any] = {"logprobs": body.logprobs}
    if body.max_tokens == 0:
        if not body.echo or body.use_beam_search:
            raise invalid("max_tokens", "0 is allowed with echo only (to score the prompt).")
        check_int("min_tokens", body.min_tokens, 0, 0, optional=True)
        changes["max_tokens"] = 1  # the engine samples one token, which the answer leaves out
    if body.echo and body.logprobs is not None:
        if body.prompt_logprobs not in (None, body.logprobs):
            raise ParameterError("prompt_logprobs", body.prompt_logprobs, f"the value of logprobs ({body.logprobs}) with echo")
        changes["prompt_logprobs"] = body.logprobs
    return body.sampling(**changes)


class CompletionAnswer(ChoicesAnswer):
    """Choices of prompt i are i * n .. i * n + n - 1."""

    def __init__(self, ctx: ApiContext, body: CompletionRequest, model: str):
        super().__init__(ctx, body, "cmpl-", "text_completion", model)

    async def add_prompt(self, prompt: Prompt, given: list[int], params: SamplingParams) -> None:
        body, ctx = self.body, self.ctx
        if body.max_tokens is None:  # the default is 16, or what fits
            keep = params.truncate_prompt_tokens
            length = len(given) if keep is None else min(len(given), max(keep, 0))  # -1: the prompt makes room
            room = max(1, min(DEFAULT_MAX_TOKENS, ctx.engine.max_model_len - length))
            params = msgspec.structs.replace(params, max_tokens=max(room, params.min_tokens))
        ids, params = await ctx.check_prompt(given, params, field="prompt", side=body.truncation_side)
        self.usage.prompt_tokens += len(ids)
        echo, spans = "", None
        if body.echo:
            whole = isinstance(prompt, str) and params.truncate_prompt_tokens is None
            echo = prompt if whole else ctx.engine.tokenizer.decode(ids, params.skip_special_tokens)  # type: ignore[assignment]
            if whole and body.logprobs is not None:
                spans = await ctx.in_thread(ctx.engine.tokenizer.spans, prompt, body.add_special_tokens is not False)
        for index in range(params.n):
            own = for_sample(params, index)
            choice = CompletionChoice(self, len(self.choices), own, ids, echo, spans)
            choice.sample = self.add(ids, own, choice)
        if body.max_tokens == 0:
            self.usage.scoring = True


class CompletionChoice:
    """Text, logprobs and ids of one choice; streamed, each burst becomes one chunk."""

    sample: Sample

    def __init__(
        self, answer: CompletionAnswer, index: int, params: SamplingParams, prompt_ids: array, echo: str,
        spans: list[Span] | None,
    ):  # fmt: skip
        body = answer.body
        self.answer, self.index, self.prompt_ids = answer, index, prompt_ids
        self.streaming, self.scoring = bool(body.stream), body.max_tokens == 0
        self.echo, self.spans, self.with_echo = echo, spans, bool(body.echo)
        self.with_ids = bool(body.return_token_ids)
        self.begun = False
        self.num_sent = 0  # characters
        self.form = answer.logprob_format(params)
        self.logprobs = CompletionLogprobs(self.form, () if body.echo else prompt_ids) if body.logprobs is not None else None
        self.texts: list[str] = []
        self.ids: list[int] = []
        self.finish: tuple[str | None, int | str | None] = (None, None)
        self.open = answer.head + b'{"index":%d,"text":' % index
        self.plain = self.logprobs is None and not self.with_ids and not answer.continuous_usage

    def push(self, delta: Delta) -> bytes:
        text, reason = delta.text, delta.finish_reason
        if not self.begun:
            self.begun = True
            text = self._begin() + ("" if self.scoring else text)
        elif self.plain and self.streaming and reason is None:  # the common case, once per token
            if not text:
                return b""
            return b"data: " + self.open + encode(text) + b',"logprobs":null,"finish_reason":null}]}\n\n'
        if not self.scoring:
            if self.logprobs is not None:
                self.logprobs.add(delta)
            self.ids.extend(delta.token_ids)
        if reason is not None:
            self.finish = ("length" if self.scoring else reason, delta.stop_reason)
        if not self.streaming:
            self.texts.append(text)
            return b""
        if not text and reason is None:
            return b""  # ids and logprobs wait for the text that they belong to
        return self._chunk(text)

    def _begin(self) -> str:
        """What comes before the first token: the echoed prompt."""
        if not self.with_echo:
            return ""
        if self.logprobs is not None:
            self.logprobs.add_prompt(self.prompt_ids, self.sample.text.prompt_logprobs or [], self.echo, self.spans)
        return self.echo

    def _fields(self, text: str) -> bytes:
        reason, stop_reason = self.finish
        fields: dict[str, Any] = {"logprobs": None}
        num_waiting = 0  # the ids of a chunk are those of its logprobs
        self.num_sent += len(text)
        if self.logprobs is not None:
            fields["logprobs"] = self.logprobs.take(self.num_sent, whole=reason is not None)
            num_waiting = self.logprobs.num_waiting
        fields["finish_reason"] = reason
        if stop_reason is not None:
            fields["stop_reason"] = stop_reason
        if self.with_ids:
            count = len(self.ids) - num_waiting
            fields["token_ids"], self.ids = self.ids[:count], self.ids[count:]
            if self.prompt_ids:  # once
                fields["prompt_token_ids"], self.prompt_ids = self.prompt_ids.tolist(), array("i")
        if self.answer.body.prompt_logprobs is not None and self.sample.text.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_logprobs(self.sample.text.prompt_logprobs, self.form)
        return encode(text) + b"," + encode(fields)[1:]

    def _chunk(self, text: str) -> bytes:
        usage = b',"usage":' + self.answer.usage_json() if self.answer.continuous_usage else b""
        return b"data: " + self.open + self._fields(text) + b"]" + usage + b"}\n\n"

    def whole(self) -> bytes:
        return b'{"index":%d,"text":' % self.index + self._fields("".join(self.texts))
