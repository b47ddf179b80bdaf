"""POST /v1/rerank (Jina's and vLLM's form, Cohere's at /v1 and /v2) and POST /v1/score (vLLM's)."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from headrace.api.body import read_json
from headrace.api.context import ApiContext, new_id
from headrace.api.errors import invalid, unsupported
from headrace.api.pair_scores import PairFields, Pairs, pair_scores
from headrace.api.protocol import Body
from headrace.api.service import json_response

# names of the two sides in a body of /v1/score
SIDES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))


class Document(Body, kw_only=True):
    text: str
    image: Any = None  # refused


class RerankRequest(PairFields, kw_only=True):
    """POST /v1/rerank."""

    query: str
    documents: list[str | Document]
    top_n: int | None = None  # 0: all
    return_documents: bool | None = None  # null is true
    # neutral only
    rank_fields: Any = None
    max_chunks_per_doc: Any = None
    relevant_spans: Any = None


class ScoreRequest(PairFields, kw_only=True):
    """POST /v1/score."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    items: str | list[str] | None = None
    data_1: str | list[str] | None = None
    data_2: str | list[str] | None = None


async def rerank(ctx: ApiContext, request: Request) -> Response:
    """The documents, the best first; of equals the first first."""
    body = await read_json(request, RerankRequest, ctx.config)
    model = ctx.check_model(body.model)
    ctx.refuse_adapter(body.model)
    if not body.documents:
        raise invalid("documents", "an empty list; at least one document is needed.")
    if body.top_n is not None and body.top_n < 0:
        raise invalid("top_n", f"got {body.top_n}, allowed: an integer >= 0; 0 is all.")
    texts = []
    for i, document in enumerate(body.documents):
        if isinstance(document, Document) and document.image is not None:
            raise unsupported(f"documents[{i}].image", "not supported by this server: documents are text")
        texts.append(document if isinstance(document, str) else document.text)
    values, tokens = await pair_scores(ctx, request, body, Pairs([body.query], texts))
    order = sorted(range(len(texts)), key=lambda i: (-values[i], i))
    results: list[dict[str, Any]] = []
    for i in order[: body.top_n or len(order)]:
        shown = {} if body.return_documents is False else {"document": {"text": texts[i]}}
        results.append({"index": i, "relevance_score": values[i], **shown})
    version = "2" if request.scope["path"].startswith("/v2") else "1"
    return json_response({
        "id": new_id("rerank-"), "object": "list", "model": model, "results": results,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        "meta": {"api_version": {"version": version}, "tokens": {"input_tokens": tokens, "output_tokens": 0}},
    })  # fmt: skip


async def score(ctx: ApiContext, request: Request) -> Response:
    """A score for each pair, in their order."""
    body = await read_json(request, ScoreRequest, ctx.config)
    model = ctx.check_model(body.model)
    ctx.refuse_adapter(body.model)
    values, tokens = await pair_scores(ctx, request, body, _pairs(body))
    data = [{"index": i, "object": "score", "score": value} for i, value in enumerate(values)]
    return json_response({
        "id": new_id("score-"), "object": "list", "created": int(time.time()), "model": model, "data": data,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    })  # fmt: skip


def _pairs(body: ScoreRequest) -> Pairs:
    given = {name for side in SIDES for name in side if getattr(body, name) is not None}
    names = next((side for side in SIDES if set(side) <= given), None)
    if names is None or set(names) != given:
        near = names or next((side for side in SIDES if given & set(side)), SIDES[0])
        wrong = next((name for name in near if name not in given), None) or min(given - set(near))
        allowed = "; or ".join(" and ".join(side) for side in SIDES)
        code = "missing_required_parameter" if names is None else "invalid_value"
        raise invalid(wrong, f"both sides of the pairs are needed, and no other: {allowed}.", code)
    one, two = ([value] if isinstance(value := getattr(body, name), str) else value for name in names)
    for name, texts in zip(names, (one, two), strict=True):
        if not texts:
            raise invalid(name, "an empty list; at least one text is needed.")
    if len(one) not in (1, len(two)):
        raise invalid(names[0], f"{len(one)} texts for {len(two)} {names[1]}; allowed are one, or one for each.")
    return Pairs(one, two, names)
