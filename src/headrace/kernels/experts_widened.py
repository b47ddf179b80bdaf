"""MXFP4 experts of some rows: each warp widens what it has loaded to bfloat16, scales within, and multiplies where it lies.

As in warp_products.py a warp has tiles of 16 rows of the weights and goes over K in runs of 128 columns; thread 4 g + q holds
bytes 16 q to 16 q + 15 of rows g and g + 8, so of two groups of columns. A scale is a power of two, so a weight times its scale
is a bfloat16: no sum has to be scaled, and a weight is widened once for all rows of x of its expert. Pairs are sorted by expert
(experts_sort.py). A row's sums go over K from its beginning to its end, whatever is beside it.

Widening takes 2.1 of the 2.6 instructions that there are for a weight.
"""

# mypy: disable-error-code="assignment, misc, var-annotated"
# (kernels grow tuples in loops that the compiler unrolls)

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from headrace.kernels.experts_ends import open_gate
from headrace.kernels.experts_sort import Sorted, tile_end, tile_expert, tile_first, turned
from headrace.kernels.experts_warp import own_runs
from headrace.kernels.launch import gdc_launch_dependents, gdc_wait, hold, jit, pdl, tl
from headrace.kernels.narrow import NarrowMatrix, are_mxfp4, assembly, held_width
from headrace.kernels.warp_words import FLOAT_4, LOAD, LOAD_ONCE, M_8, MULTIPLY_8, UINT_2, UINT_16, load_words

# For each expert, on average: fewer are multiplied by whole numbers (experts_warp_tiles.py), more by warps with roles
# (experts_roles.py). Measured on an H200 with 32 experts, as are the tiles
LEAST_PAIRS, MOST_PAIRS = 1, 12


def _widen() -> Any:
    """Four words of e2m1, two words of two scales each, for their low and their high halves, and where in these the thread's
    scale is -> eight registers of the low halves and eight of the high ones, times 2^-32.

    A code, times the sum of two powers of two, has its sign and its rest where bfloat16 has them: that is 2^-126 times what it
    stands for; a scale is made 2^94 times as large. A pair is of bytes 0 and 2, or 1 and 3, of a word: so x has its columns
    turned.
    """
    lines = [f"fma.rn.bf16x2 s{i}, ${20 + i}, m, z;\nprmt.b32 s{i}, s{i}, 0, $22;" for i in range(2)]
    for word in range(4):
        lines.append(f"shr.u32 r, ${16 + word}, 8;")
        for half, (mask, factor) in enumerate((("000f000f", "0x1040"), ("00f000f0", "0x0104"))):
            for part, source in enumerate((f"${16 + word}", "r")):
                lines += [f"and.b32 t, {source}, 0x{mask};", f"mul.lo.u32 t, t, {factor};", "and.b32 t, t, 0x81c081c0;"]
                lines.append(f"fma.rn.bf16x2 ${8 * half + 2 * word + part}, t, s{half}, z;")
    start = "mov.b32 z, 0x80008000;\nmov.b32 m, 0x6e806e80;\n"
    return tl and tl.constexpr("{.reg .b32 s0, s1, r, t, m, z;\n" + start + "\n".join(lines) + "\n}")


WIDEN, WIDE = _widen(), tl and tl.constexpr(",".join(["=&r"] * 16 + ["r"] * 7))
LOAD_SCALES = tl and tl.constexpr("ld.global.v2.b32 {$0, $1}, [$2];")


@jit
def _load_run(weights, scales, run):
    """Of every row of a thread the four words of a run, and the run's four scales."""
    found = ()
    for i in tl.static_range(len(weights)):
        pointers = (scales[i] + run * 4).to(tl.int64)
        four = tl.inline_asm_elementwise(LOAD_SCALES, "=r,=r,l", [pointers], dtype=UINT_2, is_pure=False, pack=1)
        found = found + ((load_words(weights[i] + run * 64, LOAD_ONCE), four),)
    return found


@jit
def _load_x(xs, run):
    """Of every eight rows of x the columns that a thread's words are multiplied by."""
    found = ()
    for n in tl.static_range(len(xs)):
        x = xs[n] + run * 128
        words = load_words(x, LOAD) + load_words(x + 8, LOAD) + load_words(x + 64, LOAD) + load_words(x + 72, LOAD)
        found = found + (words,)
    return found


@jit
def _widened(row, scale_at):
    words, scales = row
    given = words + (scales[0], scales[1], scale_at)
    return tl.inline_asm_elementwise(WIDEN, WIDE, given, dtype=UINT_16, is_pure=True, pack=1)


@jit
def _rest(parts):
    found = ()
    for i in tl.static_range(1, len(parts)):
        found = found + (parts[i],)
    return found


@jit
def _four(acc, index: tl.constexpr):
    return acc[4 * index], acc[4 * index + 1], acc[4 * index + 2], acc[4 * index + 3]


