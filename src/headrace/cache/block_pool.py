"""Block ids of the KV cache: how many references each has, and which are free. No torch here."""

from __future__ import annotations


class BlockPool:
    """`num_blocks` block ids, 0 .. num_blocks - 1.

    A block is *in use* (references > 0), *free* (on the free list) or *cached*: without a reference, but still named by
    the prefix index, which alone may free it. The pool does not know the index; it only takes what it is told is free.
    """

    __slots__ = ("_free", "num_blocks", "refs")

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks
        # a stack: the block freed last is the one whose memory is warmest
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` free blocks, each with one reference now; the caller has made sure that there are as many."""
        free = self._free
        if count > len(free):
            raise RuntimeError(f"{count} blocks taken, but only {len(free)} of {self.num_blocks} are free")
        refs = self.refs
        taken = [free.pop() for _ in range(count)]
        for block in taken:
            refs[block] = 1
        return taken

    def free(self, block: int) -> None:
        """Put a block without references on the free list."""
        self._free.append(block)

    def check(self) -> set[int]:
        """The free blocks; AssertionError unless they are distinct, exist and have no reference."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is on the free list twice"
        assert all(0 <= block < self.num_blocks for block in free), "a block on the free list does not exist"
        assert all(self.refs[block] == 0 for block in free), "a free block has references"
        assert min(self.refs, default=0) >= 0, "a reference count is negative"
        return free
