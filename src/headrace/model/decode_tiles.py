"""Which tiles the fused decode step runs with: defaults from the shapes, candidates to choose from, and JSON to keep a choice.

A product runs as a GEMV (CUDA cores, few rows) or as a skinny GEMM (tensor cores), told by its tile's type. Tables found by
`tune` hold one StepTiles per number of rows up to which it serves.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace

from headrace.kernels.attention_decode import SplitTile
from headrace.kernels.attention_decode_fused import AttentionTile
from headrace.kernels.gemv import MAX_ROWS as GEMV_MAX_ROWS
from headrace.kernels.gemv import GemvTile
from headrace.kernels.launch import next_power_of_2
from headrace.kernels.skinny_gemm import MAX_ROWS, GemmTile
from headrace.model.config import ModelConfig

ROW_STEPS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # a table has an entry for each
FEW_ROWS = 64  # above, a product's time is also its arithmetic, and reading x again for every weight tile
GEMV_ROWS = 4  # up to here the defaults use GEMVs
PRODUCTS = ("qkv", "o", "gate_up", "down", "lm_head")
AHEAD_BYTES = 112 * 1024  # of shared memory that a program may fill before the wait: two to an SM
ALONE_BYTES = 208 * 1024  # one to an SM
TOUCH_BYTES = 128 * 1024  # of weights that a program may ask into the L2 cache before the wait
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
    attention = AttentionTile(early=rows <= GEMV_ROWS, heads_first=rows > FEW_ROWS)
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
    return GemvTile(block_n, block_k, warps, _prefetch(shape, block_n, block_k, 32 * warps))


def _prefetch(shape: Shape, block_n: int, block_k: int, threads: int, registers: int = 64) -> int:
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
            return _wide(shape, block_n, block_m, splits)
    return _wide(shape, 64, 64, splits)


def _wide(shape: Shape, block_n: int, block_m: int, splits: int, prefetch: int = 0) -> GemmTile:
    """A tile in four steps of 64 (192 KB at most), with as many warps as keep accumulators and merges in registers."""
    size = block_n * block_m * (2 if shape.gated else 1)
    warps = 8 if size >= 128 * 128 or (shape.merged and splits > 1 and size >= 64 * 128) else 4
    return GemmTile(block_n, 64, splits, warps, 4, prefetch, block_m)


def ahead_tile(shape: Shape, rows: int) -> GemmTile:
    """As `gemm_tile`, with all of a program's weights loaded before the wait where they fit."""
    tile = gemm_tile(shape, rows)
    for block_n in (tile.block_n, 32, 16):
        ahead = _ahead(shape, rows, block_n, tile.splits, 4)
        if ahead is not None and block_n <= tile.block_n:
            return ahead
    return tile


