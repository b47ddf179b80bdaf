"""Who enters a new core when, after a death: how the request that kills cores is found, and the rest lose nothing.

A request is *proven* in a core when it has got a few tokens there. After a death
    1. those that the dead core had proven go in again together: whatever killed it, they had run for a while; with them those
       that have seen one kill and nothing else, which says little about them;
    2. when these are proven again, the others go in, one at a time, each alone in being unproven;
    3. then whatever has arrived since.
Where other cores live, those of 1, and those that were unproven when somebody killed the core, go on there at once
(`release`). So suspects of a core are tried in its successor alone, and the other cores know nothing of it.
A request that was alone in being unproven when the core died, and had entered it because of a death before, is to blame.
Where somebody killed the core it takes more deaths, still more where kills hit others, too, and those of before do not count
once a core is killed that no suspect is in: whoever kills that one may have killed the others, too.
(Two killers at once can put the blame on a third: one that was proven reaches its fatal token just when an innocent one,
interrupted by the other, has its turn. That is accepted: the alternative costs a third death each time.)
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

from headrace.engine.streams import Stream

PROVEN = 4  # tokens: more than the steps that are in flight at once
MOST_TURNS = 64  # more suspects than that enter in groups
TURN_SECONDS = 10.0  # a turn that lasts longer holds nobody up any more
PATIENCE = 2  # deaths for which a request is blamed when the core ended by itself or hung
PATIENCE_WHEN_KILLED = 5  # when somebody killed it, which says little about the request: the OOM killer or an operator
RECENT_KILLS = 16  # for every two of these that hit others it takes one more: it is rather somebody outside


class Probation:
    """`submit` sends a request to the present core."""

    def __init__(self, submit: Callable[[Stream], None], clock: Callable[[], float] = time.monotonic):
        self._submit, self._clock = submit, clock
        self._turns: deque[list[Stream]] = deque()
        self._turn: list[Stream] = []  # entered, and not all proven
        self._entered: set[Stream] = set()  # in any turn of the present core, and were not proven since
        self._free: set[Stream] = set()  # of those in turns to come: nothing is held against them
        self._suspects: set[Stream] = set()  # that came, or will come, into the present core as such
        self._alone: deque[int] = deque(maxlen=RECENT_KILLS)  # by id, who was alone in being unproven when the core was killed
        self._began = 0.0

    @property
    def active(self) -> bool:
        """Requests that arrive now must wait."""
        return bool(self._turn or self._turns)

    def after_death(self, streams: Iterable[Stream], killed: bool) -> Stream | None:
        """Plan the turns in the next core. Returns the request that is to blame; it has no place in them.

        `streams` are all that live, and those that the core still had while nobody waited for them any more (`ended`).
        """
        streams = list(streams)
        inside = [p for p in streams if p.sent]
        outside = [p for p in streams if not p.sent]  # their turn had not come, whatever is held against them
        proven = [p for p in inside if p.num_in_core >= PROVEN]
        unproven = [p for p in inside if p.num_in_core < PROVEN]
        for p in proven:
            p.deaths = p.kills = 0
        if killed and not self._suspects.intersection(unproven):
            for p in outside:
                p.kills = 0
        for p in inside:
            if killed:
                p.kills += 1
            else:
                p.deaths += 1
        culprit = None
        if len(unproven) == 1 and unproven[0] in self._entered:
            p = unproven[0]
            if killed:
                self._alone.append(id(p))
            patience = PATIENCE_WHEN_KILLED + sum(i != id(p) for i in self._alone) // 2
            if not p.ended and (p.kills >= patience if killed else p.deaths >= PATIENCE):
                culprit = p
        for p in inside:
            p.sent, p.num_in_core = False, 0
        # those with the most deaths last: the others run by then, and need no further proof
        waiting = [p for p in unproven + outside if p is not culprit and not p.ended]
        suspects = sorted((p for p in waiting if p.deaths or p.kills > 1), key=lambda p: p.deaths + p.kills)
        unblamed = [p for p in waiting if not p.deaths and p.kills <= 1]
        self._suspects = set(waiting)
        size = max(1, -(-len(suspects) // MOST_TURNS))
        self._turn, self._entered = [], set()
        self._turns = deque(suspects[i : i + size] for i in range(0, len(suspects), size))
        if proven or unblamed:
            self._turns.appendleft(proven + unblamed)
        self._free = {*proven, *unblamed, *(p for p in outside if p in self._free)}
        return culprit

    def release(self) -> list[Stream]:
        """Take out those that other cores may have at once, if there are others."""
        free = [p for turn in self._turns for p in turn if p in self._free and not p.ended]
        self._turns = deque(rest for turn in self._turns if (rest := [p for p in turn if p not in self._free]))
        self._free = set()
        return free

    def advance(self) -> bool:
        """Let the next ones in if the present turn is over; True when there is no turn any more."""
        self._turn = [p for p in self._turn if not p.ended and p.num_in_core < PROVEN]
        if self._turn and self._clock() - self._began < TURN_SECONDS:
            return False
        self._turn = []
        while self._turns and not self._turn:
            self._turn = [p for p in self._turns.popleft() if not p.ended]
        self._began = self._clock()
        self._entered = {*self._turn, *(p for p in self._entered if not p.ended and p.num_in_core < PROVEN)}
        self._free.intersection_update(p for turn in self._turns for p in turn)
        for p in self._turn:
            self._submit(p)
        return not self._turn
