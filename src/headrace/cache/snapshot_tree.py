"""A prefix index for models whose layers keep a state: a path can only be gone on from where the state was kept. No torch here.

A *snapshot* is the state behind the last token of a node's block, in a row of its own of the StatePool (cache/state_pool.py).
There is a fixed number of them. One is free, promised to a step that will write it, or held by a node; where none is free, the
one that was used longest ago is taken from its node.
"""

from __future__ import annotations

from collections import OrderedDict

from headrace.cache.block_pool import BlockPool
from headrace.cache.radix_tree import Node, RadixTree
from headrace.cache.recorded_tree import below


class SnapshotTree(RadixTree):
    """A RadixTree whose matches end at a node with a snapshot."""

    def __init__(self, pool: BlockPool, block_size: int, num_snapshots: int):
        super().__init__(pool, block_size)
        self.num_snapshots = num_snapshots
        self._free = list(range(num_snapshots - 1, -1, -1))
        self._of: OrderedDict[Node, int] = OrderedDict()  # the one used last comes last

    def match(self, ids: bytes, salt: str, limit: int, path: list[Node] | None = None) -> list[Node]:
        path = super().match(ids, salt, limit, path)
        while path and path[-1] not in self._of:
            path.pop()
        return path

    def depth(self, ids: bytes, salt: str, limit: int) -> int:
        """Nodes that spell the start of `ids`, with a snapshot or without."""
        return len(super().match(ids, salt, limit))

    def use(self, node: Node) -> int:
        """The snapshot that a node has."""
        self._of.move_to_end(node)
        return self._of[node]

    def promise(self) -> int | None:
        """A snapshot to be written, to be given to `attach` or `give_back`; None: all are promised."""
        if not self._free and self._of:
            self._free.append(self._of.popitem(last=False)[1])
        return self._free.pop() if self._free else None

    def give_back(self, snapshot: int) -> None:
        """It was promised, and nobody will go on from it."""
        self._free.append(snapshot)

    def attach(self, node: Node, snapshot: int) -> None:
        """A launched step writes what was promised, behind the block of `node`."""
        if node in self._of:
            self.give_back(snapshot)
        else:
            self._of[node] = snapshot

    def drop(self, node: Node) -> None:
        for gone in below(node):
            if gone in self._of:
                self._free.append(self._of.pop(gone))
        super().drop(node)

    def check_snapshots(self, promised: list[int]) -> None:
        """AssertionError unless every snapshot is in one place, and those of nodes are of nodes that can be found."""
        held = list(self._of.values())
        places = sorted([*self._free, *held, *promised])
        assert places == list(range(self.num_snapshots)), f"{len(self._free)} free, {held} held, {promised} promised"
        assert all(node.indexed for node in self._of), "a node that has left the index holds a snapshot"
