"""Every candidate tile of a fused decode step's products, each alone, on the shapes of many models: what rules are made from.

    python benchmarks/tile_survey.py --json FILE [--rows 1,8,16,32,64] [--shapes qwen3-8b,...] [--limit 200]
    python benchmarks/tile_survey.py --read FILE       how far headrace.fast_decode.tiles' guesses are from the best

A product is launched in a CUDA graph on weights that change from launch to launch, more of them than the L2 cache holds, and
each launch may begin before the one before it ends, as in a step. The limit is the weights' bytes over the copy bandwidth
measured here. Kernels are compiled ahead by a pool of processes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import tile_search
from gpu_decode import capture, graph_ms
from headrace.fast_decode import products
from headrace.fast_decode import tiles as decode_tiles
from headrace.fast_decode.products import Tile, num_splits
from headrace.fast_decode.tiles import Shape
from headrace.kernels.split import SplitSpace
from headrace.model.weight import Weight
from headrace_bench.roofline import measure_limits

BF16 = torch.bfloat16
# hidden, inner, queries, keys and values, vocabulary
MODELS = {
    "qwen3-0.6b": (1024, 3072, 2048, 2048, 151936), "qwen3-1.7b": (2048, 6144, 2048, 2048, 151936),
    "qwen3-4b": (2560, 9728, 4096, 2048, 151936), "qwen3-8b": (4096, 12288, 4096, 2048, 151936),
    "qwen3-32b": (5120, 25600, 8192, 2048, 151936), "llama-1b": (2048, 8192, 2048, 1024, 128256),
    "llama-8b": (4096, 14336, 4096, 2048, 128256), "qwen2.5-7b": (3584, 18944, 3584, 1024, 152064),
}  # fmt: skip
IN_FLIGHT = 300 << 20  # bytes of weights that are gone through before the first comes again


class Case(NamedTuple):
    model: str
    product: str
    shape: Shape
    rows: int
    tile: Tile


def shapes_of(model: str) -> dict[str, Shape]:
    hidden, inner, q, kv, vocab = MODELS[model]
    return {
        "qkv": Shape(q + kv, hidden), "o": Shape(hidden, q), "gate_up": Shape(inner, hidden, gated=True, splittable=False),
        "down": Shape(hidden, inner), "lm_head": Shape(vocab, hidden, splittable=False),
    }  # fmt: skip


def guess(shape: Shape, rows: int) -> Tile:
    """As default_tiles on a card with a copy engine."""
    of = (
        decode_tiles.gemv_tile
        if rows == 1
        else decode_tiles.wide_tile
        if rows > decode_tiles.ALL_ROWS
        else decode_tiles.gemm_tile
    )
    return of(shape, rows)


def cases(models: list[str], rows: list[int]) -> Iterator[Case]:
    """A shape that two models share once."""
    seen = set()
    for model in models:
        for product, shape in shapes_of(model).items():
            for count in rows:
                found = [guess(shape, count), *tile_search.candidates(shape, count)]
                if count == decode_tiles.ALL_ROWS:
                    found += tile_search.wide_candidates(shape, count)
                for tile in dict.fromkeys(found):
                    if (key := (product, shape, count, tile)) not in seen:
                        seen.add(key)
                        yield Case(model, product, shape, count, tile)


class Place:
    """The tensors of a shape's products on a device."""

    def __init__(self, shape: Shape, rows: int, device: torch.device):
        self.shape, self.rows = shape, rows
        height, width = shape.columns * (2 if shape.gated else 1), shape.width
        copies = 1 if device.type == "meta" else max(2, -(-IN_FLIGHT // (2 * height * width)))

        def made(*size: int, dtype: torch.dtype = BF16) -> Tensor:
            tensor = torch.empty(size, dtype=dtype, device=device)
            return tensor if device.type == "meta" else tensor.normal_(0, 0.02)

        self.weights = [Weight(made(height, width)) for _ in range(copies)]
        self.x, self.out = made(rows, width), made(8 * rows * shape.columns, dtype=torch.float32)
        self.total, self.normed = made(rows, shape.columns, dtype=torch.float32), made(rows, shape.columns)
        self.norm, self.sumsq, self.squares = (
            made(shape.columns),
            made(rows, 16, dtype=torch.float32),
            made(rows * 512, dtype=torch.float32),
        )
        self.space = SplitSpace(8 * 256 * shape.columns, 8 * shape.columns, device)

    def run(self, product: str, tile: Tile, weight: Weight) -> None:
        rows, columns = self.rows, self.shape.columns
        if product in ("o", "down"):
            tiles = -(-columns // tile.block_n)
            squares = self.squares[: rows * tiles].view(rows, tiles)
            products.residual(self.x, weight, self.total, self.normed, squares, self.norm, tile, self.space)
        elif product == "gate_up":
            products.glu(self.x, weight, self.normed, tile, sumsq=self.sumsq, eps=1e-6)
        else:
            splits = num_splits(tile)
            out = self.out[: splits * rows * columns].view(splits, rows, columns)
            products.project(self.x, weight, out, tile, sumsq=self.sumsq, eps=1e-6)

    def run_all(self, product: str, tile: Tile) -> Tensor:
        for weight in self.weights:
            self.run(product, tile, weight)
        return self.normed


def init_compiler() -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    import compile_ahead

    compile_ahead.install(90)


def compile_case(case: Case) -> str:
    try:
        place = Place(case.shape, case.rows, torch.device("meta"))
        place.run(case.product, case.tile, place.weights[0])
    except Exception as error:
        return f"{case}: {type(error).__name__} {str(error)[:200]}"
    return ""


def measure(found: list[Case], compiled: Callable[[], object], ends: float) -> list[dict[str, Any]]:
    device, results, place = torch.device("cuda", 0), [], None
    for case in found:
        if time.perf_counter() > ends:
            print("out of time", flush=True)
            break
        if place is None or (place.shape, place.rows) != (case.shape, case.rows):
            place = None
            place = Place(case.shape, case.rows, device)
        try:
            graph, _ = capture(lambda case=case, place=place: place.run_all(case.product, case.tile))
            took = 1e3 * graph_ms(graph, 5, 2) / len(place.weights)
        except Exception as error:  # a tile that does not fit
            print(case, type(error).__name__, str(error)[:100], flush=True)
            continue
        size = 2 * case.shape.columns * (2 if case.shape.gated else 1) * case.shape.width
        results.append({
            "model": case.model, "product": case.product, "columns": case.shape.columns, "width": case.shape.width, "rows": case.rows,
            "kind": type(case.tile).__name__, **asdict(case.tile), "us": took, "bytes": size,
        })  # fmt: skip
    return results


def read(path: str) -> None:
    text = json.loads(Path(path).read_text())
    gbs, groups = text["copy_gbs"], defaultdict(dict)
    for entry in text["times"]:
        key = (entry["model"], entry["product"], entry["columns"], entry["width"], entry["rows"])
        tile = {"GemvTile": "gemv", "GemmTile": "gemm", "WideTile": "wide"}[entry["kind"]]
        fields = {
            n: v
            for n, v in entry.items()
            if n not in ("model", "product", "columns", "width", "rows", "kind", "us", "bytes")
        }
        groups[key][decode_tiles.KINDS[tile](**fields)] = (entry["us"], entry["bytes"])
    by_rows: dict[int, list[float]] = defaultdict(list)
    for (model, product, columns, width, rows), times in groups.items():
        best = min(times, key=lambda tile: times[tile])
        ours = guess(Shape(columns, width, product == "gate_up", product not in ("gate_up", "lm_head")), rows)
        took, size = times[best]
        of_ours = times[ours][0] if ours in times else float("nan")
        by_rows[rows].append(of_ours / took)
        print(
            f"{model:11} {product:8} {rows:3} rows: best {took:7.2f} us {size / gbs / 10 / took:4.0f} %  guess {of_ours / took:5.2f} x  {best}"
        )
    for rows, ratios in sorted(by_rows.items()):
        print(
            f"{rows} rows: the guess takes {statistics.mean(ratios):.3f} x the best on average, {max(ratios):.3f} at worst"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--read")
    parser.add_argument("--rows", default="1,8,32,64")
    parser.add_argument("--shapes", default=",".join(MODELS))
    parser.add_argument("--limit", type=float, default=200.0)
    args = parser.parse_args()
    if args.read:
        read(args.read)
        return
    ends = time.perf_counter() + args.limit
    found = list(cases(args.shapes.split(","), [int(n) for n in args.rows.split(",")]))
    found.sort(key=lambda case: (case.rows, case.model, case.product))
    pool = multiprocessing.get_context("fork").Pool(max(1, (os.cpu_count() or 2) - 1), init_compiler)
    seen: dict[tuple, Case] = {}
    for case in found:  # what depends on no shape is compiled once
        seen.setdefault(
            (
                case.product,
                case.tile,
                case.rows,
                case.shape.width % (case.tile.block_k),
                case.shape.width if getattr(case.tile, "prefetch", 0) else 0,
            ),
            case,
        )
    errors = [e for e in pool.map(compile_case, seen.values(), chunksize=2) if e]
    print(
        f"{len(found)} cases, {len(seen)} compiled, {len(errors)} failed, {time.perf_counter() + args.limit - ends:.0f} s",
        errors[:5],
        flush=True,
    )
    pool.terminate()
    limits = measure_limits(torch.device("cuda", 0), BF16)
    times = measure(found, lambda: None, ends)
    card = torch.cuda.get_device_name(0)
    Path(args.json).write_text(
        json.dumps({"card": card, "copy_gbs": limits.bandwidth / 1e9, "torch": torch.__version__, "times": times})
    )
    print(f"{len(times)} timed, {time.perf_counter() + args.limit - ends:.0f} s")


if __name__ == "__main__":
    main()
