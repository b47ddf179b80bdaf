"""How well documents answer queries: by a reranker's yes and no, or by the cosine of embeddings where the model is none."""

from __future__ import annotations

import contextlib
import math
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

from starlette.requests import Request

from headrace.api.checks import check_bookkeeping, check_neutral
from headrace.api.context import ApiContext, new_id
from headrace.api.errors import ApiError, allowed_only, invalid
from headrace.api.generation import sample_failure
from headrace.api.protocol import Body
from headrace.api.service import of_each, vectors_of
from headrace.conversation.reranker import QueryPrompt, Reranker
from headrace.sampling.checks import check_int
from headrace.sampling.params import SamplingParams

MAX_TOKENS = 2**22  # of all prompts of a request: each has its query's tokens
NEUTRAL = {  # as checks.NEUTRAL: of vLLM, then of Cohere
    "max_tokens_per_query": (0,), "activation": (True,), "softmax": (True,), "mm_processor_kwargs": (),
    "rank_fields": (["text"],), "max_chunks_per_doc": (1,), "relevant_spans": (False,),
}  # fmt: skip
NUM_TOP = 20  # logprobs beside the likelier answer's, among which the other one nearly always is


class PairFields(Body, kw_only=True):
    """What bodies of pairs have in common."""

    model: str | None = None
    instruction: str | None = None  # to a reranker: what a good answer is
    truncate_prompt_tokens: int | None = None  # -1: what fits
    truncation: bool | None = None  # true: as -1
    max_tokens_per_doc: int | None = None  # 0: no bound
    use_activation: bool | None = None  # false: the reranker's score before the sigmoid
    priority: int | None = None
    cache_salt: str | None = None
    user: str | None = None  # ignored
    # neutral only
    max_tokens_per_query: Any = None
    activation: Any = None
    softmax: Any = None
    mm_processor_kwargs: Any = None


class Pairs(NamedTuple):
    """One query for all documents, or one for each; and what the body calls them."""

    queries: Sequence[str]
    documents: Sequence[str]
    names: tuple[str, str] = ("query", "documents")

    def query(self, i: int) -> str:
        return self.queries[i if len(self.queries) > 1 else 0]

    def place(self, i: int) -> str:
        """The document's, in messages."""
        return f"{self.names[1]}[{i}]"


class Scores(NamedTuple):
    values: list[float]
    num_tokens: int  # of all prompts


async def pair_scores(ctx: ApiContext, request: Request, body: PairFields, pairs: Pairs) -> Scores:
    """Of each document. Raises ApiError or ParameterError naming the field."""
    check_bookkeeping(ctx, body)
    check_neutral(body, NEUTRAL)
    if len(pairs.documents) > ctx.config.max_prompts:
        most = ctx.config.max_prompts
        raise invalid(pairs.names[1], f"{len(pairs.documents)} documents; at most {most} in one request.")
    check_int("max_tokens_per_doc", body.max_tokens_per_doc, 0, 2**31 - 1, optional=True)
    reranker = ctx.reranker
    found = await (
        _by_embeddings(ctx, request, body, pairs) if reranker is None else _judged(ctx, request, body, pairs, reranker)
    )
    if not all(map(math.isfinite, found.values)):
        raise ApiError(500, "The model produced values that are not finite.", code="engine_error")
    return found


def _limit(ctx: ApiContext, body: PairFields) -> tuple[int, bool]:
    """Tokens that a prompt may have, and whether longer ones are cut. Raises ParameterError."""
    room, asked = ctx.engine.max_model_len - 1, body.truncate_prompt_tokens
    SamplingParams(truncate_prompt_tokens=asked)
    if asked is None:
        return room, body.truncation is True
    return room if asked == -1 else min(asked, room), True


# ---------------------------------------------------------------- by embeddings


async def _by_embeddings(ctx: ApiContext, request: Request, body: PairFields, pairs: Pairs) -> Scores:
    for name in ("instruction", "use_activation"):
        if getattr(body, name) is not None:
            raise allowed_only(name, "where the model is a reranker: this one scores by its embeddings")
    limit, cut = _limit(ctx, body)
    own = body.max_tokens_per_doc or limit
    params = SamplingParams(max_tokens=1)

    async def ids_of(texts: Sequence[str], most: int, cut: bool, name: str) -> list[array]:
        given = await ctx.tokenize(texts, special=True, field=name, truncated=cut)
        kept = [ids[:most] if cut else ids for ids in given]
        return [(await ctx.check_prompt(ids, params, field=f"{name}[{i}]", limit=""))[0] for i, ids in enumerate(kept)]

    batch = await ids_of(pairs.queries, limit, cut, pairs.names[0])
    count = len(batch)
    batch += await ids_of(pairs.documents, min(own, limit), cut or bool(body.max_tokens_per_doc), pairs.names[1])
    vectors = await vectors_of(ctx, request, batch, body)
    queries = vectors[:count] if count > 1 else vectors[:1] * len(pairs.documents)
    values = await ctx.in_thread(_cosines, queries, vectors[count:])
    return Scores(values, sum(map(len, batch)))


