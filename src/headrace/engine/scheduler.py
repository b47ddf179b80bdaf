"""Who computes how many tokens next: requests in, step plans out, sampled ids back in. No torch here.

    schedule(N)  counters, slots and blocks move ahead as if step N were done; a sampled token becomes *pending*
    launched(N)  the forward that writes N's KV is under way: full blocks of known tokens enter the prefix index
    schedule(N+1), launched(N+1)   may come before settle(N): pending tokens are counted, their ids stay on the device
    settle(N)    pending ids become known; requests end; what no launched step holds any more is given back

Nothing that a launched step reads or writes is given back before that step settles. So whoever finishes, is aborted or is
preempted while a step holds its row only *parts*: it gets no more rows, and leaves with the last one.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Sequence
from typing import NamedTuple

from headrace.cache.block_pool import BlockPool
from headrace.cache.radix_tree import ID_BYTES, RadixTree
from headrace.engine.admission import Admission, token_limit
from headrace.engine.decode_batch import RANK, DecodeBatch
from headrace.engine.entry import OFF_INDEX, Entry, Step
from headrace.engine.invariants import check_scheduler
from headrace.engine.pace import Pace
from headrace.engine.plan import Chunk, Decodes, StepPlan
from headrace.engine.request import Request, Status
from headrace.engine.schedule_config import SchedulerConfig, SchedulerStats
from headrace.errors import ParameterError


class Settled(NamedTuple):
    """What a step brought to its requests, but for those that had ended before."""

    ids: list[str]  # requests that got just one more token
    tokens: list[int]
    others: list[tuple[Request, list[int]]]  # who got several or ended, with the ids that it really took


class Scheduler:
    """Runs the two counters of each request (`num_scheduled`, `num_tokens`) towards each other.

    Order in a step: running decodes, running prefills, admissions, each by rank: (arrival) with fcfs, (priority, arrival)
    with priority. Nobody overtakes the head of the queue, but those who would compute what this very step computes wait
    one step, once, and then find it in the prefix index.

    Preemption is by recomputation: who lacks a block takes it from the youngest of the lowest priority, who must be
    behind; else it waits. The first in rank is therefore never preempted and finds every block sooner or later: progress
    is certain. A request that outgrows the whole cache ends with "length", like one that reaches max_model_len.
    """

    def __init__(self, config: SchedulerConfig):
        self.config = config
        self.pool = BlockPool(config.num_blocks)
        self.tree = RadixTree(self.pool, config.block_size)
        self._block_size = config.block_size
        self._key_bytes = config.block_size * ID_BYTES
        self._admission = Admission(config, self.tree)
        self._pace: Pace | None = None
        if config.max_itl is not None:
            self._pace = Pace(config.max_itl, config.block_size, config.max_num_batched_tokens)
        self._live: dict[str, Entry] = {}  # all requests that are not finished
        self._decoding: list[Entry] = []  # by rank; each wants exactly one token
        self._batch = DecodeBatch(config.block_size)  # those of them that lack nothing
        self._prefilling: list[Entry] = []  # by rank
        self._leaving: dict[Entry, None] = {}  # want no more rows, but launched steps hold some
        self._hungry: Entry | None = None  # the first in rank of those who run and found no block
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._flight: dict[int, Step] = {}  # by number: scheduled and not settled
        self._num_steps = self._num_settled = self._num_added = 0
        self._num_drafting = 0  # chunks with drafts in flight
        self._num_preemptions = self._query_tokens = self._hit_tokens = 0

    # ---- requests in and out

    def add(self, request: Request) -> None:
        """Queue a request. Raises ParameterError or CapacityError, with the numbers, if it can never be served."""
        if request.id in self._live:
            raise ParameterError("request_id", request.id, "an id that no live request has")
        limit = token_limit(request, self.config)
        priority = request.priority if self.config.policy == "priority" else 0
        self._num_added += 1
        rank = (priority, request.arrival, self._num_added)
        entry = Entry(request, rank, limit, self.config.enable_prefix_caching)
        self._live[request.id] = entry
        self._admission.push(entry)

    def abort(self, request_id: str) -> Request | None:
        """End a request now, whatever it is doing; None if there is no such one. Its ids so far stay as they are."""
        entry = self._live.get(request_id)
        if entry is None:
            return None
        self._finish(entry, "abort")
        return entry.request

    # ---- a step

    def schedule(self) -> StepPlan | None:
        """The next step; None if nothing can run now (perhaps until launched steps settle)."""
        step = Step(self._num_steps + 1, self.config.max_num_batched_tokens)
        if self._decoding:
            self._decode(step)
        if self._pace is not None and (step.decodes or step.chunks):
            step.budget = min(step.budget, self._pace.prefill_tokens())
        if self._prefilling:
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
                self._index(entry, min(stop, entry.request.num_known))
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
        self._num_settled = plan.step
        results: list[tuple[Request, list[int]]] = []
        for i in sorted(failed) if failed else ():
            entry = step.entry(i)
            if not entry.finished:
                self._fail(entry)
                results.append((entry.request, []))
        for entry, stop in step.filled:  # before the new ids: all of these are known by now
            if not entry.finished:
                self._index(entry, stop)
        plain = self._settle_decodes(step, tokens, results)
        for entry, chunk, ids in zip(step.entries, step.chunks, sampled, strict=True):
            if chunk.num_drafts:
                entry.request.num_unsure -= chunk.num_drafts
                self._num_drafting -= 1
                if not entry.finished:
                    self._accept(entry, len(ids) - 1)
            if entry.parted:
                self._settle_parted(entry, ids if chunk.samples else None, results)
            elif chunk.samples:
                taken = self._take(entry, ids)
                if taken or entry.finished:
                    results.append((entry.request, taken))
                if chunk.num_drafts and entry.request.num_tokens >= entry.limit and not entry.parted:
                    self._part(entry)  # a launched step samples its last token
        return Settled(*plain, results)

    # ---- the three parts of a step

    def _decode(self, step: Step) -> None:
        """One token for each decoding request, as far as budget and blocks go."""
        batch, budget = self._batch, step.budget
        members = batch.entries
        while len(members) > budget:
            batch.leave(members[-1], self._num_steps)
        # half of what the decodes leave: drafts must not starve the prefills
        most_drafts = min(self.config.max_draft_rows - len(self._decoding), (budget - len(self._decoding)) // 2)
        speculating = most_drafts > 0 or self._num_drafting > 0
        due, now = batch.due(), batch.clock.now
        everyone = speculating or len(members) < len(self._decoding)
        for entry in self._decoding if everyone else due:  # may lose its tail to preemption on the way, never what was visited
            member, request = entry in batch, entry.request
            if not member and not everyone:
                continue
            if speculating and (request.num_drafts or request.num_unsure):
                most = max(0, most_drafts - step.num_drafts) if len(self._decoding) <= budget else -1
                count = self._draft_count(entry, most)
                if count > 0 or (count == 0 and request.num_unsure):
                    if member:
                        batch.leave(entry, self._num_steps)
                    step.entries.append(entry)
                    step.chunks.append(self._speculate(entry, step, count))
                if count > 0 or request.num_unsure:
                    continue
            if not member or entry.due == now:
                self._advance(entry, step)
        if members:
            batch.tick(step)
            self._num_steps = step.number
        step.budget = budget - len(members) - len(step.chunks) - step.num_drafts
        for entry in step.last:
            self._part(entry)

    def _advance(self, entry: Entry, step: Step) -> None:
        """See to it that a decode can have its next row in the batch. Who finds no block waits outside of it."""
        batch, members, start = self._batch, self._batch.entries, entry.request.num_scheduled
        member = entry in batch
        if not member and len(members) == step.budget:
            if members[-1].rank < entry.rank:
                return
            batch.leave(members[-1], self._num_steps)
        if start == entry.capacity:
            if not self._room(entry, step, 1):
                if member:
                    batch.leave(entry, self._num_steps)
                return
            step.new_blocks.append((entry, len(entry.request.block_ids), self._grow(entry, 1)[0]))
        if not member:
            batch.join(entry)
        if not (start + 1) % self._block_size:
            step.filled.append((entry, start + 1))
        if start + 2 < entry.limit:
            batch.expect(entry, start + 1)
        else:
            step.last.append(entry)

    def _draft_count(self, entry: Entry, most: int) -> int:
        """How many drafts of a decoding request this step can verify. They never take a block that others need.

        Behind drafts that have not settled there must be room as if all of them were right, for its own token too; -1: there
        is none, or what is to be done to that token depends on which one it is. Then it waits until they settle.
        """
        request, capacity, unsure = entry.request, entry.capacity, entry.request.num_unsure
        start = request.num_scheduled + unsure
        count = min(request.num_drafts, most, entry.limit - start - 2)
        if start + count >= capacity:
            spare = max(0, self.tree.num_available - len(self._decoding)) if self._hungry is None else 0
            count = min(count, capacity + spare * self._block_size - start - 1)
        if not unsure:
            return max(0, count)
        index = request.num_scheduled + 1 - entry.num_prompt
        early = index + unsure + max(0, count) < entry.min_output  # stop ids are banned in all rows, whatever is accepted
        return max(-1, count) if entry.ahead is None and (early or index > entry.min_output) else -1

    def _speculate(self, entry: Entry, step: Step, count: int) -> Chunk:
        """The chunk of a decode with `count` drafts, or behind drafts that have not settled.

        It is counted as one token, and as one behind a step without drafts, until the steps settle, which say how many it is.
        """
        request, size, unsure = entry.request, self._block_size, entry.request.num_unsure
        start = request.num_scheduled
        stop = start + 1
        new_blocks: list[int] = []
        offset = 0
        missing = -(-(stop + unsure + count - entry.capacity) // size)
        if missing > 0:
            offset = len(request.block_ids)
            new_blocks = self._grow(entry, missing)
        index = stop - entry.num_prompt
        chunk = Chunk(
            request, request.slot, start, 1 + count, True, False, new_blocks, offset, index, count, slack=unsure
        )  # fmt: skip
        if unsure:
            entry.ahead = (step, chunk)
        elif not stop % size:
            step.filled.append((entry, stop))
        request.num_scheduled = stop
        entry.last_step = step.number
        if count:
            request.num_unsure += count
            self._num_drafting += 1
            step.num_drafts += count
        return chunk

    def _prefill(self, step: Step) -> None:
        complete = []
        for entry in self._prefilling:  # may lose its tail, as above
            if step.budget == 0:
                break
            if self._extend(entry, step, admitted=False):
                complete.append(entry)
        for entry in complete:
            self._prefilling.remove(entry)
            self._after_prefill(entry)

    def _admit(self, step: Step) -> None:
        for entry in self._admission.admissible(step, self._free_slots, (self._decoding, self._prefilling)):
            self._start(entry, step)

    # ---- pieces of prefill and admission

    def _extend(self, entry: Entry, step: Step, admitted: bool) -> bool:
        """Give a request as many of the tokens that it lacks as budget and blocks allow; whether that was all."""
        request, size = entry.request, self._block_size
        start = request.num_scheduled
        lacking = request.num_tokens - start
        count = min(lacking, step.budget)
        held = len(request.block_ids)
        missing = -(-(start + count) // size) - held
        new_blocks: list[int] = []
        if missing > 0:
            granted = self._room(entry, step, missing)
            count = min(count, (held + granted) * size - start)
            if count <= 0:
                return False
            new_blocks = self._grow(entry, granted)
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
                key = entry.key(entry.num_indexed, self._key_bytes)
                step.computing.add((entry.cursor, request.cache_salt, key))
        request.num_scheduled = stop
        entry.last_step = step.number
        return samples

    def _after_prefill(self, entry: Entry) -> None:
        if entry.request.num_tokens >= entry.limit:
            entry.parted = True
            self._leaving[entry] = None
        else:
            insort(self._decoding, entry, key=RANK)
            self._batch.join(entry)

    def _start(self, entry: Entry, step: Step) -> None:
        """Move a request from the queue to a slot and schedule its first chunk."""
        request, path = entry.request, entry.path
        request.block_ids = self.tree.acquire(path)
        entry.num_hit = len(path)
        request.num_scheduled = entry.capacity = len(path) * self._block_size
        if path:
            entry.cursor, entry.num_indexed = path[-1], len(path)
        entry.path = []
        request.slot = self._free_slots.pop()
        request.status = Status.RUNNING
        if not request.first_scheduled:
            request.first_scheduled = time.monotonic()
            request.num_cached = request.num_scheduled
            if entry.reads_cache:
                self._query_tokens += request.num_known
                self._hit_tokens += request.num_scheduled
        if self._extend(entry, step, admitted=True):
            self._after_prefill(entry)
        else:
            insort(self._prefilling, entry, key=RANK)

    # ---- blocks

    def _grow(self, entry: Entry, count: int) -> list[int]:
        blocks = self.tree.allocate(count)
        entry.request.block_ids += blocks
        entry.capacity += count * self._block_size
        return blocks

    def _room(self, entry: Entry, step: Step, wanted: int) -> int:
        """How many of the `wanted` blocks a running request may take now; preempts others if it would get none."""
        hungry = self._hungry
        # decodes come first in a step, but they must not eat up what is freed for a prefill ahead of them
        kept_back = 1 if hungry is not None and hungry.rank < entry.rank else 0
        while self.tree.num_available <= kept_back:
            if self._about_to_return() > step.claimed:
                step.claimed += 1
                break
            victim = self._last_behind(entry)
            if victim is None:
                break
            self._preempt(victim)
        granted = min(wanted, max(0, self.tree.num_available - kept_back))
        if granted and entry is hungry:
            self._hungry = None
        elif not granted and (hungry is None or entry.rank < hungry.rank):
            self._hungry = entry
        return granted

    def _about_to_return(self) -> int:
        """Blocks that only requests on their way out hold."""
        refs = self.pool.refs
        return sum(refs[block] == 1 for entry in self._leaving for block in entry.request.block_ids)

    def _last_behind(self, entry: Entry) -> Entry | None:
        """The running request that is last in rank, if it is behind `entry`."""
        last = max((entries[-1] for entries in (self._decoding, self._prefilling) if entries), key=RANK, default=None)
        return last if last is not None and last.rank > entry.rank else None

    def _preempt(self, entry: Entry) -> None:
        entry.request.num_preemptions += 1
        self._num_preemptions += 1
        self._part(entry)

    def _index(self, entry: Entry, stop: int) -> None:
        """Enter the full blocks up to token `stop` into the prefix index; their ids are known."""
        size, width = self._block_size, self._key_bytes
        request = entry.request
        index = entry.num_indexed
        while (index + 1) * size <= stop:
            key = entry.key(index, width)
            node = self.tree.insert(entry.cursor, request.cache_salt, key, request.block_ids[index])
            if node is None:  # what is above it has left the index
                index = OFF_INDEX
                break
            entry.cursor = node
            index += 1
        entry.num_indexed = index

    # ---- ends

    def _take(self, entry: Entry, ids: list[int]) -> list[int]:
        """Append sampled ids, up to the one that ends the request; the ids that it took."""
        request = entry.request
        output, stops = entry.output, entry.stops
        if request.pooling is not None:
            self._finish(entry, "stop")  # the prompt is computed: that was all
            return []
        if not request.first_token:
            request.first_token = time.monotonic()
        for n, token in enumerate(ids, 1):
            output.append(token)
            length = len(output)
            stopped = token in stops and length >= entry.min_output
            if stopped or length >= entry.max_output:
                self._index_accepted(entry, n)
                self._finish(entry, "stop" if stopped else "length", stops[token] if stopped else None)
                return ids[:n]
        self._index_accepted(entry, len(ids))
        return ids

    def _index_accepted(self, entry: Entry, count: int) -> None:
        """`count` ids have been taken of a step: all but the last were right drafts, computed tokens like any other."""
        stop = entry.request.num_known - 1
        if count > 1 and (entry.num_indexed + 1) * self._block_size <= stop:
            self._index(entry, stop)

    def _accept(self, entry: Entry, count: int) -> None:
        """So many drafts of a settled step were right; -1: it came to nothing, which is as if it had not been."""
        request = entry.request
        request.num_scheduled += count
        if count < 0 and entry.cursor is not None:
            self.tree.drop_path(entry.cursor)  # as in _fail
        if entry.ahead is not None:
            step, chunk = entry.ahead
            entry.ahead = None
            chunk.start += count
            chunk.output_index += count
            chunk.slack = 0
            if not (chunk.start + 1) % self._block_size:
                step.filled.append((entry, chunk.start + 1))

    def _settle_decodes(
        self, step: Step, tokens: list[int], results: list[tuple[Request, list[int]]]
    ) -> tuple[list[str], list[int]]:
        """The requests that just got one more token, and the tokens; what happened to the others is added to `results`."""
        apart = []
        for row, (entry, token) in enumerate(zip(step.decoding, tokens, strict=True)):
            if entry.parted or token in entry.stops:
                apart.append(row)
            else:  # shorter than its limit: whoever gets there has parted
                entry.output.append(token)
        ids = step.decodes.ids if step.decodes is not None else []
        if not apart:
            return ids, tokens
        for row in apart:
            entry, taken = step.decoding[row], [tokens[row]]
            if entry.parted:
                self._settle_parted(entry, taken, results)
            else:
                results.append((entry.request, self._take(entry, taken)))
        ids, tokens = ids.copy(), tokens.copy()
        for row in reversed(apart):
            del ids[row], tokens[row]
        return ids, tokens

    def _settle_parted(self, entry: Entry, ids: list[int] | None, results: list[tuple[Request, list[int]]]) -> None:
        """Who is not finished keeps what was sampled for it, if it samples; after its last row it leaves."""
        if ids is not None and not entry.finished:
            taken = self._take(entry, ids)  # if that ends it, it may be gone already
            if taken or entry.finished:
                results.append((entry.request, taken))
        if entry in self._leaving and entry.last_step <= self._num_settled:
            self._release(entry)

    def _fail(self, entry: Entry) -> None:
        # a NaN in a shared block would fail everybody who hits it, for ever; so the whole path is forgotten
        if entry.cursor is not None:
            self.tree.drop_path(entry.cursor)
        self._finish(entry, "error")

    def _finish(self, entry: Entry, reason: str, stop_reason: int | None = None) -> None:
        request = entry.request
        waiting = request.status is Status.WAITING
        request.status = Status.FINISHED
        request.finish_reason, request.stop_reason = reason, stop_reason
        del self._live[request.id]
        if request.output_ids and reason != "error":
            self._admission.estimate.observe(len(request.output_ids))
        if waiting:
            self._admission.forget()
        else:
            self._part(entry)

    def _part(self, entry: Entry) -> None:
        """Give a running request no more rows; what it holds goes as soon as no launched step holds its row."""
        if not entry.parted:
            if entry in self._batch:
                self._batch.leave(entry, self._num_steps)
            (self._decoding if entry in self._decoding else self._prefilling).remove(entry)
            self._leaving[entry] = None
            entry.parted = True
        if entry is self._hungry:
            self._hungry = None
        if entry.last_step <= self._num_settled:
            self._release(entry)

    def _release(self, entry: Entry) -> None:
        """Give slot and blocks back; a preempted request goes back to the queue."""
        request = entry.request
        del self._leaving[entry]
        self.tree.release(request.block_ids)
        request.block_ids = []
        self._free_slots.append(request.slot)
        request.slot = -1
        self._admission.left(entry)
        if not entry.finished:
            request.status = Status.WAITING
            request.num_scheduled = 0
            entry.parted = False
            entry.rest()
            self._admission.push_back(entry)

    def reset_prefix_cache(self) -> None:
        """Forget every cached block that no request holds."""
        self.tree.evict(self.tree.num_available - self.pool.num_free)

    def check(self) -> None:
        """Law 5 and all counters; AssertionError with a description. Costs a walk over everything."""
        check_scheduler(self)

    # ---- gauges

    @property
    def has_unfinished(self) -> bool:
        """Whether any request wants or holds anything: also one that ended while a launched step has its row."""
        return bool(self._live or self._leaving)

    @property
    def num_running(self) -> int:
        """Requests that own a slot."""
        return self.config.max_num_seqs - len(self._free_slots)

    @property
    def decoding(self) -> list[Request]:
        """The requests that want one token (or more, with drafts), by rank."""
        return [entry.request for entry in self._decoding]

    @property
    def num_waiting(self) -> int:
        return self._admission.num_waiting

    @property
    def kv_usage(self) -> float:
        return 1.0 - self.tree.num_available / self.pool.num_blocks

    @property
    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            self.num_running, self.num_waiting, self.kv_usage, self._num_preemptions,
            self._query_tokens, self._hit_tokens, self.tree.num_evictions,
        )  # fmt: skip
