"""`use_beam_search` of completions and chat: the n best of a search `best_of` (completions only; default: n) beams wide.

`length_penalty`, `early_stopping` and `ignore_eos` are those of BeamSearchParams, so the answers are LLM.beam_search's.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request

from headrace.api.context import ApiContext
from headrace.api.errors import allowed_only, invalid, unsupported
from headrace.api.generation import Answer, Generation, Sample, run_all
from headrace.api.protocol import GenerationFields
from headrace.api.sse import EventStream
from headrace.beam_search import BeamSearch, BeamSearchParams, run_in_engine
from headrace.engine.messages import EngineOutput
from headrace.errors import ParameterError

# what a search cannot honour, with the values that ask for nothing
WITHOUT: dict[str, tuple[Any, ...]] = {
    "temperature": (0,), "top_p": (1,), "top_k": (0, -1), "min_p": (0,), "presence_penalty": (0,), "frequency_penalty": (0,),
    "repetition_penalty": (1,), "logit_bias": ({},), "allowed_token_ids": (), "bad_words": ([],), "min_tokens": (0,),
    "stop": ([],), "stop_token_ids": ([],), "include_stop_str_in_output": (False,), "logprobs": (False,), "top_logprobs": (0,),
    "prompt_logprobs": (), "structured_outputs": (), "response_format": ({"type": "text"},), "tools": ([],),
}  # fmt: skip


def beam_params(ctx: ApiContext, body: GenerationFields, best_of: int | None = None) -> BeamSearchParams | None:
    """The search that the body asks for, None if it does not. Raises ApiError or ParameterError."""
    if not body.use_beam_search:
        for name, default in (("length_penalty", 1.0), ("early_stopping", False)):
            if getattr(body, name) not in (None, default):
                raise allowed_only(name, "with use_beam_search")
        return None
    if ctx.adapter_of(body.model):
        raise unsupported("use_beam_search", "not with an adapter")
    for name, neutral in WITHOUT.items():
        value = getattr(body, name, None)
        if value is not None and not any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in neutral):
            raise unsupported(name, "not with use_beam_search" + (f" (only {neutral[0]!r})" if neutral else ""))
    n = 1 if body.n is None else body.n
    width = n if best_of is None else best_of
    if width < n:
        raise invalid("best_of", f"got {width}, allowed: at least n = {n}.")
    given = {f: v for f in ("length_penalty", "early_stopping", "ignore_eos") if (v := getattr(body, f)) is not None}
    try:
        params = BeamSearchParams(beam_width=width, num_return_sequences=n, **given)
        params.num_candidates(0 if params.ignore_eos else len(ctx.inputs.eos_token_ids))
        return params
    except ParameterError as e:
        names = {"beam_width": "n" if best_of is None else "best_of"}
        raise ParameterError(names.get(e.field, e.field), e.value, e.allowed) from None


class BeamGeneration(Generation):
    """Answers with the sequences of a search for each prompt; `answer.samples` are its places, n for each prompt."""

    def __init__(self, ctx: ApiContext, request: Request, answer: Answer, params: BeamSearchParams):
        super().__init__(ctx, request, answer)
        self.params = params
        n = params.num_return_sequences or 1
        self.groups = [answer.samples[i : i + n] for i in range(0, len(answer.samples), n)]
        self.searches = [self._search(group[0]) for group in self.groups]

    def _search(self, sample: Sample) -> BeamSearch:
        assert sample.params.max_tokens is not None
        params = msgspec.structs.replace(self.params, max_tokens=sample.params.max_tokens)
        return BeamSearch(sample.prompt_ids.tolist(), params, sample.params.eos_token_ids, sample.cache_salt)

    async def run(self, stream: EventStream | None) -> None:
        tokens = self.params.beam_width * sum(len(s.prompt_ids) for s in self.searches)
        with await self.ctx.limits.admit(self.params.beam_width * len(self.searches), tokens):
            self.request.state.body.release()
            await run_all([self._run(s, g, stream) for s, g in zip(self.searches, self.groups, strict=True)])

    async def _run(self, search: BeamSearch, group: list[Sample], stream: EventStream | None) -> None:
        """A search gives nothing before its end."""
        reason = "abort"
        try:
            first = group[0]
            await run_in_engine(self.ctx.engine, search, first.request_id, priority=first.priority)
            reason = "stop"
            for sample, found in zip(group, search.results(), strict=True):
                news = EngineOutput(sample.request_id, found.token_ids, finish_reason=found.finish_reason)
                data = sample.choice.push(sample.text.push(news))
                if data and stream is not None:
                    await stream.write(data)
        except Exception:
            reason = "error"
            raise
        finally:
            for sample in group:
                self.ctx.sample_ended(sample, self.endpoint, reason, self.arrival, None)
