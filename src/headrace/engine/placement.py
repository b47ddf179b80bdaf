"""Which part of this machine each of several cores has: cards of its own, or its share of the CPU's cores and of the memory.

A core that is alone has the machine, as any process. On GPUs, core n of R ranks each sees cards n * R to (n + 1) * R - 1 and no
others. Of a CPU each has cores of its own, of one socket as far as may be, since what crosses sockets is slow, and its threads
stay there.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

from headrace.config import EngineConfig, visible_cards
from headrace.engine.core_process import CoreProcess
from headrace.engine.core_supply import StandbySupply
from headrace.engine.supervision import Core
from headrace.engine.wire import Place
from headrace.errors import ParameterError
from headrace.machine import available_memory, num_cards, usable_cores, usable_cpus

logger = logging.getLogger(__name__)
Item = TypeVar("Item")


class Placement:
    """Divides the machine among `data_parallel_size` cores. Making it raises ParameterError where it cannot be divided so."""

    def __init__(self, config: EngineConfig, count_cards: Callable[[], int] | None = None):
        """`count_cards`: how many CUDA sees here; asked only where it matters."""
        self.num_cores, self.ranks = config.data_parallel_size, config.tensor_parallel_size
        self._device, self._threads = config.device, config.threads
        self._count_cards = count_cards or num_cards
        self._cards: list[str] | None = None  # None: nobody has looked yet
        self._cpus: list[list[int]] = []  # of each core of the CPU
        self._memory = 0  # bytes for each
        if self.num_cores > 1:
            self._divide()

    def of(self, number: int) -> Place:
        """Raises ParameterError if there is no card left for it."""
        if number == 0 and self.num_cores == 1:
            return Place()
        if self._cards is None:
            self._divide()
        assert self._cards is not None
        name = f"core {number}"
        if self._cards:
            cards = self._cards[number * self.ranks : (number + 1) * self.ranks]
            if len(cards) < self.ranks:
                raise ParameterError("core", number, f"at most {len(self._cards) // self.ranks - 1}: {self._words()}")
            return Place(name, cards)
        if number >= self.num_cores:  # it came later, when all was divided: the system finds room for it
            return Place(name, threads=self._share_of(0), memory=self._memory)
        cpus = [i for core in share(self._cpus, number, self.num_cores) for i in core]
        return Place(name, None, cpus or None, max(1, min(self._share_of(number), len(cpus))), self._memory)

    def _share_of(self, number: int) -> int:
        """Threads."""
        return max(1, len(share(range(self._threads or usable_cores()), number, self.num_cores)))

    def _divide(self) -> None:
        cards = 0 if self._device == "cpu" else self._count_cards()
        self._cards = (visible_cards() or list(map(str, range(cards))))[:cards]
        if cards:
            if self.num_cores * self.ranks > cards:
                raise ParameterError("data_parallel_size", self.num_cores, f"at most {cards // self.ranks}: {self._words()}")
            return
        if self._device == "cuda":
            raise ParameterError("device", "cuda", "auto or cpu here: CUDA sees no card")
        if self._threads is not None and self._threads < self.num_cores:
            allowed = f"at least {self.num_cores}: data_parallel_size cores share them"
            raise ParameterError("threads", self._threads, allowed)
        self._cpus, self._memory = usable_cpus(), max(1, available_memory() // self.num_cores)
        if len(self._cpus) < self.num_cores:
            logger.warning("%d cores share %d of this CPU: each slows the others down", self.num_cores, len(self._cpus))

    def _words(self) -> str:
        """Of what there is."""
        of_each = f", {self.ranks} for each core (tensor_parallel_size)" if self.ranks > 1 else ""
        return f"CUDA sees {len(self._cards or ())} cards here{of_each}"


class PlacedSupply(StandbySupply):
    """Processes of this machine, each in its place."""

    def __init__(self, spawn: Callable[..., Awaitable[CoreProcess]], placement: Placement, first: CoreProcess | None = None):
        super().__init__(spawn, first, partial(spawn, standby=True))
        self._placement = placement

    async def take(self, number: int) -> Core:
        place = self._placement.of(number)
        core = await super().take(number)
        if isinstance(core, CoreProcess):
            core.place = place
        return core


def share(whole: Sequence[Item], number: int, count: int) -> Sequence[Item]:
    """Part `number` of what is divided into `count` parts as equal as can be."""
    return whole[number * len(whole) // count : (number + 1) * len(whole) // count]
