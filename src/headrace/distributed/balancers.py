"""The rules by which a front can choose a core, by the names that `--router` has for them."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.cache.events import BlockEvents
from headrace.distributed.router import Router
from headrace.engine.interface import Balancer
from headrace.errors import ParameterError

ROUTERS = ("prefix", "least-loaded", "round-robin")


class Blind:
    """Knows nothing of what cores hold."""

    def added(self, core: int) -> None:
        pass

    def removed(self, core: int) -> None:
        pass

    def blocks(self, core: int, events: BlockEvents) -> None:
        pass


class LeastLoaded(Blind):
    """Where the fewest tokens are outstanding."""

    def choose(self, prompt_ids: object, cache_salt: str, loads: Mapping[int, int]) -> int:
        return min(loads, key=loads.__getitem__)


class RoundRobin(Blind):
    """One after the other."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, prompt_ids: object, cache_salt: str, loads: Mapping[int, int]) -> int:
        self._last = min((core for core in loads if core > self._last), default=min(loads))
        return self._last


def balancer_named(name: str, seed: int = 0) -> Balancer:
    """Raises ParameterError for a name that is not in ROUTERS."""
    if name not in ROUTERS:
        raise ParameterError("router", name, "one of " + ", ".join(ROUTERS))
    return Router(seed=seed) if name == "prefix" else LeastLoaded() if name == "least-loaded" else RoundRobin()
