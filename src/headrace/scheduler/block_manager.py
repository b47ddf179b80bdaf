"""Who holds slots and blocks: requests take them, from each other too, and give them back. No torch here.

Nothing that a launched step reads or writes is given back before that step settles. So whoever finishes, is aborted or is
preempted while a step holds its row only *retires*: it gets no more rows, and leaves with the last one.
"""

from __future__ import annotations

import time
from bisect import insort

from headrace.cache.block_pool import BlockPool
from headrace.scheduler.admission import Admission
from headrace.scheduler.config import Limits, SchedulerStats
from headrace.scheduler.decode_batch import RANK, DecodeBatch, Scheduled
from headrace.scheduler.plan import NewBlocks
from headrace.scheduler.request import Request, Status
from headrace.scheduler.snapshots import prefix_cache


class BlockManager:
    """All requests: they wait in `admission`, run in `decoding` or `prefilling`, or are `leaving`.

    Preemption is by recomputation: who lacks a block takes it from the youngest of the lowest priority, who must be
    behind; else it waits. The first in rank is therefore never preempted and finds every block sooner or later: progress
    is certain.
    """

    def __init__(self, limits: Limits):
        self.pool = BlockPool(limits.num_blocks)
        self.tree, self.snapshots = prefix_cache(self.pool, limits)
        self.admission = Admission(limits, self.tree)
        self.block_size = limits.block_size
        self.key_bytes = self.tree.key_bytes
        self.live: dict[str, Request] = {}  # all requests that are not finished
        self.decoding: list[Request] = []  # by rank; each wants exactly one token
        self.batch = DecodeBatch(limits.block_size)  # those of them that lack nothing
        self.prefilling: list[Request] = []  # by rank
        self.leaving: dict[Request, None] = {}  # want no more rows, but launched steps hold some
        self.starved: Request | None = None  # the first in rank of those who run and found no block
        self.free_slots = list(range(limits.max_num_seqs - 1, -1, -1))
        self.num_settled = 0  # the number of the last step that has settled
        self.stats = SchedulerStats()

    # ---- from the queue to the decodes

    def admit(self, request: Request) -> None:
        """Give a request that leaves the queue a slot, and the blocks of its prompt that the prefix index has."""
        path = request.path
        request.block_ids = self.tree.acquire(path)
        request.num_hit = len(path)
        request.num_scheduled = request.capacity = len(path) * self.block_size
        if path:
            request.cursor, request.num_indexed = path[-1], len(path)
        request.snapshot = self.snapshots.begin(request, path)
        request.path = []
        request.slot = self.free_slots.pop()
        request.status = Status.RUNNING
        if not request.first_scheduled:
            request.first_scheduled = time.monotonic()
            request.num_cached = request.num_scheduled
            if request.reads_cache:
                self.stats.prefix_query_tokens += request.num_known
                self.stats.prefix_hit_tokens += request.num_scheduled

    def prefilled(self, request: Request) -> None:
        """All that there was is scheduled: from now on it decodes, if it wants more than the token that this samples."""
        if request.num_tokens >= request.limit:
            request.retired = True
            self.leaving[request] = None
        else:
            insort(self.decoding, request, key=RANK)
            self.batch.join(request)

    # ---- blocks

    def room(self, request: Request, step: Scheduled, wanted: int) -> int:
        """How many of the `wanted` blocks a running request may take now; preempts others if it would get none."""
        starved = self.starved
        # decodes come first in a step, but they must not eat up what is freed for a prefill ahead of them
        kept_back = 1 if starved is not None and starved.rank < request.rank else 0
        while self.tree.num_available <= kept_back:
            if self._about_to_return() > step.claimed:
                step.claimed += 1
                break
            victim = self._last_behind(request)
            if victim is None:
                break
            victim.num_preemptions += 1
            self.stats.num_preemptions += 1
            self.retire(victim)
        granted = min(wanted, max(0, self.tree.num_available - kept_back))
        if granted and request is starved:
            self.starved = None
        elif not granted and (starved is None or request.rank < starved.rank):
            self.starved = request
        return granted

    def _about_to_return(self) -> int:
        """Blocks that only requests on their way out hold."""
        refs = self.pool.refs
        return sum(refs[block] == 1 for request in self.leaving for block in request.block_ids)

    def _last_behind(self, request: Request) -> Request | None:
        """The running request that is last in rank, if it is behind `request`."""
        last = max((requests[-1] for requests in (self.decoding, self.prefilling) if requests), key=RANK, default=None)
        return last if last is not None and last.rank > request.rank else None

    def grow(self, request: Request, count: int) -> NewBlocks:
        """Append so many blocks to a block table; they are there (`room`)."""
        new = NewBlocks(request.slot, len(request.block_ids), self.tree.allocate(count))
        request.block_ids += new.blocks
        request.capacity += count * self.block_size
        return new

    def index(self, request: Request, stop: int) -> None:
        """Enter the full blocks up to token `stop` into the prefix index; their ids are known."""
        size = self.block_size
        while request.fills(stop, size):
            index = request.num_indexed
            key = request.key(index, self.key_bytes)
            node = self.tree.insert(request.cursor, request.cache_salt, key, request.block_ids[index])
            if node is None:  # what is above it has left the index
                request.indexing = False
                break
            request.cursor, request.num_indexed = node, index + 1
            self.snapshots.indexed(request, node)

    # ---- what was sampled

    def take(self, request: Request, ids: list[int]) -> list[int]:
        """Append the ids that a request's last row brought, up to the one that ends it; the ids that it took."""
        if request.pooling is not None:
            self.finish(request, "stop")  # the prompt is computed: that was all
            return []
        if not request.first_token:
            request.first_token = time.monotonic()
        output, stops, max_output = request.output_ids, request.stops, request.limit - len(request.prompt_ids)
        for n, token in enumerate(ids, 1):
            output.append(token)
            stopped = token in stops and len(output) >= request.min_output
            if stopped or len(output) >= max_output:
                self._index_accepted(request, n)
                self.finish(request, "stop" if stopped else "length", stops[token] if stopped else None)
                return ids[:n]
        self._index_accepted(request, len(ids))
        return ids

    def _index_accepted(self, request: Request, count: int) -> None:
        """`count` ids have been taken of a step: all but the last were right drafts, computed tokens like any other."""
        stop = request.num_known - 1
        if count > 1 and request.fills(stop, self.block_size):
            self.index(request, stop)

    # ---- ends

    def finish(self, request: Request, reason: str, stop_reason: int | None = None) -> None:
        waiting = request.status is Status.WAITING
        request.status = Status.FINISHED
        request.finish_reason, request.stop_reason = reason, stop_reason
        del self.live[request.id]
        if request.output_ids and reason != "error":
            self.admission.estimate.observe(len(request.output_ids))
        if waiting:
            self.admission.forget()
        else:
            self.retire(request)

    def retire(self, request: Request) -> None:
        """Give a running request no more rows; what it holds goes as soon as no launched step holds its row."""
        if not request.retired:
            if request in self.batch:
                self.batch.leave(request)
            (self.decoding if request in self.decoding else self.prefilling).remove(request)
            self.leaving[request] = None
            request.retired = True
        if request is self.starved:
            self.starved = None
        self.release(request)

    def release(self, request: Request) -> None:
        """Who retires gives slot and blocks back once its last row has settled; who was preempted waits again."""
        if request.last_step > self.num_settled:
            return
        del self.leaving[request]
        self.snapshots.end(request)
        self.tree.release(request.block_ids)
        request.block_ids = []
        self.free_slots.append(request.slot)
        request.slot = -1
        self.admission.left(request)
        if not request.finished:
            request.status = Status.WAITING
            request.num_scheduled = 0
            request.retired = False
            request.reset()
            self.admission.push_back(request)
