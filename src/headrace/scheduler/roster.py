"""Who is there and what they hold: requests take slots and blocks, from each other too, and leave. No torch here.

Nothing that a launched step reads or writes is given back before that step settles. So whoever finishes, is aborted or is
preempted while a step holds its row only *parts*: it gets no more rows, and leaves with the last one.
"""

from __future__ import annotations

import time
from bisect import insort

from headrace.cache.block_pool import BlockPool
from headrace.cache.radix_tree import ID_BYTES, RadixTree
from headrace.scheduler.admission import Admission
from headrace.scheduler.config import SchedulerConfig, SchedulerStats
from headrace.scheduler.decode_batch import RANK, DecodeBatch
from headrace.scheduler.entry import OFF_INDEX, Entry, Step
from headrace.scheduler.request import Status


class Roster:
    """All requests: they wait in `admission`, run in `decoding` or `prefilling`, or are `leaving`.

    Preemption is by recomputation: who lacks a block takes it from the youngest of the lowest priority, who must be
    behind; else it waits. The first in rank is therefore never preempted and finds every block sooner or later: progress
    is certain.
    """

    def __init__(self, config: SchedulerConfig):
        self.pool = BlockPool(config.num_blocks)
        self.tree = RadixTree(self.pool, config.block_size)
        self.admission = Admission(config, self.tree)
        self.block_size = config.block_size
        self.key_bytes = config.block_size * ID_BYTES
        self.live: dict[str, Entry] = {}  # all requests that are not finished
        self.decoding: list[Entry] = []  # by rank; each wants exactly one token
        self.batch = DecodeBatch(config.block_size)  # those of them that lack nothing
        self.prefilling: list[Entry] = []  # by rank
        self.leaving: dict[Entry, None] = {}  # want no more rows, but launched steps hold some
        self.hungry: Entry | None = None  # the first in rank of those who run and found no block
        self.free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self.num_settled = 0  # the number of the last step that has settled
        self.num_drafting = 0  # chunks with drafts in flight
        self.stats = SchedulerStats()

    # ---- from the queue to the decodes

    def enter(self, entry: Entry) -> None:
        """Give a request that leaves the queue a slot, and the blocks of its prompt that the prefix index has."""
        request, path = entry.request, entry.path
        request.block_ids = self.tree.acquire(path)
        entry.num_hit = len(path)
        request.num_scheduled = entry.capacity = len(path) * self.block_size
        if path:
            entry.cursor, entry.num_indexed = path[-1], len(path)
        entry.path = []
        request.slot = self.free_slots.pop()
        request.status = Status.RUNNING
        if not request.first_scheduled:
            request.first_scheduled = time.monotonic()
            request.num_cached = request.num_scheduled
            if entry.reads_cache:
                self.stats.prefix_query_tokens += request.num_known
                self.stats.prefix_hit_tokens += request.num_scheduled

    def prefilled(self, entry: Entry) -> None:
        """All that there was is scheduled: from now on it decodes, if it wants more than the token that this samples."""
        if entry.request.num_tokens >= entry.limit:
            entry.parted = True
            self.leaving[entry] = None
        else:
            insort(self.decoding, entry, key=RANK)
            self.batch.join(entry)

    # ---- blocks

    def room(self, entry: Entry, step: Step, wanted: int) -> int:
        """How many of the `wanted` blocks a running request may take now; preempts others if it would get none."""
        hungry = self.hungry
        # decodes come first in a step, but they must not eat up what is freed for a prefill ahead of them
        kept_back = 1 if hungry is not None and hungry.rank < entry.rank else 0
        while self.tree.num_available <= kept_back:
            if self._about_to_return() > step.claimed:
                step.claimed += 1
                break
            victim = self._last_behind(entry)
            if victim is None:
                break
            victim.request.num_preemptions += 1
            self.stats.num_preemptions += 1
            self.part(victim)
        granted = min(wanted, max(0, self.tree.num_available - kept_back))
        if granted and entry is hungry:
            self.hungry = None
        elif not granted and (hungry is None or entry.rank < hungry.rank):
            self.hungry = entry
        return granted

    def _about_to_return(self) -> int:
        """Blocks that only requests on their way out hold."""
        refs = self.pool.refs
        return sum(refs[block] == 1 for entry in self.leaving for block in entry.request.block_ids)

    def _last_behind(self, entry: Entry) -> Entry | None:
        """The running request that is last in rank, if it is behind `entry`."""
        last = max((entries[-1] for entries in (self.decoding, self.prefilling) if entries), key=RANK, default=None)
        return last if last is not None and last.rank > entry.rank else None

    def grow(self, entry: Entry, count: int) -> list[int]:
        """Append so many blocks to a block table; they are there (`room`)."""
        blocks = self.tree.allocate(count)
        entry.request.block_ids += blocks
        entry.capacity += count * self.block_size
        return blocks

    def index(self, entry: Entry, stop: int) -> None:
        """Enter the full blocks up to token `stop` into the prefix index; their ids are known."""
        size, width = self.block_size, self.key_bytes
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

    def finish(self, entry: Entry, reason: str, stop_reason: int | None = None) -> None:
        request = entry.request
        waiting = request.status is Status.WAITING
        request.status = Status.FINISHED
        request.finish_reason, request.stop_reason = reason, stop_reason
        del self.live[request.id]
        if request.output_ids and reason != "error":
            self.admission.estimate.observe(len(request.output_ids))
        if waiting:
            self.admission.forget()
        else:
            self.part(entry)

    def part(self, entry: Entry) -> None:
        """Give a running request no more rows; what it holds goes as soon as no launched step holds its row."""
        if not entry.parted:
            if entry in self.batch:
                self.batch.leave(entry)
            (self.decoding if entry in self.decoding else self.prefilling).remove(entry)
            self.leaving[entry] = None
            entry.parted = True
        if entry is self.hungry:
            self.hungry = None
        self.let_go(entry)

    def let_go(self, entry: Entry) -> None:
        """Who parts gives slot and blocks back once its last row has settled; who was preempted waits again."""
        if entry.last_step > self.num_settled:
            return
        request = entry.request
        del self.leaving[entry]
        self.tree.release(request.block_ids)
        request.block_ids = []
        self.free_slots.append(request.slot)
        request.slot = -1
        self.admission.left(entry)
        if not entry.finished:
            request.status = Status.WAITING
            request.num_scheduled = 0
            entry.parted = False
            entry.rest()
            self.admission.push_back(entry)
