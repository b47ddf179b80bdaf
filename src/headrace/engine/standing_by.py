"""A process that stands by imports without haste, until it is needed: it shares the CPU with the first streams' steps.

A step on a CPU ends when the last of its threads does, and imports would have one of two cores for more than a second.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
import time
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

from headrace.machine import usable_cores

PART = 64  # one in so many of the seconds that this machine's CPU has


class Unhurried(MetaPathFinder):
    """Imports a module, and all that this imports, in a thread of its own; `hurry` has it go on as fast as it can.

    Python asks the first finder before every module, and this one finds nothing: it waits there until the part is kept.
    """

    def __init__(self, module: str):
        self._pause = max(0.0, PART / usable_cores() - 1)  # seconds for each that the thread has had of the CPU
        self._needed, self._used = threading.Event(), 0.0
        self._thread = threading.Thread(target=import_quietly, args=(module,), daemon=True)
        sys.meta_path.insert(0, self)
        self._thread.start()

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if not self._needed.is_set() and threading.get_ident() == self._thread.ident:
            self._needed.wait(self._pause * (time.thread_time() - self._used))
            self._used = time.thread_time()

    def hurry(self) -> None:
        self._needed.set()


def import_quietly(module: str) -> None:
    """What fails here will fail again, and then be told."""
    with contextlib.suppress(Exception):
        importlib.import_module(module)