@jit
def _add_run(acc, run, xs, scale_at):
    """acc, of each tile and eight rows of x four sums, + the products of a run."""
    new = ()
    for tile in tl.static_range(len(run) // 2):
        upper, lower = _widened(run[2 * tile], scale_at), _widened(run[2 * tile + 1], scale_at)
        for n in tl.static_range(len(xs)):
            given = upper + lower + xs[n] + _four(acc, tile * len(xs) + n)
            d = tl.inline_asm_elementwise(MULTIPLY_8, M_8, given, dtype=FLOAT_4, is_pure=True, pack=1)
            new = new + (d[0], d[1], d[2], d[3])
    return new


@jit
def _joined(parts):
    """Tensors [T] -> one of [T, 2, 2, ...], in their order."""
    for _ in tl.static_range(8):
        if len(parts) > 1:
            joined = ()
            for i in tl.static_range(len(parts) // 2):
                joined = joined + (tl.join(parts[i], parts[i + len(parts) // 2]),)
            parts = joined
    return parts[0]


@jit(do_not_specialize=["clamp"])
def _widened_tiles(
    x_ptr, w_ptr, scales_ptr, bias_ptr, order_ptr, tiles_ptr, factors_ptr, shares_ptr, out_ptr, out_width, clamp,
    CHOSEN: tl.constexpr, N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr, WARPS: tl.constexpr,
    WARPS_K: tl.constexpr, AHEAD: tl.constexpr, TURN: tl.constexpr, X_AHEAD: tl.constexpr, GLU: tl.constexpr,
    ACTIVATION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    RUNS: tl.constexpr = K // 128
    OWN: tl.constexpr = (RUNS + WARPS_K - 1) // WARPS_K  # runs of a warp
    SURE: tl.constexpr = OWN - (OWN * WARPS_K - RUNS)  # that every warp has, if that is a number
    TURNS: tl.constexpr = (SURE - AHEAD) // TURN * TURN if SURE > AHEAD else 0
    WARPS_N: tl.constexpr = WARPS // WARPS_K
    OF_TILE: tl.constexpr = 8 if GLU else 16
    COLUMNS: tl.constexpr = WARPS_N * TILES * OF_TILE
    first = tl.program_id(0) * COLUMNS
    t = tl.arange(0, WARPS * 32)
    lane, warp = t % 32, t // 32
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.program_id(1)
    expert = tile_expert(tiles_ptr, slot)
    if expert < 0:
        return
    at, end = tile_first(tiles_ptr, slot), tile_end(tiles_ptr, slot)
    if GLU:  # noqa: SIM102  (the compiler decides this one)
        if first >= N:  # past its end a row is 0
            column = first + tl.arange(0, COLUMNS)
            for n in tl.static_range(ROWS // 8):
                place = at + n * 8 + tl.arange(0, 8)
                target = out_ptr + place[:, None].to(tl.int64) * out_width + column[None, :]
                ok = (place < end)[:, None] & (column < out_width)[None, :]
                tl.store(target, tl.zeros([8, COLUMNS], out_ptr.dtype.element_ty), mask=ok)
            return
    first_run, own = warp % WARPS_K * OWN, own_runs(warp % WARPS_K, RUNS, WARPS_K)
    row = first + warp // WARPS_K * (TILES * OF_TILE) + lane // 4
    of_expert = expert.to(tl.int64) * (2 * N if GLU else N)
    weights, scales = (), ()
    for i in tl.static_range(2 * TILES):  # of 16 rows of a gated product eight are gates and eight what they open
        of_row = row + (i // 2 * OF_TILE + (0 if GLU else i % 2 * 8))
        if N % COLUMNS:
            of_row = tl.minimum(of_row, N - 1)
        of_row = of_expert + of_row + (i % 2 * N if GLU else 0)
        weights = weights + (w_ptr + of_row * (K // 2) + first_run * 64 + lane % 4 * 16,)
        scales = scales + (scales_ptr + of_row * (K // 32) + first_run * 4,)
    runs = ()
    for i in tl.static_range(AHEAD):
        runs = runs + (_load_run(weights, scales, tl.minimum(i, own - 1)),)
    xs = ()
    for n in tl.static_range(ROWS // 8):
        place = tl.minimum(at + n * 8 + lane // 4, end - 1)  # rows past the expert's last repeat it, unstored
        if GLU:
            place = tl.load(order_ptr + place) // CHOSEN
        xs = xs + (x_ptr + place.to(tl.int64) * K + first_run * 128 + lane % 4 * 16,)
    scale_at = tl.where(lane % 4 < 2, 0x1010, 0x3232).to(tl.uint32)  # of two in a word, twice; 0x4444: 0
    acc = ()
    for _ in tl.static_range(TILES * ROWS // 2):
        acc = acc + (tl.zeros([WARPS * 32], tl.float32),)
    x = _load_x(xs, tl.minimum(0, own - 1))
    for turn in range(0, TURNS, TURN):
        for i in tl.static_range(TURN):
            runs = runs + (_load_run(weights, scales, turn + i + AHEAD),)
            if X_AHEAD:
                next_x = _load_x(xs, turn + i + 1)
            else:
                x = _load_x(xs, turn + i)
            if PDL:
                hold()
            acc = _add_run(acc, runs[0], x, scale_at)
            runs = _rest(runs)
            if X_AHEAD:
                x = next_x
    for i in tl.static_range(TURNS, OWN):
        if i + AHEAD < OWN:  # past a warp's last run it is that again, multiplied by nothing
            runs = runs + (_load_run(weights, scales, tl.minimum(i + AHEAD, own - 1)),)
        if X_AHEAD and i + 1 < OWN:
            next_x = _load_x(xs, tl.minimum(i + 1, own - 1))
        else:
            next_x = x
        if not X_AHEAD:
            x = _load_x(xs, tl.minimum(i, own - 1))
        if i >= SURE:
            scale_at = tl.where(i < own, scale_at, 0x4444)
        acc = _add_run(acc, runs[0], x, scale_at)
        runs = _rest(runs)
        x = next_x
    MORE: tl.constexpr = 2.0**32
    column = first + tl.arange(0, COLUMNS)
    to_column = turned(column) if GLU else column
    for n in tl.static_range(ROWS // 8):
        parts = ()
        for tile in tl.static_range(TILES):
            parts = parts + _four(acc, tile * (ROWS // 8) + n)
        y = tl.reshape(_joined(parts), (WARPS_N, WARPS_K, 8, 4, TILES, 2, 2))  # g, q, tile, its halves, two rows of x
        y = tl.sum(y, 1) * MORE
        place = at + n * 8 + tl.arange(0, 8)
        pair = tl.load(order_ptr + tl.minimum(place, end - 1))
        if GLU:
            g, u = tl.split(tl.reshape(tl.permute(y, (0, 3, 1, 2, 5, 4)), (COLUMNS, 8, 2)))
            if factors_ptr is not None:
                factor = tl.load(factors_ptr + pair // CHOSEN)[None, :]
                g, u = g * factor, u * factor
            y = open_gate(g, u, bias_ptr, expert * (2 * N), column[:, None], N, clamp, ACTIVATION)
            to_row = place
        else:
            y = tl.reshape(tl.permute(y, (0, 3, 4, 1, 2, 5)), (COLUMNS, 8))
            if bias_ptr is not None:
                y += tl.load(bias_ptr + expert * N + column, mask=column < N, other=0.0).to(tl.float32)[:, None]
            y = y * tl.load(shares_ptr + pair)[None, :]
            to_row = pair
        target = out_ptr + to_row[None, :].to(tl.int64) * out_width + to_column[:, None]
        tl.store(target, y.to(out_ptr.dtype.element_ty), mask=(place < end)[None, :] & (to_column < out_width)[:, None])


class WidenedTile(NamedTuple):
    """A program's work: rows of x; of a warp, tiles of 16 rows of the weights; warps, and those that share columns; runs of the
    weights on their way, in how many a turn of the loop is, and whether the next run's x is on its way, too; registers."""

    rows: int
    tiles: int
    warps: int
    warps_k: int
    ahead: int
    turn: int
    x_ahead: bool
    registers: int


def widened_tile(pairs: int, count: int) -> WidenedTile | None:
    """None: others take less."""
    if not LEAST_PAIRS * count <= pairs <= MOST_PAIRS * count:
        return None
    return WidenedTile(8, 1, 4, 1, 2, 3, True, 128) if pairs <= 4 * count else WidenedTile(16, 2, 8, 2, 1, 2, False, 128)


def takes_widened(x: Tensor, gate_up: NarrowMatrix, down: NarrowMatrix) -> bool:
    """Of MXFP4, on a card, for bfloat16 rows."""
    return are_mxfp4(gate_up, down) and assembly(x) > 0


def launch_widened(
    x: Tensor, weight: NarrowMatrix, bias: Tensor | None, pairs: Sorted, chosen: int, out: Tensor, columns: int,
    tile: WidenedTile, *, shares: Tensor | None = None, activation: str = "silu", clamp: float = 0.0,
    factors: Tensor | None = None,
) -> None:  # fmt: skip
    """As experts_tiles.launch, of x with its columns turned, as wide as the weights are held; so is what has no `shares`."""
    width, glu = held_width(weight), shares is None
    of_program = tile.warps // tile.warps_k * tile.tiles * (8 if glu else 16)
    _widened_tiles[-(-out.shape[1] // of_program), len(pairs.tiles)](
        x, weight.data, weight.scales, bias, pairs.order, pairs.tiles, factors, shares, out, out_width=out.shape[1],
        clamp=clamp, CHOSEN=chosen, N=columns, K=width, ROWS=tile.rows, TILES=tile.tiles, WARPS=tile.warps,
        WARPS_K=tile.warps_k, AHEAD=min(tile.ahead, max(1, width // 128 // tile.warps_k)), TURN=tile.turn,
        X_AHEAD=tile.x_ahead, GLU=glu, ACTIVATION="clamped" if clamp else activation, num_warps=tile.warps,
        maxnreg=tile.registers, **pdl(x),
    )  # fmt: skip
