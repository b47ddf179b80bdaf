"""How many cores there should be: pure logic over numbers and time, which never waits and asks nobody.

Demand is counted in cores: requests in flight over what one core should have, or KV cache in use, whichever is more. There is
a gap between what adds a core and what takes one away: the cores that stay must have room to spare at the demand there was.
And demand must last: for `upscale_delay` above what there is, for `downscale_delay` below it. What is decided then is the
least (the most) that the whole of this time asked for, so that a moment never decides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from headrace.errors import ParameterError
from headrace.options import check, option

FULL = 0.9  # of a core's KV cache in use: more, and requests are preempted
SPARE = 0.8  # of the cores that stay after one is taken away, so much may be used


_cores = partial(option, group="several machines: cores on the nodes of a Ray cluster", low=1)
_seconds = partial(_cores, low=0.0, high=86400.0, unit="SECONDS")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingConfig:
    """Bounds and pace; names follow Ray Serve where the meaning is the same."""

    min_replicas: int = _cores(1, "cores at least", high=256)
    max_replicas: int = _cores(1, "cores at most, as the load asks for", high=256, shown="none")
    target_ongoing_requests: int | None = _cores(
        None, "of one core; more in flight ask for another", high=2**31 - 1, shown="--max-num-seqs"
    )
    upscale_delay: float = _seconds(5.0, "of load before a core is added")
    downscale_delay: float = _seconds(120.0, "without load before one is taken away")

    def __post_init__(self) -> None:
        check(self)
        if self.max_replicas < self.min_replicas:
            raise ParameterError("max_replicas", self.max_replicas, f"an integer in [{self.min_replicas}, 256]")


@dataclass(frozen=True, slots=True)
class Demand:
    """What there is to do at some time."""

    requests: int  # in flight: running, waiting, or interrupted
    per_core: int  # requests that one core should have
    kv_used: float = 0.0  # in cores: the sum of the shares in use

    def cores(self, spare: float = 1.0) -> int:
        """That are needed for it, if each is used up to this share."""
        return math.ceil(max(self.requests / self.per_core, self.kv_used / FULL) / spare)


class Autoscaler:
    """Asked every now and then; remembers since when there have been too few or too many cores."""

    def __init__(self, config: ScalingConfig):
        self.config = config
        self._few: tuple[float, int] | None = None  # since when there are too few; the least that were needed since then
        self._many: tuple[float, int] | None = None  # since when there are too many; the most that were needed since then

    def wanted(self, now: float, cores: int, demand: Demand) -> int:
        """How many there should be; `cores`: how many there are, or will be by what has been begun. `now` never goes back."""
        config = self.config
        bounded = min(max(cores, config.min_replicas), config.max_replicas)
        if bounded != cores:
            return self._decided(bounded)
        up = min(demand.cores(), config.max_replicas)
        down = max(demand.cores(SPARE), config.min_replicas)
        self._few = (now, up) if self._few is None else (self._few[0], min(self._few[1], up))
        self._many = (now, down) if self._many is None else (self._many[0], max(self._many[1], down))
        if self._few[1] <= cores:
            self._few = None
        elif now - self._few[0] >= config.upscale_delay:
            return self._decided(self._few[1])
        if self._many[1] >= cores:
            self._many = None
        elif now - self._many[0] >= config.downscale_delay:
            return self._decided(self._many[1])
        return cores

    def _decided(self, wanted: int) -> int:
        self._few = self._many = None
        return wanted
