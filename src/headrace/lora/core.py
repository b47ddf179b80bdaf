"""A core's adapters: which slot each has, on all of its ranks, and why one that was to be loaded is not there."""

from __future__ import annotations

import logging
from collections.abc import Callable

from headrace.errors import CheckpointError, ParameterError
from headrace.lora.format import Version

logger = logging.getLogger(__name__)
MEMORY = 64  # failures that are remembered


class CoreAdapters:
    """`load` and `unload` do it on all ranks; who calls them sees to it that no request has an adapter that goes."""

    def __init__(self, slots: int, load: Callable[[Version, int], None], unload: Callable[[str], None]):
        self._free, self._load, self._unload = list(range(slots))[::-1], load, unload
        self._slots: dict[str, int] = {}
        self.state: dict[str, str] = {}  # digest -> why it is not there; nothing: it is

    def load(self, version: Version) -> None:
        """Raises CheckpointError, or ParameterError if all slots are taken."""
        if version.digest in self._slots:
            return
        if not self._free:
            raise ParameterError("lora", version.path, f"at most {len(self._slots)} adapters at the same time (max_loras)")
        self._load(version, self._free[-1])
        self._slots[version.digest] = self._free.pop()
        self.state[version.digest] = ""
        logger.info("adapter %s loaded", version.path or version.digest)

    def try_load(self, version: Version) -> None:
        """As `load`; a failure is told by `state`."""
        try:
            self.load(version)
        except (CheckpointError, ParameterError, OSError) as error:
            logger.error("an adapter cannot be loaded: %s", error)
            while len(self.state) - len(self._slots) >= MEMORY:
                del self.state[next(digest for digest, why in self.state.items() if why)]
            self.state[version.digest] = str(error)

    def unload(self, digest: str) -> None:
        self.state.pop(digest, None)
        if (slot := self._slots.pop(digest, None)) is not None:
            self._unload(digest)
            self._free.append(slot)


def check_adapter(adapters: CoreAdapters | None, digest: str) -> None:
    """Raises ParameterError if a request cannot have this one."""
    state = {} if adapters is None else adapters.state
    if digest and (why := state.get(digest, "an adapter that is loaded")):
        raise ParameterError("lora", digest, why)
