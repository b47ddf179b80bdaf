"""Which tiles a fused decode step should have on this card: candidates for each product, and the search among them.

What `tune` finds goes into a table (JSON, `to_json`) that the engine reads: see headrace.fast_decode.tile_tables.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace

from headrace.fast_decode.attention import AttentionTile
from headrace.fast_decode.gemv import GemvTile
from headrace.fast_decode.products import Tile
from headrace.fast_decode.ring_tile import RingAttention, RingTile
from headrace.fast_decode.ring_tile import row_block as ring_rows
from headrace.fast_decode.rounded_tile import PAIR_ROWS, RoundedTile
from headrace.fast_decode.skinny_gemm import MAX_ROWS as GEMM_MAX_ROWS
from headrace.fast_decode.skinny_gemm import GemmTile
from headrace.fast_decode.tile_tables import KINDS
from headrace.fast_decode.tiles import (
    ALL_ROWS,
    FILL,
    FLOAT,
    LARGE_BYTES,
    PRODUCTS,
    SHORT_ROWS,
    Kinds,
    Shape,
    StepTiles,
    TileTable,
    early_steps,
    gemm_tile,
    product_shapes,
    wide_tile,
)
from headrace.fast_decode.wide_gemm import WideTile
from headrace.fast_decode.widened_tile import WidenedTile, factors_bytes, row_block, run_bytes
from headrace.kernels.attention_decode import SplitTile
from headrace.kernels.launch import next_power_of_2
from headrace.kernels.narrow import RUN, packed
from headrace.model.config import ModelConfig
from headrace.model.weight import Kind

AHEAD_BYTES = 112 * 1024  # of shared memory that a program may fill before the wait: two to an SM
ALONE_BYTES = 208 * 1024  # one to an SM
TOUCH_BYTES = 128 * 1024  # of weights that a program may ask into the L2 cache before the wait


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


def _touched(shape: Shape, tile: GemmTile, per_byte: float = 0.5) -> int:
    """Steps of a tile whose weights are TOUCH_BYTES at most."""
    step = int(tile.block_k * tile.block_n / per_byte) * (2 if shape.gated else 1)
    return min(-(-shape.width // (tile.block_k * tile.splits)), TOUCH_BYTES // step)


def narrow_candidates(shape: Shape, rows: int, per_byte: int) -> list[Tile]:
    """Of weights of a byte or half of one: rows of 512 bytes for each warp, or as many steps in flight as fit."""
    if rows == 1:
        width, found = shape.width // per_byte, []
        for block_n, warps in itertools.product((2, 4, 8, 16), (1, 2, 4, 8)):
            registers = 4 * block_n * (2 if shape.gated else 1)
            if -width % (512 * warps) <= width // 8 and shape.columns // block_n >= FILL and registers <= 64:
                found += [GemvTile(block_n, 512 * warps * per_byte, warps, early) for early in {max(1, 64 // registers), 1}]
        return found
    found = []
    for block_m, block_n, block_k in itertools.product((64, 128), (64, 128), (64, 128, 256)):
        block_m = block_m if rows > 64 else max(16, next_power_of_2(rows))
        step = block_k * (2 * block_m + block_n // per_byte)
        warps = 8 if block_n * block_m > 64 * 128 or block_n == 128 else 4
        if 3 * step > ALONE_BYTES or block_k < 128 * (per_byte - 1) or block_m * block_n > 128 * 128:
            continue
        for splits in (1, 2, 4, 8):
            programs = -(-shape.columns // block_n) * splits * -(-rows // block_m) * (2 if shape.gated else 1)
            if splits > 1 and (not shape.splittable or programs > 6 * FILL or shape.width < 2 * block_k * splits):
                continue
            if programs < 0.7 * FILL:
                continue
            if rows > 64:
                found.append(WideTile(block_m, block_n, block_k, splits, warps, 3))
                continue
            tile = GemmTile(block_n, block_k, splits, warps, 3)
            found += [tile, replace(tile, touch=_touched(shape, tile, per_byte))]
            found += [replace(tile, num_warps=2)] if block_n == 64 and rows <= 16 else []
    return list(dict.fromkeys(found))


def widened_candidates(shape: Shape, rows: int, kind: Kind) -> list[Tile]:
    """On Hopper: programs for half the card to six to a multiprocessor, of which the rings leave room for one to four on it."""
    found: list[Tile] = []
    forms = ((64, 4), (64, 8), (32, 4), (128, 8)) if shape.gated else ((64, 4), (128, 8))
    for (block_n, warps), splits, runs in itertools.product(forms, (1, 2, 3, 4, 6, 8), (1, 2)):
        programs = shape.columns // block_n * splits
        if shape.width % (RUN * runs * splits) or shape.columns % block_n or (runs > 1 and kind == "int8"):
            continue
        if programs < 0.5 * FILL or (splits > 1 and (not shape.splittable or programs > 6 * FILL)):
            continue
        rows_of = block_n * (2 if shape.gated else 1)
        step = runs * run_bytes(kind, rows_of, row_block(rows))
        kept = factors_bytes(kind, rows_of, shape.width // RUN // splits)
        room = {(LARGE_BYTES // beside - 1024 - kept) // step for beside in (1, 2, 3, 4)}
        found += [WidenedTile(block_n, splits, min(n, 8), warps, runs) for n in sorted(room) if n > 1]
    return list(dict.fromkeys(found))


def rounded_candidates(shape: Shape, rows: int) -> list[Tile]:
    """Of FP8 layers on Hopper: programs for half the card to twice it, rings of a third of what one may have to all of it."""
    found: list[Tile] = []
    for block_n, splits, stages in itertools.product((64, 128), (1, 2, 4, 8), (3, 4, 5, 6, 7, 8, 12)):
        step = 128 * (block_n * (2 if shape.gated else 1) + ring_rows(rows) * (2 if rows <= PAIR_ROWS else 1))
        programs = shape.columns // block_n * splits
        if shape.columns % block_n or shape.width % (128 * splits) or not 60 << 10 <= stages * step <= ALONE_BYTES:
            continue
        if 0.5 * FILL <= programs <= 2.2 * FILL and (splits == 1 or shape.splittable):
            found.append(RoundedTile(block_n, splits, stages, 8 if block_n == 128 and (shape.gated or rows > 32) else 4))
    return found


def candidates(shape: Shape, rows: int, kind: Kind = "float") -> list[Tile]:
    """What `tune` tries for one product: four to sixty tiles."""
    if kind == "fp8" and rows > 1:
        return rounded_candidates(shape, rows)
    if kind in ("int4", "int8") and 1 < rows <= GEMM_MAX_ROWS:
        return widened_candidates(shape, rows, kind)
    if kind != "float":
        return narrow_candidates(shape, rows, packed(kind))
    found = wide_candidates(shape, rows) if rows > ALL_ROWS else []
    if rows > GEMM_MAX_ROWS:
        return found
    if rows == 1:
        for block_n, warps in ((16, 4), (8, 4), (4, 4), (8, 8), (16, 8), (8, 2), (4, 2), (4, 1), (2, 1), (8, 1)):
            if 256 * warps > shape.width or (block_n == 16 and shape.gated):
                continue
            early = early_steps(shape, block_n, 256 * warps, 32 * warps, 128)
            found.append(GemvTile(block_n, 256 * warps, warps, early))
            if warps > 1 and block_n < 16 and shape.width % (256 * warps) == 0:
                steps = shape.width // (256 * warps)
                found += [replace(found[-1], shared=n) for n in (1, 2, 3, 6) if n <= steps <= 12]
    else:
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
                found += ring_candidates(shape, rows, block_n, splits)
    return found


def ring_candidates(shape: Shape, rows: int, block_n: int, splits: int) -> list[Tile]:
    """Of 64 columns, as many steps in flight as fit or fewer."""
    step, steps = 2 * 128 * (block_n * (2 if shape.gated else 1) + ring_rows(rows)), -(-shape.width // (128 * splits))
    stages = {min(n, steps, ALONE_BYTES // step) for n in (3, 4, 5, 6, 8)}
    return [RingTile(64, 128, splits, n, late) for n in sorted(stages) for late in (False, True)] if block_n == 64 else []


def wide_candidates(shape: Shape, rows: int) -> list[Tile]:
    """For more than ALL_ROWS rows: programs for half the card to several times it, as many steps in flight as fit."""
    found: list[Tile] = []
    for block_m, block_n in itertools.product((64, 128), (16, 32, 64, 128)):
        size = block_m * block_n * (2 if shape.gated else 1)
        for splits in (1, 2, 4, 8):
            programs = -(-shape.columns // block_n) * -(-rows // block_m) * splits
            if block_m > max(64, next_power_of_2(rows)) or size > 128 * 128 or programs < 0.45 * FILL:
                continue
            if splits > 1 and (not shape.splittable or programs > 2.1 * FILL or shape.width < 256 * splits):
                continue
            for block_k in (64, 128):
                step = 2 * block_k * (block_m + block_n * (2 if shape.gated else 1))
                stages = min(512 // block_k, ALONE_BYTES // step)
                if stages > 2:
                    found.append(WideTile(block_m, block_n, block_k, splits, 8 if size >= 128 * 128 else 4, stages))
    return found or [wide_tile(shape, rows)]


def attention_candidates(rows: int) -> list[tuple[AttentionTile | SplitTile, int]]:
    """(tile, programs) pairs that `tune` tries."""
    if rows <= SHORT_ROWS:
        return [
            (AttentionTile(block_n, warps, 3, 1, early), programs)
            for early in (True, False)
            for block_n, warps in (((64, 4), (64, 2), (32, 2)) if rows <= 2 else ((64, 4), (64, 2)))
            for programs in ((FILL, 2 * FILL) if rows == 1 else (FILL, 2 * FILL, 4 * FILL, 8 * FILL))
        ]
    shapes = ((64, 4, 3), (64, 4, 2), (64, 2, 3), (64, 2, 2), (128, 4, 2), (32, 2, 3), (32, 1, 2))
    one: list[tuple[AttentionTile | SplitTile, int]] = [
        (AttentionTile(block_n, warps, stages, 1, early, heads_first, touch), programs)
        for block_n, warps, stages in shapes
        for early, heads_first in ((True, False), (True, True), (False, False), (False, True)) for touch in (0, 1)
        for programs in ((4 * FILL,) if rows > ALL_ROWS else (FILL, 2 * FILL, 4 * FILL))
    ]  # fmt: skip
    return one + [(SplitTile(64, 4, 3), 4 * FILL), (SplitTile(64, 2, 3), 4 * FILL)] if rows > ALL_ROWS else one


def ring_attention_candidates(config: ModelConfig) -> list[RingAttention]:
    """(For heads that it suits.)"""
    sizes = [(c, n) for c, n in ((1, 1), (1, 2), (1, 3), (2, 2), (3, 3), (3, 6)) if 256 * config.head_dim * n <= ALONE_BYTES]
    return [RingAttention(*size, programs) for size in sizes for programs in (FILL, 2 * FILL, 4 * FILL)]


def tune(
    start: StepTiles, config: ModelConfig, rows: int, measure: Callable[[StepTiles], float], seconds: float,
    say: Callable[[str], None] = lambda line: None, kinds: Kinds = FLOAT,
) -> tuple[StepTiles, float]:  # fmt: skip
    """Coordinate search: the best tile of each product in turn, the others held; -> (tiles, measured time).

    `measure` gives the time of a step, or raises where a tile does not fit. Ends after `seconds`.
    """
    deadline = time.monotonic() + seconds
    best, best_time = start, measure(start)
    say(f"start {best_time:.4f}")
    shapes, kind = product_shapes(config), dict(zip(PRODUCTS, kinds, strict=True))

    def trials() -> Iterable[tuple[str, dict]]:
        for name in ("gate_up", "down", "qkv", "o"):
            yield from ((name, {name: tile}) for tile in candidates(shapes[name], rows, kind[name]))
        for tile, programs in attention_candidates(rows):
            change = {"attention": tile, "attention_programs": programs, "ring_attention": None}
            yield "attention", change
            if isinstance(tile, SplitTile):  # which the best QKV tile may exclude
                yield "attention", {**change, "qkv": replace(wide_tile(shapes["qkv"], rows), splits=1)}
        yield from (("ring_attention", {"ring_attention": tile}) for tile in ring_attention_candidates(config))
        yield from (("lm_head", {"lm_head": tile}) for tile in candidates(shapes["lm_head"], rows, kind["lm_head"]))

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
    names = {kind: name for name, kind in KINDS.items()}
    out: dict[str, dict] = {}
    for rows, tiles in sorted(table.items()):
        entry: dict = {"attention": asdict(tiles.attention), "attention_programs": tiles.attention_programs}
        entry["attention_kernels"] = 2 if isinstance(tiles.attention, SplitTile) else 1
        for name in ("short_attention", "few_attention", "ring_attention"):
            tile = getattr(tiles, name)
            entry[name] = None if tile is None else asdict(tile)
        entry["cluster_attention"] = [asdict(tile) for tile in tiles.cluster_attention]
        for name in PRODUCTS:
            tile = getattr(tiles, name)
            entry[name] = {"kind": names[type(tile)], **asdict(tile)}
        out[str(rows)] = entry
    return json.dumps(out, indent=1)
