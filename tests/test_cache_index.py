"""Block pool and prefix index, held against a model that is a dict of token tuples and looks at everything each time."""

from __future__ import annotations

import random
import time
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.cache.block_pool import BlockPool
from headrace.cache.radix_tree import RadixTree

SIZE = 2


def to_bytes(ids) -> bytes:
    return array("i", ids).tobytes()


def blocks_of(ids):
    return [tuple(ids[i : i + SIZE]) for i in range(0, len(ids) - len(ids) % SIZE, SIZE)]


def put(tree: RadixTree, ids: list[int], salt: str = "") -> list[int]:
    """Compute `ids` without looking at the index, enter all full blocks; the table, references still held."""
    table = tree.allocate(-(-len(ids) // SIZE))
    cursor = None
    for key, block in zip(blocks_of(ids), table, strict=False):
        cursor = tree.insert(cursor, salt, to_bytes(key), block)
    return table


def found(tree: RadixTree, ids: list[int], salt: str = "", limit: int = 10**6) -> list[int]:
    return [node.block for node in tree.match(to_bytes(ids), salt, limit)]


def check(tree: RadixTree) -> None:
    free, cached = tree.pool.check(), tree.check()
    assert not free & cached
    assert tree.num_available == len(free) + len(cached)


class NaiveIndex:
    """Paths as (salt, tuple of blocks) -> [block, last release]; evicts the least recently released leaf."""

    def __init__(self) -> None:
        self.paths: dict[tuple, list[int]] = {}
        self.clock = 0

    def match(self, ids, salt):
        path, result = (salt,), []
        for key in blocks_of(ids):
            path = (*path, key)
            if path not in self.paths:
                break
            result.append(self.paths[path][0])
        return result

    def evict(self, refs) -> int | None:
        leaves = [p for p in self.paths if not any(q[:-1] == p for q in self.paths) and not refs[self.paths[p][0]]]
        if not leaves:
            return None
        return self.paths.pop(min(leaves, key=lambda p: self.paths[p][1]))[0]


@given(st.data())
@settings(max_examples=150)
def test_matches_and_eviction_order_are_those_of_the_naive_index(data):
    pool = BlockPool(12)
    tree, naive = RadixTree(pool, SIZE), NaiveIndex()
    tables: list[tuple[list[int], str, list[int]]] = []
    ids_strategy = st.lists(st.integers(0, 1), min_size=1, max_size=9)
    for _ in range(data.draw(st.integers(1, 40))):
        ids, salt = data.draw(ids_strategy), data.draw(st.sampled_from(["", "x"]))
        action = data.draw(st.sampled_from(["run", "run", "release", "evict", "match"]))
        if action == "run":
            path = tree.match(to_bytes(ids), salt, (len(ids) - 1) // SIZE)
            assert [n.block for n in path] == naive.match(ids[: (len(ids) - 1) // SIZE * SIZE], salt)
            missing = -(-len(ids) // SIZE) - len(path)
            revived = sum(not pool.refs[n.block] for n in path)
            if missing > tree.num_available - revived:
                continue
            table = tree.acquire(path)
            while pool.num_free < missing:
                block = naive.evict(pool.refs)
                if block is None:
                    break
                tree.evict(1)
                assert block in pool.check(), "another block than the naive index's went"
            if pool.num_free < missing:  # stranded nodes: the naive index has no rule for them
                tree.release(table)
                return
            cursor = path[-1] if path else None
            table += tree.allocate(missing)
            name: tuple = (salt, *blocks_of(ids)[: len(path)])
            for index in range(len(path), len(ids) // SIZE):
                name = (*name, blocks_of(ids)[index])
                cursor = tree.insert(cursor, salt, to_bytes(name[-1]), table[index])
                naive.clock += 1
                entry = naive.paths.setdefault(name, [table[index], 0])
                if not pool.refs[entry[0]]:
                    entry[1] = naive.clock  # computed again counts as use
                assert cursor.block == entry[0]
            tables.append((ids, salt, table))
        elif action == "release" and tables:
            ids, salt, table = tables.pop(data.draw(st.integers(0, len(tables) - 1)))
            tree.release(table)
            stamp_of = {entry[0]: entry for entry in naive.paths.values()}
            for block in table:
                naive.clock += 1
                if not pool.refs[block] and block in stamp_of:
                    stamp_of[block][1] = naive.clock
        elif action == "evict":
            block = naive.evict(pool.refs)
            if block is not None:
                tree.evict(1)
                assert block in pool.check()
        else:
            assert found(tree, ids, salt) == naive.match(ids, salt)
        assert tree.num_nodes == len(naive.paths)
        check(tree)


def test_salts_do_not_see_each_other():
    tree = RadixTree(BlockPool(8), SIZE)
    table = put(tree, [1, 2, 3, 4], salt="tenant a")
    assert found(tree, [1, 2, 3, 4], "tenant a") == table
    assert found(tree, [1, 2, 3, 4], "tenant b") == found(tree, [1, 2, 3, 4]) == []


def test_a_salt_costs_nothing_once_its_blocks_are_gone():
    tree = RadixTree(BlockPool(2), SIZE)
    for i in range(1000):
        tree.release(put(tree, [i, i], salt=f"tenant {i} \ud800"))
    assert len(tree._roots) <= 2
    check(tree)


def test_ids_that_differ_in_the_high_bytes_only_do_not_match():
    tree = RadixTree(BlockPool(4), SIZE)
    put(tree, [1, 2])
    assert found(tree, [1 + 2**16, 2]) == found(tree, [1 + 2**24, 2]) == []


def test_a_reused_block_is_not_found_under_its_old_tokens():
    tree = RadixTree(BlockPool(2), SIZE)
    tree.release(put(tree, [1, 2, 3, 4]))
    table = put(tree, [5, 6, 7, 8])  # evicts both
    assert sorted(table) == [0, 1]
    assert found(tree, [1, 2, 3, 4]) == [] and found(tree, [5, 6, 7, 8]) == table
    check(tree)


def test_leaves_go_first_and_the_stem_stays():
    tree = RadixTree(BlockPool(4), SIZE)
    tree.release(put(tree, [1, 2, 3, 4, 5, 6]))
    tree.evict(1)
    assert len(found(tree, [1, 2, 3, 4, 5, 6])) == 2
    tree.evict(1)
    assert len(found(tree, [1, 2, 3, 4, 5, 6])) == 1
    check(tree)


def test_a_block_in_use_is_never_evicted():
    tree = RadixTree(BlockPool(4), SIZE)
    held = put(tree, [1, 2, 3, 4])
    tree.release(put(tree, [5, 6, 7, 8]))
    tree.evict(2)
    assert found(tree, [1, 2, 3, 4]) == held and found(tree, [5, 6]) == []
    with pytest.raises(RuntimeError):
        tree.evict(1)
    with pytest.raises(RuntimeError):
        tree.allocate(3)


def test_duplicates_stay_private_and_what_stands_above_one_in_use_can_still_be_had():
    tree = RadixTree(BlockPool(4), SIZE)
    first = put(tree, [1, 2])
    second = put(tree, [1, 2, 3, 4])  # its first block duplicates, its second hangs below the first one's node
    assert found(tree, [1, 2, 3, 4]) == [first[0], second[1]]
    tree.release(first)  # cached, with a child in use
    assert (tree.pool.num_free, tree.num_cached) == (1, 1)
    check(tree)
    third = tree.allocate(2)  # all that is available: the stranded node has to go, its subtree leaves the index
    assert first[0] in third and found(tree, [1, 2, 3, 4]) == []
    check(tree)
    tree.release(second)
    tree.release(third)
    assert tree.pool.num_free == 4
    check(tree)


def test_a_leaf_that_got_a_child_while_nobody_held_it_is_no_leaf_any_more():
    tree = RadixTree(BlockPool(8), SIZE)
    tree.release(put(tree, [1, 2]))
    held = put(tree, [1, 2, 3, 4])  # its own block for the stem: nobody holds the one that is indexed
    tree.release(put(tree, [5, 6]))
    tree.evict(1)
    assert found(tree, [5, 6]) == [] and found(tree, [1, 2, 3, 4])[1:] == [held[1]]
    check(tree)


def test_a_block_that_is_computed_again_counts_as_used():
    tree = RadixTree(BlockPool(8), SIZE)
    for ids in ([1, 2], [3, 4]):
        tree.release(put(tree, ids))
    put(tree, [1, 2])
    tree.evict(1)
    assert found(tree, [1, 2]) and not found(tree, [3, 4])


def test_an_insert_below_a_node_that_has_gone_is_refused():
    tree = RadixTree(BlockPool(4), SIZE)
    table = put(tree, [1, 2])
    (node,) = tree.match(to_bytes([1, 2]), "", 9)
    tree.release(table)
    tree.evict(1)
    block = tree.allocate(1)[0]
    assert tree.insert(node, "", to_bytes([3, 4]), block) is None
    check(tree)


def test_a_match_can_be_taken_up_again_after_evictions_and_insertions():
    tree = RadixTree(BlockPool(8), SIZE)
    ids = [1, 2, 3, 4, 5, 6]
    tree.release(put(tree, ids))
    path = tree.match(to_bytes(ids), "", 3)
    tree.evict(2)
    assert len(tree.match(to_bytes(ids), "", 3, path)) == 1
    tree.release(put(tree, ids))
    assert [n.block for n in tree.match(to_bytes(ids), "", 3, path)] == found(tree, ids)
    assert len(path) == 3
    assert len(tree.match(to_bytes(ids), "", 2, path)) == 2


def test_dropping_a_path_takes_all_that_hangs_on_it_and_nothing_else():
    tree = RadixTree(BlockPool(8), SIZE)
    held = put(tree, [1, 2, 3, 4])
    tree.release(put(tree, [1, 2, 5, 6]))
    other = put(tree, [7, 8])
    tree.drop_path(tree.match(to_bytes([1, 2, 3, 4]), "", 9)[-1])
    assert found(tree, [1, 2]) == [] and found(tree, [7, 8]) == other
    check(tree)
    tree.release(held)
    tree.release(other)
    assert tree.pool.num_free + tree.num_cached == 8 and tree.num_cached == 1


def test_hits_without_evictions_do_not_make_the_heap_grow():
    tree = RadixTree(BlockPool(4), SIZE)
    tree.release(put(tree, [1, 2]))
    for _ in range(10_000):
        tree.release(tree.acquire(tree.match(to_bytes([1, 2]), "", 9)))
    assert len(tree._leaves) <= 2048
    check(tree)


def test_cost_per_block_does_not_grow_with_the_cache():
    """A scan anywhere would cost 30 times more at 30 times the size; the bound is a third of that."""

    def cost(size: int) -> float:
        rng = random.Random(0)
        tree = RadixTree(BlockPool(size), SIZE)
        for _ in range(size // 8):
            tree.release(put(tree, [rng.randrange(1000) for _ in range(16)]))
        best = float("inf")
        for _ in range(5):
            began = time.thread_time()
            for _ in range(200):
                tree.release(put(tree, [rng.randrange(1000) for _ in range(16)]))
            best = min(best, time.thread_time() - began)
        return best

    assert cost(30_000) < 10 * cost(1_000)


def test_pool_refuses_to_hand_out_what_it_has_not():
    pool = BlockPool(3)
    taken = pool.take(2)
    assert len(set(taken)) == 2 and pool.num_free == 1 and [pool.refs[b] for b in taken] == [1, 1]
    with pytest.raises(RuntimeError, match="2 blocks"):
        pool.take(2)
    assert pool.num_free == 1


def test_pool_check_sees_a_double_free():
    pool = BlockPool(2)
    (block,) = pool.take(1)
    with pytest.raises(AssertionError):
        pool.free(block)
        pool.check()
    pool.refs[block] = 0
    pool.free(block)
    with pytest.raises(AssertionError, match="twice"):
        pool.check()
