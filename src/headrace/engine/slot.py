"""A place for a core: supervised, with what its core has said of itself and the tokens that are outstanding there."""

from __future__ import annotations

import asyncio
from typing import Protocol

from headrace.config import EngineConfig
from headrace.engine.messages import EngineRequest
from headrace.engine.probation import Probation
from headrace.engine.stats import CoreStats
from headrace.engine.streams import Stream
from headrace.engine.supervision import Core, CoreSupply, SupervisionConfig, Supervisor
from headrace.engine.wire import Abort, Add, FromCore, News, Progress, Ready

STANDBY_DELAY = 2.0  # seconds after a core is ready: its first requests have the machine for themselves
EXPECTED_TOKENS = 256  # of output that count as outstanding: what a request may have at most says little of what it will have


class Keeper(Protocol):
    """Who has the slots, and is told what becomes of each; called in the event loop."""

    config: EngineConfig
    limits: SupervisionConfig
    supply: CoreSupply
    loads: dict[int, int]  # tokens outstanding in each slot that is open, by number

    def took(self, slot: Slot, news: News) -> None: ...

    def began(self, slot: Slot) -> None:
        """It has a core that has loaded its model."""

    def opened(self, slot: Slot) -> None:
        """Its core takes whatever comes, for the first time or again."""

    def closed(self, slot: Slot) -> None:
        """It has no core any more."""

    def lost(self, slot: Slot, why: str, killed: bool) -> None:
        """Its core died, and another will come; `killed`: somebody else ended it."""

    def ended(self, slot: Slot, why: str) -> None:
        """Its core died, or could not be had, and there will be none any more."""


class Slot:
    """One core, and after its death the next: the `Owner` of their supervisor.

    Open while its core takes whatever comes: that has loaded its model, has nobody on probation, and is not to go.
    """

    def __init__(self, number: int, keeper: Keeper, past: CoreStats, restarts: int, at_start: bool):
        self.number, self._keeper, self.at_start = number, keeper, at_start
        self.info: Ready | None = None  # of the latest core that was ready
        self.doing = "loading"  # while its core does not serve yet
        self.stats = CoreStats()  # of the present core
        self.past = past  # counters of the cores before
        self.restarts = restarts
        self.load = 0  # tokens outstanding
        self.leaving = False  # takes nothing new
        self.ending = False  # and its core is being ended
        self.dead: str | None = None  # why there will be no core any more
        self.settled = asyncio.Event()  # it has been ready, or is dead
        self.probation = Probation(self.send)
        self.supervisor = Supervisor(keeper.config, keeper.limits, keeper.supply, self, number)

    @property
    def core(self) -> Core | None:
        return self.supervisor.core

    @property
    def ready(self) -> bool:
        core = self.supervisor.core
        return core is not None and core.ready is not None and self.dead is None

    @property
    def progressing(self) -> bool:
        core = self.supervisor.core
        return core is not None and self.ready and self._keeper.limits.fault(core) is None

    @property
    def stays(self) -> bool:
        return self.dead is None and not self.leaving

    def counters(self) -> CoreStats:
        """The present core's gauges, and counters over all that there have been here: these never go back."""
        return self.stats.added_to(self.past)

    # ---------------------------------------------------------------- streams

    def send(self, stream: Stream) -> None:
        if self.core is not None:
            self.core.send(Add(stream.request))
            stream.slot, stream.sent, stream.num_in_core = self, True, 0
            self._weigh(stream, outstanding(stream.request, begun=False))

    def began(self, stream: Stream) -> None:
        """A stream gets its first tokens from the present core."""
        self._weigh(stream, outstanding(stream.request, begun=True))

    def left(self, stream: Stream) -> None:
        """A stream is over."""
        self._weigh(stream, 0)

    def abort(self, stream: Stream) -> bool:
        """Nobody waits for it any more; whether the core has it, and will say when it has let go of it."""
        if not stream.sent or self.core is None:
            return False
        self.core.send(Abort([stream.request.id]))
        return True

    def _weigh(self, stream: Stream, load: int) -> None:
        self.load += load - stream.load
        stream.load = load
        if self.number in self._keeper.loads:
            self._keeper.loads[self.number] = self.load

    # ---------------------------------------------------------------- open or not

    def leave(self, leaving: bool = True) -> None:
        """Take nothing new, or take it again."""
        self.leaving = leaving
        if leaving:
            self._keeper.loads.pop(self.number, None)
        elif self.ready and not self.probation.active:
            self._open()

    def _open(self) -> None:
        if not self.leaving:
            self._keeper.loads[self.number] = self.load
            self._keeper.opened(self)

    # ---------------------------------------------------------------- told by the supervisor

    def heard(self, message: FromCore) -> None:
        if self.dead is not None:  # its streams are elsewhere
            return
        if isinstance(message, News):
            self._keeper.took(self, message)
            if message.stats is not None:
                self.stats = message.stats
            if self.probation.active:
                self.tick()
        elif isinstance(message, Progress):
            self.doing = str(message)
        elif isinstance(message, Ready):
            self.info = message
            self.settled.set()
            self._keeper.began(self)
            if not self.probation.active or self.probation.advance():
                self._open()
            self.supervisor.prepare_standby(STANDBY_DELAY)

    def tick(self) -> None:
        """Whose turn it is may have changed."""
        if self.ready and self.probation.active and self.probation.advance():
            self._open()

    def died(self) -> bool:
        progressed = self.stats.steps > 0
        self.past, self.stats, self.doing = self.counters(), CoreStats(), "loading"
        self._close()
        return progressed

    def goes_on(self, why: str, killed: bool) -> None:
        self.restarts += 1
        self._keeper.lost(self, why, killed)

    def gave_up(self, why: str) -> None:
        self.dead, self.probation = why, Probation(self.send)
        self.settled.set()
        self._close()
        self._keeper.ended(self, why)

    def _close(self) -> None:
        self._keeper.closed(self)
        self.load = 0


def outstanding(request: EngineRequest, begun: bool) -> int:
    """Tokens of it that are still to be computed, as far as can be known."""
    most, done = request.params.max_tokens, len(request.output_ids)
    left = EXPECTED_TOKENS if most is None else max(1, min(EXPECTED_TOKENS, most - done))
    return left if begun else left + len(request.prompt_ids) + done
