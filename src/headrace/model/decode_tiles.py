"""Which tiles the fused decode step runs with: defaults from the shapes, or tables that were searched on a card.

A product runs as a GEMV (CUDA cores, few rows) or as a skinny GEMM (tensor cores), told by its tile's type. A table holds one
StepTiles per number of rows up to which it serves; benchmarks/tile_search.py finds it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from headrace.kernels.attention_decode import SplitTile
from headrace.kernels.attention_decode_fused import AttentionTile
from headrace.kernels.gemv import GemvTile
from headrace.kernels.launch import next_power_of_2
from headrace.kernels.skinny_gemm import MAX_ROWS, GemmTile
from headrace.model.config import ModelConfig

ROW_STEPS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # the default table has an entry for each
FEW_ROWS = 64  # above, a product's time is also its arithmetic, and reading x again for every weight tile
GEMV_ROWS = 1  # up to here the defaults use GEMVs: with a few rows more they are slower, and wide ones spill registers
SHORT_ROWS = 4  # up to here attention is short: the kernel behind it may start while it runs
PRODUCTS = ("qkv", "o", "gate_up", "down", "lm_head")
MERGE_ELEMENTS = 32768  # partial sums of a tile, 128 KB: about a microsecond for the program that adds them
FILL = 128  # programs that fill an H100 or H200 (132 SMs) with at most one each


@dataclass(frozen=True, slots=True)
class StepTiles:
    """The tiles of one decode step. `attention_programs`: splits are chosen so that about that many programs run.

    A SplitTile stands for two kernels, rotation with the cache write and attention over the cache, that choose splits
    themselves; the QKV product is then not split.
    """

    qkv: GemvTile | GemmTile
    o: GemvTile | GemmTile
    gate_up: GemvTile | GemmTile
    down: GemvTile | GemmTile
    lm_head: GemvTile | GemmTile
    attention: AttentionTile | SplitTile = AttentionTile()
    attention_programs: int = 4 * FILL

    def __post_init__(self) -> None:
        if isinstance(self.attention, SplitTile) and isinstance(self.qkv, GemmTile) and self.qkv.splits > 1:
            raise ValueError("attention in two kernels takes no partial QKV sums")


def with_attention_in_two(tiles: StepTiles) -> StepTiles:
    """The same, with all keys and values written before any of them is read."""
    if isinstance(tiles.attention, SplitTile):
        return tiles
    whole = replace(tiles.qkv, splits=1) if isinstance(tiles.qkv, GemmTile) else tiles.qkv
    return replace(tiles, qkv=whole, attention=SplitTile())


TileTable = Mapping[int, StepTiles]  # rows up to which it serves -> tiles


@dataclass(frozen=True, slots=True)
class Shape:
    """columns [N] and width [K] of a product; a gated one has 2 N weight rows.

    `splittable`: partial sums are allowed; `merged`: the program that ends last adds them up, else the next kernel does.
    """

    columns: int
    width: int
    gated: bool = False
    splittable: bool = True
    merged: bool = False


def product_shapes(config: ModelConfig) -> dict[str, Shape]:
    hidden, inner = config.hidden_size, config.intermediate_size
    return {
        "qkv": Shape(config.q_size + 2 * config.kv_size, hidden),
        "o": Shape(hidden, config.q_size, merged=True),
        "gate_up": Shape(inner, hidden, gated=True, splittable=False),
        "down": Shape(hidden, inner, merged=True),
        "lm_head": Shape(config.vocab_size, hidden, splittable=False),
    }


def default_tiles(config: ModelConfig, rows: int) -> StepTiles:
    """Good guesses for H100 and H200 from the shapes alone."""
    kind = gemv_tile if rows <= GEMV_ROWS else gemm_tile
    products = {name: kind(shape, rows) for name, shape in product_shapes(config).items()}
    attention = AttentionTile(early=rows <= SHORT_ROWS, heads_first=rows > FEW_ROWS)
    return StepTiles(**products, attention=attention, attention_programs=default_programs(rows))


def default_programs(rows: int) -> int:
    return FILL if rows <= 2 else 2 * FILL if rows <= 4 else 4 * FILL


def default_table(config: ModelConfig) -> dict[int, StepTiles]:
    return {rows: default_tiles(config, rows) for rows in ROW_STEPS}


def gemv_tile(shape: Shape, rows: int) -> GemvTile:
    """Four warps side by side along K, enough programs to fill the card, at most 64 registers of early weights a thread."""
    warps = 4 if shape.width >= 1024 else 2 if shape.width >= 512 else 1
    block_k = 256 * warps
    widest = 8 if shape.gated or shape.width > 1024 else 16
    block_n = next((n for n in (16, 8, 4) if n <= widest and shape.columns >= 1.4 * FILL * n), 4)
    if rows > 1:
        block_n = min(block_n, 8)
    return GemvTile(block_n, block_k, warps, early_steps(shape, block_n, block_k, 32 * warps))


def early_steps(shape: Shape, block_n: int, block_k: int, threads: int, registers: int = 64) -> int:
    a_step = (2 if shape.gated else 1) * block_n * block_k // (2 * threads)
    return max(1, min(-(-shape.width // block_k), registers // a_step))


def gemm_tile(shape: Shape, rows: int) -> GemmTile:
    """About FILL programs by splitting K where it may be split, by narrower tiles where it may not."""
    if rows > FEW_ROWS:
        return wide_tile(shape, rows)
    if shape.splittable:
        block_n = 64 if shape.columns >= 32 * FILL else 32
        splits = 1
        while shape.columns // block_n * splits < FILL and splits < 8 and shape.width // (2 * splits) >= 256:
            splits *= 2
        return GemmTile(block_n, 128, splits, 4, 4)
    if shape.gated:
        block_n = 64 if shape.columns >= 64 * FILL else 32 if shape.columns >= 24 * FILL and rows <= 16 else 16
        return GemmTile(block_n, 128, 1, 4, 3 if block_n > 16 else 4)
    return GemmTile(64, 128, 1, 4, 4)


def wide_tile(shape: Shape, rows: int) -> GemmTile:
    """For more than FEW_ROWS rows: the largest tile that makes about FILL programs, a residual's with splits.

    A product of M rows reads 2 N M K (1 / weight rows of a tile + 1 / block_m) bytes from the L2 cache, several times what it
    reads from memory. What the last program of a residual's tile has to read alone is bounded by MERGE_ELEMENTS.
    """
    for block_n, block_m in ((128, 256), (128, 128), (64, 256), (64, 128), (64, 64)):
        halves = 2 if shape.gated else 1
        if block_m > next_power_of_2(rows) or halves * block_n * block_m > 128 * 256:
            continue
        programs = -(-shape.columns // block_n) * -(-rows // block_m)
        splits = 1
        while shape.merged and programs * splits < 0.7 * FILL and splits < 8 and shape.width // (2 * splits) >= 256:
            splits *= 2
        if programs * splits >= 0.7 * FILL and (splits == 1 or splits * block_n * block_m <= MERGE_ELEMENTS):
            return wide(shape, block_n, block_m, splits)
    return wide(shape, 64, 64, splits)


def wide(shape: Shape, block_n: int, block_m: int, splits: int, prefetch: int = 0) -> GemmTile:
    """A tile in four steps of 64 (192 KB at most), with as many warps as keep accumulators and merges in registers."""
    size = block_n * block_m * (2 if shape.gated else 1)
    warps = 8 if size >= 128 * 128 or (shape.merged and splits > 1 and size >= 64 * 128) else 4
    return GemmTile(block_n, 64, splits, warps, 4, prefetch, block_m)


def from_json(text: str) -> dict[int, StepTiles]:
    """Inverse of `to_json`. Raises ValueError, KeyError or TypeError on anything else."""
    table = {}
    for rows, entry in json.loads(text).items():
        products = {}
        for name in PRODUCTS:
            values = dict(entry[name])
            product = {"gemv": GemvTile, "gemm": GemmTile}[values.pop("kind")]
            products[name] = product(**values)
        kind = SplitTile if entry.get("attention_kernels", 1) == 2 else AttentionTile
        attention = kind(**entry["attention"])
        table[int(rows)] = StepTiles(**products, attention=attention, attention_programs=entry["attention_programs"])
    if max(table, default=0) > MAX_ROWS:
        raise ValueError(f"a table serves at most {MAX_ROWS} rows")
    return table
