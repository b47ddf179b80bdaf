"""A step plan becomes device work: rows, one forward pass, sampled ids that stay on the device. Nothing here waits.

    launch(plan) = forward(plan) -> Pending, then sample(pending) -> StepHandle
    forward(plan) = replay(plan, key) of captured decodes, or place(plan) and compute(plan), captured where that can be
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
from headrace.kernels.prepare import FAILED, IDS, KEPT, Rows
from headrace.model.forward import Forward
from headrace.sampling.penalties import UserProcessor
from headrace.scheduler.plan import StepPlan, StepResult
from headrace.structured_output.manager import GrammarMasks
from headrace.worker.batch_state import BatchState
from headrace.worker.decode_numbers import decode_numbers
from headrace.worker.drafter import Drafter, write_drafts
from headrace.worker.rare_results import PromptResult, prompt_result, prompts_that_ask
from headrace.worker.sampling import DeviceOutput, RowSampler, Tail
from headrace.worker.split_sampling import SplitSampler
from headrace.worker.staging import Staging

if TYPE_CHECKING:
    from headrace.worker.captured import Replayed
    from headrace.worker.cuda_graphs import DecodeGraphs, Key
    from headrace.worker.prompt_graphs import PromptGraphs, PromptKey


@dataclass(slots=True)
class Pending:
    """A launched forward pass whose rows have not been sampled yet."""

    plan: StepPlan
    logits: Tensor | None  # [R, vocab]
    rows: Rows | None  # those that are sampled
    prompts: list[PromptResult] = field(default_factory=list)
    sampled: DeviceOutput | None = None  # by the captured step itself


class ModelRunner:
    """Runs steps on one device."""

    def __init__(
        self, decoder: Forward, kv: KVCache, state: BatchState,
        graphs: DecodeGraphs | None = None, drafter: Drafter | None = None, prompts: PromptGraphs | None = None,
    ):  # fmt: skip
        self.drafter, self.prompts = drafter, prompts
        self.decoder, self.kv, self.state, self.graphs = decoder, kv, state, graphs
        part, choose = decoder.vocab, decoder.choose
        self.sampler = RowSampler(state, decoder.vocab_size, choose) if part is None else SplitSampler(state, part)

    def launch(self, plan: StepPlan) -> StepHandle:
        pending = self.forward(plan, whole=False)
        return self.sample(pending) if pending.sampled is None else StepHandle(pending, pending.sampled, self.state.staging)

    def idle(self) -> bool:
        """There is nothing to run: prepare for what may come. False if there is nothing left to prepare."""
        return any(graphs is not None and graphs.capture_next() for graphs in (self.graphs, self.prompts))

    def leave_preparations(self) -> None:
        """What `idle` had still to do is not done ahead."""
        for graphs in (self.graphs, self.prompts):
            if graphs is not None:
                graphs.leave_planned()

    def forward(self, plan: StepPlan, whole: bool = True) -> Pending:  # whole: else a captured step may sample itself
        decodes, prompts = self.graphs, self.prompts
        if decodes is not None and plan.is_decode and plan.num_tokens <= decodes.sizes[-1]:  # there every row is a sequence
            return self.replay(plan, decodes.key_of(plan, Tail.LOGITS if whole else self.sampler.tail(plan)))
        self.place(plan)
        if prompts is None or not prompts.takes(plan):
            return self.compute(plan)
        return self.compute(plan, prompts.key_of(plan, Tail.LOGITS if whole else self.sampler.tail(plan)))

    def replay(self, plan: StepPlan, key: Key) -> Pending:
        assert self.graphs is not None
        self.state.staging.next_step()
        if self.drafter is not None:
            self.drafter.placed(plan)
        numbers = decode_numbers(plan, self.state)
        if plan.num_drafts:
            write_drafts(plan, self.state, self.drafter)
        return self._pending(plan, self.graphs.replay(numbers, key))

    def _pending(self, plan: StepPlan, done: Replayed) -> Pending:
        self.kv.states.keep(plan.kept)
        if done.logits is None:
            return Pending(plan, None, None, sampled=DeviceOutput(done.sent))
        count = int(plan.num_sampled.sum())
        return Pending(plan, done.logits[:count], done.rows.part(0, count))

    @torch.inference_mode()
    def place(self, plan: StepPlan) -> None:
        self.state.apply(plan)
        self.kv.states.restore(plan.admitted)
        for new in plan.admitted:
            self.sampler.load(new)
        if self.drafter is not None:
            self.drafter.placed(plan)

    @torch.inference_mode()
    def compute(self, plan: StepPlan, key: PromptKey | None = None) -> Pending:  # key: of the captured step that does it
        if key is not None:
            assert self.prompts is not None
            return self._pending(plan, self.prompts.replay(plan, key))
        if plan.num_drafts:
            write_drafts(plan, self.state, self.drafter)
        if plan.is_plain:  # every row is a sequence that samples
            batch, _, rows = self.state.prepare(plan.slots, plan.starts, plan.counts)
            logits = self.decoder.decode(batch, self.kv)
            self.kv.states.keep(plan.kept)
            return Pending(plan, logits, rows)
        num_sampled, stops, asking = plan.num_sampled, np.cumsum(plan.counts), prompts_that_ask(plan, self.state)
        sampled = np.repeat(stops - np.cumsum(num_sampled), num_sampled) + np.arange(num_sampled.sum())
        count, most = len(sampled), len(self.state.block_tables)  # more rows are more than attention takes as sequences
        only = count < stops[-1] and count <= most and not asking
        sampled = self.prompts.filled_up(sampled, min(most, stops[-1] - 1)) if only and self.prompts is not None else sampled
        batch, wanted, rows = self.state.prepare(plan.slots, plan.starts, plan.counts, plan.unverified, sampled, only)
        batch.num_verified = 1 + int(plan.drafts.nonzero()[0].max(initial=-1))
        hidden = self.decoder.forward(batch, self.kv, wanted)
        self.kv.states.keep(plan.kept)
        pending = Pending(plan, None, rows.part(0, count))
        if count:
            picked = hidden if len(sampled) == len(hidden) else hidden[self.state.staging.upload(sampled)]
            pending.logits = self.decoder.logits(picked)[:count]
        for prompt in asking:
            stop, count = stops[prompt.sequence], plan.counts[prompt.sequence]
            pending.prompts.append(prompt_result(prompt, hidden[stop - count : stop], self.state, self.decoder))
        return pending

    @torch.inference_mode()
    def sample(
        self, pending: Pending, masks: GrammarMasks | None = None, users: Sequence[UserProcessor] = (), edited: bool = False
    ) -> StepHandle:
        """`masks` and `users`: what only the host can do to the logits, with what the step before sampled; of several ranks
        only the first one's host, and the others are told that it does (`edited`)."""
        output = None
        if pending.logits is not None and pending.rows is not None:
            output = self.sampler(pending.logits, pending.plan, pending.rows, masks, users, edited)
        return StepHandle(pending, output, self.state.staging)


