"""The prefix index: which full blocks hold which tokens after which prefix, and which of them goes first. No torch here."""

from __future__ import annotations

from heapq import heappop, heappush

from headrace.cache.block_pool import BlockPool

ID_BYTES = 4  # token ids are compared as int32 bytes: exact, and a dict key that hashes once


class Node:
    """One full block under its parent: `key` holds its tokens, `block` the KV of these tokens after the whole path.

    A root has a salt for a key and neither parent nor block.
    """

    __slots__ = ("block", "children", "indexed", "is_root", "key", "parent", "stamp")

    def __init__(self, parent: Node | None, key: bytes, block: int = 0):
        self.parent = parent
        self.key = key
        self.block = block
        self.children: dict[bytes, Node] | None = None  # made with the first child: a leaf needs none
        self.stamp = 0  # when its last reference went
        self.is_root = parent is None
        self.indexed = True  # until it leaves the index


def root_key(salt: str) -> bytes:
    return salt.encode("utf-8", "surrogatepass")


class RadixTree:
    """Prefix tree over full blocks of `block_size` tokens; owner of every block that is cached.

    Each `salt` has its own root, so that tenants do not see each other's prefixes; a root lives as long as it has
    children, so there are never more roots than blocks. Tokens are compared exactly (no hash stands for them).

    Eviction takes the least recently released *leaf* without references, in O(log n): a heap of (stamp, node) whose
    outdated entries are skipped when they surface and swept out when they are more than the blocks. A request whose block
    duplicates an existing node keeps its own block, private, and goes on below the existing node; so a node without
    references may stand above one in use. Such a stranded node goes when no leaf is left, and its subtree leaves the
    index with it: free + cached is what can really be had.
    """

    def __init__(self, pool: BlockPool, block_size: int):
        self.pool = pool
        self.key_bytes = block_size * ID_BYTES
        self.num_cached = 0  # blocks without references that are in the index
        self.num_nodes = 0
        self._roots: dict[bytes, Node] = {}  # by salt
        self.nodes: list[Node | None] = [None] * pool.num_blocks  # by block id
        self._leaves: list[tuple[int, Node]] = []
        self._clock = 0

    @property
    def num_available(self) -> int:
        """Blocks that allocate() can give now."""
        return self.pool.num_free + self.num_cached

    def match(self, ids: bytes, salt: str, limit: int, path: list[Node] | None = None) -> list[Node]:
        """The longest path of at most `limit` nodes that spells the start of `ids` (int32 bytes), root's child first.

        `path` may hold an earlier answer for the same ids: it is shortened to what still exists and extended in place,
        so asking again costs what has changed. References are not taken: see acquire().
        """
        if path is None:
            path = []
        del path[limit:]
        while path and not path[-1].indexed:  # a parent never leaves before its children
            path.pop()
        node = path[-1] if path else self._roots.get(root_key(salt))
        width = self.key_bytes
        start = len(path) * width
        while node is not None and node.children and len(path) < limit:
            node = node.children.get(ids[start : start + width])
            if node is not None:
                path.append(node)
                start += width
        return path

    def acquire(self, path: list[Node]) -> list[int]:
        """Take one reference to each block of the path; the block ids."""
        refs = self.pool.refs
        blocks = [node.block for node in path]
        for block in blocks:
            if not refs[block]:
                self.num_cached -= 1
            refs[block] += 1
        return blocks

    def insert(self, parent: Node | None, salt: str, key: bytes, block: int) -> Node | None:
        """The node of `key` under `parent` (None: the root of `salt`), made for `block` unless it exists.

        None if the parent has left the index. The caller holds a reference to `block`.
        """
        if parent is None:
            parent = self._roots.get(root_key(salt))
            if parent is None:
                parent = self._roots[root_key(salt)] = Node(None, root_key(salt))
        elif not parent.indexed:
            return None
        children = parent.children
        if children is None:
            children = parent.children = {}
        node = children.get(key)
        if node is None:
            node = children[key] = self.nodes[block] = Node(parent, key, block)
            self.num_nodes += 1
        elif not self.pool.refs[node.block]:
            self._retire(node)  # computed again: as good as used
        return node

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each, evicting as needed; at most num_available."""
        missing = count - self.pool.num_free
        if missing > 0:
            self.evict(missing)
        return self.pool.take(count)

    def release(self, blocks: list[int]) -> None:
        """Give back one reference to each block of a table."""
        refs, nodes, free = self.pool.refs, self.nodes, self.pool.free
        for block in blocks:
            refs[block] -= 1
            if not refs[block]:
                node = nodes[block]
                if node is None:
                    free(block)
                else:
                    self.num_cached += 1
                    self._retire(node)
        if len(self._leaves) > 2 * self.num_cached + 1024:
            # a prefix that is hit again and again without any eviction leaves one outdated entry each time
            self._leaves = sorted({entry[0]: entry for entry in self._leaves if self._is_current(entry)}.values())

    def evict(self, count: int) -> None:
        """Free at least `count` cached blocks; RuntimeError if there are not as many."""
        pool, leaves = self.pool, self._leaves
        if count > self.num_cached:
            raise RuntimeError(f"{count} blocks to evict, but only {self.num_cached} are cached")
        target = pool.num_free + count
        while pool.num_free < target and leaves:
            entry = heappop(leaves)
            if self._is_current(entry):
                self.drop(entry[1])
        if pool.num_free < target:
            # every cached node stands above one in use; all go in one scan, for a scan per block would be quadratic
            for node in [n for n in self.nodes if n is not None and not pool.refs[n.block]]:
                if node.indexed:
                    self.drop(node)

    def drop(self, node: Node) -> None:
        """Take a node and all below it out of the index; blocks without references become free."""
        parent = node.parent
        assert parent is not None and parent.children is not None
        del parent.children[node.key]
        stack = [node]
        while stack:
            node = stack.pop()
            if node.children:
                stack.extend(node.children.values())
            block = node.block
            self.nodes[block] = None
            node.indexed, node.parent, node.children = False, None, None  # no cycles are left to the collector
            self.num_nodes -= 1
            if not self.pool.refs[block]:
                self.num_cached -= 1
                self.pool.free(block)
        if parent.children:
            return
        if parent.is_root:
            del self._roots[parent.key]
        elif not self.pool.refs[parent.block]:
            heappush(self._leaves, (parent.stamp, parent))

    def drop_path(self, node: Node) -> None:
        """Take the whole path of a node, and what hangs on it, out of the index."""
        if not node.indexed:
            return
        while node.parent is not None and not node.parent.is_root:
            node = node.parent
        self.drop(node)

    def _retire(self, node: Node) -> None:
        """Note that a node without references was used just now."""
        self._clock += 1
        node.stamp = self._clock
        if not node.children:
            heappush(self._leaves, (self._clock, node))

    def _is_current(self, entry: tuple[int, Node]) -> bool:
        stamp, node = entry
        return node.stamp == stamp and node.indexed and not node.children and not self.pool.refs[node.block]

    def check(self) -> set[int]:
        """The cached blocks; AssertionError unless tree, reference counts and eviction order agree with each other."""
        current = {node for stamp, node in self._leaves if self._is_current((stamp, node))}
        cached: set[int] = set()
        count = 0
        stack = list(self._roots.values())
        assert all(root.children for root in stack), "a root without children is kept"
        while stack:
            node = stack.pop()
            for key, child in (node.children or {}).items():
                count += 1
                assert child.parent is node and child.key == key and len(key) == self.key_bytes, "a link is wrong"
                assert self.nodes[child.block] is child, f"block {child.block} does not know its node"
                if not self.pool.refs[child.block]:
                    cached.add(child.block)
                    assert child.children or child in current, f"leaf {child.block} can never be evicted"
                stack.append(child)
        assert count == self.num_nodes == sum(n is not None for n in self.nodes), "nodes that no root reaches"
        assert len(cached) == self.num_cached, f"{len(cached)} blocks are cached, {self.num_cached} are counted"
        return cached
