"""Many plain decode steps at once, as a simulator needs them: what schedule() and settle() would do, one after the other.

Beside the scheduler, not in its way. Between two events of its members (a block fills, is needed, or the last token comes) a
batch of decodes only moves its clock; whoever decides what such steps bring can make them in one go. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.scheduler.plan import StepPlan
from headrace.scheduler.prefill_budget import WINDOW
from headrace.scheduler.request import Request
from headrace.scheduler.scheduler import Scheduler


def plain_steps(scheduler: Scheduler) -> int:
    """How many further steps are plain decodes of the same requests in which no block is taken or filled and nobody ends.

    That is so if nobody is added, aborted or samples a stop token until then. 0: the next step may be anything.
    """
    blocks = scheduler.blocks
    batch, admission = blocks.batch, blocks.admission
    if blocks.prefilling or blocks.leaving or not batch.members or len(batch.members) != len(blocks.decoding):
        return 0
    if batch.changed or any(s.others or s.filled or s.decodes is not batch.decodes for s in scheduler.flight.values()):
        return 0
    if admission.num_waiting and blocks.free_slots and admission.head is not admission.refused:
        return 0  # somebody may start
    return min(batch.events) - batch.clock.now


def left_out(scheduler: Scheduler) -> list[Request]:
    """Decodes without a row in the step that was scheduled last: they found no block, or it is full."""
    blocks = scheduler.blocks
    if len(blocks.batch.members) == len(blocks.decoding):
        return []
    return [request for request in blocks.decoding if request not in blocks.batch]


def leap(scheduler: Scheduler, in_flight: StepPlan | None, count: int, token: int, seconds: Sequence[float]) -> None:
    """Make `count` plain steps, at most plain_steps(): each member gets `count` times `token`.

    As many settle; if one is in flight, the last of the new ones is in its place afterwards, with the same plan. `seconds` are
    those of the steps that settle.
    """
    blocks = scheduler.blocks
    batch = blocks.batch
    tokens = [token] * count
    for request in batch.members:
        request.output_ids += tokens
    batch.clock.now += count
    batch.last_step += count
    scheduler.num_steps += count
    blocks.num_settled += count
    if in_flight is not None:
        step = scheduler.flight.pop(in_flight.step)
        step.number = in_flight.step = in_flight.step + count
        step.decode(step.decodes, batch.clock.now - 1)
        in_flight.starts = in_flight.starts + count
        scheduler.flight[step.number] = step
    if scheduler.prefill_budget is not None:
        for s in seconds[-WINDOW:]:
            scheduler.prefill_budget.observe(0, s)
