"""What the prefix index costs per block, and how that grows with the number of cached blocks.

    python benchmarks/cache_index.py [--json FILE] [--sizes 1000 10000 ...]

For each size a tree of that many cached blocks is built (documents of 32 blocks that share 8-block stems), and then:
    insert   a new document's blocks, keys made from its ids, as a running request does
    match    a cached document, ids to bytes included
    hold     acquire + release of a matched path
    evict    in order of last use, one block at a time, as a full cache does for each new block
Microseconds of processor time per block. Wanted: single microseconds at 100,000 blocks.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from array import array

from about import write
from headrace.cache.block_pool import BlockPool
from headrace.cache.radix_tree import Node, RadixTree

DEPTH, STEM = 32, 8


def documents(count: int, block_size: int, rng: random.Random) -> list[list[int]]:
    """Token ids; ten documents to a stem."""
    result = []
    for i in range(count):
        if i % 10 == 0:
            stem = [rng.randrange(128_000) for _ in range(STEM * block_size)]
        result.append(stem + [rng.randrange(128_000) for _ in range((DEPTH - STEM) * block_size)])
    return result


def insert(tree: RadixTree, ids: list[int], block_size: int) -> int:
    """As a request does that computes the whole document; the number of blocks."""
    blocks = tree.allocate(len(ids) // block_size)
    cursor: Node | None = None
    for index, block in enumerate(blocks):
        key = array("i", ids[index * block_size : (index + 1) * block_size]).tobytes()
        cursor = tree.insert(cursor, "", key, block)
    tree.release(blocks)
    return len(blocks)


def measure(size: int, block_size: int, probes: int = 200) -> dict[str, float]:
    rng = random.Random(size)
    tree = RadixTree(BlockPool(size + DEPTH), block_size)
    clock = time.thread_time
    times: dict[str, float] = {}
    held = []  # documents that are in the tree
    while tree.num_cached <= size - DEPTH:
        for ids in documents(min(max(size // DEPTH // 4, 1), 1000), block_size, rng):
            if tree.num_cached <= size - DEPTH:
                insert(tree, ids, block_size)
                if len(held) < probes or rng.random() < 0.1:
                    held.append(ids)
    gc.collect()
    held = rng.sample(held, min(probes, len(held)))

    began = clock()
    paths = [tree.match(array("i", ids).tobytes(), "", DEPTH) for ids in held]
    times["match"] = (clock() - began) / sum(map(len, paths))
    assert all(len(path) == DEPTH for path in paths)

    began = clock()
    for path in paths:
        tree.release(tree.acquire(path))
    times["hold"] = (clock() - began) / sum(map(len, paths))

    began = clock()
    count = min(size // 2, probes * DEPTH)
    for _ in range(count):
        tree.evict(1)
    times["evict"] = (clock() - began) / count

    fresh = documents(count // DEPTH or 1, block_size, rng)  # into the room just made
    began = clock()
    blocks = sum(insert(tree, ids, block_size) for ids in fresh)
    times["insert"] = (clock() - began) / blocks
    return {"cached_blocks": size, "block_size": block_size} | {k: round(v * 1e6, 3) for k, v in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000, 10_000, 100_000, 1_000_000])
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    args = parser.parse_args()
    rows = []
    for size in args.sizes:
        row = measure(size, args.block_size)
        rows.append(row)
        figures = ", ".join(f"{name} {row[name]:.2f}" for name in ("match", "insert", "hold", "evict"))
        print(f"{size:9,d} cached blocks of {args.block_size}: {figures} us per block", flush=True)
    if args.json:
        write(args.json, {"benchmark": "cache_index", "rows": rows})


if __name__ == "__main__":
    main()
