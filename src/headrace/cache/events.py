"""What becomes of the blocks of a prefix cache, as whoever knows only their hashes must be told: a router, or another fleet."""

from __future__ import annotations

import msgspec


class Stored(msgspec.Struct, array_like=True):
    """Blocks that follow each other, now in the index. Hashes are chained: each stands for everything up to its block's end."""

    hashes: list[int]  # 64 bits each
    parent: int | None = None  # the hash of the block before the first; None: they begin a prompt
    token_ids: list[int] = []  # of all of them; only where events are published


class BlockEvents(msgspec.Struct, array_like=True):
    """Since the last ones, of one core."""

    stored: list[Stored] = []
    evicted: list[int] = []  # hashes
    cleared: bool = False  # before all of these, everything went
