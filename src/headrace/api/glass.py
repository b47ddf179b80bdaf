"""GET /glass/events: what one core does, as server-sent events; the engine's half of the page at `/` is drawn from these alone.

`?core=N` chooses the core (0). Times are seconds of the engine's clock, token counts are tokens, blocks are numbers from 0. The
events of a connection, each a JSON object:

snapshot    the whole state: at first, after a core has come back, and when a reader was too slow for what came in between
    now, n                time, and the number of the last step
    block_size, num_blocks, max_num_seqs, budget (tokens of a step), policy (fcfs | priority)
    decodes               slots that decode one token in each step, until a step says otherwise
    requests              [id, prompt, priority, arrival, slot (-1: it waits), cached, scheduled, known, admitted, first,
                          preemptions, reason of its end or null, output]: `scheduled` tokens are computed of the `known` ones
    tables                [slot, block, block, ...]: the block table of each slot that is taken
    nodes                 [block, above, block, above, ...]: the prefix index; `above` is -1 at a prompt's first block
    head                  [id, words]: who is first in the queue, and why it waits; null: nobody waits
    reading               [weights, token, rate]: bytes that a step reads at least, those of each token of context, and bytes
                          that can be read in a second; null where that is not known
request     {events: [[what, n, time, id, ...], ...]}; each belongs before the first step whose number is greater than n
    arrived               prompt, priority, output that it brought along
    admitted              slot, cached tokens, known tokens
    first                 its first token was read
    preempted             how often so far
    ended                 stop | length | abort | error, output tokens
step        {now, steps, entered, gone, head}: up to 1/20 second of steps
    steps                 [n, time, [schedule, launch, wait, settle, device], count, decodes, rows, left, taken, verified], ...
        times             microseconds of the loop's turn; `device` is of the step before
        count, decodes    plain decodes in the step, one token each, and their slots: null, if they are those of the step before
        rows              [slot, kind, start, tokens, drafts, ...]: all others; kind 1 prefills, kind 0 verifies its drafts
        left              slots whose requests have given their blocks back; before `taken`
        taken             [slot, column, count, block, ..., ...]: blocks added to a table; column 0 begins a new one
        verified          [n, slot, tokens, ...]: what the rows with drafts of an earlier step have brought: 1 + right drafts
                          A step with the number of the one before it and no rows only tells of what has left since
    entered, gone         blocks that entered the prefix index, as in `nodes`, after those that left it
stats       each half second: gauges and counters (engine/stats.py) of all cores together, and in `cores` of each;
            `texts`: whether /glass/text answers
core        {core, state: died | loaded, why}

Nothing of this is computed while nobody looks. Four may at a time, and the fifth gets a 429. Ids and counts only: texts are for
GET /glass/text, which is refused unless the server was started with --glass-text.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.api.context import ApiContext
from headrace.api.errors import ApiError, ClientGone, invalid, too_many, unavailable
from headrace.api.glass_hub import Glass, TooManyViewersError
from headrace.api.lifeline import Lifeline
from headrace.api.service import json_response
from headrace.api.sse import EventStream

MOST_TOKENS = 4096  # of one text
GREETING = b"retry: 1000\n\n"


class GlassRoutes:
    """The two handlers, around what they show."""

    def __init__(self, glass: Glass):
        self.glass = glass

    async def events(self, ctx: ApiContext, request: Request) -> Response:
        core = _number(request, "core", 0)
        if ctx.engine.status().draining:
            raise unavailable("The server is shutting down.", 5, "shutting_down")
        if core not in (cores := [each.number for each in ctx.engine.cores()] or [0]):  # none: the first is still to come
            raise invalid("core", f"one of {', '.join(map(str, cores))}.")
        return EventsResponse(ctx, self.glass, core)

    async def text(self, ctx: ApiContext, request: Request) -> Response:
        """GET /glass/text?id=&start=&stop=: what a request in flight has at these positions."""
        if not ctx.config.glass_text:
            raise ApiError(403, "This server shows no texts: it was started without --glass-text.", code="texts_hidden")
        start, stop = _number(request, "start", 0), _number(request, "stop", MOST_TOKENS)
        ids = await self.glass.token_ids(request.query_params.get("id", ""), start, min(stop, start + MOST_TOKENS))
        if ids is None:
            raise ApiError(404, "No request of this id is in flight.", code="unknown_request")
        return json_response({"text": ctx.engine.tokenizer.decode(ids, False), "tokens": len(ids)})


def _number(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise invalid(name, "an integer >= 0.")
    return int(text)


class EventsResponse(Response):
    """Lives as long as its reader."""

    def __init__(self, ctx: ApiContext, glass: Glass, core: int):
        self._ctx, self._glass, self._core = ctx, glass, core

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with Lifeline(receive, None) as line, self._glass.look(self._core) as viewing:
                stream = EventStream(scope, send, lambda: line.end(ClientGone()))
                self._ctx.ticker.add(stream)
                try:
                    await stream.write(GREETING)
                    while data := await viewing.next():
                        await stream.write(data)
                    await stream.end(b"")
                finally:
                    self._ctx.ticker.remove(stream)
        except TooManyViewersError as e:
            raise too_many(f"{e}.", 5, "too_many_viewers") from None
