"""Steps with prompts as CUDA graphs: prompts, chunks of prompts and decodes together, captured by tokens and sequences.

A captured step is: ends of sequences and sampled rows from numbers (kernels/prepare) -> all rows from these
(kernels/prompt_rows) -> forward -> logits of the sampled rows -> sampler -> ids into the slots' token table. How many rows each
sequence has is known to the device alone: all sequences go through both attention kernels, and each kernel takes its own
(attention/triton_backend); so it is with the kernels of gated delta nets (kernels/delta_triton). So one graph does for all
mixtures of so many tokens and sequences.

Up to some thousands of tokens the launches, one by one, take longer than the device does. Larger steps are not captured, nor
are those that leave more than tokens and logits behind (prompt logprobs, embeddings), nor steps with drafts.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.attention.triton_backend import FEW_TOKENS, TritonAttention
from headrace.cache.kv_cache import KVCache
from headrace.kernels.attention_decode import MAX_ROWS
from headrace.kernels.prepare import POSITION, SLOT, UNVERIFIED, Rows, prepare_rows, publish
from headrace.kernels.prompt_rows import END, NUMBERS, TokenRows, expand_rows
from headrace.kernels.tables import Int
from headrace.model.batch import ForwardBatch, WantedRows
from headrace.model.decoder import Decoder
from headrace.model.delta_net import GatedAttention, GatedDeltaNet
from headrace.model.experts import ExpertsMlp
from headrace.model.forward import Forward
from headrace.model.mixer import SelfAttention
from headrace.model.mlp import DenseMlp
from headrace.scheduler.plan import StepPlan
from headrace.worker.batch_state import BatchState, aligned
from headrace.worker.captured import COVERING, Mailbox, Replayed, StepGraphs
from headrace.worker.captured_sampling import sample_step
from headrace.worker.cuda_graphs import CONTEXTS, context_buckets
from headrace.worker.memory_plan import MAX_PROMPT_GRAPHS, MOST_TOKENS, captured_tokens
from headrace.worker.rare_results import prompts_that_ask
from headrace.worker.sampling import Tail

if TYPE_CHECKING:
    from torch.cuda.graphs import _POOL_HANDLE as Pool

FEW_SEQS, MANY_SEQS = (8, 32, 96), (264, 520)  # buckets of sequences, before as many as there may be
ROWS_WORTH_ONE = 32  # rows of padding that weigh as much as a step that was missed: 640 in a step of 1,024 is soon captured
LONG_CONTEXT = 16384  # few rows behind more than this are better off where the split kernel takes them: uncaptured


class PromptKey(NamedTuple):
    tokens: int
    seqs: int
    decodes: bool  # sequences may have so few rows that attention splits them
    context: int  # bucket
    tail: Tail


def token_sizes(most: int) -> list[int]:
    """16, 32, then every 64 up to 1024, every 256 up to 2048, every 512 above; the last is not less than `most`."""
    sizes = [16, 32, *range(64, 1024, 64), *range(1024, 2048, 256), *range(2048, MOST_TOKENS + 1, 512)]
    return sizes[: bisect_left(sizes, min(most, MOST_TOKENS)) + 1]


def seq_sizes(most: int) -> list[int]:
    """Multiples of 8, so that what follows them in memory is aligned; one more than `most` sequences have room."""
    return [s for s in FEW_SEQS + MANY_SEQS if s <= most] + [aligned(most + 1, 8)]


def can_capture(forward: Forward) -> bool:
    """Whether all of the model can do without what only the host knows of a step."""
    if not isinstance(forward, Decoder) or forward.config.per_layer is not None:
        return False
    attention = forward.attention
    if not isinstance(attention, TritonAttention) or attention.group * FEW_TOKENS > MAX_ROWS:
        return False
    mixers = {SelfAttention, GatedAttention, GatedDeltaNet}
    return all(type(of.mixer) in mixers and isinstance(of.mlp, (DenseMlp, ExpertsMlp)) for of in forward.layers)


def prompt_graphs(
    forward: Forward, kv: KVCache, state: BatchState, max_num_seqs: int, max_model_len: int, max_tokens: int,
    pool: Pool,
) -> PromptGraphs | None:  # fmt: skip
    """None for a model whose steps with prompts cannot be captured."""
    if not can_capture(forward):
        return None
    assert isinstance(forward, Decoder)
    most = captured_tokens(forward.config, max_tokens)
    return PromptGraphs(forward, kv, state, max_num_seqs, max_model_len, most, pool)


class PromptGraphs(StepGraphs[PromptKey]):
    """See StepGraphs. `decoder`: one that can be captured; `max_tokens`: of a step."""

    spare = 16

    def __init__(
        self, decoder: Decoder, kv: KVCache, state: BatchState, max_num_seqs: int, max_model_len: int, max_tokens: int,
        pool: Pool,
    ):  # fmt: skip
        self.decoder: Decoder = decoder
        self.kv = kv
        self.sizes, self.seq_sizes = token_sizes(max_tokens), seq_sizes(max_num_seqs)
        self.buckets = context_buckets(CONTEXTS, max_model_len)
        device, seqs = state.device, self.seq_sizes[-1]
        super().__init__(state, Mailbox(2 * seqs, device, NUMBERS), MAX_PROMPT_GRAPHS, pool)
        self._ends, self._rows = Rows.empty(2 * seqs, device), TokenRows.empty(self.sizes[-1], seqs, device)
        self._each_alone = torch.arange(seqs + 1, dtype=torch.int32, device=device)
        self._logits = torch.empty((seqs, decoder.logit_columns), dtype=decoder.dtype, device=device)

    def takes(self, plan: StepPlan) -> bool:
        """Whether a captured step does for this one, whose requests have their slots."""
        if plan.num_tokens > self.sizes[-1] or plan.num_drafts or self.decoder.hidden_state_hook is not None:
            return False
        if self.state.host_ints[plan.slots, Int.LORA].any():
            return False
        slow = (plan.counts > FEW_TOKENS) & (plan.starts > LONG_CONTEXT)
        return not slow.any() and not prompts_that_ask(plan, self.state)

    def key_of(self, plan: StepPlan, tail: Tail) -> PromptKey:
        """The step that is to be replayed for a plan that can be captured."""
        context = int((plan.starts + plan.counts + np.maximum(plan.unverified, 0)).max())
        decodes = bool((plan.counts <= FEW_TOKENS).any())
        return self._chosen(self.key_for(plan.num_tokens, len(plan), decodes, context, tail))

    def filled_up(self, sampled: np.ndarray, most: int) -> np.ndarray:
        """Sampled rows [R] of a step that is not captured, the last one again and again up to a number that captured steps
        have: for another one cuBLAS may have another kernel, and to load that waits for all that the device has to do."""
        room = self.seq_sizes[bisect_left(self.seq_sizes, len(sampled))]
        return np.pad(sampled, (0, room - len(sampled)), mode="edge") if len(sampled) and room <= most else sampled

    def replay(self, plan: StepPlan, key: PromptKey) -> Replayed:
        """Launch the step `key`; its rows are those that are sampled, and padded ones behind."""
        captured = self._take(key)
        sent = self._send(captured, numbers_of(plan, key.tokens, key.seqs, self.state.dummy_slot), 2 * key.seqs)
        return Replayed(captured.logits, self._ends.part(key.seqs, 2 * key.seqs), sent)

    def key_for(self, tokens: int, seqs: int, decodes: bool, context: int, tail: Tail) -> PromptKey:
        """With a padded sequence, and hardly more of them than tokens. That there are no decodes is worth a graph of its own
        where sequences are few."""
        size = self.sizes[bisect_left(self.sizes, tokens)]
        room = self.seq_sizes[bisect_left(self.seq_sizes, seqs + 1)]
        bucket = self.buckets[bisect_left(self.buckets, context)]
        return PromptKey(size, min(size + 8, room), decodes or room > self.seq_sizes[0], bucket, tail)

    def prepare(self) -> None:
        """Capture steps that cover whatever may come, before any comes; what fits better comes in idle time."""
        few, most, sizes = self.seq_sizes[0] - 1, self.seq_sizes[-1] - 1, self.sizes
        many = min(most, MANY_SEQS[0] - 1)  # what covers all that may come would sample rows for all of them
        rounded = [s for s in sizes if s & (s - 1) == 0 or s == sizes[-1]]
        shapes = [(s, most, True, self.buckets[-1]) for s in rounded[::-3]]
        shapes += [(s, *of, self.buckets[0]) for s in reversed(rounded) for of in ((many, True), (few, False))]
        for shape in shapes:  # a smaller one fits into the memory of a larger
            key = self.key_for(*shape, Tail.FILTERED)
            if key not in self._graphs and len(self._graphs) < self.max_graphs:
                self._capture_ahead(key)
        some = min(most, FEW_SEQS[-1] - 1)
        for of in ((few, False), (some, True), (many, True), (few, True)):
            self._todo += [self.key_for(s, *of, 1, Tail.FILTERED) for s in reversed(sizes)]
        self._todo += [self.key_for(s, few, False, 1, tail) for tail in (Tail.GREEDY, Tail.RANDOM) for s in rounded]
        self._prepared = time.monotonic()

    def _covers(self, key: PromptKey, wanted: PromptKey) -> bool:
        if Tail.LOGITS in (key.tail, wanted.tail) or COVERING[key.tail] < COVERING[wanted.tail]:
            return False
        return all(has >= needs for has, needs in zip(key[:4], wanted[:4], strict=True))

    def _waste(self, cover: PromptKey, wanted: PromptKey) -> int:
        """Rows that stand for nothing are computed, too."""
        return 1 + (cover.tokens - wanted.tokens) // ROWS_WORTH_ONE

    def _order(self, key: PromptKey) -> tuple[int, ...]:
        return *key[:4], COVERING[key.tail]

    def _padding(self, key: PromptKey) -> np.ndarray:
        return numbers_of(None, key.tokens, key.seqs, self.state.dummy_slot)

    def _step(self, key: PromptKey) -> Tensor | None:
        tokens, seqs, decodes, context, tail = key
        state, mail, decoder = self.state, self._mailbox, self.decoder
        ends, rows = self._ends.part(0, 2 * seqs), self._rows.part(tokens, seqs)
        prepare_rows(mail.inbox[:, :END], mail.turn, state.tables, ends)
        expand_rows(mail.inbox, mail.turn, state.tables, ends, rows)
        batch, wanted = captured_batches(rows, ends, self._each_alone, state.block_tables, context, decodes)
        logits = decoder.logits(decoder.forward(batch, self.kv, wanted), self._logits[:seqs])
        if tail is Tail.LOGITS:
            return logits
        sampled = ends.part(seqs, 2 * seqs)
        token_ids, failed = sample_step(logits, sampled, tail, decoder.vocab)
        publish(token_ids, failed, sampled, state.tables, mail.outbox, mail.turn)
        return None


def captured_batches(
    rows: TokenRows, ends: Rows, each_alone: Tensor, block_tables: Tensor, context: int, decodes: bool
) -> tuple[ForwardBatch, WantedRows]:
    """All rows of a step, and those that are sampled: `ends` [2 S] are the last ones of the sequences, and then these.
    `each_alone` [>= S + 1]: 0, 1, ...; `context` bounds all sequences; `decodes` as of PromptKey."""
    seqs = len(rows.index)
    of_seqs, sampled = ends.part(0, seqs), ends.part(seqs, 2 * seqs)
    batch = ForwardBatch(
        rows.token_ids, rows.positions, rows.slot_mapping, block_tables, of_seqs.seq_slots, rows.query_start, of_seqs.seq_lens,
        seqs if decodes else 0, [], [], context_bound=context,
    )  # fmt: skip
    alone = ForwardBatch(
        sampled.token_ids, sampled.positions, sampled.slot_mapping, block_tables, sampled.seq_slots, each_alone[: seqs + 1],
        sampled.seq_lens, seqs, [1] * seqs, [context] * seqs,
    )  # fmt: skip
    return batch, WantedRows(rows.index, alone)


def numbers_of(plan: StepPlan | None, tokens: int, seqs: int, dummy_slot: int) -> np.ndarray:
    """[5, 2 * seqs] int32: of each sequence its last row and where its rows end (see kernels/prepare and kernels/prompt_rows),
    and then the same of each row that is sampled, and its number; the rest is padding. Without a plan all of it.

    The last sequence is a padded one. It has the padded rows: so attention makes them zeros, and whatever is then computed of
    them is finite."""
    numbers = np.full((NUMBERS, 2 * seqs), -1, np.int32)
    numbers[SLOT], numbers[END], numbers[END, seqs - 1] = dummy_slot, 0, tokens
    if plan is None:
        return numbers
    count, ends = len(plan), np.cumsum(plan.counts, dtype=np.int32)
    sequences = numbers[:, :count]
    sequences[SLOT], sequences[POSITION], sequences[UNVERIFIED] = plan.slots, plan.starts + plan.counts - 1, plan.unverified
    numbers[END, :count], numbers[END, count : seqs - 1] = ends, ends[-1]
    sampling = np.flatnonzero(plan.samples)
    numbers[:, seqs : seqs + len(sampling)] = sequences[:, sampling]
    numbers[END, seqs : seqs + len(sampling)] = ends[sampling] - 1
    return numbers
