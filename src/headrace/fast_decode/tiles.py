"""Which tiles the fused decode step runs with: what a step has, and defaults from the shapes (tile_tables.py has others).

How a product runs is told by its tile's type (see products.py). A table holds one StepTiles per number of rows up to which it
serves; the largest is where the path ends: above, cuBLAS was faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from headrace.fast_decode.attention import AttentionTile
from headrace.fast_decode.gemv import GemvTile
from headrace.fast_decode.products import Tile, num_splits
from headrace.fast_decode.ring_tile import MAX_ROWS as RING_ROWS
from headrace.fast_decode.ring_tile import RingAttention, RingTile
from headrace.fast_decode.ring_tile import row_block as ring_rows
from headrace.fast_decode.rounded_tile import PAIR_ROWS, RoundedTile
from headrace.fast_decode.skinny_gemm import MAX_ROWS as GEMM_MAX_ROWS
from headrace.fast_decode.skinny_gemm import GemmTile, row_block
from headrace.fast_decode.warp_gemm import WarpTile
from headrace.fast_decode.wide_gemm import WideTile
from headrace.fast_decode.widened_tile import WidenedTile, factors_bytes, run_bytes
from headrace.kernels.attention_decode import SplitTile
from headrace.kernels.launch import next_power_of_2
from headrace.kernels.narrow import RUN, packed
from headrace.kernels.warp_products import RUN_BYTES
from headrace.model.config import ModelConfig
from headrace.model.decoder_weights import MATRICES
from headrace.model.weight import Kind

ROW_STEPS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # the default table has an entry for each
WARP_ROWS = 8  # up to here each warp multiplies 4-bit numbers for itself: all that is in its tile of x
ALL_ROWS = 32  # up to here a product takes all rows at once; above, tiles of both operands where the card has a copy engine
SHORT_ROWS = 4  # up to here attention is short, a tile of its own, and keys and values by rings of two tiles
EARLY_ROWS = 8  # up to here the kernel behind attention may start while it runs
PRODUCTS = ("qkv", "o", "gate_up", "down", "lm_head")
SMALL_BYTES, LARGE_BYTES = 96 * 1024, 224 * 1024  # of shared memory that a program has on every card, and on Hopper
MULTIPROCESSORS = 132  # of an H100 or H200
FILL = 128  # programs that fill one with at most one each


@dataclass(frozen=True, slots=True)
class StepTiles:
    """The tiles of one decode step. `attention_programs`: splits are chosen so that about that many programs run.

    A SplitTile stands for two kernels, rotation with the cache write and attention over the cache, that choose splits
    themselves; the QKV product is then not split. `short_attention` serves contexts that one of its tiles holds: it is in
    registers before the wait for the QKV product, and there is nothing to merge. `few_attention` serves contexts of up to its
    `few` tokens. `ring_attention` takes the place of `attention` on Hopper, for keys and values in bfloat16, and there the
    first of `cluster_attention` whose `few` tokens hold the contexts that of all of these.
    """

    qkv: Tile
    o: Tile
    gate_up: Tile
    down: Tile
    lm_head: Tile
    attention: AttentionTile | SplitTile | RingAttention = AttentionTile()
    attention_programs: int = 4 * FILL
    short_attention: AttentionTile | None = None
    few_attention: AttentionTile | None = None
    ring_attention: RingAttention | None = None
    cluster_attention: tuple[RingAttention, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.attention, SplitTile) and num_splits(self.qkv) > 1:
            raise ValueError("attention in two kernels takes no partial QKV sums")


def with_attention_in_two(tiles: StepTiles) -> StepTiles:
    """The same, with all keys and values written before any of them is read."""
    whole: Tile = tiles.qkv
    if not isinstance(whole, GemvTile):
        whole = replace(whole, splits=1)
    two = tiles.attention if isinstance(tiles.attention, SplitTile) else SplitTile()
    return replace(
        tiles, qkv=whole, attention=two, short_attention=None, few_attention=None, ring_attention=None, cluster_attention=()
    )  # fmt: skip


def with_fp8_cache(tiles: StepTiles, config: ModelConfig, rows: int, ring: bool = False) -> StepTiles:
    """The same for keys and values in FP8: half the bytes make tiles of twice the keys. They are the fastest on an H200 as long
    as all programs run at once, two to a multiprocessor. `ring`: attention_ring_fp8.py is for the heads, and runs; of more than
    ALL_ROWS where tables have rings for bfloat16 or products are FP8 (an 8B's steps of 64 rows are 3 to 5 % faster, a 4B's 8 %
    slower), and behind a qkv in parts, as all steps had it that were compared on a card."""
    in_fp8 = isinstance(tiles.gate_up, RoundedTile)
    fast = rows <= ALL_ROWS or tiles.ring_attention is not None or in_fp8
    if ring and fast and rows > (2 if in_fp8 else SHORT_ROWS) and num_splits(tiles.qkv) > 1:
        tile = RingAttention(2, 2, 2 * FILL if rows <= ALL_ROWS else 4 * FILL)
        return replace(tiles, attention=tile, attention_programs=tile.programs)
    pairs, programs = rows * config.num_kv_heads, tiles.attention_programs
    if pairs >= FILL:
        programs = min(programs, 2 * FILL)
    if not isinstance(tiles.attention, AttentionTile) or tiles.attention.block_n >= 128 or config.head_dim > 128:
        return tiles
    if max(pairs, programs) > 2 * FILL:
        return tiles
    wide = replace(tiles.attention, block_n=128, num_warps=4, num_stages=2)
    return replace(tiles, attention=wide, attention_programs=programs)


def with_ring_attention(tiles: StepTiles) -> StepTiles:
    """The same with the attention that is for Hopper, if there is one."""
    ring = tiles.ring_attention
    return tiles if ring is None else replace(tiles, attention=ring, attention_programs=ring.programs)


TileTable = Mapping[int, StepTiles]  # rows up to which it serves -> tiles


@dataclass(frozen=True, slots=True)
class Shape:
    """columns [N] and width [K] of a product; a gated one has 2 N weight rows. `splittable`: partial sums are allowed."""

    columns: int
    width: int
    gated: bool = False
    splittable: bool = True


def product_shapes(config: ModelConfig, delta: bool = False) -> dict[str, Shape]:
    """Of a layer with attention, or of one that is a gated delta net."""
    hidden, inner, net = config.hidden_size, config.intermediate_size, config.delta
    columns, width = config.q_size * (2 if config.attn_gate else 1) + 2 * config.kv_size, config.q_size
    if delta and net is not None:
        columns, width = net.channels + net.v_size + 2 * net.value_heads, net.v_size
    return {
        "qkv": Shape(columns, hidden),
        "o": Shape(hidden, width),
        "gate_up": Shape(inner, hidden, gated=True, splittable=False),
        "down": Shape(hidden, inner),
        "lm_head": Shape(config.vocab_size, hidden, splittable=False),
    }


Kinds = tuple[Kind, ...]  # of the matrices of PRODUCTS
FLOAT: Kinds = ("float", "float", "float", "float", "float")


def default_tiles(
    config: ModelConfig, rows: int, copy_engine: bool = True, kinds: Kinds = FLOAT, delta: bool = False, warps: bool = True,
    rounded: bool = True, widened: bool = True,
) -> StepTiles:  # fmt: skip
    """Good guesses for H100 and H200 from the shapes alone, and the weights' kinds; `warps` and behind: see `default_table`."""
    plain = config.norm_place == "pre"
    wide = rows > (ALL_ROWS if plain else RING_ROWS)
    ring = partial(ring_tile, deep=plain)
    guess = gemv_tile if rows == 1 else gemm_tile if not copy_engine else wide_tile if wide else ring
    shapes = product_shapes(config, delta)
    products = {
        name: guess(shapes[name], rows) if kind == "float" else narrow_tile(shapes[name], rows, kind, warps, widened)
        for name, kind in zip(PRODUCTS, kinds, strict=True)
    }
    in_fp8 = rounded_tiles(shapes, rows) if rounded and kinds[:-1] == ("fp8",) * 4 and rows > 1 else {}
    products |= in_fp8
    if not copy_engine:
        products = {name: within(SMALL_BYTES, tile, shapes[name], rows) for name, tile in products.items()}
    return StepTiles(
        **products, attention=attention_tile(config, rows, copy_engine), attention_programs=default_programs(rows),
        short_attention=None, few_attention=few_tile(config) if rows == 1 else None,
        ring_attention=ring_attention_tile(config, rows, kinds[0]) if copy_engine and not in_fp8 else None,
        cluster_attention=(),
    )  # fmt: skip


