"""What becomes of the blocks of a prefix cache, as whoever knows only their hashes must be told: a router, or another fleet.

A block's hash stands for the tokens of the whole prompt up to the block's end, and for its cache salt. It is the same in every
process and on every machine. Two blocks of the same hash cost a wrong guess of where to send a request, never a wrong token:
the index compares the tokens themselves.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b

import msgspec

from headrace.cache.radix_tree import ID_BYTES, root_key

HASH_BYTES = 8


class Stored(msgspec.Struct, array_like=True):
    """Blocks that follow each other, now in the index. Hashes are chained: each stands for everything up to its block's end."""

    hashes: list[int]  # 64 bits each
    parent: int | None = None  # the hash of the block before the first; None: they begin a prompt
    token_ids: list[int] = []  # of all of them; only where events are published
    cache_salt: str = ""  # likewise, and of a prompt's first


class BlockEvents(msgspec.Struct, array_like=True):
    """Since the last ones, of one core. What has left comes before what has entered: no block is in both."""

    stored: list[Stored] = []  # those above before those below
    evicted: list[int] = []  # hashes
    cleared: bool = False  # before all of these, everything went; a core's first events say so
    block_size: int = 0  # tokens in a block; 0: nothing is known of it


def root_hash(cache_salt: str) -> bytes:
    """What the first block of a prompt hangs on."""
    return blake2b(root_key(cache_salt), digest_size=HASH_BYTES).digest()


def chained(parent: bytes, key: bytes) -> bytes:
    """The hash of the block whose tokens are `key` (int32 bytes), after `parent`."""
    return blake2b(parent + key, digest_size=HASH_BYTES).digest()


def number(digest: bytes) -> int:
    """A hash as it travels."""
    return int.from_bytes(digest, "little")


def block_hashes(ids: array, block_size: int, cache_salt: str = "") -> list[int]:
    """The hashes of all full blocks of a prompt (int32 ids)."""
    width, data = block_size * ID_BYTES, ids.tobytes()
    digest, hashes = root_hash(cache_salt), []
    for start in range(0, len(data) - width + 1, width):
        digest = chained(digest, data[start : start + width])
        hashes.append(number(digest))
    return hashes
