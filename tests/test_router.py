"""The router: what it knows of the cores' blocks is what they hold, and what it chooses is what the rule says."""

from __future__ import annotations

from array import array
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.cache.block_pool import BlockPool
from headrace.cache.events import BlockEvents, Stored, block_hashes
from headrace.cache.recorded_tree import RecordedTree
from headrace.distributed import block_index
from headrace.distributed import router as router_module
from headrace.distributed.balancers import balancer_named
from headrace.distributed.block_index import BlockIndex
from headrace.distributed.router import CANDIDATES, Draws, Router
from headrace.errors import ParameterError
from test_cache_index import SIZE, to_bytes

NAMES = st.integers(0, 11)


def cores_of(index: BlockIndex, name: int) -> set[int]:
    mask = index.holders(name)
    return {core for core, place in index.places.items() if mask >> place & 1}


@given(st.data())
@settings(max_examples=80)
def test_masks_are_those_of_a_naive_model(data):
    index = BlockIndex(1000, 1000)
    held: dict[int, set[int]] = {}
    expected: dict[int, set[int]] = {}
    for _ in range(data.draw(st.integers(1, 60))):
        action = data.draw(st.sampled_from(["add", "remove", "stored", "stored", "evicted", "expect", "tidy", "touch"]))
        core = data.draw(st.integers(0, 4))
        names = data.draw(st.lists(NAMES, max_size=4))
        if action == "add":
            index.add(core)
            held[core], expected[core] = set(), set()
        elif action == "remove":
            index.remove(core)
            held.pop(core, None)
            expected.pop(core, None)
        elif action == "tidy":
            index.tidy(data.draw(st.integers(1, 5)))
        elif action == "touch":
            index.touch(names)
        elif core in held:
            getattr(index, action)(core, names)
            if action == "stored":
                held[core] |= set(names)
                expected[core] -= set(names)
            elif action == "evicted":
                held[core] -= set(names)
                expected[core] -= set(names)
            else:
                expected[core] |= set(names)
        for name in range(12):
            assert cores_of(index, name) == {c for c in held if name in held[c] | expected[c]}
        assert set(index.places) == set(held)
    for _ in range(4):
        index.tidy(1000)
    assert len(index) == len(set().union(*held.values()) if held else set()), "blocks that nobody holds are kept"


def test_places_are_used_again_and_their_number_is_bounded(monkeypatch):
    monkeypatch.setattr(block_index, "MOST_GONE", 4)
    index = BlockIndex(1000, 1000)
    for core in range(200):  # each comes, stores and goes before anything is tidied up
        index.add(core)
        index.stored(core, range(core, core + 50))
        index.expect(core, [core])
        index.remove(core)
        assert len(index._cores) <= 16
    index.add(7)
    assert all(not index.holders(name) for name in range(300))


def test_the_memory_is_bounded_and_the_blocks_used_last_stay():
    index = BlockIndex(640, 64)
    index.add(0)
    index.stored(0, system := list(range(10)))
    for i in range(1, 200):
        index.touch(system)
        index.stored(0, chain := list(range(1000 * i, 1000 * i + 30)))
        index.expect(0, range(-100 * i, 90 - 100 * i))
        assert len(index) <= 640 and len(index._expected) <= 64
        assert all(map(index.holders, chain)), "what has just been stored is forgotten"
    assert all(map(index.holders, system)), "what is used all the time is forgotten"
    index.touch(chain)
    while all(map(index.holders, chain)):
        index.stored(0, range(i := i + 1000, i + 10))
    gone = [not index.holders(name) for name in chain]
    assert gone == sorted(gone), "the beginning of a prompt goes before its end"


# ---- with cores that have real prefix indexes


