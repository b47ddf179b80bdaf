"""A child by fork has none of its parent's threads. Without torch's, a model hangs or crashes when it runs: said before."""

from __future__ import annotations

import os

from headrace.errors import EngineDeadError

_builder: int | None = None  # the process that made an engine, this one or one that it was forked from: no engine's state


def claim_process() -> None:
    """An engine is to be made here. Raises EngineDeadError in a fork of a process that has made one."""
    global _builder  # noqa: PLW0603  (of the process)
    _builder = _builder or os.getpid()
    refuse_fork_of(_builder)


def refuse_fork_of(owner: int) -> None:
    """Raises EngineDeadError unless this process is `owner`."""
    if os.getpid() != owner:
        raise EngineDeadError(
            f"process {os.getpid()} is a fork of process {owner}, which has made an engine: the threads that run models are "
            f'not in it, and it can use no engine. Start it by spawn instead: multiprocessing.get_context("spawn")'
        )
