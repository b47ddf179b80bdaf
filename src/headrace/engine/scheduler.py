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
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from operator import attrgetter
from typing import Literal

from headrace.cache.block_pool import BlockPool
from headrace.cache.radix_tree import ID_BYTES, Node, RadixTree
from headrace.engine.admission import LengthEstimate, PeakForecast
from headrace.engine.entry import OFF_INDEX, Entry
from headrace.engine.invariants import check_scheduler
from headrace.engine.plan import Chunk, StepPlan
from headrace.engine.request import Request, Status
from headrace.errors import CapacityError, ParameterError

RANK = attrgetter("rank")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Sizes in tokens; raises ParameterError on a value out of range."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    policy: Literal["fcfs", "priority"] = "fcfs"

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size", "num_blocks"):
            if getattr(self, name) < 1:
                raise ParameterError(name, getattr(self, name), "an integer >= 1")
        if self.policy not in ("fcfs", "priority"):
            raise ParameterError("policy", self.policy, "one of fcfs, priority")
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ParameterError(
                "max_num_batched_tokens",
                self.max_num_batched_tokens,
                f">= max_model_len = {self.max_model_len} without chunked prefill: a prompt is computed in one step",
            )


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Gauges of this moment and counters since the start."""

    num_running: int
    num_waiting: int
    kv_usage: float  # fraction of the blocks that requests hold
    num_preemptions: int
    prefix_query_tokens: int  # prompt tokens looked up in the prefix index, at first admissions
    prefix_hit_tokens: int
    num_evictions: int  # blocks


class Step:
    """A plan in the making, and what its settling needs."""

    __slots__ = ("budget", "chunks", "claimed", "computing", "entries", "filled", "starved")

    def __init__(self, budget: int):
        self.budget = budget  # tokens left
        self.chunks: list[Chunk] = []
        self.entries: list[Entry] = []  # of the chunks
        self.filled: list[tuple[Entry, int]] = []  # whose blocks get full, up to which token
        self.computing: set[tuple[Node | None, str, bytes]] = set()  # blocks that can be hit after this step
        self.starved = False  # somebody who runs lacks blocks: nobody may start
        self.claimed = 0  # blocks about to be given back that somebody waits for


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
        # KV is kept for all tokens but the last one
        self.max_len = min(config.max_model_len, config.num_blocks * config.block_size + 1)
        self._block_size = config.block_size
        self._key_bytes = config.block_size * ID_BYTES
        self._estimate = LengthEstimate()
        self._live: dict[str, Entry] = {}  # all requests that are not finished
        self._waiting: list[tuple[tuple[float, float, int], Entry]] = []  # heap; finished ones are skipped
        self._num_waiting = 0
        self._decoding: list[Entry] = []  # by rank; each wants exactly one token
        self._prefilling: list[Entry] = []  # by rank
        self._leaving: dict[Entry, None] = {}  # want no more rows, but launched steps hold some
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._flight: dict[int, Step] = {}  # by number: scheduled and not settled
        self._refused: Entry | None = None  # the head of the queue, if it had to wait for memory since the last release
        self._num_steps = self._num_added = 0
        self._num_preemptions = self._query_tokens = self._hit_tokens = 0

    # ---- requests in and out

    def add(self, request: Request) -> None:
        """Queue a request. Raises ParameterError or CapacityError, with the numbers, if it can never be served."""
        num_prompt, num_known = len(request.prompt_ids), request.num_known
        if request.id in self._live:
            raise ParameterError("request_id", request.id, "an id that no live request has")
        if num_prompt < 1:
            raise ParameterError("prompt_ids", request.prompt_ids, "at least one token")
        if num_known + 1 > self.config.max_model_len:
            raise ParameterError(
                "prompt_ids", f"{num_known} tokens", f"at most max_model_len - 1 = {self.config.max_model_len - 1} tokens"
            )
        if num_known + 1 > self.max_len:
            raise CapacityError(
                f"a request of {num_known} tokens needs {-(-num_known // self._block_size)} blocks of the KV cache, "
                f"which has {self.config.num_blocks} (of {self._block_size} tokens)"
            )
        max_tokens = request.params.max_tokens
        limit = self.max_len if max_tokens is None else min(self.max_len, num_prompt + max_tokens)
        if num_known >= limit:
            raise ParameterError("output_ids", f"{num_known - num_prompt} tokens", f"fewer than max_tokens = {max_tokens}")
        priority = request.priority if self.config.policy == "priority" else 0
        self._num_added += 1
        rank = (priority, request.arrival, self._num_added)
        entry = Entry(request, rank, limit, self.config.enable_prefix_caching)
        self._live[request.id] = entry
        self._enqueue(entry)

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
        step = Step(self.config.max_num_batched_tokens)
        self._decode(step)
        self._prefill(step)
        self._admit(step)
        if not step.chunks:
            return None
        self._num_steps += 1
        self._flight[self._num_steps] = step
        return StepPlan(self._num_steps, step.chunks)

    def launched(self, plan: StepPlan) -> None:
        """The worker has launched the plan for good: its full blocks may be hit by whatever is launched later."""
        step = self._flight[plan.step]
        unknown = []
        for entry, stop in step.filled:
            if not entry.finished:
                self._index(entry, min(stop, entry.request.num_known))
                if stop > entry.request.num_known:
                    unknown.append((entry, stop))
        step.filled = unknown

    def settle(
        self, plan: StepPlan, sampled: Sequence[list[int]], failed: frozenset[int] = frozenset()
    ) -> list[tuple[Request, list[int]]]:
        """Take a launched plan's result; steps settle in their order.

        `sampled[i]` are the ids of chunk i, empty if it does not sample; the chunks in `failed` have no valid result and
        end their requests with "error". Returns (request, ids that it really takes) for each request that got ids or
        ended, except those that had ended before.
        """
        step = self._flight.pop(plan.step)
        results: list[tuple[Request, list[int]]] = []
        for i in sorted(failed):
            entry = step.entries[i]
            if not entry.finished:
                self._fail(entry)
                results.append((entry.request, []))
        for entry, stop in step.filled:  # before the new ids: all of these are known by now
            if not entry.finished:
                self._index(entry, stop)
        for entry, chunk, ids in zip(step.entries, step.chunks, sampled, strict=True):
            request = entry.request
            request.num_in_flight -= 1
            if entry.parted:
                self._settle_parted(entry, chunk, ids, results)
            elif chunk.samples:
                results.append((request, self._take(entry, ids)))
        return results

    # ---- the three parts of a step

    def _decode(self, step: Step) -> None:
        """One token for each decoding request, as far as budget and blocks go."""
        chunks, entries, filled = step.chunks, step.entries, step.filled
        budget = step.budget
        last = []
        for entry in self._decoding:  # may lose its tail to preemption on the way, never what was visited
            if len(chunks) == budget:
                break
            request = entry.request
            start = request.num_scheduled
            stop = start + 1
            new_blocks: list[int] = []
            offset = 0
            if start == entry.capacity:
                if not self._room(entry, step, 1):
                    continue
                offset = len(request.block_ids)
                new_blocks = self._grow(entry, 1)
            if stop == entry.capacity:
                filled.append((entry, stop))
            chunks.append(Chunk(request, request.slot, start, 1, True, False, new_blocks, offset, stop - entry.num_prompt))
            entries.append(entry)
            request.num_scheduled = stop
            request.num_pending += 1
            request.num_in_flight += 1
            if stop + 1 >= entry.limit:
                last.append(entry)
        step.budget = budget - len(chunks)
        for entry in last:
            self._decoding.remove(entry)
            self._leaving[entry] = None

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
        """Start waiting requests in the order of their rank."""
        forecast: PeakForecast | None = None
        aside = []
        while self._waiting and self._free_slots and step.budget > 0 and not step.starved:
            entry = self._waiting[0][1]
            if entry.finished:
                heappop(self._waiting)
                continue
            crowded = len(self._free_slots) < self.config.max_num_seqs
            if entry is self._refused and crowded:
                break
            if entry.reads_cache:
                limit = (entry.request.num_known - 1) // self._block_size  # the last token is always computed
                self.tree.match(entry.ids, entry.request.cache_salt, limit, entry.path)
            if self._is_computed_now(entry, step):
                entry.delayed = True
                aside.append(heappop(self._waiting))
                continue
            size, hit = self._block_size, len(entry.path)
            lacking = entry.request.num_known - hit * size
            if not self.config.enable_chunked_prefill and lacking > step.budget:
                break
            demand = self._demand(entry)
            available = self.tree.num_available - demand[-1]
            fits = available > 0 if self.config.enable_chunked_prefill else available * size >= lacking
            if fits and crowded:
                forecast = forecast or self._forecast()
                fits = forecast.fits(*demand)
            if not fits:
                self._refused = entry
                break
            if forecast is not None:
                forecast.add(*demand)
            heappop(self._waiting)
            self._start(entry, step)
        for item in aside:
            heappush(self._waiting, item)

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
            if self._waiting:
                key = entry.key(entry.num_indexed, self._key_bytes)
                step.computing.add((entry.cursor, request.cache_salt, key))
        request.num_scheduled = stop
        request.num_pending += samples
        request.num_in_flight += 1
        return samples

    def _after_prefill(self, entry: Entry) -> None:
        if entry.request.num_tokens >= entry.limit:
            self._leaving[entry] = None
        else:
            insort(self._decoding, entry, key=RANK)

    def _start(self, entry: Entry, step: Step) -> None:
        """Move a request from the queue to a slot and schedule its first chunk."""
        request, path = entry.request, entry.path
        self._num_waiting -= 1
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

    def _is_computed_now(self, entry: Entry, step: Step) -> bool:
        """Whether this step computes the very block that a waiting request would compute next."""
        index, request = len(entry.path), entry.request
        if not step.computing or entry.delayed or not entry.reads_cache:
            return False
        if (index + 1) * self._block_size >= request.num_known:
            return False
        parent = entry.path[-1] if entry.path else None
        return (parent, request.cache_salt, entry.key(index, self._key_bytes)) in step.computing

    def _forecast(self) -> PeakForecast:
        running = self._decoding + self._prefilling
        own_blocks = sum(len(e.request.block_ids) - e.num_hit for e in running)
        in_use = self.pool.num_blocks - self.tree.num_available
        forecast = PeakForecast(self.pool.num_blocks, self._block_size, in_use - own_blocks)
        for entry in running:
            forecast.add(*self._expected(entry, entry.num_hit))
        return forecast

    def _demand(self, entry: Entry) -> tuple[int, int, int]:
        """What a waiting request would bring: as _expected(), and the blocks of its hit that nobody holds now."""
        refs = self.pool.refs
        revived = sum(not refs[node.block] for node in entry.path)
        return *self._expected(entry, len(entry.path)), revived

    def _expected(self, entry: Entry, num_hit: int) -> tuple[int, int]:
        """Tokens in blocks of its own, and tokens still to come."""
        request = entry.request
        num_tokens = request.num_tokens
        rest = self._estimate.remaining(num_tokens - entry.num_prompt, entry.limit - num_tokens)
        return num_tokens - num_hit * self._block_size, rest

    # ---- blocks

    def _grow(self, entry: Entry, count: int) -> list[int]:
        blocks = self.tree.allocate(count)
        entry.request.block_ids += blocks
        entry.capacity += count * self._block_size
        return blocks

    def _room(self, entry: Entry, step: Step, wanted: int) -> int:
        """How many of the `wanted` blocks a running request may take now; preempts others if it would get none."""
        tree = self.tree
        while not tree.num_available:
            if self._about_to_return() > step.claimed:
                step.claimed += 1
                break
            victim = self._last_behind(entry)
            if victim is None:
                break
            self._preempt(victim)
        available = tree.num_available
        if available < wanted:
            step.starved = True
            return available
        return wanted

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
        output, stops = request.output_ids, entry.stops
        request.num_pending -= 1
        if not output:
            request.first_token = time.monotonic()
        for n, token in enumerate(ids, 1):
            output.append(token)
            length = len(output)
            if token in stops and length >= entry.min_output:
                self._finish(entry, "stop", stops[token])
                return ids[:n]
            if length >= entry.max_output:
                self._finish(entry, "length")
                return ids[:n]
        return ids

    def _settle_parted(self, entry: Entry, chunk: Chunk, ids: list[int], results: list[tuple[Request, list[int]]]) -> None:
        """A preempted request keeps what was sampled for it, a finished one does not; both may leave now."""
        request = entry.request
        if chunk.samples and not entry.finished:
            results.append((request, self._take(entry, ids)))  # if that ends it, it is gone already
        if request.num_in_flight == 0 and entry in self._leaving:
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
        request.num_pending = 0  # what is still to come is discarded
        del self._live[request.id]
        if request.output_ids and reason != "error":
            self._estimate.observe(len(request.output_ids))
        if not waiting:
            self._part(entry)
            return
        self._num_waiting -= 1
        if len(self._waiting) > 2 * self._num_waiting + 64:  # who aborts while the head waits must not pile up
            self._waiting = [item for item in self._waiting if not item[1].finished]
            heapify(self._waiting)

    def _part(self, entry: Entry) -> None:
        """Give a running request no more rows; what it holds goes as soon as no launched step holds its row."""
        if entry not in self._leaving:
            (self._decoding if entry in self._decoding else self._prefilling).remove(entry)
            self._leaving[entry] = None
        entry.parted = True
        if entry.request.num_in_flight == 0:
            self._release(entry)

    def _release(self, entry: Entry) -> None:
        """Give slot and blocks back; a preempted request goes back to the queue."""
        request = entry.request
        del self._leaving[entry]
        self.tree.release(request.block_ids)
        request.block_ids = []
        self._free_slots.append(request.slot)
        request.slot = -1
        self._refused = None
        if not entry.finished:
            request.status = Status.WAITING
            request.num_scheduled = 0
            entry.parted = False
            entry.rest()
            self._enqueue(entry)
            if self._waiting[0][1] is entry:
                self._refused = entry  # to let it in again at once would be thrashing: somebody has to end first

    def check(self) -> None:
        """Law 5 and all counters; AssertionError with a description. Costs a walk over everything."""
        check_scheduler(self)

    def _enqueue(self, entry: Entry) -> None:
        heappush(self._waiting, (entry.rank, entry))
        self._num_waiting += 1

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
    def num_waiting(self) -> int:
        return self._num_waiting

    @property
    def kv_usage(self) -> float:
        return 1.0 - self.tree.num_available / self.pool.num_blocks

    @property
    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            self.num_running, self.num_waiting, self.kv_usage, self._num_preemptions,
            self._query_tokens, self._hit_tokens, self.tree.num_evictions,
        )  # fmt: skip
