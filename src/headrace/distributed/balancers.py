"""The rules by which a front can choose a core, by the names that `--router` has for them."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.distributed.router import Router
from headrace.engine.interface import Balancer
from headrace.engine.slots import LeastLoaded
from headrace.errors import ParameterError

ROUTERS = ("prefix", "least-loaded", "round-robin")


class RoundRobin(LeastLoaded):
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