def few_tile(config: ModelConfig) -> AttentionTile | None:
    """One row's context is read sooner by a program for each query head (heads of 128 measured; of 64 as soon)."""
    if config.head_dim != 128 or config.attn_gate:
        return None
    return AttentionTile(block_n=32, num_warps=2, early=True, few=4096)


def ring_attention_tile(config: ModelConfig, rows: int, kind: Kind = "float") -> RingAttention | None:
    """On an H200 steps of 8 and 32 rows of four models, whose heads are of 64, 128 and 256, are 3 to 11 % faster by it, of 2
    and 4 rows 2 to 7 (behind 2,048 tokens 5 to 14); of 64 rows those of Gemma-2-2B are, and of others some. 2 and 4 rows with
    narrow weights lose by it; with experts they have not been measured."""
    many = config.norm_place != "pre" and config.head_dim > 128
    least = 1 if kind == "float" and config.experts is None else SHORT_ROWS
    if not least < rows <= (RING_ROWS if many else ALL_ROWS):
        return None
    few = rows <= 16
    if config.head_dim > 128:
        return RingAttention(1, 3, FILL) if few else RingAttention(1, 1, 2 * FILL if rows <= ALL_ROWS else 4 * FILL)
    if config.head_dim <= 64:
        return RingAttention(3, 6, FILL if few else 2 * FILL)
    short = rows <= SHORT_ROWS or (few and kind != "float")
    return RingAttention(2, 2, 2 * FILL) if short else RingAttention(3, 3, 2 * FILL)


