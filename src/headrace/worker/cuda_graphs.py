"""Decode steps as CUDA graphs: captured for a set of batch sizes, padded up to the next one, replayed without a copy.

A captured step is: rows from numbers (kernels/prepare) -> forward -> sampler -> ids into the slots' token table, drafts
verified. So the ids feed the next step without leaving the device, and what the host gives a step is four int32 per row, which
it reads from pinned memory itself, as it writes the ids for the host (worker/mailbox). Steps whose logits need
more than the fused sampler (penalties, masks, logprobs ...) replay a graph that ends with the logits.

Graphs are keyed by (rows, context bucket, what follows the forward, drafts or not), captured when first needed; the other
sizes of a kind that is in use, and few rows' other contexts, are captured while the engine has nothing to do.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.cache.kv_cache import KVCache
from headrace.kernels.prepare import DecodeRows, prepare_decode, publish
from headrace.kernels.sample import sample_rows
from headrace.model.batch import ForwardBatch
from headrace.sampling.params import GREEDY_EPS
from headrace.sampling.philox import PURPOSE_SAMPLE
from headrace.worker.batch_state import BatchState
from headrace.worker.mailbox import Mailbox
from headrace.worker.sampling import Tail

logger = logging.getLogger(__name__)
FEW_ROWS = 16  # up to here how far attention is split decides about a step's time, and short contexts have graphs of their own
# tokens of the first context buckets for so few rows, and for more; 256 is what the tile tables' short attention holds
FEW_CONTEXTS, CONTEXTS = (256, 512), (2048,)
DecodeForward = Callable[[ForwardBatch, KVCache], Tensor]  # one row per sequence -> logits [R, V]


class Key(NamedTuple):
    rows: int
    context: int  # bucket
    tail: Tail
    related: bool  # as ForwardBatch.related


@dataclass(slots=True)
class Captured:
    graph: torch.cuda.CUDAGraph
    logits: Tensor | None  # [R, V]


@dataclass(slots=True)
class Replayed:
    """What a replay leaves behind, padded rows too."""

    logits: Tensor | None  # [R, V]; None: sampled within the step
    sent: Tensor  # [3, R] int32 on the host, there when the step is done: ids, failures, which rows count (with drafts)


def graph_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8, 16, then every 8 up to 128, every 16 up to 512, every 64 above; max_num_seqs itself is the last."""
    sizes = [1, 2, 4, *range(8, 128, 8), *range(128, 512, 16), *range(512, max_num_seqs, 64)]
    return [s for s in sizes if s < max_num_seqs] + [max_num_seqs]


def context_buckets(first: tuple[int, ...], max_model_len: int) -> list[int]:
    """The first ones, then each four times the one before; the last is max_model_len."""
    buckets = list(first)
    while buckets[-1] < max_model_len:
        buckets.append(4 * buckets[-1])
    return [b for b in buckets[:-1] if b < max_model_len] + [max_model_len]


class DecodeGraphs:
    """Captures and replays decode steps; everything happens on the current stream's thread."""

    def __init__(
        self, forward: DecodeForward, kv: KVCache, state: BatchState, max_num_seqs: int, max_model_len: int,
        max_draft_rows: int = 0,
    ):  # fmt: skip
        self.max_draft_rows = max_draft_rows  # of steps with drafts
        self.forward, self.kv, self.state = forward, kv, state
        self.sizes = graph_sizes(max_num_seqs)
        self.few_buckets, self.buckets = (context_buckets(first, max_model_len) for first in (FEW_CONTEXTS, CONTEXTS))
        device = state.device
        self._mailbox = Mailbox(self.sizes[-1], device)
        self._rows = DecodeRows.empty(self.sizes[-1], device)
        self._query_start = torch.arange(self.sizes[-1] + 1, dtype=torch.int32, device=device)
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._graphs: dict[Key, Captured] = {}
        self._todo: list[Key] = []
        self._wanted: set[tuple[int, Tail, bool]] = set()  # a context bucket for many rows, and the rest of a Key
        self._logits: Tensor | None = None

    def size_for(self, rows: int) -> int:
        return self.sizes[bisect_left(self.sizes, rows)]

    def bucket_for(self, context: int, size: int) -> int:
        buckets = self.few_buckets if size <= FEW_ROWS else self.buckets
        return buckets[bisect_left(buckets, context)]

    def replay(self, numbers: np.ndarray, context: int, tail: Tail, related: bool = False) -> Replayed:
        """Launch the step of the rows `numbers` [4, R] int32 (see prepare_decode), contexts up to `context`.

        `related`: some of the rows are of one request.
        """
        count = numbers.shape[1]
        size = self.size_for(count)
        key = Key(size, self.bucket_for(context, size), tail, related)
        captured = self._graphs.get(key) or self.capture(key)
        try:
            sent = self._mailbox.post(numbers, size, self.state.dummy_slot)
            captured.graph.replay()
        except BaseException:
            self._mailbox.resume()
            raise
        wanted = (self.bucket_for(context, self.sizes[-1]), tail, related)
        if wanted not in self._wanted:
            self._wanted.add(wanted)
            below = [s for s in reversed(self.sizes) if s < size]
            others = below + [s for s in self.sizes if s > size and (not related or s <= self.max_draft_rows)]
            likely = [(s, self.bucket_for(context, s)) for s in others]
            likely += [(s, bucket) for bucket in self.few_buckets for s in (size, *others) if s <= FEW_ROWS]
            self._todo += [Key(s, bucket, tail, related) for s, bucket in likely]
        return Replayed(captured.logits, sent)

    def capture_next(self) -> bool:
        """Capture one of the graphs that are likely to be needed; False if there is none left."""
        while self._todo:
            key = self._todo.pop(0)
            if key not in self._graphs:
                self.capture(key)
                return True
        return False

    def leave_planned(self) -> None:
        """Capture nothing ahead but what later steps make likely."""
        self._todo.clear()

    def capture(self, key: Key) -> Captured:
        began = time.perf_counter()
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
        logger.debug("captured %s in %.1f ms", key, 1e3 * (time.perf_counter() - began))
        return captured

    def _step(self, key: Key) -> Tensor | None:
        size, bucket, tail, related = key
        state, rows, mail = self.state, self._rows.first(size), self._mailbox
        prepare_decode(
            mail.inbox, mail.turn, state.token_ids, state.block_tables, state.floats, state.ints, state.accepted, rows,
            block_size=state.block_size,
        )  # fmt: skip
        batch = ForwardBatch(
            rows.token_ids, rows.positions, rows.slot_mapping, state.block_tables, rows.seq_slots,
            self._query_start[: size + 1], rows.seq_lens, size, [1] * size, [bucket] * size, related=related,
        )  # fmt: skip
        logits = self.forward(batch, self.kv)
        if tail is Tail.LOGITS:
            if self._logits is None:
                self._logits = torch.empty((self.sizes[-1], logits.shape[1]), dtype=logits.dtype, device=logits.device)
            # one buffer for all sizes: a graph's own output would stay allocated for ever
            return self._logits[:size].copy_(logits)
        token_ids, failed = sample_rows(
            logits, rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seed, rows.output_index, rows.sample_index,
            purpose=PURPOSE_SAMPLE, greedy_eps=GREEDY_EPS,
            all_greedy=tail is Tail.GREEDY, any_filter=tail is Tail.FILTERED,
        )  # fmt: skip
        accepted = state.accepted if related else None
        publish(token_ids, failed, rows, state.token_ids, mail.outbox, mail.turn, accepted)
        return None
