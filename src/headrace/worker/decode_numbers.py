"""What the host says of the rows of a captured decode step: four numbers each (see kernels/prepare)."""

from __future__ import annotations

import numpy as np

from headrace.kernels.prepare import NEW_BLOCK, POSITION, SLOT, UNVERIFIED
from headrace.scheduler.plan import StepPlan
from headrace.worker.batch_state import BatchState, block_writes


def decode_numbers(plan: StepPlan, state: BatchState) -> np.ndarray:
    """[4, R] int32: a row for each sequence, and for each draft. New blocks that have no number are entered into the tables."""
    numbers = np.full((4, len(plan)), -1, np.int32)
    numbers[SLOT], numbers[POSITION], numbers[UNVERIFIED] = plan.slots, plan.starts, plan.unverified
    if plan.new_blocks:
        _enter_blocks(plan, numbers, state)
    if plan.num_drafts:
        # each draft's row is a sequence of its own, one token longer than that of the row before it, in the same slot
        numbers = np.repeat(numbers, plan.counts, axis=1)
        numbers[POSITION] += np.arange(numbers.shape[1], dtype=np.int32)
        numbers[POSITION] -= np.repeat(np.cumsum(plan.counts, dtype=np.int32) - plan.counts, plan.counts)
    return numbers


def _enter_blocks(plan: StepPlan, numbers: np.ndarray, state: BatchState) -> None:
    """Blocks that plain decodes open come with their rows' numbers, others by a write of their own."""
    row_of = np.empty(len(state.admitted), np.int32)
    row_of[plan.slots] = np.arange(len(plan))
    others = []
    for new in plan.new_blocks:
        row = row_of[new.slot]
        if row < plan.num_decodes:
            numbers[NEW_BLOCK, row] = new.blocks[0]
        else:
            others.append(new)
    state.enter(block_writes(others))
