"""Who computes how many tokens next: requests in, step plans out, sampled ids back in. No torch here.

    schedule(N)  counters, slots and blocks move ahead as if step N were done; a sampled token becomes *pending*
    launched(N)  the forward that writes N's KV is under way: full blocks of known tokens enter the prefix index
    schedule(N+1), launched(N+1)   may come before settle(N): pending tokens are counted, their ids stay on the device
    settle(N)    pending ids become known; requests end; what no launched step holds any more is given back

Who holds slots and blocks, and how they come and go, is the block manager's part.
"""

from __future__ import annotations

from bisect import insort
from typing import NamedTuple

from headrace.errors import ParameterError
from headrace.scheduler.admission import token_limit
from headrace.scheduler.block_manager import BlockManager
from headrace.scheduler.config import Limits
from headrace.scheduler.decode_batch import RANK, Row, Scheduled
from headrace.scheduler.drafting import Drafting
from headrace.scheduler.invariants import check_scheduler
from headrace.scheduler.plan import StepPlan, StepResult
from headrace.scheduler.prefill_budget import PrefillBudget
from headrace.scheduler.request import Request


class Gain(NamedTuple):
    """A request and the ids that it took."""

    request: Request
    ids: list[int]


class Settled(NamedTuple):
    """What a step brought to its requests, but for those that had ended before. A request is in one of the parts only."""

    ids: list[str]  # those that got one more token, and nothing else is to be said of them: nearly all
    tokens: list[int]
    gains: list[Gain]  # those that got their first or several, or ended


