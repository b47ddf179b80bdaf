"""Who computes how many tokens next: requests in, step plans out, sampled ids back in. No torch here.

    schedule(N)  counters, slots and blocks move ahead as if step N were done; a sampled token becomes *pending*
    launched(N)  the forward that writes N's KV is under way: full blocks of known tokens enter the prefix index
    schedule(N+1), launched(N+1)   may come before settle(N): pending tokens are counted, their ids stay on the device
    settle(N)    pending ids become known; requests end; what no launched step holds any more is given back

Who holds slots and blocks, and how they come and go, is the roster's part (`scheduler.roster`).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence

from headrace.errors import ParameterError
from headrace.scheduler.admission import token_limit
from headrace.scheduler.config import SchedulerConfig
from headrace.scheduler.decode_batch import RANK
from headrace.scheduler.drafts import add_draft_chunk, draft_count
from headrace.scheduler.entry import Entry, Step
from headrace.scheduler.invariants import check_scheduler
from headrace.scheduler.pace import Pace
from headrace.scheduler.plan import Chunk, Decodes, StepPlan
from headrace.scheduler.request import Request
from headrace.scheduler.roster import Roster
from headrace.scheduler.settle import Settled, settle_step


class Scheduler:
    """Runs the two counters of each request (`num_scheduled`, `num_tokens`) towards each other.

    Order in a step: running decodes, running prefills, admissions, each by rank: (arrival) with fcfs, (priority, arrival)
    with priority. Nobody overtakes the head of the queue, but those who would compute what this very step computes wait
    one step, once, and then find it in the prefix index.

    A request that outgrows the whole cache ends with "length", like one that reaches max_model_len.
    """

    def __init__(self, config: SchedulerConfig):
        self.config = config
        self._roster = Roster(config)
        self.pool, self.tree, self._admission = self._roster.pool, self._roster.tree, self._roster.admission
        self.stats = self._roster.stats
        self._pace: Pace | None = None
        if config.max_itl is not None:
            self._pace = Pace(config.max_itl, config.block_size, config.max_num_batched_tokens)
        self._flight: dict[int, Step] = {}  # by number: scheduled and not settled
        self._num_steps = self._num_added = 0

    # ---- requests in and out

    def add(self, request: Request) -> None:
        """Queue a request. Raises ParameterError or CapacityError, with the numbers, if it can never be served."""
        if self.has(request.id):
            raise ParameterError("request_id", request.id, "an id that no live request has")
        limit = token_limit(request, self.config)
        priority = request.priority if self.config.policy == "priority" else 0
        self._num_added += 1
        rank = (priority, request.arrival, self._num_added)
        entry = Entry(request, rank, limit, self.config.enable_prefix_caching)
        self._roster.live[request.id] = entry
        self._admission.push(entry)

    def has(self, request_id: str) -> bool:
        """Whether it waits or runs."""
        return request_id in self._roster.live

    def abort(self, request_id: str) -> Request | None:
        """End a request now, whatever it is doing; None if there is no such one. Its ids so far stay as they are."""
        entry = self._roster.live.get(request_id)
        if entry is None:
            return None
        self._roster.finish(entry, "abort")
        return entry.request

    # ---- a step

    def schedule(self, drafting: bool = True) -> StepPlan | None:
        """The next step; None if nothing can run now (perhaps until launched steps settle). `drafting`: somebody has drafts."""
        step = Step(self._num_steps + 1, self.config.max_num_batched_tokens)
        if self._roster.decoding:
            self._decode(step, drafting)
        if self._pace is not None and (step.decodes or step.chunks):
            step.budget = min(step.budget, self._pace.prefill_tokens())
        if self._roster.prefilling:
            self._prefill(step)
        if self._admission.num_waiting:
            self._admit(step)
        if step.decodes is None and not step.chunks:
            return None
        self._num_steps = step.number
        self._flight[step.number] = step
        return StepPlan(step.number, step.decodes or Decodes.none(), step.chunks, step.num_drafts)

    def launched(self, plan: StepPlan) -> None:
        """The worker has launched the plan for good: its full blocks may be hit by whatever is launched later."""
        step = self._flight[plan.step]
        if not step.filled:
            return
        unknown = []
        for entry, stop in step.filled:
            if not entry.finished:
                self._roster.index(entry, min(stop, entry.request.num_known))
                if stop > entry.request.num_known:
                    unknown.append((entry, stop))
        step.filled = unknown

    def took(self, plan: StepPlan, seconds: float) -> None:
        """What a step has cost, for the choice of further ones."""
        if self._pace is not None and (plan.decodes or plan.num_drafts):
            self._pace.observe(sum(c.num_tokens for c in plan.others if c.num_tokens > 1 + c.num_drafts), seconds)

    def settle(
        self, plan: StepPlan, tokens: list[int], sampled: Sequence[list[int]], failed: frozenset[int] = frozenset()
    ) -> Settled:
        """Take a launched plan's result; steps settle in their order.

        `tokens` are the ids of the decodes, `sampled[i]` those of the other chunk i: empty if it does not sample, or has
        drafts and is to be computed again without (a NaN of theirs reaches the rows before them in attention), which a step
        behind it does already (Chunk.slack). The rows in `failed` (decodes, then chunks) have no valid result and end their
        requests with "error".
        """
        step = self._flight.pop(plan.step)
        self._roster.num_settled = plan.step
        return settle_step(self._roster, step, tokens, sampled, failed)

    # ---- the three parts of a step

    def _decode(self, step: Step, drafting: bool) -> None:
        """One token for each decoding request, as far as budget and blocks go."""
        roster, budget = self._roster, step.budget
        batch, decoding = roster.batch, roster.decoding
        members, now = batch.entries, batch.clock.now
        while len(members) > budget:
            batch.leave(members[-1])
        # half of what the decodes leave: drafts must not starve the prefills
        most_drafts = min(self.config.max_draft_rows - len(decoding), (budget - len(decoding)) // 2) if drafting else 0
        speculating = most_drafts > 0 or roster.num_drafting > 0
        due = batch.due()
        everyone = speculating or len(members) < len(decoding)
        for entry in decoding if everyone else due:  # may lose its tail to preemption on the way, never what was visited
            member, request = entry in batch, entry.request
            if not member and not everyone:
                continue
            if speculating and (request.num_drafts or request.num_unsure):
                most = max(0, most_drafts - step.num_drafts) if len(decoding) <= budget else -1
                if self._speculate(entry, step, most):
                    continue
            if not member or entry.due == now:
                self._advance(entry, step)
        if members:
            batch.tick(step)
        step.budget = budget - len(members) - len(step.chunks) - step.num_drafts
        for entry in step.last:
            roster.part(entry)

    def _speculate(self, entry: Entry, step: Step, most: int) -> bool:
        """Give a decode drafts, or a row behind those that have not settled; False if it goes on as one without."""
        unsure = entry.request.num_unsure > 0
        count = draft_count(self._roster, entry, most)
        if count > 0 or (count == 0 and unsure):
            if entry in self._roster.batch:
                self._roster.batch.leave(entry)
            add_draft_chunk(self._roster, entry, step, count)
        return count > 0 or unsure

    def _advance(self, entry: Entry, step: Step) -> None:
        """See to it that a decode can have its next row in the batch. Who finds no block waits outside of it."""
        roster, batch, start = self._roster, self._roster.batch, entry.request.num_scheduled
        members, member = batch.entries, entry in batch
        if not member and len(members) == step.budget:
            if members[-1].rank < entry.rank:
                return
            batch.leave(members[-1])
        if start == entry.capacity:
            if not roster.room(entry, step, 1):
                if member:
                    batch.leave(entry)
                return
            step.new_blocks.append((entry, len(entry.request.block_ids), roster.grow(entry, 1)[0]))
        if not member:
            batch.join(entry)
        if not (start + 1) % roster.block_size:
            step.filled.append((entry, start + 1))
        if start + 2 < entry.limit:
            batch.expect(entry, start + 1)
        else:
            step.last.append(entry)

    def _prefill(self, step: Step) -> None:
        prefilling, complete = self._roster.prefilling, []
        for entry in prefilling:  # may lose its tail, as above
            if step.budget == 0:
                break
            if self._extend(entry, step, admitted=False):
                complete.append(entry)
        for entry in complete:
            prefilling.remove(entry)
            self._roster.prefilled(entry)

    def _admit(self, step: Step) -> None:
        roster = self._roster
        for entry in self._admission.admissible(step, roster.free_slots, (roster.decoding, roster.prefilling)):
            roster.enter(entry)
            if self._extend(entry, step, admitted=True):
                roster.prefilled(entry)
            else:
                insort(roster.prefilling, entry, key=RANK)

    def _extend(self, entry: Entry, step: Step, admitted: bool) -> bool:
        """Give a request as many of the tokens that it lacks as budget and blocks allow; whether that was all."""
        request, roster, size = entry.request, self._roster, self._roster.block_size
        start = request.num_scheduled
        lacking = request.num_tokens - start
        count = min(lacking, step.budget)
        held = len(request.block_ids)
        missing = -(-(start + count) // size) - held
        new_blocks: list[int] = []
        if missing > 0:
            granted = roster.room(entry, step, missing)
            count = min(count, (held + granted) * size - start)
            if count <= 0:
                return False
            new_blocks = roster.grow(entry, granted)
        stop = start + count
        samples = count == lacking
        if admitted:  # the whole table is new to the worker, the part that was hit too
            held, new_blocks = 0, request.block_ids.copy()
        step.chunks.append(Chunk(request, request.slot, start, count, samples, admitted, new_blocks, held, request.num_output))
        step.entries.append(entry)
        step.budget -= count
        if (entry.num_indexed + 1) * size <= stop:
            step.filled.append((entry, stop))
            if self._admission.num_waiting:
                key = entry.key(entry.num_indexed, roster.key_bytes)
                step.computing.add((entry.cursor, request.cache_salt, key))
        request.num_scheduled = stop
        entry.last_step = step.number
        return samples

    # ---- upkeep and gauges

    def reset_prefix_cache(self) -> None:
        """Forget every cached block that no request holds."""
        self.tree.evict(self.tree.num_available - self.pool.num_free)

    def check(self) -> None:
        """Law 5 and all counters; AssertionError with a description. Costs a walk over everything."""
        check_scheduler(self.config, self._roster, self._flight.values())

    @property
    def has_unfinished(self) -> bool:
        """Whether any request wants or holds anything: also one that ended while a launched step has its row."""
        return bool(self._roster.live or self._roster.leaving)

    @property
    def num_running(self) -> int:
        """Requests that own a slot."""
        return self.config.max_num_seqs - len(self._roster.free_slots)

    @property
    def decoding(self) -> list[Request]:
        """The requests that want one token (or more, with drafts), by rank."""
        return [entry.request for entry in self._roster.decoding]

    @property
    def num_waiting(self) -> int:
        return self._admission.num_waiting

    @property
    def kv_usage(self) -> float:
        """Fraction of the blocks that requests hold."""
        return 1.0 - self.tree.num_available / self.pool.num_blocks
