"""Captured steps with prompts without a card: what they do is done at once, by torch, with the padding left out."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from drafting import sample_on_host
from headrace.engine.core import EngineCore
from headrace.kernels.prepare import Rows
from headrace.kernels.prompt_rows import NUMBERS, TokenRows
from headrace.model.batch import ForwardBatch, WantedRows
from headrace.scheduler.config import Limits
from headrace.worker import prompt_graphs
from headrace.worker.captured import PAGES, Captured
from headrace.worker.cuda_graphs import CONTEXTS, context_buckets
from headrace.worker.model_runner import ModelRunner
from headrace.worker.prompt_graphs import PromptGraphs, PromptKey, seq_sizes, token_sizes
from headrace.worker.sampling import Tail


class Unpinned:
    """A mailbox whose device is the host."""

    def __init__(self, rows: int, numbers: int):
        self.inbox, self.outbox = (torch.zeros((PAGES, n, rows), dtype=torch.int32) for n in (numbers, 3))
        self.turn = torch.zeros(1, dtype=torch.int32)
        self.posted = 0

    def post(self, numbers: np.ndarray, size: int, dummy_slot: int) -> Tensor:
        assert numbers.shape[1] == size
        page, self.posted = self.posted % PAGES, self.posted + 1
        self.inbox[page, :, :size] = torch.from_numpy(numbers)
        return self.outbox[page, :, :size]

    def resume(self) -> None:
        """Somebody failed and is not heard of any further."""


class Exact:
    """A decoder of batches that say only to the device what they hold."""

    def __init__(self, decoder):
        self.decoder, self.hidden_state_hook = decoder, None
        self.vocab = None if decoder is None else decoder.vocab

    def forward(self, batch: ForwardBatch, kv, wanted: WantedRows) -> Tensor:
        assert batch.query_lens == [] and batch.seq_lens.max() <= batch.context_bound
        lens = batch.query_start.diff().tolist()
        seqs = int((batch.seq_lens > 0).sum())
        rows = sum(lens[:seqs])
        assert all(lens[:seqs]) and not any(lens[seqs:-1]) and sum(lens) == len(batch.token_ids), "the last one has padded rows"
        assert (batch.slot_mapping[:rows] >= 0).all() and (batch.slot_mapping[rows:] == -1).all()
        batch = ForwardBatch(
            batch.token_ids[:rows], batch.positions[:rows], batch.slot_mapping[:rows], batch.block_tables, batch.seq_slots[:seqs],
            batch.query_start[: seqs + 1], batch.seq_lens[:seqs], 0, lens[:seqs], batch.seq_lens[:seqs].tolist(),
        )  # fmt: skip
        alone, size = wanted.batch, wanted.batch.num_rows
        n = int((alone.seq_lens > 0).sum())
        assert n <= seqs and (alone.seq_lens[:n] > 0).all()
        alone = ForwardBatch(
            alone.token_ids[:n], alone.positions[:n], alone.slot_mapping[:n], alone.block_tables, alone.seq_slots[:n],
            alone.query_start[: n + 1], alone.seq_lens[:n], n, [1] * n, alone.seq_lens[:n].tolist(),
        )  # fmt: skip
        hidden = self.decoder.forward(batch, kv, WantedRows(wanted.index[:n], alone))
        return torch.cat((hidden, hidden.new_zeros((size - n, hidden.shape[1]))))

    def logits(self, hidden: Tensor, out: Tensor) -> Tensor:
        return self.decoder.logits(hidden)


class UncapturedPrompts(PromptGraphs):
    """Counts what it replays."""

    def __init__(self, decoder, kv, state, max_num_seqs: int, max_model_len: int, max_tokens: int):
        self.decoder, self.kv, self.state = Exact(decoder), kv, state
        self.sizes, self.seq_sizes = token_sizes(max_tokens), seq_sizes(max_num_seqs)
        self.buckets = context_buckets(CONTEXTS, max_model_len)
        seqs = self.seq_sizes[-1]
        self._mailbox, self.max_graphs = Unpinned(2 * seqs, NUMBERS), 96
        self._ends, self._rows = Rows.empty(2 * seqs, state.device), TokenRows.empty(self.sizes[-1], seqs, state.device)
        self._each_alone, self._logits = torch.arange(seqs + 1, dtype=torch.int32), torch.empty(seqs, 0)
        self._graphs, self._todo, self._prepared, self._missed, self._stand_ins = {}, [], None, Counter(), {}
        self.replays: Counter[Tail] = Counter()

    def _capture(self, key: PromptKey) -> Captured:
        captured = Captured(SimpleNamespace(replay=lambda: self._at_once(captured, key)), None)
        self._graphs[key] = captured
        self._stand_ins.clear()
        return captured

    def _at_once(self, captured: Captured, key: PromptKey) -> None:
        self.replays[key.tail] += 1
        captured.logits = self._step(key)


def capture_prompts(core: EngineCore, monkeypatch) -> UncapturedPrompts:
    """Let a core's steps with prompts run as captured ones do."""
    monkeypatch.setattr(prompt_graphs, "sample_step", sample_on_host)
    return give_prompts(core.runner, core.scheduler.limits)


def give_prompts(runner: ModelRunner, limits: Limits) -> UncapturedPrompts:
    runner.prompts = UncapturedPrompts(
        runner.decoder, runner.kv, runner.state, limits.max_num_seqs, limits.max_model_len, limits.max_num_batched_tokens
    )
    return runner.prompts
