"""Decode steps as CUDA graphs: captured for a set of batch sizes, padded up to the next one, replayed without a copy.

A captured step is: rows from numbers (kernels/prepare) -> forward -> sampler -> ids into the slots' token table, drafts
verified. So the ids feed the next step without leaving the device, and what the host gives a step is four int32 per row, which
it reads from pinned memory itself, as it writes the ids for the host (`Mailbox`). Steps whose logits need
more than the fused sampler (penalties, masks, logprobs ...) replay a graph that ends with the logits.

Graphs are keyed by (rows, context bucket, what follows the forward, drafts or not), captured when first needed; the other
sizes of a kind that is in use, and few rows' other contexts, are captured while the engine has nothing to do. There are at
most `max_graphs`, which is what the memory plan counts with: after that the one that was not used for longest makes room, and
nothing more is captured ahead.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.cache.kv_cache import KVCache
from headrace.kernels.prepare import SLOT, Rows, prepare_rows, publish
from headrace.kernels.tables import Int
from headrace.model.batch import ForwardBatch
from headrace.model.ranks import VocabPart
from headrace.worker.batch_state import BatchState
from headrace.worker.captured_sampling import sample_step
from headrace.worker.memory_plan import MAX_GRAPHS
from headrace.worker.sampling import Tail

logger = logging.getLogger(__name__)
MIB = 1 << 20
PAGES = 64  # a power of two (see prepare.py); so many steps may be under way, those of a draft model among them
HALF = PAGES // 2
FEW_ROWS = 16  # up to here how far attention is split decides about a step's time, and short contexts have graphs of their own
# tokens of the first context buckets for so few rows, and for more; 256 is what the tile tables' short attention holds
FEW_CONTEXTS, CONTEXTS = (256, 512), (2048,)
COVERING = {Tail.GREEDY: 0, Tail.RANDOM: 1, Tail.FILTERED: 2}  # a sampler does what those before it do, with the same ids
MISSES, SETTLED_SECONDS = 1000, 60.0
# one row per sequence -> logits [R, V], for Tail.LOGITS in memory that stays (the next call may overwrite it)
DecodeForward = Callable[[ForwardBatch, KVCache], Tensor]


class Key(NamedTuple):
    rows: int
    context: int  # bucket
    tail: Tail
    related: bool  # as ForwardBatch.related
    adapted: bool = False  # likewise


@dataclass(slots=True)
class Captured:
    graph: torch.cuda.CUDAGraph
    logits: Tensor | None  # [R, V]


@dataclass(slots=True)
class Replayed:
    """What a replay leaves behind, padded rows too."""

    logits: Tensor | None  # [R, V]; None: sampled within the step
    rows: Rows
    sent: Tensor  # [3, R] int32 on the host, there when the step is done: ids, failures, which rows count (with drafts)


def graph_sizes(most: int) -> list[int]:
    """1, 2, 4, 8, 16, then every 8 up to 128, every 16 up to 512, every 64 above; `most` itself is the last."""
    sizes = [1, 2, 4, *range(8, 128, 8), *range(128, 512, 16), *range(512, most, 64)]
    return [s for s in sizes if s < most] + [most]


def context_buckets(first: tuple[int, ...], max_model_len: int) -> list[int]:
    """The first ones, then each four times the one before; the last is max_model_len."""
    buckets = list(first)
    while buckets[-1] < max_model_len:
        buckets.append(4 * buckets[-1])
    return [b for b in buckets[:-1] if b < max_model_len] + [max_model_len]


class Mailbox:
    """Numbers to captured steps and ids back, through host memory that the device itself reads and writes.

    Copies before and after a step's graph would each cost the stream microseconds, a fraction that shows where a step has
    hundreds. A step takes the page after the one before it: which, it counts on the device (`turn`), so that pages can be
    filled while earlier steps still run.

    `inbox` [PAGES, 4, rows] and `outbox` [PAGES, 3, rows] int32, pinned; `turn` [1] int32 on the device: pages taken.
    """

    def __init__(self, rows: int, device: torch.device):
        self.inbox = torch.zeros((PAGES, 4, rows), dtype=torch.int32, pin_memory=True)
        self.outbox = torch.zeros((PAGES, 3, rows), dtype=torch.int32, pin_memory=True)
        self.turn = torch.zeros(1, dtype=torch.int32, device=device)
        self._inbox = self.inbox.numpy()
        self._posted = 0
        self._left = [torch.cuda.Event(), torch.cuda.Event()]  # the steps with pages of this half are done

    def post(self, numbers: np.ndarray, size: int, dummy_slot: int) -> Tensor:
        """The numbers [4, R] of the next step, padded to `size` rows; -> where its ids, failures, and which rows count (only
        of steps with drafts) will be: [3, size]."""
        page = self._posted % PAGES
        if page % HALF == 0:
            half = page // HALF
            self._left[1 - half].record()
            self._left[half].synchronize()  # of 32 steps ago: long done
        self._posted += 1
        count = numbers.shape[1]
        self._inbox[page, :, :count] = numbers
        self._inbox[page, 0, count:size] = dummy_slot
        self._inbox[page, 1:, count:size] = -1
        return self.outbox[page, :, :size]

    def resume(self) -> None:
        """Somebody was interrupted and perhaps no step took the last page: go on with the one that the device takes next."""
        torch.cuda.synchronize(self.turn.device)
        self._posted = int(self.turn) % PAGES


class DecodeGraphs:
    """Captures and replays decode steps; everything happens on the current stream's thread. `part`: what the logits of one of
    several ranks are."""

    kinds: tuple[bool, ...] = (False,)  # of steps: those with adapters are True

    def __init__(
        self, forward: DecodeForward, kv: KVCache, state: BatchState, max_num_seqs: int, max_model_len: int,
        max_draft_rows: int = 0, max_graphs: int = MAX_GRAPHS, part: VocabPart | None = None,
    ):  # fmt: skip
        self.max_num_seqs, self.max_draft_rows, self.max_graphs = max_num_seqs, max_draft_rows, max_graphs
        self.forward, self.kv, self.state, self.part = forward, kv, state, part
        # of one request's drafts there may be more rows than requests
        self.sizes = graph_sizes(max(max_num_seqs, max_draft_rows))
        self.few_buckets, self.buckets = (context_buckets(first, max_model_len) for first in (FEW_CONTEXTS, CONTEXTS))
        device = state.device
        self._mailbox = Mailbox(self.sizes[-1], device)
        self._rows = Rows.empty(self.sizes[-1], device)
        self._query_start = torch.arange(self.sizes[-1] + 1, dtype=torch.int32, device=device)
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._graphs: dict[Key, Captured] = {}  # the last used one comes last
        self._todo: list[Key] = []
        self._prepared: float | None = None  # time.monotonic() when what covers all had been captured
        self._missed: Counter[Key] = Counter()  # replays for which another step stood in
        self._stand_ins: dict[Key, Key] = {}  # that one, until another is captured
        self._wanted: set[tuple[int, Tail, bool, bool]] = set()  # a context bucket for many rows, and the rest of a Key

    def size_for(self, rows: int) -> int:
        return self.sizes[bisect_left(self.sizes, rows)]

    def bucket_for(self, context: int, size: int) -> int:
        buckets = self.few_buckets if size <= FEW_ROWS else self.buckets
        return buckets[bisect_left(buckets, context)]

    def replay(self, numbers: np.ndarray, context: int, tail: Tail, related: bool = False) -> Replayed:
        """Launch the step of the rows `numbers` [4, R] int32 (see prepare_rows), contexts up to `context`.

        `related`: some of the rows are of one request.
        """
        count = numbers.shape[1]
        size = self.size_for(count)
        adapted = True in self.kinds and bool(self.state.host_ints[numbers[SLOT], Int.LORA].any())
        wanted = Key(size, self.bucket_for(context, size), tail, related, adapted)
        key = wanted if wanted in self._graphs else self._cover(wanted)
        captured = self._graphs.pop(key, None) or self.capture(key)
        self._graphs[key] = captured
        try:
            sent = self._mailbox.post(numbers, key.rows, self.state.dummy_slot)
            captured.graph.replay()
        except BaseException:
            self._mailbox.resume()
            raise
        of_context = (self.bucket_for(context, self.sizes[-1]), tail, related, adapted)
        if of_context not in self._wanted:
            self._wanted.add(of_context)
            below = [s for s in reversed(self.sizes) if s < size]
            most = self.max_draft_rows if related else self.size_for(self.max_num_seqs)
            others = below + [s for s in self.sizes if size < s <= most]
            likely = [(s, self.bucket_for(context, s)) for s in others]
            likely += [(s, bucket) for bucket in self.few_buckets for s in (size, *others) if s <= FEW_ROWS]
            self._todo += [Key(s, bucket, tail, related, adapted) for s, bucket in likely]
        return Replayed(captured.logits, self._rows, sent)

    def prepare(self) -> None:
        """Capture steps that cover whatever plain decode may come, before any comes: each does for fewer rows, shorter contexts
        and simpler samplers. What fits better comes in idle time, and under load when it has been wanted for long."""
        fewer, most = self.buckets[0], self.buckets[-1]
        rows = [s for s in self.sizes if s & (s - 1) == 0 or s == self.sizes[-1]]
        for context in dict.fromkeys((most, fewer)):
            for size, adapted in product(reversed(rows), self.kinds):  # a smaller one fits into the memory of a larger
                key = Key(size, self.bucket_for(context, size), Tail.FILTERED, False, adapted)
                if key not in self._graphs and len(self._graphs) < self.max_graphs:
                    self.capture(key)
        self._todo += [
            Key(s, self.bucket_for(self.buckets[0], s), tail, False)
            for tail in (Tail.FILTERED, Tail.RANDOM, Tail.GREEDY) for s in self.sizes
        ]  # fmt: skip
        self._prepared = time.monotonic()

    def _cover(self, wanted: Key) -> Key:
        """A captured step that does for the wanted one, the smallest; that itself, if there is none, or if it shall be captured
        now: that takes as long as many steps, and so not in the first minute."""
        if self._prepared is None or wanted.tail is Tail.LOGITS or wanted.related:
            return wanted
        if (cover := self._stand_ins.get(wanted)) is None or cover not in self._graphs:
            covers = [key for key in self._graphs if self._covers(key, wanted)]
            if not covers:
                return wanted
            cover = self._stand_ins[wanted] = min(covers, key=lambda key: (key.rows, key.context, COVERING[key.tail]))
        self._missed[wanted] += 1
        if self._missed[wanted] > MISSES and time.monotonic() - self._prepared > SETTLED_SECONDS:
            del self._missed[wanted]
            return wanted
        if self._missed[wanted] == 1:
            self._todo.insert(0, wanted)
        return cover

    @staticmethod
    def _covers(key: Key, wanted: Key) -> bool:
        if key.related or key.tail is Tail.LOGITS or COVERING[key.tail] < COVERING[wanted.tail]:
            return False
        return key.adapted == wanted.adapted and key.rows >= wanted.rows and key.context >= wanted.context

    def next_planned(self) -> Key | None:
        """A graph that is likely to be needed and is not there; None if there is none left, or no room."""
        while self._todo and len(self._graphs) < self.max_graphs:
            key = self._todo.pop(0)
            if key not in self._graphs:
                return key
        return None

    def capture_next(self) -> bool:
        """Capture one of those; False if there is none."""
        key = self.next_planned()
        if key is not None:
            self.capture(key)
        return key is not None

    def leave_planned(self) -> None:
        """Capture nothing ahead but what later steps make likely."""
        self._todo.clear()

    def capture(self, key: Key) -> Captured:
        while len(self._graphs) >= self.max_graphs:
            del self._graphs[next(iter(self._graphs))]  # one that still runs is freed when it is done
        return self._capture(key)

    def _capture(self, key: Key) -> Captured:
        began, before = time.perf_counter(), self._driver_bytes()
        current = torch.cuda.current_stream(self.state.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream), torch.inference_mode():
            try:
                self._mailbox.post(np.empty((4, 0), np.int32), key.rows, self.state.dummy_slot)
                self._step(key)  # padded rows only: compiles and loads what is not there yet
            except BaseException:
                self._mailbox.resume()
                raise
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                logits = self._step(key)
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        captured = self._graphs[key] = Captured(graph, logits)
        self._stand_ins.clear()
        took, grown = 1e3 * (time.perf_counter() - began), (self._driver_bytes() - before) / MIB
        logger.debug("captured %s in %.1f ms: %.2f MiB of the driver's, %d graphs", key, took, grown, len(self._graphs))
        return captured

    def _driver_bytes(self) -> int:
        """Memory of the device that is taken, by whomever, but for that of torch's allocator."""
        free, total = torch.cuda.mem_get_info(self.state.device)
        return total - free - torch.cuda.memory_reserved(self.state.device)

    def _step(self, key: Key) -> Tensor | None:
        size, bucket, tail, related, adapted = key
        state, rows, mail = self.state, self._rows.part(0, size), self._mailbox
        prepare_rows(mail.inbox, mail.turn, state.tables, rows)
        batch = ForwardBatch(
            rows.token_ids, rows.positions, rows.slot_mapping, state.block_tables, rows.seq_slots,
            self._query_start[: size + 1], rows.seq_lens, size, [1] * size, [bucket] * size, adapted=adapted,
            related=related,
        )  # fmt: skip
        logits = self.forward(batch, self.kv)
        if tail is Tail.LOGITS:
            return logits
        token_ids, failed = sample_step(logits, rows, tail, self.part)
        publish(token_ids, failed, rows, state.tables, mail.outbox, mail.turn, verify=related)
        return None