def _ahead(
    shape: Shape, rows: int, block_n: int, splits: int, warps: int, most: int = AHEAD_BYTES
) -> GemmTile | None:  # fmt: skip
    """A tile that loads all its weights before the wait; None if it would fill more than `most` bytes."""
    steps = -(-shape.width // (128 * splits))
    held = 2 * 128 * steps * (block_n * (2 if shape.gated else 1) + max(16, next_power_of_2(rows)))
    return GemmTile(block_n, 128, splits, warps, 2, prefetch=steps) if held <= most else None


def _touched(shape: Shape, tile: GemmTile) -> int:
    """Steps of a tile whose weights are TOUCH_BYTES at most."""
    step = 2 * tile.block_k * tile.block_n * (2 if shape.gated else 1)
    return min(-(-shape.width // (tile.block_k * tile.splits)), TOUCH_BYTES // step)


def candidates(shape: Shape, rows: int) -> list[GemvTile | GemmTile]:
    """What `tune` tries for one product: about twenty tiles."""
    if rows > FEW_ROWS:
        return wide_candidates(shape, rows)
    found: list[GemvTile | GemmTile] = []
    if rows <= GEMV_MAX_ROWS:
        wide = ((16, 4), (8, 4), (4, 4), (8, 8), (16, 8), (8, 2), (4, 2), (4, 1), (2, 1), (8, 1))
        for block_n, warps in wide if rows == 1 else wide[1:3] + wide[5:8] if rows <= 4 else wide[1:3]:
            if 256 * warps > shape.width or (block_n == 16 and shape.gated):
                continue
            early = _prefetch(shape, block_n, 256 * warps, 32 * warps, 128 if rows == 1 else 64)
            found.append(GemvTile(block_n, 256 * warps, warps, early))
    if rows > 1:
        for block_n in (16, 32, 64):
            for splits in (1, 2, 4, 8):
                programs = -(-shape.columns // block_n) * splits
                if splits > 1 and (not shape.splittable or programs > 4 * FILL or shape.width < 256 * splits):
                    continue
                if programs < 0.35 * FILL or (splits == 1 and block_n < 64 and programs > 16 * FILL):
                    continue
                ahead = _ahead(shape, rows, block_n, splits, 4, ALONE_BYTES)
                found.append(ahead or GemmTile(block_n, 128, splits, 4, 3, prefetch=2))
                found.append(GemmTile(block_n, 64, splits, 4, 6, prefetch=2))
                for tile in (GemmTile(block_n, 128, splits, 4, 4), GemmTile(block_n, 64, splits, 4, 6)):
                    found += [tile, replace(tile, touch=_touched(shape, tile))]
    return found


def wide_candidates(shape: Shape, rows: int) -> list[GemvTile | GemmTile]:
    """For more than FEW_ROWS rows: tiles of 64 or 128 weight rows (256 gated), one to four tiles of rows, splits to fill."""
    found: list[GemvTile | GemmTile] = []
    for block_n, block_m in ((64, 64), (64, 128), (64, 256), (128, 64), (128, 128), (128, 256)):
        if block_m > next_power_of_2(rows) or (shape.gated and block_n * block_m > 128 * 128):
            continue
        most = MERGE_ELEMENTS if block_m == 256 else 2 * MERGE_ELEMENTS  # or it would spill registers
        for splits in (1, 2, 4, 8):
            programs = -(-shape.columns // block_n) * -(-rows // block_m) * splits
            if splits > 1 and (not shape.splittable or programs > 2 * FILL or shape.width < 256 * splits):
                continue
            if splits > 1 and shape.merged and splits * block_n * block_m > most:
                continue
            if shape.splittable and programs < 0.35 * FILL:
                continue
            found.append(_wide(shape, block_n, block_m, splits))
            if block_n * block_m <= 64 * 128:
                found.append(_wide(shape, block_n, block_m, splits, prefetch=2))
    return found


def attention_candidates(rows: int) -> list[tuple[AttentionTile | SplitTile, int]]:
    """(tile, programs) pairs that `tune` tries."""
    if rows > FEW_ROWS:
        wide: list[AttentionTile | SplitTile] = [
            AttentionTile(block_n, 4, stages, 1, False, True, touch)
            for block_n, stages in ((64, 3), (64, 2), (32, 3), (32, 4)) for touch in (0, 1, 3)
        ]  # fmt: skip
        return [(tile, 4 * FILL) for tile in [*wide, SplitTile(64, 4, 3), SplitTile(64, 2, 3)]]
    if rows <= GEMV_ROWS:
        return [
            (AttentionTile(block_n, 4, 3, 1, early), programs)
            for early in (True, False)
            for block_n in ((64, 32) if rows <= 2 else (64,))
            for programs in ((FILL, 2 * FILL) if rows == 1 else (FILL, 2 * FILL, 4 * FILL, 8 * FILL))
        ]
    return [
        (AttentionTile(block_n, 4, stages, 1, early, False, touch), programs)
        for block_n, stages in ((64, 3), (64, 2), (32, 3), (32, 4)) for early in (True, False) for touch in (0, 1, 3)
        for programs in ((FILL, 4 * FILL) if (block_n, touch) == (64, 1) else (2 * FILL,))
    ]  # fmt: skip


def tune(
    start: StepTiles, config: ModelConfig, rows: int, measure: Callable[[StepTiles], float], seconds: float,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[StepTiles, float]:  # fmt: skip
    """Coordinate search: the best tile of each product in turn, the others held; -> (tiles, measured time).

    `measure` gives the time of a step, or raises where a tile does not fit. Ends after `seconds`.
    """
    deadline = time.monotonic() + seconds
    best, best_time = start, measure(start)
    say(f"start {best_time:.4f}")
    shapes = product_shapes(config)

    def trials() -> Iterable[tuple[str, dict]]:
        for name in ("gate_up", "down", "qkv", "o"):
            yield from ((name, {name: tile}) for tile in candidates(shapes[name], rows))
        for tile, programs in attention_candidates(rows):
            change = {"attention": tile, "attention_programs": programs}
            yield "attention", change
            if isinstance(tile, SplitTile):  # which the best QKV tile may exclude
                yield "attention", {**change, "qkv": gemm_tile(shapes["qkv"], rows)}
        yield from (("lm_head", {"lm_head": tile}) for tile in candidates(shapes["lm_head"], rows))

    for name, change in trials():
        if time.monotonic() > deadline:
            say("time is up")
            break
        try:
            trial = replace(best, **change)
        except ValueError:  # two choices that exclude each other
            continue
        if trial == best:
            continue
        try:
            took = measure(trial)
        except Exception as error:  # a tile that does not fit this card is no candidate
            say(f"{name} {change[name]}: {type(error).__name__}")
            continue
        if took < best_time:
            say(f"{took:.4f} with {name} {change}")
            best, best_time = trial, took
    return best, best_time


def to_json(table: TileTable) -> str:
    """A table as text: {rows: {product: [kind, fields], ...}}."""
    out: dict[str, dict] = {}
    for rows, tiles in sorted(table.items()):
        entry: dict = {"attention": asdict(tiles.attention), "attention_programs": tiles.attention_programs}
        entry["attention_kernels"] = 2 if isinstance(tiles.attention, SplitTile) else 1
        for name in PRODUCTS:
            tile = getattr(tiles, name)
            entry[name] = {"kind": "gemv" if isinstance(tile, GemvTile) else "gemm", **asdict(tile)}
        out[str(rows)] = entry
    return json.dumps(out, indent=1)


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
