"""When the state of a sequence is kept, so that others can go on from there: at the ends of chunks. No torch here.

A chunk of a prompt ends where somebody may want to go on: at its last full block, before its end; where it leaves a prefix that
others had (the third to come by then finds a snapshot there); else on the border of a block, so that every long chunk leaves
one. A long answer leaves one every so many blocks: the next turn of a conversation begins with it, and so does a request that
was preempted. What is less than a few blocks is computed again.
"""

from __future__ import annotations

from headrace.cache.block_pool import BlockPool
from headrace.cache.radix_tree import Node, RadixTree
from headrace.cache.recorded_tree import prefix_index
from headrace.cache.snapshot_tree import SnapshotTree
from headrace.scheduler.config import Limits
from headrace.scheduler.decode_batch import Scheduled
from headrace.scheduler.request import Request

LEAST_BLOCKS = 4  # between two snapshots of a prompt
DECODE_BLOCKS = 16  # and of an answer


class NoSnapshots:
    """Of models whose layers keep no state."""

    def begin(self, request: Request, path: list[Node]) -> int:
        """A request is admitted and goes on behind `path`: from which snapshot; -1: from the start, or it needs none."""
        return -1

    def cut(self, request: Request, start: int, count: int) -> int:
        """How many of `count` tokens from `start` on a chunk should have."""
        return count

    def keep(self, request: Request, stop: int, step: Scheduled, decodes: bool) -> None:
        """`step` computes a request's tokens up to `stop`: the state there may be worth a snapshot."""

    def indexed(self, request: Request, node: Node) -> None:
        """`node` stands for the last of a request's blocks that are in the index."""

    def end(self, request: Request) -> None:
        """A request gives its slot back."""

    def check(self, running: set[Request]) -> None:
        """AssertionError unless snapshots add up; `running`: the requests with a slot."""


def prefix_cache(pool: BlockPool, limits: Limits) -> tuple[RadixTree, NoSnapshots]:
    """The index, and what is to be done about states."""
    if not limits.num_snapshots:
        return prefix_index(pool, limits.block_size, limits.kv_cache_events), NoSnapshots()
    tree = SnapshotTree(pool, limits.block_size, limits.num_snapshots)
    return tree, Snapshots(tree, limits.block_size)


class Snapshots(NoSnapshots):
    """The scheduler's part: `tree` knows which snapshots there are."""

    def __init__(self, tree: SnapshotTree, block_size: int):
        self.tree, self.block_size = tree, block_size
        self._promised: dict[Request, dict[int, int]] = {}  # by how many blocks the state is behind: the snapshot
        self._last: dict[Request, int] = {}  # of those that run: tokens behind the last one, kept or gone on from
        self._branch: dict[Request, int] = {}  # tokens that others had as well when it was admitted

    def begin(self, request: Request, path: list[Node]) -> int:
        self._last[request] = len(path) * self.block_size
        limit = (request.num_known - 1) // self.block_size
        self._branch[request] = self.block_size * self.tree.depth(request.keys, request.cache_salt, limit)
        return self.tree.use(path[-1]) if path else -1

    def cut(self, request: Request, start: int, count: int) -> int:
        if not request.indexing:
            return count
        size, stop = self.block_size, start + count
        for border in sorted((self._branch[request], (request.num_tokens - 1) // size * size)):
            if start < border < stop and self._is_worth(request, border, LEAST_BLOCKS):
                return border - start
        if stop < request.num_tokens and stop // size * size > start:
            return stop // size * size - start
        return count

    def _is_worth(self, request: Request, stop: int, blocks: int) -> bool:
        return stop - self._last[request] >= blocks * self.block_size

    def keep(self, request: Request, stop: int, step: Scheduled, decodes: bool) -> None:
        blocks = DECODE_BLOCKS if decodes else LEAST_BLOCKS
        if stop % self.block_size or not request.indexing or not self._is_worth(request, stop, blocks):
            return
        snapshot = self.tree.promise()
        if snapshot is not None:
            step.kept.append((request.slot, snapshot))
            self._promised.setdefault(request, {})[stop // self.block_size] = snapshot
            self._last[request] = stop

    def indexed(self, request: Request, node: Node) -> None:
        promised = self._promised.get(request)
        if promised and (snapshot := promised.pop(request.num_indexed, None)) is not None:
            self.tree.attach(node, snapshot)

    def end(self, request: Request) -> None:
        for snapshot in self._promised.pop(request, {}).values():
            self.tree.give_back(snapshot)
        del self._last[request], self._branch[request]

    def check(self, running: set[Request]) -> None:
        assert self._last.keys() == self._branch.keys() == running >= self._promised.keys(), "snapshots of nobody's sequence"
        self.tree.check_snapshots([one for promised in self._promised.values() for one in promised.values()])
