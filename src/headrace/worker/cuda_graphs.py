"""Decode steps as CUDA graphs: captured for a set of batch sizes, padded up to the next one, replayed without a copy.

A captured step is: rows from numbers (kernels/prepare) -> forward -> sampler -> ids into the slots' token table, drafts
verified. So the ids feed the next step without leaving the device, and what the host gives a step is four int32 per row, which
it reads from pinned memory itself, as it writes the ids for the host (`Mailbox`). Steps whose logits need
more than the fused sampler (penalties, masks, logprobs ...) replay a graph that ends with the logits.

Graphs are keyed by (rows, context bucket, what follows the forward, drafts or not), captured when first needed; the other
sizes of a kind that is in use, and few rows' other contexts, are captured while the engine has nothing to do (captured.py).
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
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
from headrace.scheduler.plan import StepPlan
from headrace.worker.batch_state import BatchState
from headrace.worker.captured import COVERING, Mailbox, Replayed, StepGraphs
from headrace.worker.captured_sampling import sample_step
from headrace.worker.memory_plan import MAX_GRAPHS
from headrace.worker.sampling import Tail

FEW_ROWS = 16  # up to here how far attention is split decides about a step's time, and short contexts have graphs of their own
# tokens of the first context buckets for so few rows, and for more; 256 is what the tile tables' short attention holds
FEW_CONTEXTS, CONTEXTS = (256, 512), (2048,)
# one row per sequence -> logits [R, V], for Tail.LOGITS in memory that stays (the next call may overwrite it)
DecodeForward = Callable[[ForwardBatch, KVCache], Tensor]


class Key(NamedTuple):
    rows: int
    context: int  # bucket
    tail: Tail
    related: bool  # as ForwardBatch.related
    adapted: bool = False  # likewise


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


class DecodeGraphs(StepGraphs[Key]):
    """See StepGraphs. `part`: what the logits of one of several ranks are."""

    kinds: tuple[bool, ...] = (False,)  # of steps: those with adapters are True

    def __init__(
        self, forward: DecodeForward, kv: KVCache, state: BatchState, max_num_seqs: int, max_model_len: int,
        max_draft_rows: int = 0, max_graphs: int = MAX_GRAPHS, part: VocabPart | None = None,
    ):  # fmt: skip
        self.max_num_seqs, self.max_draft_rows = max_num_seqs, max_draft_rows
        self.forward, self.kv, self.part = forward, kv, part
        self.decoder = getattr(forward, "__self__", None)
        # of one request's drafts there may be more rows than requests
        self.sizes = graph_sizes(max(max_num_seqs, max_draft_rows))
        self.few_buckets, self.buckets = (context_buckets(first, max_model_len) for first in (FEW_CONTEXTS, CONTEXTS))
        device = state.device
        super().__init__(state, Mailbox(self.sizes[-1], device), max_graphs)
        self._rows = Rows.empty(self.sizes[-1], device)
        self._query_start = torch.arange(self.sizes[-1] + 1, dtype=torch.int32, device=device)
        self._wanted: set[tuple[int, Tail, bool, bool]] = set()  # a context bucket for many rows, and the rest of a Key

    def size_for(self, rows: int) -> int:
        return self.sizes[bisect_left(self.sizes, rows)]

    def bucket_for(self, context: int, size: int) -> int:
        buckets = self.few_buckets if size <= FEW_ROWS else self.buckets
        return buckets[bisect_left(buckets, context)]

    def key_of(self, plan: StepPlan, tail: Tail) -> Key:
        """The step that is to be replayed for a plan of decodes, whatever the steps before it accept."""
        context = int((plan.starts + plan.counts + plan.unverified).max())
        return self.key_for(plan.num_tokens, context, tail, plan.num_drafts > 0, plan.slots)

    def key_for(self, rows: int, context: int, tail: Tail, related: bool = False, slots: np.ndarray | None = None) -> Key:
        """The same for so many rows with contexts up to `context`, in these slots (None: of requests without adapters), some
        of which are of one request if they are `related`."""
        size = self.size_for(rows)
        adapted = slots is not None and True in self.kinds and bool(self.state.host_ints[slots, Int.LORA].any())
        of_context = (self.bucket_for(context, self.sizes[-1]), tail, related, adapted)
        if of_context not in self._wanted:
            self._wanted.add(of_context)
            below = [s for s in reversed(self.sizes) if s < size]
            most = self.max_draft_rows if related else self.size_for(self.max_num_seqs)
            others = below + [s for s in self.sizes if size < s <= most]
            likely = [(s, self.bucket_for(context, s)) for s in others]
            likely += [(s, bucket) for bucket in self.few_buckets for s in (size, *others) if s <= FEW_ROWS]
            self._todo += [Key(s, bucket, tail, related, adapted) for s, bucket in likely]
        return self._chosen(Key(size, self.bucket_for(context, size), tail, related, adapted))

    def replay(self, numbers: np.ndarray, key: Key) -> Replayed:
        """Launch the step `key` with the rows `numbers` [4, R] int32 (see prepare_rows)."""
        captured = self._take(key)
        sent = self._send(captured, numbers, key.rows)
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
                    self._capture_ahead(key)
        self._todo += [
            Key(s, self.bucket_for(self.buckets[0], s), tail, False)
            for tail in (Tail.FILTERED, Tail.RANDOM, Tail.GREEDY) for s in self.sizes
        ]  # fmt: skip
        self._prepared = time.monotonic()

    def _covers(self, key: Key, wanted: Key) -> bool:
        if wanted.related or key.related or Tail.LOGITS in (key.tail, wanted.tail):
            return False
        fits = key.adapted == wanted.adapted and key.rows >= wanted.rows and key.context >= wanted.context
        return fits and COVERING[key.tail] >= COVERING[wanted.tail]

    def _order(self, key: Key) -> tuple[int, ...]:
        return key.rows, key.context, COVERING[key.tail]

    def _padding(self, key: Key) -> np.ndarray:
        numbers = np.full((4, key.rows), -1, np.int32)
        numbers[SLOT] = self.state.dummy_slot
        return numbers

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
