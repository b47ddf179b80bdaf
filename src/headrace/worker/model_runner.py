"""A step plan becomes device work: rows, one forward pass, sampled ids that stay on the device. Nothing here waits.

    launch(plan) = forward(plan) -> Pending, then sample(pending) -> StepHandle
    StepHandle.result() is the only place where the host waits for the device.

The two halves are separate for steps whose sampler needs what the previous step sampled (user logits processors, grammars):
the forward is launched first and the previous step is settled while it runs.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from headrace.cache.kv_cache import KVCache
from headrace.model.forward import Forward
from headrace.scheduler.plan import Chunk, StepPlan
from headrace.speculative.proposer import Drafter
from headrace.structured_output.manager import GrammarMasks
from headrace.worker.batch_state import BatchState, new_blocks, sequences, slack_of
from headrace.worker.sampling import DeviceOutput, StepSampler, Tail, first_rows
from headrace.worker.staging import Staging

if TYPE_CHECKING:
    from headrace.worker.cuda_graphs import DecodeGraphs


@dataclass(slots=True)
class Pending:
    """A launched forward pass whose rows have not been sampled yet."""

    plan: StepPlan
    chunks: list[Chunk]  # those that sample beside the decodes, in row order
    logits: Tensor | None  # [R, vocab]
    prompt_logprobs: list = field(default_factory=list)  # (chunk, ids [n, k+1], logprobs [n, k+1], ranks [n]) on the device
    pooled: list = field(default_factory=list)  # (chunk, [H]) on the device
    sampled: DeviceOutput | None = None  # by the captured step itself


@dataclass(slots=True)
class StepResult:
    """What a step produced, on the host. Indices are those of plan.chunks: decodes, then the others."""

    tokens: list[int]  # of the decodes
    others: list[list[int]]  # ids of each of plan.others
    failed: frozenset[int] = frozenset()
    logprobs: dict[int, list[tuple[np.ndarray, np.ndarray, int]]] = field(default_factory=dict)  # of each id: ids, values, rank
    prompt_logprobs: list[tuple[Chunk, np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=list)
    pooled: list[tuple[Chunk, np.ndarray]] = field(default_factory=list)


class ModelRunner:
    """Runs steps on one device."""

    def __init__(
        self, decoder: Forward, kv: KVCache, state: BatchState,
        graphs: DecodeGraphs | None = None, drafter: Drafter | None = None,
    ):  # fmt: skip
        self.drafter = drafter
        self.decoder, self.kv, self.state, self.graphs = decoder, kv, state, graphs
        self.device = state.device
        self.sampler = StepSampler(state, decoder.vocab_size)

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
        """Whether a captured decode step does it; there every row is a sequence, of which max_num_seqs are the most."""
        if self.graphs is None or not is_decode(plan):
            return False
        return not plan.num_drafts or plan.num_tokens <= self.graphs.sizes[-1]

    def _replay(self, plan: StepPlan, tail: Tail) -> Pending:
        assert self.graphs is not None
        self.state.staging.next_step()
        if self.drafter is not None:
            self.drafter.placed(plan.chunks)
        slots, starts, counts = sequences(plan.decodes, plan.others)
        numbers = np.full((4, len(slots)), -1, np.int32)
        numbers[0], numbers[1], numbers[3] = slots, starts, 0
        for row, _, block in plan.decodes.new_blocks:
            numbers[2, row] = block
        self.state.enter(new_blocks(plan.others))
        unsure = plan.unsure
        if unsure:
            numbers[3] = slack_of(plan.decodes, plan.others)
        if plan.num_drafts:
            # each draft's row is a sequence of its own, one token longer than that of the row before it, in the same slot
            self._write_drafts(plan)
            further = np.arange(plan.num_tokens) - first_rows(counts)
            numbers = np.repeat(numbers, counts, axis=1)
            numbers[1] += further.astype(np.int32)
        done = self.graphs.replay(numbers, int((numbers[1] + numbers[3]).max()) + 1, tail, plan.num_drafts > 0)
        pending = Pending(plan, plan.others, None if done.logits is None else done.logits[: numbers.shape[1]])
        if done.logits is None:
            ids, failed, kept = done.sent
            pending.sampled = DeviceOutput(ids, failed, {}, kept=kept if plan.num_drafts else None)
        return pending

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> Pending:
        if self._is_captured(plan):
            return self._replay(plan, Tail.LOGITS)
        for request in self.state.apply(plan):
            self.sampler.load(request)
        if self.drafter is not None:
            self.drafter.placed(plan.chunks)
        if plan.num_drafts:
            self._write_drafts(plan)
        slots, starts, counts = sequences(plan.decodes, plan.others)
        rows = sampled_rows(plan, np.cumsum(counts))
        whole = self._reads_all(plan, counts, rows)
        slack = slack_of(plan.decodes, plan.others) if plan.unsure else None
        batch, wanted = self.state.rows_and_wanted(slots, starts, counts, slack, None if whole else rows)
        hidden = self.decoder.forward(batch, self.kv, wanted)
        pending = Pending(plan, [c for c in plan.others if c.samples and c.request.pooling is None], None)
        if rows:
            picked = hidden if len(rows) == len(hidden) else hidden[self.state.staging.upload(np.asarray(rows))]
            pending.logits = self.decoder.logits(picked)
        start = len(plan.decodes)
        for c in plan.others:
            if scores_prompt(c):
                pending.prompt_logprobs.append((c, *self._prompt_logprobs(c, hidden[start : start + c.num_tokens])))
            if c.request.pooling is not None:
                rows_of = hidden[start : start + c.num_tokens].float()
                pending.pooled.append((c, rows_of.sum(0) if c.request.pooling == "mean" else rows_of[-1]))
            start += c.num_tokens
        return pending

    @torch.inference_mode()
    def sample(self, pending: Pending, masks: GrammarMasks | None = None) -> StepHandle:
        output = None
        if pending.logits is not None:
            output = self.sampler(pending.logits, pending.plan.decodes, pending.chunks, masks)
        return StepHandle(pending, output, self.state.staging)

    def _write_drafts(self, plan: StepPlan) -> None:
        """Put the drafts where the forward finds its ids: those that the host knows, and then those of the drafter."""
        known = [(c.slot, c.start, i, d, c.slack > 0) for c in plan.others for i, d in enumerate(c.drafts, 1)]
        if known:
            slots, starts, after, ids, unsure = self.state.staging.upload(np.asarray(known, np.int64).T.copy())
            table, positions = self.state.token_ids, starts + after
            if plan.unsure:  # guesses for positions that have been sampled since must not take their place
                sampled = self.state.accepted[slots] * unsure >= after
                ids = torch.where(sampled, table[slots, positions], ids)
            table.index_put_((slots, positions), ids.to(torch.int32))
        if self.drafter is not None:
            self.drafter.propose([c for c in plan.others if c.num_drafts and not c.drafts])

    def _reads_all(self, plan: StepPlan, counts: np.ndarray, rows: list[int]) -> bool:
        """Whether not only sampled rows are read, or they are more than attention takes as sequences."""
        if any(scores_prompt(c) or c.request.pooling is not None for c in plan.others):
            return True
        return len(rows) == counts.sum() or len(rows) > len(self.state.block_tables)

    def _prompt_logprobs(self, chunk: Chunk, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logprobs of the prompt tokens that the rows of `chunk` predict (row p predicts position p + 1)."""
        stop = min(chunk.stop, len(chunk.request.prompt_ids) - 1)
        targets = self.state.token_ids[chunk.slot, chunk.start + 1 : stop + 1].to(torch.int64)
        hidden = hidden[: stop - chunk.start]
        num_top = chunk.request.params.prompt_logprobs
        assert num_top is not None
        return self.sampler.prompt_logprobs(self.decoder.logits, hidden, targets, num_top)


