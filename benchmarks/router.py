"""What the prefix router costs per request, and how that grows with cores and known blocks.

    python benchmarks/router.py [--json FILE] [--cores 1 100 1000] [--blocks 10000 1000000]

A prompt is 4,096 tokens in 64 blocks, the first 16 of which nine others share; its core, drawn at random, has told that it
holds them. For each number of cores and of known blocks, microseconds of processor time (medians over prompts in random
order, so that most of the index is in no cache):
    hash     the prompt's blocks, which the router does once: the largest part
    hit      choosing a core for a prompt that is held, without the hashes
    stem     for one of which others hold the first 16 blocks
    miss     for one that nobody holds
    loads    least-loaded, for comparison: it looks at every core
    told     a core's events, per block: half of them stored, half evicted
and the memory of the index per known block. Last, per block that a core stores in its prefix index and for which another goes:
without notes, and with notes that are read after each prompt.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
import tracemalloc
from array import array
from collections.abc import Callable, Iterable
from typing import Any
from unittest.mock import patch

from about import write
from headrace.cache.block_pool import BlockPool
from headrace.cache.events import BlockEvents, Stored, block_hashes
from headrace.cache.radix_tree import RadixTree
from headrace.cache.recorded_tree import RecordedTree
from headrace.distributed import router as router_module
from headrace.distributed.balancers import LeastLoaded
from headrace.distributed.router import Router

BLOCK_SIZE, DEPTH, STEM, SHARED_BY = 64, 64, 16, 10
PROBES = 500


class Prompts:
    """Hashes of prompts, made without their tokens: what the router makes of tokens is measured apart."""

    def __init__(self, seed: int):
        self._rng = random.Random(seed)
        self._stem: list[int] = []

    def _draw(self, count: int) -> list[int]:
        return [self._rng.getrandbits(64) for _ in range(count)]

    def next(self, number: int) -> list[int]:
        if number % SHARED_BY == 0:
            self._stem = self._draw(STEM)
        return self._stem + self._draw(DEPTH - STEM)


def filled(cores: int, blocks: int, rng: random.Random) -> tuple[Router, list[list[int]], float]:
    """A router that knows so many blocks, some of the prompts, and bytes per block."""
    router = Router(max_blocks=2 * blocks + 1000)
    for core in range(cores):
        router.added(core)
        router.blocks(core, BlockEvents([], [], True, BLOCK_SIZE))
    prompts, kept = Prompts(blocks), []
    gc.collect()
    tracemalloc.start()
    number = 0
    while len(router.index) < blocks:
        hashes = prompts.next(number)
        number += 1
        router.blocks(rng.randrange(cores), BlockEvents([Stored(hashes)], [], False, BLOCK_SIZE))
        if number % max(1, blocks // (DEPTH - STEM) // PROBES) == 0:
            kept.append(hashes)
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return router, kept, size / len(router.index)


def micros(work: Callable[[Any], object], inputs: Iterable[Any]) -> float:
    times = []
    for value in inputs:
        began = time.thread_time()
        work(value)
        times.append(time.thread_time() - began)
    return round(1e6 * statistics.median(times), 2)


def measure(cores: int, blocks: int) -> dict[str, float]:
    rng = random.Random(cores)
    router, held, size = filled(cores, blocks, rng)
    loads = {core: rng.randrange(20_000) for core in range(cores)}
    rng.shuffle(held)
    fresh = [[rng.getrandbits(64) for _ in range(DEPTH)] for _ in held]
    stems = [hashes[:STEM] + new[STEM:] for hashes, new in zip(held, fresh, strict=True)]
    result = {"cores": cores, "blocks": len(router.index), "bytes_per_block": round(size, 1)}
    tokens = [array("i", [rng.randrange(128_000) for _ in range(BLOCK_SIZE * DEPTH)]) for _ in range(50)]
    result["hash"] = micros(lambda ids: block_hashes(ids, BLOCK_SIZE), tokens)
    with patch.object(router_module, "block_hashes", lambda hashes, size, salt: hashes):
        for name, prompts in (("hit", held), ("stem", stems), ("miss", fresh)):
            result[name] = micros(lambda hashes: router.choose(hashes, "", loads), prompts)
    least = LeastLoaded()
    result["loads"] = micros(lambda _: least.choose(None, "", loads), range(200))
    events = [
        (rng.randrange(cores), BlockEvents([Stored(new)], old, False, BLOCK_SIZE)) for old, new in zip(held, fresh, strict=True)
    ]
    result["told"] = round(micros(lambda event: router.blocks(*event), events) / (2 * DEPTH), 3)
    return result


def noted(block_size: int) -> dict[str, float]:
    """Microseconds per block of a new prompt of 64 that enters a prefix index of 10,000, where others go for it."""
    rng, result = random.Random(block_size), {}
    prompts = [array("i", [rng.randrange(128_000) for _ in range(block_size * DEPTH)]).tobytes() for _ in range(PROBES)]
    for name, kind in (("plain", RadixTree), ("noted", RecordedTree)):
        tree = kind(BlockPool(10_000), block_size)

        def store(data: bytes, tree: RadixTree = tree) -> None:
            blocks, cursor, width = tree.allocate(DEPTH), None, tree.key_bytes
            for index, block in enumerate(blocks):
                cursor = tree.insert(cursor, "", data[index * width : (index + 1) * width], block)
            tree.release(blocks)
            if isinstance(tree, RecordedTree):
                tree.events()

        result[name] = round(micros(store, prompts) / DEPTH, 2)
    return {"block_size": block_size, **result}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cores", type=int, nargs="+", default=[1, 2, 100, 1000])
    parser.add_argument("--blocks", type=int, nargs="+", default=[10_000, 1_000_000])
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    rows = []
    print(f"{'cores':>6}{'blocks':>10}{'B/block':>9}{'hash':>8}{'hit':>8}{'stem':>8}{'miss':>8}{'loads':>8}{'told':>8}   us")
    for blocks in args.blocks:
        for cores in args.cores:
            row = measure(cores, blocks)
            rows.append(row)
            print(f"{cores:>6}{row['blocks']:>10}{row['bytes_per_block']:>9}", end="")
            print("".join(f"{row[name]:>8}" for name in ("hash", "hit", "stem", "miss", "loads", "told")), flush=True)
    notes = [noted(size) for size in (16, 64)]
    print(
        "\n".join(
            f"a core's index, blocks of {n['block_size']}: {n['plain']} us a block, {n['noted']} with notes" for n in notes
        )
    )
    if args.json:
        write(args.json, {"unit": "microseconds of processor time", "rows": rows, "notes": notes})


if __name__ == "__main__":
    main()
