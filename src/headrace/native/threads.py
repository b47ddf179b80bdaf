"""How many threads the native step has."""

from __future__ import annotations

import os

from headrace.errors import ParameterError
from headrace.machine import usable_cores


def most_threads() -> int:
    """Threads that can run at the same time: those of every core that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1


def check_threads(wanted: int | None) -> None:
    """Raises ParameterError for more threads than can run: each step would wait for those that are not running."""
    if wanted is not None and wanted > (most := most_threads()):
        raise ParameterError("threads", wanted, f"at most {most}, as many as this process's cores can run at once")


def num_threads(wanted: int | None) -> int:
    """As asked for, or one for each core that is this process's own (see machine.usable_cores)."""
    return wanted if wanted is not None else usable_cores()
