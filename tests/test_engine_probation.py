"""After deaths of the core: the one that kills it is found, nobody else is blamed, everybody else gets in."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.probation import MOST_TURNS, PATIENCE, PATIENCE_WHEN_KILLED, PROVEN, RECENT_KILLS, TURN_SECONDS, Probation


@dataclass(eq=False)
class Passenger:
    name: int
    length: int = 20
    fatal_at: int | None = None  # the core dies when it is about to get its n-th token
    done: int = 0
    placed: bool = False  # it belongs to this core or the next: the client leaves it to the probation
    sent: bool = False
    ended: bool = False
    num_in_core: int = 0
    deaths: int = 0
    kills: int = 0


@dataclass
class World:
    """A core that steps all passengers at once, and its client."""

    passengers: list[Passenger]
    killed: bool = False  # by a signal, where a request ends the core
    clock: float = 0.0
    deaths: int = 0
    blamed: list[Passenger] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.probation = Probation(self.submit, lambda: self.clock)

    def submit(self, p: Passenger) -> None:
        assert not p.sent and not p.ended
        p.placed = p.sent = True
        p.num_in_core = 0

    def send_rest(self) -> None:
        for p in self.passengers:
            assert p.sent or p.ended or not p.placed, "nobody is on probation, and one is not let in"
            if not p.placed and not p.ended:
                self.submit(p)

    def die(self, killed: bool) -> None:
        self.deaths += 1
        culprit = self.probation.after_death([p for p in self.passengers if p.placed and not p.ended], killed)
        if culprit is not None:
            culprit.ended = True
            self.blamed.append(culprit)
        if not self.probation.active or self.probation.advance():
            self.send_rest()

    def step(self) -> None:
        running = [p for p in self.passengers if p.sent and not p.ended]
        # what a step sampled is read one step late: a fatal one takes the news of the step before along
        if any(p.fatal_at is not None and p.done + 1 >= p.fatal_at for p in running):
            return self.die(self.killed)
        for p in running:
            p.done += 1
            p.num_in_core += 1
            p.ended = p.done >= p.length
        self.clock += 0.01
        if self.probation.active and self.probation.advance():
            self.send_rest()


@given(arrivals=st.lists(st.integers(0, 60), min_size=1, max_size=12), gaps=st.lists(st.integers(0, 8), max_size=30))
def test_nobody_is_forgotten_however_often_somebody_kills_the_core(arrivals, gaps):
    world, due, kills = World([]), sorted(arrivals), set(accumulate(gaps))
    for step in range(3000):
        while due and due[0] <= step:
            due.pop(0)
            world.passengers.append(Passenger(len(world.passengers), 40))
            if not world.probation.active:
                world.send_rest()
        world.die(True) if step in kills else world.step()
        if not due and all(p.ended for p in world.passengers):
            return
    raise AssertionError([p for p in world.passengers if not p.ended])


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=20),
    fatal=st.lists(st.integers(1, 25), max_size=1) | st.lists(st.integers(1, PROVEN), max_size=4),
    kills=st.lists(st.integers(0, 40), max_size=PATIENCE_WHEN_KILLED - 1),
)
def test_the_killers_are_blamed_and_only_they(lengths, fatal, kills):
    passengers = [Passenger(i, n) for i, n in enumerate(lengths)]
    passengers += [Passenger(100 + i, 30, at) for i, at in enumerate(fatal)]
    world = World(passengers)
    world.send_rest()
    for step in range(5000):
        if all(p.ended for p in passengers):
            break
        world.die(True) if step in kills else world.step()
    killers = [p for p in passengers if p.fatal_at is not None]
    assert all(p.ended for p in passengers)
    assert {p.name for p in world.blamed} == {p.name for p in killers}
    assert all(p.done == p.length for p in passengers if p.fatal_at is None), "everybody else got everything"


def test_one_killer_among_many_costs_two_deaths():
    """Whenever it comes, whoever is there."""
    for fatal_at in (1, 2):
        for others in range(6):
            world = World([Passenger(i, 200, None) for i in range(others)])
            world.send_rest()
            for _ in range(10):
                world.step()
            killer = Passenger(99, 50, fatal_at)
            world.passengers.append(killer)
            world.submit(killer)
            while not killer.ended:
                world.step()
            assert world.deaths == PATIENCE == 2 and world.blamed == [killer]


def test_a_kill_from_outside_needs_more_proof():
    world = World([Passenger(0)])
    world.send_rest()
    for n in range(PATIENCE_WHEN_KILLED):
        assert not world.blamed, n
        world.die(True)
    assert [p.name for p in world.blamed] == [0]


def test_a_kill_of_a_core_without_suspects_speaks_for_those_outside():
    old, suspect = Passenger(0, 100), Passenger(1, 100)
    world = World([old, suspect])
    world.send_rest()
    world.die(True)
    world.die(True)
    for kills in range(2, PATIENCE_WHEN_KILLED - 1):
        assert suspect.kills == kills and not suspect.sent and old.sent
        for _ in range(PROVEN):
            world.step()  # of the old one, alone
        assert suspect.sent
        world.die(True)
    assert suspect.kills == PATIENCE_WHEN_KILLED - 1 and not suspect.sent and old.sent
    world.die(True)  # the old one was inside alone
    assert suspect.kills == 0 and not world.blamed
    world.die(True)
    while not suspect.ended:
        world.step()


def test_a_kill_of_a_core_with_one_suspect_says_nothing_of_others():
    first, second = passengers = [Passenger(0), Passenger(1)]
    world = World(passengers)
    world.send_rest()
    world.die(True)
    world.die(True)
    assert first.sent and not second.sent and first.kills == second.kills == 2
    world.die(True)
    assert first.kills == 3 and second.kills == 2


def test_one_kill_holds_nobody_up():
    world = World([Passenger(i) for i in range(50)])
    world.send_rest()
    for _ in range(PROVEN):
        world.step()
    world.passengers += [Passenger(100 + i) for i in range(50)]
    world.send_rest()
    world.die(True)
    assert all(p.sent for p in world.passengers)


def test_who_kills_cores_all_the_time_is_found_outside():
    """Five kills in a row hit one request sooner or later; that they hit others, too, speaks for it."""
    rng, ended = random.Random(0), 0
    world = World([])
    for number in range(400):
        for step in range(rng.randint(3, 12)):
            world.passengers = [p for p in world.passengers if not p.ended]
            ended += 40 - len(world.passengers)
            new = range(40 - len(world.passengers))
            world.passengers += [Passenger(10**6 * number + 1000 * step + i, rng.randint(1, 60)) for i in new]
            if not world.probation.active:
                world.send_rest()
            world.step()
        world.die(True)
    assert not world.blamed and ended > 1000


@pytest.mark.parametrize("killers", [1, 2, 3, 6])
def test_those_that_take_all_memory_are_found_though_they_are_several(killers):
    """The OOM killer's signal is that of an operator."""
    innocent = [Passenger(i, 100) for i in range(5)]
    world = World([*innocent, *(Passenger(100 + i, 50, 2) for i in range(killers))], killed=True)
    world.send_rest()
    while not all(p.ended for p in world.passengers):
        world.step()
    assert {p.name for p in world.blamed} == {100 + i for i in range(killers)} and all(p.done == 100 for p in innocent)
    assert world.deaths <= killers * (PATIENCE_WHEN_KILLED + RECENT_KILLS // 2) and (killers > 1 or world.deaths == PATIENCE_WHEN_KILLED)


def test_deaths_without_passengers_blame_nobody():
    world = World([])
    world.die(False)
    assert not world.probation.active and not world.blamed


def test_turns_are_bounded_in_number_and_time():
    passengers = [Passenger(i, 1000) for i in range(3 * MOST_TURNS)]
    world = World(passengers)
    world.send_rest()
    world.die(True)  # nobody is proven
    world.die(True)
    steps = 0
    while world.probation.active:
        world.step()
        steps += 1
    assert steps <= MOST_TURNS * (PROVEN + 1) and all(p.sent for p in passengers)
    world = World([Passenger(0), Passenger(1)])
    world.send_rest()
    world.die(True)
    world.die(True)
    first = [p.sent for p in world.passengers]
    assert sum(first) == 1
    world.clock += TURN_SECONDS + 1  # it makes no progress, perhaps a long prefill
    world.probation.advance()
    assert all(p.sent for p in world.passengers)


def test_who_has_left_is_not_blamed_nor_anybody_for_him():
    """The reader of a killer went away: the core has it, nobody waits for it."""
    gone, innocent = Passenger(0), Passenger(1)
    probation = Probation(lambda p: None)
    for _ in range(4):
        gone.sent = innocent.sent = gone.ended = True
        innocent.num_in_core = gone.num_in_core = 0
        assert probation.after_death([gone, innocent], False) is None
