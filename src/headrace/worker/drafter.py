"""What the runner asks of a proposer of drafts on the device. Whatever it says, output is exact."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from headrace.scheduler.plan import StepPlan


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