def _cosines(queries: list[list[float]], documents: list[list[float]]) -> list[float]:
    return [_cosine(a, b) for a, b in zip(queries, documents, strict=True)]


def _cosine(a: list[float], b: list[float]) -> float:
    """Of vectors of length 1, but for rounding."""
    return max(-1.0, min(1.0, math.fsum(x * y for x, y in zip(a, b, strict=True))))


# ---------------------------------------------------------------- by yes and no


async def _judged(ctx: ApiContext, request: Request, body: PairFields, pairs: Pairs, reranker: Reranker) -> Scores:
    prompts = await ctx.in_thread(_prompts, ctx, body, pairs, reranker)

    async def score(name: str, ids: array) -> float:
        margin = await _margin(ctx, name, ids, body, reranker)
        return margin if body.use_activation is False else _sigmoid(margin)

    return Scores(await of_each(ctx, request, prompts, new_id("score-"), score), sum(map(len, prompts)))


def _prompts(ctx: ApiContext, body: PairFields, pairs: Pairs, reranker: Reranker) -> list[array]:
    limit, cut = _limit(ctx, body)
    heads: dict[str, QueryPrompt] = {}
    found, total = [], 0
    for i, document in enumerate(pairs.documents):
        query = pairs.query(i)
        if query not in heads:
            ctx.check_length(query, pairs.names[0])
            heads[query] = reranker.prompt(query, body.instruction)
        head = heads[query]
        if (room := limit - head.num_tokens) < 1:
            why = f"its prompt has {head.num_tokens} tokens before any document; {limit} are all that a prompt may have."
            raise invalid(pairs.names[0], why, "context_length_exceeded")
        most = body.max_tokens_per_doc or None
        if cut:
            most = room if most is None else min(most, room)
        if most is None:
            ctx.check_length(document, pairs.place(i))
        ids = ctx.inputs.check_ids(reranker.pair(head, document, most), pairs.place(i))
        if len(ids) > limit:
            why = f"{len(ids)} tokens with its query; at most {limit}. `truncation` true cuts documents to what fits."
            raise invalid(pairs.place(i), why, "context_length_exceeded")
        total += len(ids)
        if total > MAX_TOKENS:
            raise invalid(pairs.names[1], f"more than {MAX_TOKENS} tokens, with a query for each; send fewer at a time.")
        found.append(ids)
    return found


async def _margin(ctx: ApiContext, name: str, ids: array, body: PairFields, reranker: Reranker) -> float:
    """The logit of yes minus that of no."""
    answers = [reranker.yes, reranker.no]
    found = await _logprobs(ctx, name, ids, body, answers, NUM_TOP)
    missing = [token for token in answers if token not in found]
    if missing:  # it is less likely than many that are no answer; its prompt is in the cache
        found |= await _logprobs(ctx, f"{name}-again", ids, body, missing, 0)
    return found[reranker.yes] - found[reranker.no]


async def _logprobs(
    ctx: ApiContext, name: str, ids: array, body: PairFields, allowed: list[int], num_top: int
) -> dict[int, float]:
    """Of the likeliest of the `allowed` tokens behind a prompt, and of the `num_top` likeliest of all."""
    params = ctx.inputs.complete(
        SamplingParams(
            max_tokens=1, temperature=0.0, repetition_penalty=1.0, allowed_token_ids=allowed, logprobs=num_top,
            detokenize=False, ignore_eos=True,
        ),
        len(ids),
    )  # fmt: skip
    outputs = ctx.engine.generate(name, ids, params, priority=body.priority or 0, cache_salt=body.cache_salt or "")
    found: dict[int, float] = {}
    async with contextlib.aclosing(outputs):
        async for news in outputs:
            if news.finish_reason in ("error", "abort"):
                raise sample_failure(news)
            for entry in news.logprobs or ():
                found.update(zip(entry.ids, entry.logprobs, strict=True))
    return found


def _sigmoid(x: float) -> float:
    small = math.exp(-abs(x))
    return 1.0 / (1.0 + small) if x >= 0 else small / (1.0 + small)
