"""The sampler's inputs for a step, put together from the slots' parameters; its outputs, on their way to the host.

Gathered parameters are kept while the same slots run, so that a steady decode builds nothing but its output indices.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from headrace.kernels.verify import kept_rows, note_accepted
from headrace.sampling.logprobs import LogprobsRequest, prompt_logprobs
from headrace.sampling.params import GREEDY_EPS
from headrace.sampling.sampler import SampleInputs, SampleOutput, sample
from headrace.scheduler.plan import Chunk, Decodes, StepPlan
from headrace.scheduler.request import Request
from headrace.structured_output.manager import GrammarMasks
from headrace.worker.batch_state import FLOATS, INTS, BatchState, sequences, slack_of
from headrace.worker.edits import StepEdits

Host = Callable[[Tensor], Tensor]


class Tail(enum.Enum):
    """What follows the forward in a captured step."""

    GREEDY = "greedy"
    RANDOM = "random"  # temperature only, greedy rows among them
    FILTERED = "filtered"  # top-k, top-p, min-p
    LOGITS = "logits"


@dataclass(slots=True)
class DeviceOutput:
    """Ids and logprobs of R rows, perhaps with padded ones behind; `to_host` starts their copies, `logprobs_of` reads them."""

    token_ids: Tensor
    failed: Tensor
    logprob_rows: dict[int, int]  # row -> place in `logprobs`
    logprobs: tuple[Tensor, Tensor, Tensor, Tensor] | None = None  # chosen [Q], ranks [Q], top ids, top logprobs [Q, K]
    kept: Tensor | None = None  # [R] bool: the drafts before the row were right; None: there were none

    @property
    def plain(self) -> bool:
        """One id per row and nothing else."""
        return self.logprobs is None and self.kept is None

    def to_host(self, host: Host) -> DeviceOutput:
        logprobs = None if self.logprobs is None else tuple(host(t) for t in self.logprobs)
        kept = None if self.kept is None else host(self.kept)
        return DeviceOutput(host(self.token_ids), host(self.failed), self.logprob_rows, logprobs, kept)  # type: ignore[arg-type]

    def logprobs_of(self, row: int, num_top: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Ids and logprobs of a row's token and its `num_top` likeliest (-1: all that can be), and the token's rank."""
        assert self.logprobs is not None
        q = self.logprob_rows[row]
        chosen, ranks, top_ids, top = (t[q].numpy() for t in self.logprobs)
        width = int((top > -np.inf).sum()) if num_top < 0 else num_top
        ids = np.concatenate(([self.token_ids[row].item()], top_ids[:width]))
        return ids, np.concatenate(([chosen], top[:width])), int(ranks)


