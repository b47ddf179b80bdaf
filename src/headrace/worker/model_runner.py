"""A step plan becomes device work: rows, one forward pass, sampled ids that stay on the device. Nothing here waits.

    launch(plan) = forward(plan) -> Pending, then sample(pending) -> StepHandle
    StepHandle.result() is the only place where the host waits for the device.

The two halves are separate for steps whose sampler needs what the previous step sampled (user logits processors, grammars):
the forward is launched first and the previous step is settled while it runs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from headrace.cache.kv_cache import KVCache
from headrace.kernels.prepare import FAILED, IDS, KEPT, NEW_BLOCK, POSITION, SLOT, UNVERIFIED, Rows
from headrace.model.forward import Forward
from headrace.sampling.penalties import UserProcessor
from headrace.scheduler.plan import Pooled, PromptScores, StepPlan, StepResult
from headrace.structured_output.manager import GrammarMasks
from headrace.worker.batch_state import BatchState, block_writes
from headrace.worker.drafter import Drafter, DraftRow
from headrace.worker.sampling import DeviceOutput, RowSampler, Tail
from headrace.worker.staging import Staging

if TYPE_CHECKING:
    from headrace.worker.cuda_graphs import DecodeGraphs


@dataclass(slots=True)
class Pending:
    """A launched forward pass whose rows have not been sampled yet."""

    plan: StepPlan
    logits: Tensor | None  # [R, vocab]
    rows: Rows | None  # those that are sampled
    prompt_logprobs: list[tuple[int, Tensor, Tensor, Tensor]] = field(default_factory=list)  # as PromptScores, on the device
    pooled: list[tuple[int, Tensor]] = field(default_factory=list)  # as Pooled
    sampled: DeviceOutput | None = None  # by the captured step itself


class ModelRunner:
    """Runs steps on one device."""

    def __init__(
        self, decoder: Forward, kv: KVCache, state: BatchState,
        graphs: DecodeGraphs | None = None, drafter: Drafter | None = None,
    ):  # fmt: skip
        self.drafter = drafter
        self.decoder, self.kv, self.state, self.graphs = decoder, kv, state, graphs
        self.sampler = RowSampler(state, decoder.vocab_size)

    def launch(self, plan: StepPlan) -> StepHandle:
        if not self._is_captured(plan):
            return self.sample(self.forward(plan))
        tail = self.sampler.tail(plan)
        pending = self._replay(plan, tail)
        if tail is Tail.LOGITS:
            return self.sample(pending)
        return StepHandle(pending, pending.sampled, self.state.staging)

    def idle(self) -> bool:
        """There is nothing to run: prepare for what may come. False if there is nothing left to prepare."""
        return self.graphs is not None and self.graphs.capture_next()

    def leave_preparations(self) -> None:
        """What `idle` had still to do is not done ahead."""
        if self.graphs is not None:
            self.graphs.leave_planned()

    def _is_captured(self, plan: StepPlan) -> bool:
        """Whether a captured decode step does it; there every row is a sequence."""
        return self.graphs is not None and plan.is_decode and plan.num_tokens <= self.graphs.sizes[-1]

    def _replay(self, plan: StepPlan, tail: Tail) -> Pending:
        assert self.graphs is not None
        self.state.staging.next_step()
        if self.drafter is not None:
            self.drafter.placed(plan)
        numbers = np.full((4, len(plan)), -1, np.int32)
        numbers[SLOT], numbers[POSITION], numbers[UNVERIFIED] = plan.slots, plan.starts, plan.unverified
        if plan.new_blocks:
            self._enter_blocks(plan, numbers)
        has_drafts = plan.num_drafts > 0
        if has_drafts:
            # each draft's row is a sequence of its own, one token longer than that of the row before it, in the same slot
            self._write_drafts(plan)
            numbers = np.repeat(numbers, plan.counts, axis=1)
            numbers[POSITION] += np.arange(numbers.shape[1], dtype=np.int32)
            numbers[POSITION] -= np.repeat(np.cumsum(plan.counts, dtype=np.int32) - plan.counts, plan.counts)
        count = numbers.shape[1]
        context = int((numbers[POSITION] + numbers[UNVERIFIED]).max()) + 1
        done = self.graphs.replay(numbers, context, tail, has_drafts)
        if done.logits is None:
            return Pending(plan, None, None, sampled=DeviceOutput(done.sent))
        return Pending(plan, done.logits[:count], done.rows.part(0, count))

    def _enter_blocks(self, plan: StepPlan, numbers: np.ndarray) -> None:
        """Blocks that plain decodes open come with their rows' numbers, others by a write of their own."""
        row_of = np.empty(len(self.state.admitted), np.int32)
        row_of[plan.slots] = np.arange(len(plan))
        others = []
        for new in plan.new_blocks:
            row = row_of[new.slot]
            if row < plan.num_decodes:
                numbers[NEW_BLOCK, row] = new.blocks[0]
            else:
                others.append(new)
        self.state.enter(block_writes(others))

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> Pending:
        if self._is_captured(plan):
            return self._replay(plan, Tail.LOGITS)
        self.state.apply(plan)
        for new in plan.admitted:
            self.sampler.load(new)
        if self.drafter is not None:
            self.drafter.placed(plan)
        if plan.num_drafts:
            self._write_drafts(plan)
        num_sampled, stops = plan.num_sampled, np.cumsum(plan.counts)
        sampled = np.repeat(stops - np.cumsum(num_sampled), num_sampled) + np.arange(num_sampled.sum())
        scored, pooled = self._scored(plan), self._pooled(plan)
        # more rows than there are slots are more than attention takes as sequences
        only = len(sampled) < stops[-1] and len(sampled) <= len(self.state.block_tables) and not scored and not pooled
        batch, wanted, rows = self.state.prepare(plan.slots, plan.starts, plan.counts, plan.unverified, sampled, only)
        hidden = self.decoder.forward(batch, self.kv, wanted)
        pending = Pending(plan, None, rows)
        if len(sampled):
            picked = hidden if len(sampled) == len(hidden) else hidden[self.state.staging.upload(sampled)]
            pending.logits = self.decoder.logits(picked)
        for s in scored:
            pending.prompt_logprobs.append((s, *self._prompt_logprobs(plan, s, hidden[stops[s] - plan.counts[s] : stops[s]])))
        for s, pooling in pooled.items():
            rows_of = hidden[stops[s] - plan.counts[s] : stops[s]].float()
            pending.pooled.append((s, rows_of.sum(0) if pooling == "mean" else rows_of[-1]))
        return pending

    @torch.inference_mode()
    def sample(
        self, pending: Pending, masks: GrammarMasks | None = None, users: Sequence[UserProcessor] = ()
    ) -> StepHandle:
        """`masks` and `users`: what only the host can do to the logits, with what the step before sampled."""
        output = None
        if pending.logits is not None and pending.rows is not None:
            output = self.sampler(pending.logits, pending.plan, pending.rows, masks, users)
        return StepHandle(pending, output, self.state.staging)

    def _write_drafts(self, plan: StepPlan) -> None:
        """Put the drafts where the forward finds its ids: those that the host knows, and then those of the drafter."""
        known = [(s, i, d) for s, ids in plan.guesses.items() for i, d in enumerate(ids, 1)]
        if known:
            of, after, ids = np.asarray(known, np.int64).T
            host = np.stack([plan.slots[of], plan.starts[of] + after, after, ids, plan.unverified[of] > 0])
            slots, positions, behind, drafts, unverified = self.state.staging.upload(host)
            table = self.state.token_ids
            if plan.any_unverified:  # guesses for positions that have been sampled since must not take their place
                sampled = self.state.tables.accepted[slots] * unverified >= behind
                drafts = torch.where(sampled, table[slots, positions], drafts)
            table.index_put_((slots, positions), drafts.to(torch.int32))
        if self.drafter is not None:
            columns = (c.tolist() for c in (plan.slots, plan.starts, plan.drafts, plan.unverified))
            rows = [DraftRow(*row) for row in zip(*columns, strict=True)]
            self.drafter.propose([r for s, r in enumerate(rows) if r.num_drafts and s not in plan.guesses])

    def _scored(self, plan: StepPlan) -> list[int]:
        """Sequences that compute rows which give logprobs of prompt tokens that are asked for."""
        return [
            s
            for s, slot, start in self._prefills(plan)
            if (new := self.state.request(slot)).params.prompt_logprobs is not None and start < new.num_prompt - 1
        ]

    def _pooled(self, plan: StepPlan) -> dict[int, str]:
        """How the sequences of prompts that are embedded are pooled."""
        return {s: pooling for s, slot, _ in self._prefills(plan) if (pooling := self.state.request(slot).pooling) is not None}

    @staticmethod
    def _prefills(plan: StepPlan) -> list[tuple[int, int, int]]:
        """Sequence, slot and start of all but plain decodes."""
        begin = plan.num_decodes
        return list(zip(range(begin, len(plan)), plan.slots[begin:].tolist(), plan.starts[begin:].tolist(), strict=True))

    def _prompt_logprobs(self, plan: StepPlan, sequence: int, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logprobs of the prompt tokens that a sequence's rows predict (row p predicts position p + 1)."""
        slot, start = int(plan.slots[sequence]), int(plan.starts[sequence])
        new = self.state.request(slot)
        stop = min(start + len(hidden), new.num_prompt - 1)
        targets = self.state.token_ids[slot, start + 1 : stop + 1].to(torch.int64)
        num_top = new.params.prompt_logprobs
        assert num_top is not None
        return self.sampler.prompt_logprobs(self.decoder.logits, hidden[: stop - start], targets, num_top)


class StepHandle:
    """The result of a launched step, on its way to the host."""

    def __init__(self, pending: Pending, output: DeviceOutput | None, staging: Staging):
        self.plan = pending.plan
        host = staging.download
        self._output = None if output is None else output.to_host(host)
        self._prompt = [(s, host(i), host(p), host(r)) for s, i, p, r in pending.prompt_logprobs]
        self._pooled = [(s, host(v)) for s, v in pending.pooled]
        self._done = None
        self.finished = time.perf_counter()  # when the device was done, as far as the host knows
        if staging.device.type == "cuda":
            self._done = torch.cuda.Event()
            self._done.record()

    def result(self) -> StepResult:
        """Wait for the step and read what it produced."""
        if self._done is not None:
            self._done.synchronize()
            self.finished = time.perf_counter()
        plan, output, count = self.plan, self._output, len(self.plan)
        if output is not None and plan.is_plain and not output.wanted:  # nearly always
            sent = output.sent.numpy()
            failed = sent[FAILED, :count].nonzero()[0]
            return StepResult(sent[IDS, :count].tolist(), [1] * count, frozenset(failed.tolist()))
        result = StepResult([], [0] * count)
        if output is not None:
            self._read(plan, output, result)
        result.prompt_logprobs = [PromptScores(s, i.numpy(), p.numpy(), r.numpy()) for s, i, p, r in self._prompt]
        result.pooled = [Pooled(s, v.numpy()) for s, v in self._pooled]
        return result

    @staticmethod
    def _read(plan: StepPlan, output: DeviceOutput, result: StepResult) -> None:
        """Sort the rows' ids into sequences."""
        sent = output.sent.numpy()
        ids, bad, failed, row = sent[IDS].tolist(), set(sent[FAILED].nonzero()[0].tolist()), set(), 0
        kept = sent[KEPT].tolist() if plan.num_drafts else None
        for s, count in enumerate(plan.num_sampled.tolist()):
            stop = row + count if kept is None else row + sum(kept[row : row + count])
            if row in bad and count:
                stop = row + 1 if s < plan.num_decodes else row
                if count == 1:  # else perhaps a draft's fault: to be computed again without
                    failed.add(s)
            result.token_ids += ids[row:stop]
            result.counts[s] = stop - row
            if count and row in output.wanted:
                result.logprobs[s] = [output.scores(r) for r in range(row, stop)]
            row += count
        result.failed = frozenset(failed)
