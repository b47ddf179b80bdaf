"""The sampler of a step: parameters come with the rows, edits of the logits from what the slots ask for; its outputs go to the
host."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.kernels.prepare import IDS, KEPT, Rows, publish
from headrace.kernels.tables import Float, Int
from headrace.sampling.logprobs import LogprobsRequest
from headrace.sampling.params import GREEDY_EPS
from headrace.sampling.penalties import UserProcessor
from headrace.sampling.sampler import SampleInputs, sample
from headrace.scheduler.plan import Admitted, StepPlan, TokenLogprobs
from headrace.structured_output.manager import GrammarMasks
from headrace.worker.batch_state import BatchState, aligned
from headrace.worker.edits import SampledRow, StepEdits

Host = Callable[[Tensor], Tensor]


class Tail(enum.Enum):
    """What follows the forward in a captured step."""

    GREEDY = "greedy"
    RANDOM = "random"  # temperature only, greedy rows among them
    FILTERED = "filtered"  # top-k, top-p, min-p
    LOGITS = "logits"


class WantedScores(NamedTuple):
    """Logprobs that a row asks for: where they are, and how many of the likeliest (-1: all that can be)."""

    place: int
    num_top: int


@dataclass(slots=True)
class DeviceOutput:
    """What came of R rows, perhaps with padded ones behind; `to_host` starts its copy, `scores` reads logprobs."""

    sent: Tensor  # [3, R] int32: see kernels.prepare
    wanted: dict[int, WantedScores] = field(default_factory=dict)  # by row
    logprobs: tuple[Tensor, Tensor, Tensor, Tensor] | None = None  # chosen [Q], ranks [Q], top ids, top logprobs [Q, K]

    def to_host(self, host: Host) -> DeviceOutput:
        logprobs = None if self.logprobs is None else tuple(host(t) for t in self.logprobs)
        return DeviceOutput(host(self.sent), self.wanted, logprobs)  # type: ignore[arg-type]

    def scores(self, row: int) -> TokenLogprobs:
        assert self.logprobs is not None
        place, num_top = self.wanted[row]
        chosen, ranks, top_ids, top = (t[place].numpy() for t in self.logprobs)
        width = int((top > -np.inf).sum()) if num_top < 0 else num_top
        ids = [int(self.sent[IDS, row]), *top_ids[:width].tolist()]
        return TokenLogprobs(ids, [float(chosen), *top[:width].tolist()], int(ranks))


class RowSampler:
    """Samples the rows of a step and leaves the ids in the state's token table, where the next step reads them."""

    def __init__(self, state: BatchState, vocab_size: int):
        self.state, self.vocab_size = state, vocab_size
        self._edits = StepEdits(state, vocab_size)
        self._special = np.zeros(state.dummy_slot + 1, np.bool_)  # slots that need more than the fused sampler
        self._tail_for = 0  # a version of plain decodes
        self._tail = Tail.LOGITS

    def load(self, new: Admitted) -> None:
        """A request got its slot."""
        self._tail_for = 0
        self._special[new.slot] = self._edits.load(new) or new.params.logprobs is not None

    def tail(self, plan: StepPlan) -> Tail:
        """What a captured step must do after its forward, for these slots."""
        if not plan.is_plain or plan.version != self._tail_for:
            self._tail_for = plan.version if plan.is_plain else 0
            self._tail = Tail.LOGITS if self._special[plan.slots].any() else tail_of(self.state, plan.slots)
        return self._tail

    def __call__(
        self, logits: Tensor, plan: StepPlan, rows: Rows, masks: GrammarMasks | None = None, users: Sequence[UserProcessor] = ()
    ) -> DeviceOutput:
        """One id per row of logits [R, V]: for each sequence that samples one, and one for each of its drafts.

        What needs the ids before it on the host is given: `masks` of grammars, and what `users` do to the logits of rows.
        """
        num_sampled = plan.num_sampled
        slots = np.repeat(plan.slots, num_sampled)
        special = self._rows(plan, num_sampled, np.flatnonzero(self._special[slots]))
        inputs = sample_inputs(self.state, rows, slots)
        inputs.edits = self._edits.of_step(special, rows, masks, users)
        tops = {r.row: n for r in special if (n := self.state.request(r.slot).params.logprobs) is not None}
        if tops:
            most = -1 if min(tops.values()) < 0 else max(tops.values())
            inputs.logprobs = LogprobsRequest(self.state.staging.upload(np.asarray(list(tops))), most)
        output = sample(logits, inputs)
        verify = plan.num_drafts > 0
        sent = torch.empty((3, aligned(len(slots))), dtype=torch.int32, device=logits.device)[:, : len(slots)]
        publish(output.token_ids, output.failed, rows, self.state.tables, sent, None, verify)
        if inputs.edits is not None and inputs.edits.penalties is not None:
            self._edits.count(rows, output.token_ids, sent[KEPT] if verify else None)
        found = output.logprobs
        logprobs = None if found is None else (found.logprobs, found.ranks, found.top_ids, found.top_logprobs)
        return DeviceOutput(sent, {r: WantedScores(q, n) for q, (r, n) in enumerate(tops.items())}, logprobs)

    def _rows(self, plan: StepPlan, num_sampled: np.ndarray, special: np.ndarray) -> list[SampledRow]:
        """The `special` rows of the logits [N], one by one."""
        if not special.size:
            return []
        stops = np.cumsum(num_sampled)
        of = np.searchsorted(stops, special, side="right")  # their sequences
        before = special - (stops - num_sampled)[of]
        slots = plan.slots[of]
        first = plan.starts[of] + plan.counts[of] - plan.drafts[of] - self.state.host_ints[slots, Int.PROMPT_LEN]
        columns = (special, slots, first + before, before)
        return [SampledRow(*row) for row in zip(*(c.tolist() for c in columns), strict=True)]


def sample_inputs(state: BatchState, rows: Rows, slots: np.ndarray) -> SampleInputs:
    """Parameters of `rows`, which are of these slots [R]."""
    floats, ints = state.host_floats[slots], state.host_ints[slots]
    return SampleInputs(
        rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seed, rows.output_index, rows.sample_index,
        all_greedy=bool((floats[:, Float.TEMPERATURE] < GREEDY_EPS).all()),
        any_top_k=bool((ints[:, Int.TOP_K] > 0).any()),
        any_top_p=bool((floats[:, Float.TOP_P] < 1.0).any()),
        any_min_p=bool((floats[:, Float.MIN_P] > 0.0).any()),
    )  # fmt: skip


def tail_of(state: BatchState, slots: np.ndarray) -> Tail:
    """The least sampler that does what these slots ask for, edits of their logits left aside."""
    floats, ints = state.host_floats[slots], state.host_ints[slots]
    if (floats[:, Float.TEMPERATURE] < GREEDY_EPS).all():
        return Tail.GREEDY
    filtered = (ints[:, Int.TOP_K] > 0) | (floats[:, Float.TOP_P] < 1.0) | (floats[:, Float.MIN_P] > 0.0)
    return Tail.FILTERED if filtered.any() else Tail.RANDOM
