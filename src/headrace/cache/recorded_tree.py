"""A prefix index that can be asked what has entered and left it: one wing of the index, for cores that are chosen by it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

from headrace.cache.block_pool import BlockPool
from headrace.cache.events import BlockEvents, Stored, chained, number, root_hash
from headrace.cache.radix_tree import Node, RadixTree


class RecordedTree(RadixTree):
    """A RadixTree that keeps the hash of each of its blocks, and which have come and gone since events() was last called.

    Of a block that did both only the last counts. If nobody asks, or too seldom, what is kept stays below twice the blocks
    that there are: then it is forgotten, and the next events begin anew with everything that is there, as the first ones do.
    """

    def __init__(self, pool: BlockPool, block_size: int, with_tokens: bool = False):
        super().__init__(pool, block_size)
        self.block_size, self.with_tokens = block_size, with_tokens
        self._hashes = [b""] * pool.num_blocks  # by block id, of those in the index
        self._changed: dict[bytes, Node | None] = {}  # by hash: the node that has entered; None: it has left
        self._anew = True

    def insert(self, parent: Node | None, salt: str, key: bytes, block: int) -> Node | None:
        before = self.num_nodes
        node = super().insert(parent, salt, key, block)
        if node is not None and self.num_nodes > before:
            above = root_hash(salt) if parent is None else self._hashes[parent.block]
            self._hashes[block] = digest = chained(above, key)
            self._note(digest, node)
        return node

    def drop(self, node: Node) -> None:
        for gone in below(node):
            self._note(self._hashes[gone.block], None)
        super().drop(node)

    def _note(self, digest: bytes, node: Node | None) -> None:
        if self._anew:
            return
        self._changed.pop(digest, None)  # in the order of what happened last
        self._changed[digest] = node
        if len(self._changed) > 2 * self.pool.num_blocks:
            self.tell_all()

    def tell_all(self) -> None:
        """The next events are to begin anew: somebody listens who does not know those before."""
        self._anew = True
        self._changed = {}

    def events(self) -> BlockEvents | None:
        """What has become of the blocks since the last call; None: nothing."""
        if self._anew:
            self._anew = False
            roots = list(self._roots.values())
            return BlockEvents(self._runs(node for root in roots for node in below(root)), [], True, self.block_size)
        if not self._changed:
            return None
        changed, self._changed = self._changed, {}
        evicted = [number(digest) for digest, node in changed.items() if node is None]
        return BlockEvents(self._runs(node for node in changed.values() if node is not None), evicted, False, self.block_size)

    def _runs(self, nodes: Iterable[Node]) -> list[Stored]:
        """Nodes, each after its parent, as runs of blocks that follow each other."""
        runs: list[Stored] = []
        last: Node | None = None
        for node in nodes:
            parent = node.parent
            if parent is None:  # a root
                continue
            if last is None or parent is not last:
                runs.append(Stored([], None if parent.is_root else number(self._hashes[parent.block])))
                if parent.is_root and self.with_tokens:
                    runs[-1].cache_salt = parent.key.decode("utf-8", "surrogatepass")
            runs[-1].hashes.append(number(self._hashes[node.block]))
            if self.with_tokens:
                runs[-1].token_ids += array("i", node.key)
            last = node
        return runs


def prefix_index(pool: BlockPool, block_size: int, events: str) -> RadixTree:
    """The index; `events`: "off", or "hashes" or "tokens" of the blocks that come and go."""
    return RadixTree(pool, block_size) if events == "off" else RecordedTree(pool, block_size, events == "tokens")


def below(node: Node) -> Iterator[Node]:
    """A node and all below it, each after its parent, one line of children after the other."""
    stack = [node]
    while stack:
        node = stack.pop()
        yield node
        if node.children:
            stack.extend(node.children.values())