def attention_tile(config: ModelConfig, rows: int, copy_engine: bool) -> AttentionTile:
    """Two warps keep a tile of keys and values in registers where heads are small and numbers have two bytes (measured so)."""
    if rows <= SHORT_ROWS:
        return AttentionTile(early=True)
    if copy_engine and config.head_dim <= 128 and config.num_heads <= 16 * config.num_kv_heads:
        warps = 2 if rows <= GEMM_MAX_ROWS else 4
        return AttentionTile(num_warps=warps, early=rows <= EARLY_ROWS, heads_first=True, touch=1)
    if copy_engine and config.head_dim > 128 and rows <= EARLY_ROWS:
        return AttentionTile(early=True, heads_first=True, touch=1)
    return AttentionTile(heads_first=rows > GEMM_MAX_ROWS)


def default_programs(rows: int) -> int:
    return FILL if rows <= 2 else 2 * FILL if rows <= 4 else 4 * FILL


def default_table(
    config: ModelConfig, copy_engine: bool = True, kinds: Kinds = FLOAT, delta: bool = False, warps: bool = True,
    rounded: bool = True, widened: bool = True,
) -> dict[int, StepTiles]:  # fmt: skip
    """`copy_engine`: the card can run WideTile, see takes.has_copy_engine; `delta`: see product_shapes. With narrow
    weights for few rows: above, FP8 tensor cores or whole matrices in bfloat16 are faster (kernels/narrow_linear.py). `warps`:
    all of them suit WarpTile; `rounded`: the model, and the card, suit RoundedTile if its layers are FP8; `widened`: they suit
    WidenedTile."""
    wide = copy_engine and kinds == FLOAT
    steps = [rows for rows in ROW_STEPS if wide or rows <= GEMM_MAX_ROWS]
    return {rows: default_tiles(config, rows, copy_engine, kinds, delta, warps, rounded, widened) for rows in steps}


def with_delta_qkv(
    table: TileTable, config: ModelConfig, copy_engine: bool, kinds: Kinds, delta: bool, warps: bool, widened: bool
) -> dict[int, StepTiles]:  # fmt: skip
    """The table for layers that are gated delta nets: the first product is another one. Arguments: see `default_tiles`."""
    return {
        n: replace(step, qkv=default_tiles(config, n, copy_engine, kinds, delta, warps, widened=widened).qkv)
        for n, step in table.items()
    }


