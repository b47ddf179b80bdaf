"""Processes that end with the one that started them, whatever ended that, and when it says so."""

from __future__ import annotations

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """The kernel sends this process the signal when the thread that started it is gone; on Linux only. A parent that was gone
    before is not noticed: whoever calls this looks once more."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def leave_signals_to_parent() -> None:
    """Those that come to all processes of a terminal or a unit: the parent drains first, and then says what there is to do."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
