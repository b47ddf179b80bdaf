"""A core's adapters: which slot each has, on all of its ranks, and why one that was to be loaded is not there."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from headrace.errors import HeadraceError, ParameterError
from headrace.lora.version import Version

logger = logging.getLogger(__name__)
MEMORY = 64  # failures that are remembered


class CoreAdapters:
    """Files are read and checked in a thread, while steps run, and then put into a slot between two steps, on all ranks.

    Who calls sees to it that no request has an adapter that goes.
    """

    def __init__(
        self, slots: int, read: Callable[[Version], Any], load: Callable[[Version, int, Any], None],
        unload: Callable[[str], None],
    ):  # fmt: skip
        """`load` gets what `read` has given; both may raise CheckpointError."""
        self._free, self._read, self._load, self._unload = list(range(slots))[::-1], read, load, unload
        self._slots: dict[str, int] = {}
        self._reading: dict[str, tuple[Version, Future[Any]]] = {}
        self._thread: ThreadPoolExecutor | None = None
        self.state: dict[str, str] = {}  # digest -> why it is not there; nothing: it is
        self._changed = False  # since the last turn

    def load(self, version: Version) -> None:
        """Now. Raises CheckpointError, or ParameterError if all slots are taken."""
        if version.digest not in self._slots:
            self._enter(version, self._read(version))

    def begin(self, version: Version) -> None:
        """Read it; what becomes of it is told by `state`."""
        if version.digest not in self._slots and version.digest not in self._reading:
            self._thread = self._thread or ThreadPoolExecutor(1, "headrace-adapters")
            self._reading[version.digest] = version, self._thread.submit(self._read, version)

    def turn(self) -> bool:
        """Enter what has been read by now; whether `state` is another one than at the last turn."""
        for digest in [digest for digest, (_, reading) in self._reading.items() if reading.done()]:
            self.wait(digest)
        changed, self._changed = self._changed, False
        return changed

    def wait(self, digest: str) -> None:
        """Until it is there or has failed, if it is being read."""
        if digest not in self._reading:
            return
        version, reading = self._reading.pop(digest)
        self._changed = True
        try:
            self._enter(version, reading.result())
        except (HeadraceError, OSError) as error:
            logger.error("an adapter cannot be loaded: %s", error)
            while len(self.state) - len(self._slots) >= MEMORY:
                del self.state[next(digest for digest, why in self.state.items() if why)]
            self.state[digest] = str(error)

    def _enter(self, version: Version, found: Any) -> None:
        if not self._free:
            raise ParameterError("lora", version.path, f"at most {len(self._slots)} adapters at the same time (max_loras)")
        self._load(version, self._free[-1], found)
        self._slots[version.digest] = self._free.pop()
        self.state[version.digest] = ""
        logger.info("adapter %s loaded", version.path or version.digest)

    def unload(self, digest: str) -> None:
        self._reading.pop(digest, None)
        self.state.pop(digest, None)
        self._changed = True
        if (slot := self._slots.pop(digest, None)) is not None:
            self._unload(digest)
            self._free.append(slot)


def check_adapter(adapters: CoreAdapters | None, digest: str) -> None:
    """Raises ParameterError for one that is not there, HeadraceError for one that should be: no mistake of the request."""
    state = {} if adapters is None else adapters.state
    if digest and digest not in state:
        raise ParameterError("lora", digest, "an adapter that is loaded")
    if why := state.get(digest):
        raise HeadraceError(f"the adapter could not be loaded again: {why}")
