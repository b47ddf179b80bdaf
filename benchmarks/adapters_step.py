"""What adapters add to a captured decode step alone: without, within the products, and behind these.

    python benchmarks/adapters_step.py [--model 8b] [--rows 1,8,32,64] [--adapters 8,1] [--rank 16] [--context 384]
        [--json FILE]

Random weights and adapters. `within`: x A^T by a kernel beside each product, which adds the rest at its end; `behind`: by two
kernels for each product, as other steps do it. Logits of the two are compared (in bfloat16, 36 layers deep, two that are
equally exact are 0.03 apart), and those of 20 replays, which must be the same bits.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

from about import write
from gpu_decode import BF16, BLOCK, DEVICE, MAX_LEN, MODELS, TIED, Cache, Input, capture, graph_ms, kinds, random_weights, say
from headrace.fast_decode.forward import FastDecode
from headrace.fast_decode.takes import usual_kinds
from headrace.fast_decode.tile_tables import load_tiles
from headrace.kernels.lora_product import LowRank
from headrace.kernels.tables import Int
from headrace.lora.pool import AdapterPool
from headrace.model.shard import WHOLE


class Behind:
    """The pool, whose products are not asked to add anything."""

    def __init__(self, pool: AdapterPool):
        self.add_to = pool.add_to

    def low_rank(self, target: str, x: Tensor, block_n: int) -> LowRank | None:
        return None

    def of_experts(self, layer: int, rows: int) -> None:
        return None


class Steps:
    """Captured steps of one model; the pool's adapters go to the rows in turn."""

    def __init__(self, name: str, rows: int, context: int, slots: int, rank: int):
        self.config, self.rows, self.context = MODELS[name], rows, context
        weights = random_weights(self.config, name in TIED, DEVICE, 1, kinds(name)[0])
        tiles = load_tiles(self.config, torch.cuda.get_device_name(), usual_kinds(weights))
        self.fast = FastDecode(self.config, weights, rows, DEVICE, tiles, max_model_len=MAX_LEN, logits_dtype=BF16)
        self.pool = AdapterPool(self.config, WHOLE, slots, rank, rows, BF16, DEVICE)
        for product in self.pool._products.values():
            product.pair.a.normal_(0, 0.02)
            product.pair.b.normal_(0, 0.02)
            product.pair.scales.fill_(2.0)
        self.blocks = rows * -(-context // BLOCK)
        self.kv = Cache(self.config, self.blocks + 8, DEVICE)
        self.kept: list[object] = []  # what graphs read

    @torch.inference_mode()
    def run(self, rows: int, adapters: int, within: bool = True) -> tuple[float, Tensor]:
        """Milliseconds and logits of a step; `adapters` 0: without."""
        batch = Input(self.config, self.rows, self.context, self.blocks, DEVICE).batch([self.context] * rows)
        batch.adapted = adapters > 0
        table = torch.zeros((self.rows + 1, len(Int)), dtype=torch.int64, device=DEVICE)
        if adapters:
            table[batch.seq_slots.long(), Int.LORA] = torch.arange(rows, device=DEVICE) % adapters + 1
        self.pool.table = table
        adds = self.pool if within else Behind(self.pool)

        def step() -> Tensor:
            self.pool.begin(batch, None, fused=within)
            return self.fast.forward(batch, self.kv, None, adds if adapters else None)

        graph, out = capture(step)
        self.kept.append((batch, table, self.pool._rows, graph))
        first = out.clone()
        for _ in range(20):
            graph.replay()
        torch.cuda.synchronize()
        if not (torch.equal(first, out) and first.isfinite().all()):
            raise SystemExit(f"{rows} rows, {adapters} adapters, within {within}: other bits in another replay, or no numbers")
        return graph_ms(graph), first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def numbers(text: str) -> list[int]:
        return [int(n) for n in text.split(",")]

    parser.add_argument("--model", default="8b", choices=MODELS)
    parser.add_argument("--rows", type=numbers, default=[1, 8, 32, 64])
    parser.add_argument("--adapters", type=numbers, default=[8, 1])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--context", type=int, default=384)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    steps, found = Steps(args.model, max(args.rows), args.context, max(args.adapters), args.rank), {}
    layers = steps.config.num_layers

    def told(label: str, rows: int, ms: float, base: float) -> None:
        found[f"{rows} rows, {label}"] = round(ms, 4)
        more = f"{100 * (ms / base - 1):+6.1f} % {1e3 * (ms - base) / layers:+7.2f} us a layer"
        say(f"{rows:3} rows, {label:12s} {ms:7.4f} ms {more}")

    for rows in args.rows:
        base, _ = steps.run(rows, 0)
        told("none", rows, base, base)
        for adapters in args.adapters:
            if adapters > rows:
                continue
            within, logits = steps.run(rows, adapters)
            told(f"{adapters} within", rows, within, base)
            behind, other = steps.run(rows, adapters, within=False)
            told(f"{adapters} behind", rows, behind, base)
            say(f"    apart {float((logits - other).float().norm() / other.float().norm()):.4f}")
    if args.json:
        said = {"model": args.model, "rank": args.rank, "context": args.context, "ms": found}
        write(args.json, said)


if __name__ == "__main__":
    main()
