"""The real balancers by their names, and what a request counts for its core."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.cache.events import BlockEvents
from headrace.engine.interface import Balancer
from headrace.scheduler.request import Request

EXPECTED_TOKENS = 256
ROUTERS = ("prefix", "least-loaded", "round-robin")


def outstanding(request: Request, begun: bool) -> int:
    left = max(1, min(EXPECTED_TOKENS, request.params.max_tokens or EXPECTED_TOKENS))
    return left if begun else left + len(request.prompt_ids)


class RoundRobin:
    def __init__(self) -> None:
        self._next = 0

    def added(self, core: int) -> None: ...
    def removed(self, core: int) -> None: ...
    def blocks(self, core: int, events: BlockEvents) -> None: ...

    def choose(self, prompt_ids: object, cache_salt: str, loads: Mapping[int, int]) -> int:
        self._next += 1
        return self._next % len(loads)


class LeastLoaded(RoundRobin):
    def choose(self, prompt_ids: object, cache_salt: str, loads: Mapping[int, int]) -> int:
        return min(loads, key=loads.__getitem__)


def balancer_named(name: str, seed: int) -> Balancer:
    return RoundRobin() if name == "round-robin" else LeastLoaded()
