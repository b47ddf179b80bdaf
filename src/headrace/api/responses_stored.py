"""Responses that are kept: how a request continues one, and the endpoints that show, list and delete them."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.api.context import ApiContext, new_id
from headrace.api.errors import ApiError, allowed_only, invalid, unknown_path, unsupported
from headrace.api.limits import Ticket
from headrace.api.response_store import ResponseStore, Stored, chain
from headrace.api.responses_background import followed

PREFIXES = {
    "message": "msg_", "reasoning": "rs_", "function_call": "fc_", "function_call_output": "fco_", "custom_tool_call": "ctc_",
    "custom_tool_call_output": "ctco_",
}  # fmt: skip
MAX_PAGE = 100


def owner(request: Request) -> int:
    """Whose responses this request may see: each API key has its own."""
    return int(getattr(request.state, "key", 0))


def with_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As they are listed: each has a type and an id."""
    typed = [{"type": "message", **item} for item in items]
    return [item if item.get("id") else {**item, "id": new_id(PREFIXES.get(str(item["type"]), "item_"))} for item in typed]


def continued(ctx: ApiContext, request: Request, response_id: str | None) -> tuple[Stored | None, list[dict[str, Any]]]:
    """The response that a request continues, and the items of the conversation so far."""
    name = "previous_response_id"
    if response_id is None:
        return None, []
    check_kept(ctx, name, "send the whole input")
    stored = ctx.responses.find((owner(request), response_id))
    if stored is not None and stored.now is not None:
        raise invalid(name, "that response is still in progress.")
    links = chain(stored) if stored is not None else None
    if links is None:
        text = f"{name}: there is no response {response_id[:100]!r}, or it or one that it continues is not kept any more."
        raise ApiError(404, text, param=name, code="previous_response_not_found")
    return stored, [item for link in links for item in link.both()]


def dereferenced(ctx: ApiContext, request: Request, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The input, with the items of earlier answers in the place of their ids. Raises ApiError naming the reference."""
    found: list[dict[str, Any]] = []
    known: dict[str, dict[str, Any]] = {}  # of the responses that have been read: each once
    used: set[str] = set()
    for i, item in enumerate(items):
        if item.get("type") != "item_reference" and item.keys() != {"id"}:
            found.append(item)
            continue
        item_id, field = item.get("id"), f"input[{i}].id"
        if not isinstance(item_id, str):
            raise invalid(field, "the id of an item is needed.", "missing_required_parameter")
        check_kept(ctx, f"input[{i}].type", "send the whole input")
        if item_id not in known:
            stored = ctx.responses.having(owner(request), item_id)
            if stored is None:
                text = f"{field}: there is no item {item_id[:100]!r} of an answer that is kept; send the item itself."
                raise ApiError(404, text, param=field, code="item_not_found")
            known.update((other["id"], other) for other in stored.came_out() if other.get("id"))
        if item_id in used:  # a short body must not become a long prompt
            raise invalid(field, f"{item_id[:100]!r} stands twice in the input.")
        used.add(item_id)
        found.append(known[item_id])
    return found


def check_kept(ctx: ApiContext, field: str, instead: str) -> None:
    if not ctx.responses.max_bytes:
        why = "not supported: this server keeps no responses (several --api-processes, or --responses-store-bytes 0)"
        raise unsupported(field, f"{why}; {instead}")


class Held(Response):
    """An answer that has been let in and may have a place in the store, which it gives back if it does not come to its end."""

    def __init__(self, answer: Response, store: ResponseStore, stored: Stored | None, ticket: Ticket):
        self.answer, self.held = answer, (store, stored, ticket)
        self.status_code, self.background = answer.status_code, None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.answer(scope, receive, send)
        finally:
            give_back(*self.held)


def give_back(store: ResponseStore, stored: Stored | None, ticket: Ticket) -> None:
    with ticket:
        if stored is not None:
            store.release(stored)


# ---------------------------------------------------------------------------------------------------------------------
# endpoints


def _asked(ctx: ApiContext, request: Request) -> Stored:
    response_id = request.path_params["id"]
    stored = ctx.responses.find((owner(request), response_id))
    if stored is None:
        raise ApiError(404, f"There is no response {response_id[:100]!r}.", param="id", code="response_not_found")
    return stored


async def retrieve(ctx: ApiContext, request: Request) -> Response:
    """GET /v1/responses/{id}, also while it is running."""
    stored, query = _asked(ctx, request), request.query_params
    stream, after = query.get("stream", "false").lower(), query.get("starting_after")
    if stream not in ("true", "1", "false", "0"):
        raise invalid("stream", "allowed are true, false.")
    if query.get("include_obfuscation", "false").lower() not in ("false", "0"):
        raise unsupported("include_obfuscation", "not supported by this server (only false)")
    if stream in ("true", "1"):
        if after is not None and not (after.isascii() and after.isdecimal() and len(after) <= 9):
            raise invalid("starting_after", "the sequence_number of an event, an integer from 0 on.")
        return followed(ctx, request, stored, 0 if after is None else int(after) + 1)
    if after is not None:
        raise allowed_only("starting_after", "with stream=true")
    return Response(stored.document(), media_type="application/json")


async def delete(ctx: ApiContext, request: Request) -> Response:
    """DELETE /v1/responses/{id}."""
    stored = _asked(ctx, request)
    if stored.now is not None and stored.recorder is None:
        raise invalid("id", "the response is still in progress; its request ends it by closing the connection.")
    if stored.cancel is not None:
        stored.cancel()
    ctx.responses.remove(stored)
    return _json({"id": request.path_params["id"], "object": "response.deleted", "deleted": True})


async def cancel(ctx: ApiContext, request: Request) -> Response:
    """POST /v1/responses/{id}/cancel: one that is running, whoever reads it. One of the background may have ended."""
    stored = _asked(ctx, request)
    if stored.cancel is None and stored.recorder is None:
        raise invalid("id", "the response has ended: only one that is in progress can be cancelled.")
    return Response(stored.document() if stored.cancel is None else stored.cancel(), media_type="application/json")


async def input_items(ctx: ApiContext, request: Request) -> Response:
    """GET /v1/responses/{id}/input_items: the response's own input, not what it continues."""
    items, query = _asked(ctx, request).items(), request.query_params
    order, limit, after = query.get("order", "desc"), query.get("limit", "20"), query.get("after")
    if order not in ("asc", "desc"):
        raise invalid("order", "allowed are asc, desc.")
    if not (limit.isascii() and limit.isdecimal() and len(limit) <= 3 and 1 <= int(limit) <= MAX_PAGE):
        raise invalid("limit", f"an integer from 1 to {MAX_PAGE}.")
    if order == "desc":
        items.reverse()
    begin = 0
    if after is not None:
        begin = next((i + 1 for i, item in enumerate(items) if item["id"] == after), -1)
        if begin < 0:
            raise invalid("after", f"there is no item {after[:100]!r}.")
    page = items[begin : begin + int(limit)]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    more = begin + len(page) < len(items)
    return _json({"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": more})


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


async def nothing(ctx: ApiContext, request: Request) -> Response:
    """POST /v1/responses/compact and others that are not here."""
    raise unknown_path(request.scope)
