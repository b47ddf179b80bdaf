"""What a proposer of drafts on the host must do (one on the device: worker/drafter.py). Whatever it says, output is exact."""

from __future__ import annotations

from typing import Protocol

from headrace.scheduler.request import Request


class HostProposer(Protocol):
    """Guesses from the ids that the host knows, before the step is scheduled."""

    def propose(self, request: Request, most: int) -> list[int]:
        """Up to `most` (>= 1) ids that may follow the known ones, in order; empty if there is no guess."""
        ...

    def end(self, request_id: str) -> None:
        """Forget what was kept for a request, if anything was."""
        ...