class StepHandle:
    """The result of a launched step, on its way to the host."""

    def __init__(self, pending: Pending, output: DeviceOutput | None, staging: Staging):
        self.plan = pending.plan
        host = staging.download
        self._output = None if output is None else output.to_host(host)
        self._prompts = [prompt.to_host(host) for prompt in pending.prompts]
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
        if output is not None and plan.is_plain and output.logprobs is None:  # nearly always
            sent = output.sent.numpy()
            failed = sent[FAILED, :count].nonzero()[0]
            return StepResult(sent[IDS, :count].tolist(), [1] * count, frozenset(failed.tolist()))
        result = StepResult([], [0] * count)
        if output is not None:
            self._read(plan, output, result)
        for prompt in self._prompts:
            prompt.read(result)
        return result

    @staticmethod
    def _read(plan: StepPlan, output: DeviceOutput, result: StepResult) -> None:
        """Sort the rows' ids into sequences."""
        sent = output.sent.numpy()
        ids, bad, failed, row = sent[IDS].tolist(), set(sent[FAILED].nonzero()[0].tolist()), set(), 0
        logprobs = {} if output.logprobs is None else output.logprobs.read()
        kept = sent[KEPT].tolist() if plan.num_drafts else None
        for s, count in enumerate(plan.num_sampled.tolist()):
            stop = row + count if kept is None else row + sum(kept[row : row + count])
            if row in bad and count:
                stop = row + 1 if s < plan.num_decodes else row
                if count == 1:  # else perhaps a draft's fault: to be computed again without
                    failed.add(s)
            result.token_ids += ids[row:stop]
            result.counts[s] = stop - row
            if count and row in logprobs:
                result.logprobs[s] = [logprobs[r] for r in range(row, stop)]
            row += count
        result.failed = frozenset(failed)
