"""What a prefix index tells of its blocks: whoever listens knows which token paths are in it, whatever happens and whenever he asks."""

from __future__ import annotations

import subprocess
import sys
from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.cache.block_pool import BlockPool
from headrace.cache.events import BlockEvents, block_hashes
from headrace.cache.radix_tree import RadixTree
from headrace.cache.recorded_tree import RecordedTree, prefix_index
from headrace.scheduler.config import Limits
from scheduler_driver import SchedulerDriver
from test_cache_index import SIZE, check, put


class Listener:
    """Knows of an index what its events say."""

    def __init__(self) -> None:
        self.held: dict[int, tuple] = {}  # by hash: parent, tokens, salt

    def hear(self, events: BlockEvents | None) -> None:
        if events is None:
            return
        if events.cleared:
            self.held.clear()
        for name in events.evicted:
            self.held.pop(name, None)
        for run in events.stored:
            parent = run.parent
            size = events.block_size
            assert not run.token_ids or len(run.token_ids) == size * len(run.hashes)
            for i, name in enumerate(run.hashes):
                assert parent is None or parent in self.held, "a block is told of before the one above it"
                self.held[name] = (parent, tuple(run.token_ids[i * size : (i + 1) * size]), run.cache_salt if i == 0 else "")
                parent = name


def paths(tree: RadixTree) -> set[tuple[str, tuple[int, ...]]]:
    """(salt, tokens up to its end) of every block in the index."""
    stack = [(root, root.key.decode("utf-8", "surrogatepass"), ()) for root in tree._roots.values()]
    found = set()
    while stack:
        node, salt, ids = stack.pop()
        for key, child in (node.children or {}).items():
            below = (*ids, *array("i", key))
            found.add((salt, below))
            stack.append((child, salt, below))
    return found


def hash_of(salt: str, ids: tuple[int, ...]) -> int:
    return block_hashes(array("i", ids), SIZE, salt)[-1]


@given(st.data())
@settings(max_examples=100)
def test_whoever_listens_knows_what_the_index_holds(data):
    tree = RecordedTree(BlockPool(data.draw(st.sampled_from([3, 8, 12]))), SIZE, with_tokens=data.draw(st.booleans()))
    listener, tables = Listener(), []
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["put", "put", "release", "evict", "drop path", "hear", "tell all"]))
        if action == "put":
            ids, salt = (
                data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=9)),
                data.draw(st.sampled_from(["", "x\ud800"])),
            )
            if -(-len(ids) // SIZE) <= tree.num_available:
                tables.append(put(tree, ids, salt))
        elif action == "release" and tables:
            tree.release(tables.pop(data.draw(st.integers(0, len(tables) - 1))))
        elif action == "evict" and tree.num_cached:
            tree.evict(data.draw(st.integers(1, tree.num_cached)))
        elif action == "drop path" and tables:
            node = tree.nodes[data.draw(st.sampled_from(data.draw(st.sampled_from(tables))))]
            if node is not None:
                tree.drop_path(node)
        elif action == "tell all":
            tree.tell_all()
        elif action == "hear":
            listener.hear(tree.events())
        assert len(tree._changed) <= 2 * tree.pool.num_blocks
    listener.hear(tree.events())
    assert tree.events() is None
    check(tree)
    assert set(listener.held) == {hash_of(salt, ids) for salt, ids in paths(tree)}
    if tree.with_tokens:
        assert sorted(tokens for _, tokens, _ in listener.held.values()) == sorted(ids[-SIZE:] for _, ids in paths(tree))
        assert all(salt == "" or parent is None for parent, _, salt in listener.held.values())
        assert {salt for parent, _, salt in listener.held.values() if parent is None} == {salt for salt, ids in paths(tree)}


def test_what_a_block_did_and_undid_between_two_questions_is_told_once():
    tree = RecordedTree(BlockPool(4), SIZE)
    first = tree.events()
    assert first == BlockEvents([], [], True, SIZE)
    tree.release(put(tree, [1, 2, 3, 4]))
    tree.evict(2)
    tree.release(put(tree, [1, 2]))
    events = tree.events()
    assert [run.hashes for run in events.stored] == [block_hashes(array("i", [1, 2]), SIZE)]
    assert events.evicted == block_hashes(array("i", [1, 2, 3, 4]), SIZE)[1:] and not events.cleared


def test_an_index_that_nobody_asks_keeps_nothing_and_begins_anew_when_it_is_asked():
    tree = RecordedTree(BlockPool(2), SIZE)
    tree.events()
    for i in range(100):
        tree.release(put(tree, [i, i]))
        assert len(tree._changed) <= 4
    events = tree.events()
    assert events.cleared
    assert sorted(run.hashes for run in events.stored) == sorted(block_hashes(array("i", [i, i]), SIZE) for i in (98, 99))


def test_a_hash_is_chained_salted_and_the_same_in_another_process():
    ids = array("i", [5, 6, 7, 8, 9])
    hashes = block_hashes(ids, SIZE)
    assert len(hashes) == 2 and hashes == block_hashes(ids[:4], SIZE)
    assert hashes[1] != block_hashes(array("i", [1, 6, 7, 8]), SIZE)[1] and not set(hashes) & set(block_hashes(ids, SIZE, "x"))
    code = (
        f"from array import array; from headrace.cache.events import *; print(block_hashes(array('i', {ids.tolist()}), {SIZE}))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == str(
        hashes
    )


def test_who_asks_for_no_events_has_the_plain_index():
    assert type(prefix_index(BlockPool(1), SIZE, "off")) is RadixTree


def test_a_scheduler_tells_of_prompts_outputs_and_evictions():
    limits = Limits(
        max_num_seqs=2, max_num_batched_tokens=16, max_model_len=32, block_size=SIZE, num_blocks=8, kv_cache_events="tokens"
    )
    driver, listener = SchedulerDriver(limits), Listener()
    tree = driver.scheduler.tree
    for i in range(6):
        request = driver.add(f"r{i}", [i, 1, 2, 3, 4], max_tokens=4, ignore_eos=True)
        driver.run()
        listener.hear(tree.events())
        assert set(listener.held) == {hash_of(salt, ids) for salt, ids in paths(tree)}
    ids = array("i", [*request.prompt_ids, *request.output_ids])
    assert set(block_hashes(ids[:-1], SIZE)) <= set(listener.held)
