"""What a proposer of drafts must do: two kinds, one on the host and one on the device. Whatever they say, output is exact."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from headrace.scheduler.plan import StepPlan
from headrace.scheduler.request import Request


class HostProposer(Protocol):
    """Guesses from the ids that the host knows, before the step is scheduled."""

    def propose(self, request: Request, most: int) -> list[int]:
        """Up to `most` (>= 1) ids that may follow the known ones, in order; empty if there is no guess."""
        ...

    def end(self, request_id: str) -> None:
        """Forget what was kept for a request, if anything was."""
        ...


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
