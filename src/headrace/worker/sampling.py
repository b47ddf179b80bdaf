"""The sampler of a step: parameters come with the rows, edits of the logits from what the slots ask for; its outputs go to the
host."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.kernels.prepare import KEPT, Rows, publish
from headrace.kernels.tables import Float, Int
from headrace.sampling.params import GREEDY_EPS
from headrace.sampling.penalties import UserProcessor
from headrace.sampling.sampler import Choose, SampleInputs, SampleOutput, Scratch, sample
from headrace.scheduler.plan import Admitted, StepPlan
from headrace.structured_output.manager import GrammarMasks
from headrace.worker.batch_state import BatchState, aligned
from headrace.worker.edits import SampledRow, StepEdits
from headrace.worker.rare_results import Host, RowLogprobs, logprobs_request


class Tail(enum.Enum):
    """What follows the forward in a captured step."""

    GREEDY = "greedy"
    RANDOM = "random"  # temperature only, greedy rows among them
    FILTERED = "filtered"  # top-k, top-p, min-p
    LOGITS = "logits"


class Asked(NamedTuple):
    """What some rows ask of the sampler, edits of their logits left aside (see SampleInputs)."""

    all_greedy: bool
    any_top_k: bool
    any_top_p: bool
    any_min_p: bool

    @property
    def tail(self) -> Tail:
        """The least sampler that does it."""
        if self.all_greedy:
            return Tail.GREEDY
        return Tail.FILTERED if self.any_top_k or self.any_top_p or self.any_min_p else Tail.RANDOM

    def inputs(self, rows: Rows) -> SampleInputs:
        """With the rows' parameters."""
        columns = rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seed, rows.output_index, rows.sample_index
        return SampleInputs(*columns, *self)


@dataclass(slots=True)
class DeviceOutput:
    """What came of R rows, perhaps with padded ones behind; `to_host` starts its copy."""

    sent: Tensor  # [3, R] int32: see kernels.prepare
    logprobs: RowLogprobs | None = None

    def to_host(self, host: Host) -> DeviceOutput:
        return DeviceOutput(host(self.sent), None if self.logprobs is None else self.logprobs.to_host(host))


class RowSampler:
    """Samples the rows of a step and leaves the ids in the state's token table, where the next step reads them."""

    def __init__(self, state: BatchState, vocab_size: int, choose: Choose | None = None):
        self.state, self.vocab_size, self._choose = state, vocab_size, choose
        self._edits = StepEdits(state, vocab_size)
        self._special = np.zeros(state.dummy_slot + 1, np.bool_)  # slots that need more than the fused sampler
        self._scratch = Scratch()
        self._known_for = 0  # a version of plain decodes
        self._known = Asked(True, False, False, False), False

    def load(self, new: Admitted) -> None:
        """A request got its slot."""
        self._known_for = 0
        self._special[new.slot] = self._edits.load(new) or new.params.logprobs is not None

    def tail(self, plan: StepPlan) -> Tail:
        """What a captured step must do after its forward, for these slots."""
        asked, any_special = self._wishes(plan, plan.slots)
        return Tail.LOGITS if any_special else asked.tail

    def _wishes(self, plan: StepPlan, slots: np.ndarray) -> tuple[Asked, bool]:
        """What the sampled rows' slots ask for, and if some need more. Of plain decodes it is known from the step before."""
        if not plan.is_plain or plan.version != self._known_for:
            self._known_for = plan.version if plan.is_plain else 0
            self._known = asked_of(self.state, slots), bool(self._special[slots].any())
        return self._known

    def __call__(
        self, logits: Tensor, plan: StepPlan, rows: Rows, masks: GrammarMasks | None = None,
        users: Sequence[UserProcessor] = (), edited: bool = False,
    ) -> DeviceOutput:  # fmt: skip
        """One id per row of logits [R, V]: for each sequence that samples one, and one for each of its drafts.

        What needs the ids before it on the host is given: `masks` of grammars, and what `users` do to the logits of rows.
        `edited` says to other ranks that rank 0 has any.
        """
        num_sampled = plan.num_sampled
        slots = plan.slots if plan.is_plain else np.repeat(plan.slots, num_sampled)
        asked, any_special = self._wishes(plan, slots)
        special = self._rows(plan, num_sampled, np.flatnonzero(self._special[slots])) if any_special else []
        inputs = asked.inputs(rows)
        inputs.scratch, inputs.choose = self._scratch, self._choose
        inputs.edits = self._edits.of_step(special, rows, masks, users)
        tops = {r.row: n for r in special if (n := self.state.request(r.slot).params.logprobs) is not None}
        if tops:
            inputs.logprobs = logprobs_request(tops, self.state.staging)
        output = self._sample(logits, inputs, any_special or edited or masks is not None or bool(users))
        verify = plan.num_drafts > 0
        sent = torch.empty((3, aligned(len(slots))), dtype=torch.int32, device=logits.device)[:, : len(slots)]
        publish(output.token_ids, output.failed, rows, self.state.tables, sent, None, verify)
        if inputs.edits is not None and inputs.edits.penalties is not None:
            self._edits.count(rows, output.token_ids, sent[KEPT] if verify else None)
        return DeviceOutput(sent, None if output.logprobs is None else RowLogprobs(tops, output.logprobs))

    def _sample(self, logits: Tensor, inputs: SampleInputs, whole: bool) -> SampleOutput:
        """`whole`: some row asks for more than a temperature and filters."""
        return sample(logits, inputs)

    def _rows(self, plan: StepPlan, num_sampled: np.ndarray, special: np.ndarray) -> list[SampledRow]:
        """The `special` rows of the logits [N], one by one."""
        stops = np.cumsum(num_sampled)
        of = np.searchsorted(stops, special, side="right")  # their sequences
        before = special - (stops - num_sampled)[of]
        slots = plan.slots[of]
        first = plan.starts[of] + plan.counts[of] - plan.drafts[of] - self.state.host_ints[slots, Int.PROMPT_LEN]
        columns = (special, slots, first + before, before)
        return [SampledRow(*row) for row in zip(*(c.tolist() for c in columns), strict=True)]


def asked_of(state: BatchState, slots: np.ndarray) -> Asked:
    """What the requests in these slots ask for."""
    floats, ints = state.host_floats[slots], state.host_ints[slots]
    return Asked(
        all_greedy=bool((floats[:, Float.TEMPERATURE] < GREEDY_EPS).all()),
        any_top_k=bool((ints[:, Int.TOP_K] > 0).any()),
        any_top_p=bool((floats[:, Float.TOP_P] < 1.0).any()),
        any_min_p=bool((floats[:, Float.MIN_P] > 0.0).any()),
    )