class Scheduler:
    """Runs the two counters of each request (`num_scheduled`, `num_tokens`) towards each other.

    Order in a step: running decodes, running prefills, admissions, each by rank: (arrival) with fcfs, (priority, arrival)
    with priority. Nobody overtakes the head of the queue, but those who would compute what this very step computes wait
    one step, once, and then find it in the prefix index.

    A request that outgrows the whole cache ends with "length", like one that reaches max_model_len.
    """

    def __init__(self, limits: Limits):
        self.limits = limits
        self.blocks = BlockManager(limits)
        self._drafting = Drafting(self.blocks, limits.max_drafts)
        self.pool, self.tree, self.admission = self.blocks.pool, self.blocks.tree, self.blocks.admission
        self.live, self.stats = self.blocks.live, self.blocks.stats  # by id: all requests that are not finished
        bound, most = limits.max_itl, limits.max_num_batched_tokens
        self.prefill_budget = None if bound is None else PrefillBudget(bound, limits.block_size, most)
        self.flight: dict[int, Scheduled] = {}  # by number: not settled
        self.num_steps = self._num_added = 0  # since the start

    # ---- requests in and out

    def add(self, request: Request) -> None:
        """Queue a request. Raises ParameterError or CapacityError, with the numbers, if it can never be served."""
        if request.id in self.live:
            raise ParameterError("request_id", request.id, "an id that no live request has")
        limit = token_limit(request, self.limits)
        priority = request.priority if self.limits.policy == "priority" else 0
        self._num_added += 1
        request.prepare((priority, request.arrival, self._num_added), limit, self.limits.enable_prefix_caching)
        self.live[request.id] = request
        self.admission.push(request)

    def abort(self, request_id: str) -> Request | None:
        """End a request now, whatever it is doing; None if there is no such one. Its ids so far stay as they are."""
        request = self.live.get(request_id)
        if request is not None:
            self.blocks.finish(request, "abort")
        return request

    # ---- a step

    def schedule(self, drafting: bool = True) -> StepPlan | None:
        """The next step; None if nothing can run now (perhaps until launched steps settle). `drafting`: somebody has drafts."""
        step = Scheduled(self.num_steps + 1, self.limits.max_num_batched_tokens)
        if self.blocks.decoding:
            self._decode(step, drafting)
        if self.prefill_budget is not None and (step.decodes.ids or step.others):
            step.budget = min(step.budget, self.prefill_budget.prefill_tokens())
        if self.blocks.prefilling:
            self._prefill(step)
        if self.admission.num_waiting:
            self._admit(step)
        if not step.decodes.ids and not step.others:
            return None
        self.num_steps = step.number
        self.flight[step.number] = step
        return step.plan()

    def launched(self, plan: StepPlan) -> None:
        """The worker has launched the plan for good: its full blocks may be hit by whatever is launched later."""
        step = self.flight[plan.step]
        if not step.filled:
            return
        unknown = []
        for request, stop in step.filled:
            if not request.finished:
                self.blocks.index(request, min(stop, request.num_known))
                if stop > request.num_known:
                    unknown.append((request, stop))
        step.filled = unknown

    def took(self, plan: StepPlan, seconds: float) -> None:
        """What a step has cost, for the choice of further ones."""
        if self.prefill_budget is not None and (plan.num_decodes or plan.num_drafts):
            self.prefill_budget.observe(plan.num_prefill, seconds)

    # ---- the three parts of a step

    def _decode(self, step: Scheduled, drafting: bool) -> None:
        """One token for each decoding request, as far as budget and blocks go."""
        blocks, budget = self.blocks, step.budget
        batch, decoding = blocks.batch, blocks.decoding
        members, now = batch.members, batch.clock.now
        while len(members) > budget:
            batch.leave(members[-1])
        # half of what the decodes leave: drafts must not starve the prefills
        most_drafts = min(self.limits.max_draft_rows - len(decoding), (budget - len(decoding)) // 2) if drafting else 0
        speculating = most_drafts > 0 or self._drafting.num_rows > 0
        due = batch.due()
        everyone = speculating or len(members) < len(decoding)
        for request in decoding if everyone else due:  # may lose its tail to preemption on the way, never what was visited
            member = request in batch
            if not member and not everyone:
                continue
            if speculating and (request.num_drafts or request.num_unverified):
                most = 1 + max(0, most_drafts - step.num_drafts) if len(decoding) <= budget else 0
                if self._drafting.row(request, step, most):
                    continue
            if not member or request.next_event == now:
                self._advance(request, step)
        if members:
            batch.tick(step)
        step.budget = budget - len(members) - len(step.others) - step.num_drafts
        for request in step.last:
            blocks.retire(request)

    def _advance(self, request: Request, step: Scheduled) -> None:
        """See to it that a decode can have its next row in the batch. Who finds no block waits outside of it."""
        blocks, batch, start = self.blocks, self.blocks.batch, request.num_scheduled
        members, member = batch.members, request in batch
        if not member and len(members) == step.budget:
            if members[-1].rank < request.rank:
                return
            batch.leave(members[-1])
        if start == request.capacity:
            if not blocks.room(request, step, 1):
                if member:
                    batch.leave(request)
                return
            step.new_blocks.append(blocks.grow(request, 1))
        if not member:
            batch.join(request)
        if not (start + 1) % blocks.block_size:
            step.filled.append((request, start + 1))
            blocks.snapshots.keep(request, start + 1, step, decodes=True)
        if start + 2 < request.limit:
            batch.expect(request, start + 1)
        else:
            step.last.append(request)

    def _prefill(self, step: Scheduled) -> None:
        prefilling, complete = self.blocks.prefilling, []
        for request in prefilling:  # may lose its tail, as above
            if step.budget == 0:
                break
            if self._extend(request, step, admitted=False):
                complete.append(request)
        for request in complete:
            prefilling.remove(request)
            self.blocks.prefilled(request)

    def _admit(self, step: Scheduled) -> None:
        blocks = self.blocks
        for request in self.admission.admissible(step, blocks.free_slots, (blocks.decoding, blocks.prefilling)):
            blocks.admit(request)
            if self._extend(request, step, admitted=True):
                blocks.prefilled(request)
            else:
                insort(blocks.prefilling, request, key=RANK)

    def _extend(self, request: Request, step: Scheduled, admitted: bool) -> bool:
        """Give a request as many of the tokens that it lacks as budget and blocks allow; whether that was all."""
        blocks, size = self.blocks, self.blocks.block_size
        start, held = request.num_scheduled, len(request.block_ids)
        lacking = request.num_tokens - start
        count = blocks.snapshots.cut(request, start, min(lacking, step.budget))
        missing = -(-(start + count) // size) - held
        if missing > 0:
            granted = blocks.room(request, step, missing)
            count = min(count, (held + granted) * size - start)
            if count <= 0:
                return False
            grown = blocks.grow(request, granted)
            if not admitted:
                step.new_blocks.append(grown)
        if admitted:
            step.admit(request)
        stop, complete = start + count, count == lacking
        samples = complete and request.pooling is None
        step.others.append(Row(request, complete, request.slot, start, count, 0, 0, samples))
        step.budget -= count
        blocks.snapshots.keep(request, stop, step, decodes=False)
        if request.fills(stop, size):
            step.filled.append((request, stop))
            if self.admission.num_waiting:
                key = request.key(request.num_indexed, blocks.key_bytes)
                step.computing.add((request.cursor, request.cache_salt, key))
        request.num_scheduled, request.last_step = stop, step.number
        return complete

    # ---- a step's result

    def settle(self, plan: StepPlan, result: StepResult) -> Settled:
        """Take a launched plan's result; steps settle in their order. Sequences that failed end their requests with "error"."""
        step = self.flight.pop(plan.step)
        blocks = self.blocks
        blocks.num_settled = plan.step
        gains = self._fail(step, result.failed) if result.failed else []
        for request, stop in step.filled:  # before the new ids: all of these are known by now
            if not request.finished:
                blocks.index(request, stop)
        ids, tokens = self._settle_decodes(step, result.token_ids, gains)
        begin = len(step.decodes.ids)
        for row, count in zip(step.others, result.counts[begin:], strict=True) if step.others else ():
            request, taken = row.request, result.token_ids[begin : begin + count]
            begin += count
            if row.drafts:
                self._drafting.settle(request, row.drafts, count)
            if row.completes:
                self._gain(request, taken, gains)
            if row.drafts and request.num_tokens >= request.limit and not request.retired:
                blocks.retire(request)  # a launched step samples its last token
            elif request in blocks.leaving:
                blocks.release(request)
        return Settled(ids, tokens, gains)

    def _fail(self, step: Scheduled, failed: frozenset[int]) -> list[Gain]:
        gains, requests = [], step.requests()
        for request in (requests[i] for i in sorted(failed)):
            if not request.finished:
                if request.cursor is not None:
                    # a NaN in a shared block would fail everybody who hits it, for ever; so the whole path is forgotten
                    self.tree.drop_path(request.cursor)
                self.blocks.finish(request, "error")
                gains.append(Gain(request, []))
        return gains

    def _settle_decodes(self, step: Scheduled, tokens: list[int], gains: list[Gain]) -> tuple[list[str], list[int]]:
        """The plain decodes that just got one more token, and the tokens; what happened to the others goes to `gains`."""
        requests, ids = step.decodes.requests, step.decodes.ids
        apart = []
        for i, (request, token) in enumerate(zip(requests, tokens, strict=False)):
            if request.retired or token in request.stops:
                apart.append(i)
            else:  # shorter than its limit: whoever gets there has retired
                request.output_ids.append(token)
        if step.others or apart:
            tokens = tokens[: len(ids)]
        if not apart:
            return ids, tokens
        for i in apart:
            self._gain(requests[i], [tokens[i]], gains)
            if requests[i] in self.blocks.leaving:
                self.blocks.release(requests[i])
        ids = ids.copy()
        for i in reversed(apart):
            del ids[i], tokens[i]
        return ids, tokens

    def _gain(self, request: Request, ids: list[int], gains: list[Gain]) -> None:
        """Who has ended before takes nothing."""
        if not request.finished:
            taken = self.blocks.take(request, ids)
            if taken or request.finished:
                gains.append(Gain(request, taken))

    # ---- upkeep and gauges

    def reset_prefix_cache(self) -> None:
        """Forget every cached block that no request holds."""
        self.tree.evict(self.tree.num_cached)

    def check(self) -> None:
        """Law 5 and all counters; AssertionError with a description. Costs a walk over everything."""
        check_scheduler(self.limits, self.blocks, self._drafting, self.flight.values())

    @property
    def has_unfinished(self) -> bool:
        """Whether any request wants or holds anything: also one that ended while a launched step has its row."""
        return bool(self.live or self.blocks.leaving)

    @property
    def num_running(self) -> int:
        """Requests that own a slot."""
        return self.limits.max_num_seqs - len(self.blocks.free_slots)

    @property
    def decoding(self) -> list[Request]:
        """The requests that want one token (or more, with drafts), by rank."""
        return self.blocks.decoding

    @property
    def num_waiting(self) -> int:
        return self.admission.num_waiting

    @property
    def kv_usage(self) -> float:
        """Fraction of the blocks that requests hold."""
        return 1.0 - self.tree.num_available / self.pool.num_blocks