def sampled_rows(plan: StepPlan, stops: np.ndarray) -> list[int]:
    """The rows whose logits are sampled; chunk i ends before row stops[i]."""
    count = len(plan.decodes)
    chunks = zip(stops[count:].tolist(), plan.others, strict=True)
    rows = [r for stop, c in chunks if c.request.pooling is None for r in range(stop - c.num_sampled, stop)]
    return [*range(count), *rows]


def scores_prompt(chunk: Chunk) -> bool:
    """Whether logprobs of prompt tokens are asked for that rows of this chunk give."""
    return chunk.request.params.prompt_logprobs is not None and chunk.start < len(chunk.request.prompt_ids) - 1


def is_decode(plan: StepPlan) -> bool:
    """Every row samples the next token, or one after drafts, of a request whose slot the device knows already."""
    return all(
        c.num_tokens == 1 + c.num_drafts and c.samples and not c.admitted and c.request.pooling is None for c in plan.others
    )


class StepHandle:
    """The result of a launched step, on its way to the host."""

    def __init__(self, pending: Pending, output: DeviceOutput | None, staging: Staging):
        self.plan = pending.plan
        self._chunks = pending.chunks
        host = staging.download
        self._output = None if output is None else output.to_host(host)
        self._prompt = [(c, host(i), host(p), host(r)) for c, i, p, r in pending.prompt_logprobs]
        self._pooled = [(c, host(v)) for c, v in pending.pooled]
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
        decodes, others = self.plan.decodes, self.plan.others
        output = self._output
        chunks: list[list[int]] = [[] for _ in others]
        prompt = [(c, i.numpy(), p.numpy(), r.numpy()) for c, i, p, r in self._prompt]
        pooled = [(c, v.numpy()) for c, v in self._pooled]
        if output is None:
            return StepResult([], chunks, prompt_logprobs=prompt, pooled=pooled)
        ids, count = output.token_ids.tolist(), len(decodes)
        bad = set(output.failed.numpy().nonzero()[0].tolist())
        failed = {row for row in bad if row < count}
        if not others and not output.logprob_rows:  # nearly always
            return StepResult(ids[:count], chunks, frozenset(failed))
        logprobs = {}
        for row in output.logprob_rows:
            num_top = decodes.requests[row].params.logprobs if row < count else None
            if num_top is not None:
                logprobs[row] = [output.logprobs_of(row, num_top)]
        index = {id(c): i for i, c in enumerate(others)}
        kept = None if output.kept is None else output.kept.tolist()
        row = count
        for chunk in self._chunks:
            i = index[id(chunk)]
            stop = row + 1 if kept is None else row + sum(kept[row : row + chunk.num_sampled])
            if row not in bad:
                chunks[i] = ids[row:stop]
            elif not chunk.num_drafts:  # else perhaps a draft's fault: to be computed again without
                failed.add(count + i)
            num_top = chunk.request.params.logprobs
            if num_top is not None:
                logprobs[count + i] = [output.logprobs_of(r, num_top) for r in range(row, row + len(chunks[i]))]
            row += chunk.num_sampled
        return StepResult(ids[:count], chunks, frozenset(failed), logprobs, prompt, pooled)