class Cores:
    """Real indexes, whose events the router is told."""

    def __init__(self, router: Router, count: int, num_blocks: int = 24):
        self.router, self.num_blocks = router, num_blocks
        self.trees: dict[int, RecordedTree] = {}
        for core in range(count):
            self.add(core)

    def add(self, core: int) -> None:
        self.router.added(core)
        self.trees[core] = RecordedTree(BlockPool(self.num_blocks), SIZE)
        self.tell(core)

    def tell(self, core: int) -> None:
        events = self.trees[core].events()
        if events is not None:
            self.router.blocks(core, events)

    def run(self, core: int, ids: list[int], salt: str = "") -> None:
        tree = self.trees[core]
        path = tree.match(to_bytes(ids), salt, len(ids) // SIZE)
        held, cursor = tree.acquire(path), path[-1] if path else None
        table = tree.allocate(len(ids) // SIZE - len(path))
        for index, block in enumerate(table, len(path)):
            cursor = tree.insert(cursor, salt, to_bytes(ids[index * SIZE : (index + 1) * SIZE]), block)
        tree.release(held + table)

    def hit(self, core: int, ids: list[int], salt: str = "") -> int:
        return len(self.trees[core].match(to_bytes(ids), salt, len(ids) // SIZE)) * SIZE


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=12)


@patch.object(router_module, "RECENT", 0)
@given(st.data())
@settings(max_examples=80)
def test_the_choice_has_the_fewest_tokens_before_it(data):
    """With as many cores as are looked at, and no prompt popular, the choice is the best of all by what they really hold."""
    weight = data.draw(st.sampled_from([0.5, 1.0, 4.0]))
    cores = Cores(Router(seed=data.draw(st.integers(0, 2**64)), prefix_weight=weight, max_expected=0), data.draw(st.integers(2, CANDIDATES)))
    router = cores.router
    for _ in range(data.draw(st.integers(1, 20))):
        ids, salt = data.draw(prompts), data.draw(st.sampled_from(["", "", "x"]))
        core = data.draw(st.sampled_from(sorted(cores.trees)))
        action = data.draw(st.sampled_from(["run", "run", "evict", "die", "drain"]))
        if action == "run":
            cores.run(core, ids, salt)
        elif action == "evict" and cores.trees[core].num_cached:
            cores.trees[core].evict(data.draw(st.integers(1, cores.trees[core].num_cached)))
        elif action == "die":
            router.removed(core)
            cores.add(core)
        cores.tell(core)
        loads = {c: data.draw(st.integers(0, 12)) for c in cores.trees if action != "drain" or c != core}
        chosen = router.choose(array("i", ids), salt, loads)
        assert chosen in loads
        cost = {c: loads[c] - weight * cores.hit(c, ids, salt) for c in loads}
        assert cost[chosen] == min(cost.values())


@given(st.data())
@settings(max_examples=40)
def test_a_core_that_is_gone_is_never_chosen(data):
    """Whatever it was told and in which order, also of cores that it was never told of."""
    router = Router(max_blocks=64, max_expected=16)
    for _ in range(data.draw(st.integers(1, 40))):
        action, core = (
            data.draw(st.sampled_from(["added", "removed", "blocks", "choose", "choose"])),
            data.draw(st.integers(0, 60)),
        )
        if action == "choose":
            loads = data.draw(st.dictionaries(st.integers(0, 60), st.integers(0, 50), min_size=1, max_size=30))
            assert router.choose(array("i", data.draw(prompts)), "", loads) in loads
        elif action == "blocks":
            names = block_hashes(array("i", data.draw(prompts)), SIZE)
            cleared = data.draw(st.booleans())
            router.blocks(
                core, BlockEvents([Stored(names)], data.draw(st.lists(NAMES)), cleared, data.draw(st.sampled_from([SIZE, 3])))
            )
        else:
            getattr(router, action)(core)


def prompt(*parts: int) -> list[int]:
    """Ten blocks for each part."""
    return [part for part in parts for _ in range(10 * SIZE)]


@pytest.mark.parametrize("count", [2, 3, 40, 500])
@pytest.mark.parametrize(("more", "wins"), [(0, True), (40 * SIZE, True), (40 * SIZE + 1, False)])
def test_who_holds_the_prompt_wins_until_its_load_outweighs_it(count, more, wins):
    cores = Cores(Router(prefix_weight=4.0), count)
    cores.run(1, prompt(5))
    cores.tell(1)
    loads = dict.fromkeys(range(count), 100) | {1: 100 + more}
    assert (cores.router.choose(array("i", prompt(5, 6)), "", loads) == 1) == wins
    if more:
        assert cores.router.choose(array("i", prompt(5, 6)), "another's", loads) != 1


def test_who_holds_less_is_taken_when_who_holds_most_is_busy():
    cores = Cores(Router(), 100)
    for core in range(20, 50):
        cores.run(core, prompt(5))
        cores.tell(core)
    cores.run(7, prompt(5, 6))
    cores.tell(7)
    loads = dict.fromkeys(range(100), 0)
    assert cores.router.choose(array("i", prompt(5, 6)), "", loads) == 7
    loads[7] = 1000
    assert cores.router.choose(array("i", prompt(5, 6, 7)), "", loads) in range(20, 50)


def test_a_burst_of_one_prompt_stays_together_before_any_core_has_stored_it():
    cores = Cores(Router(prefix_weight=10.0), 4)
    loads = dict.fromkeys(range(4), 0)
    first = cores.router.choose(array("i", prompt(1, 2)), "", loads)
    chosen = set()
    for i in range(8):
        loads[first] += 5
        chosen.add(cores.router.choose(array("i", prompt(1, 2, 100 + i)), "", loads))
    assert chosen == {first}
    other = cores.router.choose(array("i", prompt(3)), "", loads)
    assert other != first, "a prompt that nobody holds goes where there is least to do"
    cores.router.removed(first)
    cores.add(first)
    loads = {core: core != other for core in range(4)}
    assert cores.router.choose(array("i", prompt(1, 2)), "", loads) == other, "what a dead core was sent is forgotten"


@pytest.mark.parametrize(("recent", "wanted"), [(8, {6, 7, 8}), (0, {1, 2, 3})])
def test_a_prompt_that_all_have_is_spread(monkeypatch, recent, wanted):
    """What one core holds is worth the less, the more of the last requests could use it; without that few cores get them all."""
    monkeypatch.setattr(router_module, "RECENT", recent)
    cores = Cores(Router(), 8, num_blocks=400)
    loads, places = dict.fromkeys(range(8), 0), set()
    for i in range(300):
        ids = prompt(*range(20), 100 + i % 3)
        core = cores.router.choose(array("i", ids), "", loads)
        cores.run(core, ids)
        cores.tell(core)
        loads[core] += 10
        places.add(core)
    assert len(places) in wanted
    assert len(cores.router._recent) == recent * 8 == sum(cores.router._uses.values())


def test_cores_of_another_block_size_take_over():
    router = Router()
    for core, size in ((0, 2), (1, 4)):
        router.added(core)
        router.blocks(core, BlockEvents([], [], True, size))
    ids = array("i", range(40))
    for core, size in ((0, 2), (1, 4)):
        router.blocks(core, BlockEvents([Stored(block_hashes(ids, size))], [], False, size))
    assert router.block_size == 4
    assert router.choose(ids, "", {0: 0, 1: 20}) == 1


def test_draws_depend_on_seed_and_count_alone_and_spread():
    a, b = Draws(5), Draws(5)
    assert [a.below(10) for _ in range(100)] == [b.below(10) for _ in range(100)]
    counts = [0] * 10
    for _ in range(10_000):
        counts[a.below(10)] += 1
    assert min(counts) > 900
    found = a.some(list(range(20)), 5, dict.fromkeys(range(10), 0))
    assert len(set(found)) == 5 and min(found) >= 10
    assert sorted(a.some([1, 2, 3], 9, {2: 0})) == [1, 3]


def test_the_other_rules():
    loads = {0: 5, 3: 1, 7: 1}
    least, turns = balancer_named("least-loaded"), balancer_named("round-robin")
    assert least.choose(array("i", [1]), "", loads) == 3
    assert [turns.choose(array("i", [1]), "", loads) for _ in range(4)] == [0, 3, 7, 0]
    assert turns.choose(array("i", [1]), "", {0: 0, 7: 0}) == 7
    with pytest.raises(ParameterError, match="one of prefix, least-loaded, round-robin"):
        balancer_named("random")