def gemv_tile(shape: Shape, rows: int) -> GemvTile:
    """Four warps side by side along K, enough programs to fill the card, at most 64 registers of early weights a thread. One
    warp and few columns where K is short, or ends far from the end of a step."""
    wasted = -shape.width % 1024 / shape.width
    if (shape.width <= 1024 <= shape.columns // 2) or wasted > (0.125 if shape.gated else 0.167):
        block_n = 2 if shape.gated else 4
        return GemvTile(block_n, 256, 1, early_steps(shape, block_n, 256, 32, 128))
    warps = 4 if shape.width >= 1024 else 2 if shape.width >= 512 else 1
    block_k = 256 * warps
    widest = 8 if shape.gated or shape.width > 1024 else 16
    block_n = next((n for n in (16, 8, 4) if n <= widest and shape.columns >= 1.4 * FILL * n), 4)
    return GemvTile(block_n, block_k, warps, early_steps(shape, block_n, block_k, 32 * warps))


def early_steps(shape: Shape, block_n: int, block_k: int, threads: int, registers: int = 64) -> int:
    a_step = (2 if shape.gated else 1) * block_n * block_k // (2 * threads)
    return max(1, min(-(-shape.width // block_k), registers // a_step))


def gemm_tile(shape: Shape, rows: int) -> GemmTile:
    """64 columns, and as few splits of K as make somewhat more than FILL programs. A program that has little of K loads all its
    weights before the wait, others two steps of them, and a gated one asks for two. Measured in whole steps of five models on
    an H200: a kernel alone does not show what it keeps the next one from."""
    if not shape.splittable:
        if rows > 32 and not shape.gated:
            return GemmTile(64, 64, 1, 4, 6)
        return GemmTile(64, 128, 1, 4, 4, touch=2 if shape.gated else 0)
    splits = splits_to(1.2 * FILL, shape, 64, 8, 512)
    steps = -(-shape.width // (128 * splits))
    return GemmTile(64, 128, splits, 4, 2, prefetch=steps) if steps <= 6 else GemmTile(64, 128, splits, 4, 3, prefetch=2)


def ring_tile(shape: Shape, rows: int, deep: bool = True) -> RingTile:
    """As `gemm_tile` splits K, and the deepest ring that leaves room for another program's; of gate and up the deepest. `deep`:
    not where the norm of what is added lies between products: there gate and up leave room, too, and 4 steps of others are
    faster. (Whole steps of 8 and 32 rows of four models, on an H200.) Above ALL_ROWS short ones (of Gemma-2-2B's 64 rows)."""
    splits = splits_to(1.2 * FILL, shape, 64, 8, 512) if shape.splittable else 1
    if rows > ALL_ROWS:
        if not shape.splittable:
            return RingTile(64, 128, 1, 2) if shape.gated else RingTile(128, 64, 1, 4, True)
        tiles = -(-shape.columns // 64)  # of which two have place on a multiprocessor
        return RingTile(64, 128, splits if tiles * splits <= 2 * MULTIPROCESSORS else max(1, FILL // tiles), 3)
    step, half = 2 * 128 * (64 * (2 if shape.gated else 1) + ring_rows(rows)), LARGE_BYTES // 2
    if shape.gated and not deep:
        block_k = 128 if half // step >= 3 else 64
        return RingTile(64, block_k, 1, min(half * 128 // (step * block_k), -(-shape.width // block_k)), True)
    stages = LARGE_BYTES // step if shape.gated else half // step if shape.splittable else 4
    return RingTile(64, 128, splits, min(stages, 6 if deep else 4, -(-shape.width // (128 * splits))), deep)


def within(most: int, tile: Tile, shape: Shape, rows: int) -> Tile:
    """With as many steps of K in flight as `most` bytes of shared memory hold; beside those that are early, the sums."""
    if not isinstance(tile, GemmTile):
        return tile
    block_m = row_block(rows)
    step = 2 * tile.block_k * (tile.block_n * (2 if shape.gated else 1) + block_m)
    early = (most - 4 * tile.block_n * block_m) // step
    return replace(tile, num_stages=min(tile.num_stages, most // step), prefetch=min(tile.prefetch, early))


def splits_to(programs: float, shape: Shape, block_n: int, most: int, width: int = 256) -> int:
    """As few splits of K as make so many programs, each of which has so much of it at least."""
    splits = 1
    while -(-shape.columns // block_n) * splits < programs and splits < most and shape.width // (2 * splits) >= width:
        splits *= 2
    return splits


def wide_tile(shape: Shape, rows: int) -> WideTile | GemmTile:
    """The widest tile that makes about FILL programs, with as few splits of K as that takes. Of up to 64 rows what may be split
    is, rather than cut narrower, unless it is small."""
    if shape.columns >= 512 * FILL:  # each tile of weights is read once for all rows, or for 128 of them
        return WideTile(128, 128, 64, 1, 8, 4) if rows > 64 else gemm_tile(shape, rows)
    if rows <= 64 and shape.splittable:
        small = shape.columns <= 2048 and shape.columns * shape.width <= 6 << 20
        block_n, programs = (32, 0.84 * FILL) if small else (64, 0.55 * FILL)
        return WideTile(64, block_n, 128, splits_to(programs, shape, block_n, 4), 4, 4)
    splits = 1
    while True:
        for block_n in (64, 32, 16):
            if -(-shape.columns // block_n) * -(-rows // 64) * splits >= 0.7 * FILL:
                return WideTile(64, block_n, 128, splits, 4, 4)
        if not shape.splittable or splits == 4 or shape.width < 512 * splits:
            return WideTile(64, 16, 128, splits, 4, 4)
        splits *= 2


def narrow_tile(shape: Shape, rows: int, kind: Kind, warps: bool = True, widened: bool = True) -> Tile:
    """Of weights of a byte or half of one. What limits is the conversion in registers rather than memory: several programs to a
    multiprocessor, with few steps in flight (measured on an H200)."""
    per_byte = packed(kind)
    if widened and kind in ("int4", "int8") and rows > SHORT_ROWS and (own := widened_tile(shape, rows, kind)) is not None:
        return own
    if warps and per_byte == 2 and rows <= WARP_ROWS and (tile := warp_tile(shape, per_byte, rows)) is not None:
        return tile
    if rows == 1:
        return narrow_gemv_tile(shape, per_byte)
    # of 4 bits: 6 % faster at 32 rows; slower at 64, and of a byte at either (measured on an H200)
    if per_byte == 2 and 16 < rows <= 32 and (wide := wide_narrow_tile(shape)) is not None:
        return wide
    if not shape.splittable:  # an 8B's head in int8
        if rows <= 16:
            return GemmTile(64, 256, 1, 2, 3)
        return GemmTile(64, 128, 1, 4, 3) if rows <= 32 else GemmTile(128, 128, 1, 8, 3)
    splits = splits_to((5 if rows <= 16 else 3) * FILL, shape, 64, 8)
    return GemmTile(64, 128, splits, 2 if rows <= 16 and per_byte == 1 else 4, 3)


def rounded_tiles(shapes: Mapping[str, Shape], rows: int) -> dict[str, Tile]:
    """Of a layer's four products. Where programs are as many as multiprocessors, or nearly, each has a ring as large as one may
    have; of others two are on one (whole steps of an 8B on an H200, where the former are faster). Of none where columns are
    no whole tiles."""
    found: dict[str, Tile] = {}
    block_m = ring_rows(rows) * (2 if rows <= PAIR_ROWS else 1)
    for name in MATRICES:
        shape = shapes[name]
        if shape.columns % 128 or shape.width % 128:
            return {}
        splits = splits_to(0.7 * FILL, shape, 128, 8, 512) if shape.splittable else 1
        while shape.width % (128 * splits):
            splits //= 2
        one_each = 0.7 * FILL <= shape.columns // 128 * splits <= 1.03 * FILL
        sizes = 4 * ring_rows(rows) * next_power_of_2(shape.width // 64 // splits)
        room = (LARGE_BYTES if one_each else LARGE_BYTES // 2) - sizes
        if name == "qkv":
            found[name] = RoundedTile(64, 2 if rows <= 32 and shape.width % 256 == 0 else 1, 8)
        elif not shape.gated:
            found[name] = RoundedTile(128, splits, min(room // (128 * (128 + block_m)), 8), 4 if rows <= 32 else 8)
        elif one_each:
            found[name] = RoundedTile(128, 1, min(room // (128 * (256 + block_m)), 4 if rows <= 16 else 5), 8)
        else:
            found[name] = RoundedTile(64, 1, min(room // (128 * (128 + block_m)), 4))
    return found


def without(tile: type, table: TileTable, instead: TileTable) -> dict[int, StepTiles]:
    """The table for weights, a model or a card that `tile` (RoundedTile, DigitTile) does not suit: products as in `instead`."""
    found = dict(table)
    for rows, step in table.items():
        if any(isinstance(getattr(step, name), tile) for name in MATRICES):
            other = instead[min(n for n in instead if n >= rows)]
            found[rows] = replace(step, **{name: getattr(other, name) for name in MATRICES})
    return found


def warp_tile(shape: Shape, per_byte: int, rows: int) -> WarpTile | None:
    """16 rows of the weights, and more warps along K where there are few of these; None where warps would have unequal parts.
    A program that has little of a row loads all of it before the wait; of several rows of x, where there are not many more
    programs than fill a card, four warps load eight runs each (whole steps of an 8B with 4 bits, on an H200)."""
    block_n, runs = (8 if shape.gated else 16), shape.width // (RUN_BYTES * per_byte)
    warps = 8 if shape.columns // block_n <= 2 * FILL else 4
    if shape.width % (RUN_BYTES * per_byte) or runs % warps:
        return None
    if rows > 1 and 1.5 * FILL <= shape.columns // block_n <= 2 * FILL:
        return WarpTile(block_n, 4, 4, 8)
    chunk = runs // warps if runs // warps <= 4 else 2
    lines = shape.width // per_byte // 128
    return WarpTile(block_n, warps, warps, chunk, touch=lines if lines in (8, 16) and chunk == 2 and not shape.gated else 0)


def widened_tile(shape: Shape, rows: int, kind: Kind) -> WidenedTile | None:
    """64 columns, as few splits of K as make 1.4 times FILL programs, and the deepest rings that leave room for all of them."""
    if shape.width % RUN or shape.columns % 64:
        return None
    splits, most = 1, 8 if shape.splittable else 1
    while splits < most and shape.columns // 64 * splits < 1.4 * FILL and shape.width % (RUN * 2 * splits) == 0:
        splits *= 2
    held = 64 * (2 if shape.gated else 1)
    step, factors = run_bytes(kind, held, row_block(rows)), factors_bytes(kind, held, shape.width // RUN // splits)
    beside = min(3, -(-shape.columns // 64 * splits // MULTIPROCESSORS))
    return WidenedTile(64, splits, max(2, min(8, (LARGE_BYTES // beside - 1024 - factors) // step)))


def wide_narrow_tile(shape: Shape) -> GemmTile | None:
    """Of twice the columns, where there are enough: each tile reads all rows of x, soon more bytes than its weights are."""
    tiles, splits = shape.columns * (2 if shape.gated else 1) // 128, 1
    while tiles * splits < 1.4 * FILL:
        if not shape.splittable or splits == 8 or shape.width < 512 * splits:
            return None
        splits *= 2
    return GemmTile(128, 128, splits, 8, 3)


def narrow_gemv_tile(shape: Shape, per_byte: int) -> GemvTile:
    """A thread loads 16 bytes of a row; as many warps side by side as leave few of their bytes past the row's end."""
    width = shape.width // per_byte
    warps = next((n for n in ((2,) if shape.gated else (4, 2)) if -width % (512 * n) <= width // 8), 1)
    block_n = 8 if not shape.gated and shape.columns >= 8 * FILL else 4
    registers = 4 * block_n * (2 if shape.gated else 1)  # of a step
    return GemvTile(block_n, 512 * warps * per_byte, warps, max(1, min(-(-width // (512 * warps)), 64 // registers)))
