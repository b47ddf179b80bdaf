"""Drafts come to where the forward finds its ids: from the plan, or from a proposer on the device. Output is exact with any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from headrace.model.shard import Group
from headrace.scheduler.plan import StepPlan
from headrace.worker.batch_state import BatchState


class DraftRow(NamedTuple):
    """A sequence of a plan that is to be drafted for; see StepPlan."""

    slot: int
    start: int
    num_drafts: int
    unverified: int


class Drafter(Protocol):
    """Guesses on the device, inside the step, after the slots' tables were brought up to date and before the forward.

    A drafter with a KV cache uses the block tables of the requests: their blocks are its blocks.
    """

    cost: float  # of one draft token, relative to a decode step of the target

    def placed(self, plan: StepPlan) -> None:
        """A step begins: who got a slot or new blocks with it, and how far everybody is."""
        ...

    def propose(self, rows: Sequence[DraftRow]) -> None:
        """Write `num_drafts` ids of each row to the slots' token table, from position start + 1 on; never wait."""
        ...


class SharedDrafter:
    """The drafts of a drafter that rank 0 has, in every rank's token table. So a draft model is whole, and there once."""

    def __init__(self, drafter: Drafter | None, state: BatchState, group: Group):
        self.drafter, self.state, self.group = drafter, state, group
        self.cost = 0.0 if drafter is None else drafter.cost

    def placed(self, plan: StepPlan) -> None:
        if self.drafter is not None:
            self.drafter.placed(plan)

    def propose(self, rows: Sequence[DraftRow]) -> None:
        if not rows:
            return
        if self.drafter is not None:
            self.drafter.propose(rows)
        drafts = [(r.slot, r.start + i, r.unverified > 0) for r in rows for i in range(1, r.num_drafts + 1)]
        slots, positions, moves = self.state.staging.upload(np.asarray(drafts, np.int64).T.copy())
        where = slots, positions + self.state.tables.accepted[slots] * moves
        ids = self.state.token_ids[where]
        self.group.share(ids)
        self.state.token_ids.index_put_(where, ids)


def write_drafts(plan: StepPlan, state: BatchState, drafter: Drafter | None) -> None:
    """Those that the host knows, and then those of the drafter."""
    known = [(s, i, d) for s, ids in plan.guesses.items() for i, d in enumerate(ids, 1)]
    if known:
        of, after, ids = np.asarray(known, np.int64).T
        host = np.stack([plan.slots[of], plan.starts[of] + after, after, ids, plan.unverified[of] > 0])
        slots, positions, behind, drafts, unverified = state.staging.upload(host)
        if plan.any_unverified:  # guesses for positions that have been sampled since must not take their place
            sampled = state.tables.accepted[slots] * unverified >= behind
            drafts = torch.where(sampled, state.token_ids[slots, positions], drafts)
        state.token_ids.index_put_((slots, positions), drafts.to(torch.int32))
    if drafter is not None:
        columns = (c.tolist() for c in (plan.slots, plan.starts, plan.drafts, plan.unverified))
        rows = [DraftRow(*row) for row in zip(*columns, strict=True)]
        drafter.propose([r for s, r in enumerate(rows) if r.num_drafts and s not in plan.guesses])