class StepSampler:
    """Samples the rows of a step and leaves the ids in the state's token table, where the next step reads them."""

    def __init__(self, state: BatchState, vocab_size: int):
        self.state, self.vocab_size = state, vocab_size
        self._edits = StepEdits(state, vocab_size)
        self._special = np.zeros(state.dummy_slot + 1, np.bool_)  # slots that need more than the fused sampler
        self._gathered_for = b""
        self._gathered: SampleInputs | None = None
        self._tail_for: array | None = None  # the decodes' slots
        self._tail = Tail.LOGITS

    def load(self, request: Request) -> None:
        """A request got its slot; all its ids are known to the host."""
        self._gathered_for = b""
        params = request.params
        more = params.logprobs is not None or params.logits_processors or params.structured_outputs
        self._special[request.slot] = self._edits.load(request) or bool(more)

    def tail(self, plan: StepPlan) -> Tail:
        """What a captured step must do after its forward, for these slots."""
        same = plan.decodes.slots
        if plan.others or same is not self._tail_for:
            slots = [*same, *(c.slot for c in plan.others)]
            self._tail_for = None if plan.others else same
            self._tail = Tail.LOGITS if self._special[slots].any() else tail_of(self.state, slots)
        return self._tail

    def __call__(
        self, logits: Tensor, decodes: Decodes, others: list[Chunk], grammar: GrammarMasks | None = None
    ) -> DeviceOutput:
        """One id per row of logits [R, V]: a row for each decode, then for each other chunk one and one for each of its
        drafts. `grammar` masks some of the rows."""
        upload = self.state.staging.upload
        first_row = None
        if any(c.num_drafts for c in others):
            counts = np.ones(len(decodes) + len(others), np.int64)
            counts[len(decodes) :] = [c.num_sampled for c in others]
            first_row = upload(first_rows(counts))
            others = [row for c in others for row in c.sampled_rows()]
        slots, starts, counts = sequences(decodes, others)
        slots, stops = slots.astype(np.int64), (starts + counts).astype(np.int64)
        # two columns, one copy: where the new id goes, and its index among the outputs
        positions, output_index = upload(np.stack([stops, stops - self.state.host_ints[slots, INTS.index("prompt_len")]]))
        device_slots = upload(slots)
        if any(c.slack for c in others):
            shift = self.state.shift(device_slots, slack_of(decodes, others))
            positions, output_index = positions + shift, output_index + shift
        inputs = replace(self._gather(slots, device_slots), output_index=output_index)
        special = np.flatnonzero(self._special[slots]).tolist()
        chunks = [(r, decodes.chunk(r) if r < len(decodes) else others[r - len(decodes)]) for r in special]
        inputs.edits = self._edits.of_step(chunks, device_slots, positions, grammar)
        wanted = [r for r, c in chunks if c.request.params.logprobs is not None]
        if wanted:
            tops = [c.request.params.logprobs for _, c in chunks if c.request.params.logprobs is not None]
            inputs.logprobs = LogprobsRequest(upload(np.asarray(wanted)), -1 if min(tops) < 0 else max(tops))
        table, guesses = self.state.token_ids, None
        if first_row is not None:
            guesses = table[device_slots, positions]
        output = sample(logits, inputs)
        kept = None
        if first_row is not None and guesses is not None:
            kept = kept_rows(output.token_ids, guesses, output.failed, first_row)
            note_accepted(self.state.accepted, device_slots, kept)
        # after a wrong draft come ids that nobody reads: the next step begins where they begin
        table.index_put_((device_slots, positions), output.token_ids)
        if inputs.edits is not None and inputs.edits.penalties is not None:
            self._edits.count(device_slots, output.token_ids, kept)
        return self._device_output(output, wanted, kept)

    def prompt_logprobs(
        self, to_logits: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor, num_top: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """For hidden [n, H] and the ids that follow [n]: ids [n, K + 1], logprobs [n, K + 1], ranks [n]."""
        found = prompt_logprobs(hidden, targets, to_logits, num_top, self.vocab_size)
        ids = torch.cat([found.token_ids[:, None].int(), found.top_ids], dim=1)
        return ids, torch.cat([found.logprobs[:, None], found.top_logprobs], dim=1), found.ranks

    @staticmethod
    def _device_output(output: SampleOutput, wanted: list[int], kept: Tensor | None) -> DeviceOutput:
        found = output.logprobs
        logprobs = None if found is None else (found.logprobs, found.ranks, found.top_ids, found.top_logprobs)
        return DeviceOutput(output.token_ids, output.failed, {r: q for q, r in enumerate(wanted)}, logprobs, kept)

    def _gather(self, slots: np.ndarray, device_slots: Tensor) -> SampleInputs:
        key = slots.tobytes()
        if self._gathered is not None and key == self._gathered_for:
            return self._gathered
        floats, ints = self.state.floats[device_slots].T.contiguous(), self.state.ints[device_slots].T.contiguous()
        host_floats, host_ints = self.state.host_floats[slots], self.state.host_ints[slots]
        self._gathered_for = key
        self._gathered = SampleInputs(
            temperature=floats[FLOATS.index("temperature")],
            top_k=ints[INTS.index("top_k")].int(),
            top_p=floats[FLOATS.index("top_p")],
            min_p=floats[FLOATS.index("min_p")],
            seed=ints[INTS.index("seed")],
            output_index=device_slots,  # replaced at every step
            sample_index=ints[INTS.index("sample_index")].int(),
            all_greedy=bool((host_floats[:, FLOATS.index("temperature")] < GREEDY_EPS).all()),
            any_top_k=bool((host_ints[:, INTS.index("top_k")] > 0).any()),
            any_top_p=bool((host_floats[:, FLOATS.index("top_p")] < 1.0).any()),
            any_min_p=bool((host_floats[:, FLOATS.index("min_p")] > 0.0).any()),
        )
        return self._gathered


def tail_of(state: BatchState, slots: Sequence[int] | np.ndarray) -> Tail:
    """The least sampler that does what these slots ask for, edits of their logits left aside."""
    floats, ints = state.host_floats[slots], state.host_ints[slots]
    if (floats[:, FLOATS.index("temperature")] < GREEDY_EPS).all():
        return Tail.GREEDY
    filtered = (ints[:, INTS.index("top_k")] > 0) | (floats[:, FLOATS.index("top_p")] < 1.0)
    return Tail.FILTERED if (filtered | (floats[:, FLOATS.index("min_p")] > 0.0)).any() else Tail.RANDOM


def first_rows(counts: np.ndarray) -> np.ndarray:
    """For each sampled row, the first of its chunk, of which each has `counts`: [R] int64."""
    return np.repeat(np.cumsum(counts) - counts, counts).astype(np.int64)
