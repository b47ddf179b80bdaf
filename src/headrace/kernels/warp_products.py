"""Narrow weights times a few rows of x by the tensor cores, where each warp does all by itself: words of the weights go from
memory into its registers, become bfloat16 there, and are multiplied where they lie. Nothing passes through shared memory.

A warp has tiles of 16 rows of the weights, and goes over K in runs of 64 bytes a row: thread 4 g + q of it holds bytes 16 q to
16 q + 15 of rows g and g + 8. mma.sync m16n8k16 wants of that thread four numbers of each of the two rows for a product, and of
x, as its second operand, four of row g (of eight): those of the same columns. In which order columns are summed is free, so a
thread multiplies what it has loaded. Of 4 bits two numbers take a shift and a lop3: 0x4300 | n is 128 + n as bfloat16, and the
sums are freed of 128, and of the zero, by the sums of x, which are products with ones.

warp_words.py has the instructions.
"""

# mypy: disable-error-code="assignment, var-annotated"
# (kernels grow tuples of tiles in loops that the compiler unrolls)

from __future__ import annotations

from headrace.kernels.launch import jit, tl
from headrace.kernels.warp_words import LOAD, LOAD_ONCE, add_products, convert_row, load_words, prepare_x, sums_of_x

RUN_BYTES = 64  # of a row of the weights, for a warp at a time


@jit
def _load_run_x(pointers, KIND: tl.constexpr):
    """The columns of x that a thread's 16 bytes are multiplied by."""
    x = load_words(pointers, LOAD) + load_words(pointers + 8, LOAD)
    if KIND == "int4":
        x = x + load_words(pointers + 64, LOAD) + load_words(pointers + 72, LOAD)
    return x


@jit
def _load_factors(ptr, place, COUNT: tl.constexpr, IN_WORD: tl.constexpr):
    """COUNT scales or zeros from `place` on, IN_WORD of them in a word."""
    SIZE: tl.constexpr = IN_WORD * ptr.dtype.element_ty.primitive_bitwidth
    WORD: tl.constexpr = tl.uint32 if SIZE == 32 else tl.uint16 if SIZE == 16 else tl.uint8
    pointers = (ptr + place).to(tl.pointer_type(WORD), bitcast=True)
    words = ()
    for i in tl.static_range(COUNT // IN_WORD):
        words = words + (tl.load(pointers + i).to(tl.uint32),)
    return words


@jit
def _factor(words, index: tl.constexpr, DTYPE: tl.constexpr, IN_WORD: tl.constexpr, OFFSET: tl.constexpr):
    """A scale, or a zero that OFFSET joins, as float32."""
    BITS: tl.constexpr = DTYPE.primitive_bitwidth
    word = words[index // IN_WORD] >> (index % IN_WORD * BITS)
    if BITS == 8:  # joins 128: it is the end of that number's fraction
        found = ((word & 255) << 16 | 0x43000000).to(tl.float32, bitcast=True)
    elif BITS == 16:
        found = word.to(tl.uint16).to(DTYPE, bitcast=True).to(tl.float32) + OFFSET
    else:
        found = word.to(tl.float32, bitcast=True) + OFFSET
    return found


@jit
def _load_run(weights, run):
    """The words of a run: of every row of the thread four."""
    words = ()
    for i in tl.static_range(len(weights)):
        words = words + (load_words(weights[i] + run * 64, LOAD_ONCE),)
    return words


@jit
def _load_chunk_factors(ptr, places, at, COUNT: tl.constexpr, IN_WORD: tl.constexpr, PRESENT: tl.constexpr):
    """Of every row of the thread."""
    found = ()
    for i in tl.static_range(len(places)):
        if PRESENT:
            found = found + (_load_factors(ptr, places[i] + at, COUNT, IN_WORD),)
        else:
            found = found + ((0,),)
    return found


@jit
def _pair(acc, index: tl.constexpr):
    return acc[2 * index], acc[2 * index + 1]


@jit
def _add_run(
    acc, words, scales, zeros, xs, index: tl.constexpr,
    KIND: tl.constexpr, GROUPED: tl.constexpr, ZEROS: tl.constexpr, TILES: tl.constexpr, COLUMN_TILES: tl.constexpr,
    PAIR: tl.constexpr, SCALE_DTYPE: tl.constexpr, ZERO_DTYPE: tl.constexpr, SCALES_IN_WORD: tl.constexpr,
    ZEROS_IN_WORD: tl.constexpr,
):  # fmt: skip
    """acc + the products of a run; its scales are the `index`th of those of its chunk."""
    OFFSET: tl.constexpr = 128.0 if KIND == "int4" else 0.0
    OF_SUMS: tl.constexpr = KIND == "int4" or ZEROS > 0
    a = ()
    for i in tl.static_range(2 * TILES):
        a = a + (convert_row(words[i], KIND, TILES == 1),)
    parts, of_xs = (), ()
    for n in tl.static_range(COLUMN_TILES):
        x = prepare_x(xs[n], KIND, TILES == 1)
        if OF_SUMS:
            of_xs = of_xs + (sums_of_x(x, KIND),)
        for tile in tl.static_range(TILES):
            none = tl.zeros(acc[0].shape, tl.float32)
            if OF_SUMS or GROUPED:
                before = (none, none, none, none)
            elif PAIR == 1:
                before = (acc[2 * tile], none, acc[2 * tile + 1], none)
            else:
                before = _pair(acc, 2 * tile * COLUMN_TILES + n) + _pair(acc, (2 * tile + 1) * COLUMN_TILES + n)
            parts = parts + (add_products(a[2 * tile], a[2 * tile + 1], x, before, KIND),)
    new = ()
    for i in tl.static_range(2 * TILES):
        if GROUPED:
            scale = _factor(scales[i], index, SCALE_DTYPE, SCALES_IN_WORD, 0.0)
        if OF_SUMS:
            zero = OFFSET + 8.0
            if ZEROS:
                zero = _factor(zeros[i], index, ZERO_DTYPE, ZEROS_IN_WORD, OFFSET)
        for n in tl.static_range(COLUMN_TILES):
            for j in tl.static_range(PAIR):
                d = parts[n * TILES + i // 2][i % 2 * 2 + j]
                if OF_SUMS:
                    d -= zero * of_xs[n][j]
                if GROUPED:
                    d *= scale
                if OF_SUMS or GROUPED:
                    d += acc[(i * COLUMN_TILES + n) * PAIR + j]
                new = new + (d,)
    return new


@jit
def start(
    w_ptr, scales_ptr, zeros_ptr, first_row, split, N,
    K: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, SCALE_ROWS: tl.constexpr,
    ZEROS: tl.constexpr, BLOCK_N: tl.constexpr, GATED: tl.constexpr, WARPS: tl.constexpr, WARPS_K: tl.constexpr,
    SPLITS: tl.constexpr, CHUNK: tl.constexpr, SCALES_IN_WORD: tl.constexpr, ZEROS_IN_WORD: tl.constexpr,
):  # fmt: skip
    """What each thread of a program reads first: pointers at its weights, its rows' first scales, and a chunk of words."""
    FOUR: tl.constexpr = KIND == "int4"
    COLUMNS: tl.constexpr = 128 if FOUR else 64
    RUNS: tl.constexpr = K // COLUMNS // WARPS_K // SPLITS
    TILES: tl.constexpr = BLOCK_N // 16 // (WARPS // WARPS_K)
    HALF: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    COUNT: tl.constexpr = CHUNK * COLUMNS // GROUP if GROUP > 0 else 1
    t = tl.arange(0, WARPS * 32)
    lane, warp = t % 32, t // 32
    first_run = (split * WARPS_K + warp % WARPS_K) * RUNS
    weights, places = (), ()
    for i in tl.static_range(2 * TILES):
        row = (warp // WARPS_K * TILES + i // 2) * 16 + i % 2 * 8 + lane // 4
        of_row = tl.minimum(first_row + row % HALF, N - 1).to(tl.int64) + row // HALF * N
        weights = weights + (w_ptr + of_row * (K // 2 if FOUR else K) + first_run * 64 + lane % 4 * 16,)
        place = of_row // SCALE_ROWS * GROUPS
        if GROUP > 0:
            place += first_run * COLUMNS // GROUP
        places = places + (place,)
    words = ()
    for i in tl.static_range(CHUNK):
        words = words + (_load_run(weights, i),)
    scales = _load_chunk_factors(scales_ptr, places, 0, COUNT, SCALES_IN_WORD, True)
    zeros = _load_chunk_factors(zeros_ptr, places, 0, COUNT, ZEROS_IN_WORD, ZEROS > 0)
    return weights, places, words, scales, zeros


@jit
def sums(
    x_ptr, scales_ptr, zeros_ptr, weights, places, words, scales, zeros, first_x, split, M,
    K: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WARPS: tl.constexpr, WARPS_K: tl.constexpr, SPLITS: tl.constexpr,
    CHUNK: tl.constexpr, SCALES_IN_WORD: tl.constexpr, ZEROS_IN_WORD: tl.constexpr,
):  # fmt: skip
    """Each thread's sums: of tiles of 16 rows, their two halves, tiles of 8 rows of x, and of these two beside each other."""
    COLUMNS: tl.constexpr = 128 if KIND == "int4" else 64
    RUNS: tl.constexpr = K // COLUMNS // WARPS_K // SPLITS
    TILES: tl.constexpr = BLOCK_N // 16 // (WARPS // WARPS_K)
    COUNT: tl.constexpr = CHUNK * COLUMNS // GROUP if GROUP > 0 else 1
    SCALE_DTYPE: tl.constexpr = scales_ptr.dtype.element_ty
    ZERO_DTYPE: tl.constexpr = zeros_ptr.dtype.element_ty if ZEROS else tl.float32
    t = tl.arange(0, WARPS * 32)
    lane, warp = t % 32, t // 32
    column = (split * WARPS_K + warp % WARPS_K) * (RUNS * COLUMNS) + lane % 4 * 16
    COLUMN_TILES: tl.constexpr = (BLOCK_M + 7) // 8
    PAIR: tl.constexpr = 1 if BLOCK_M == 1 else 2  # of a single row all columns are the same
    SUMS: tl.constexpr = 2 * TILES * COLUMN_TILES * PAIR
    x_pointers = ()
    for n in tl.static_range(COLUMN_TILES):
        x_pointers = x_pointers + (x_ptr + tl.minimum(first_x + n * 8 + lane // 4, M - 1) * K + column,)
    acc = ()
    for _ in tl.static_range(SUMS):
        acc = acc + (tl.zeros([WARPS * 32], tl.float32),)
    x = _load_xs(x_pointers, KIND)
    for first in range(0, RUNS - CHUNK, CHUNK):
        next_words, next_scales, next_zeros = (), scales, zeros
        if GROUP > 0:
            at = (first + CHUNK) * COLUMNS // GROUP
            next_scales = _load_chunk_factors(scales_ptr, places, at, COUNT, SCALES_IN_WORD, True)
            next_zeros = _load_chunk_factors(zeros_ptr, places, at, COUNT, ZEROS_IN_WORD, ZEROS > 0)
        for i in tl.static_range(CHUNK):
            next_words = next_words + (_load_run(weights, first + CHUNK + i),)
            x_pointers = _advanced(x_pointers, COLUMNS)
            next_x = _load_xs(x_pointers, KIND)
            acc = _add_run(
                acc, words[i], scales, zeros, x, i * COLUMNS // GROUP if GROUP > 0 else 0,
                KIND, GROUP > 0, ZEROS, TILES, COLUMN_TILES, PAIR, SCALE_DTYPE, ZERO_DTYPE, SCALES_IN_WORD, ZEROS_IN_WORD,
            )  # fmt: skip
            x = next_x
        words, scales, zeros = next_words, next_scales, next_zeros
    for i in tl.static_range(CHUNK):
        if i + 1 < CHUNK:
            x_pointers = _advanced(x_pointers, COLUMNS)
            next_x = _load_xs(x_pointers, KIND)
        acc = _add_run(
            acc, words[i], scales, zeros, x, i * COLUMNS // GROUP if GROUP > 0 else 0,
            KIND, GROUP > 0, ZEROS, TILES, COLUMN_TILES, PAIR, SCALE_DTYPE, ZERO_DTYPE, SCALES_IN_WORD, ZEROS_IN_WORD,
        )  # fmt: skip
        if i + 1 < CHUNK:
            x = next_x
    if GROUP == 0:
        scaled = ()
        for i in tl.static_range(SUMS):
            scaled = scaled + (acc[i] * _factor(scales[i // (COLUMN_TILES * PAIR)], 0, SCALE_DTYPE, SCALES_IN_WORD, 0.0),)
        acc = scaled
    return acc


@jit
def _advanced(pointers, by: tl.constexpr):
    out = ()
    for i in tl.static_range(len(pointers)):
        out = out + (pointers[i] + by,)
    return out


@jit
def _load_xs(pointers, KIND: tl.constexpr):
    """Of every tile of eight rows of x."""
    out = ()
    for i in tl.static_range(len(pointers)):
        out = out + (_load_run_x(pointers[i], KIND),)
    return out


@jit
def gather(
    acc, KIND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WARPS: tl.constexpr, WARPS_K: tl.constexpr
):  # fmt: skip
    """What `sums` gives, as a tile [BLOCK_N, BLOCK_M]: the sums of warps that share columns added up."""
    WARPS_N: tl.constexpr = WARPS // WARPS_K
    TILES: tl.constexpr = BLOCK_N // 16 // WARPS_N
    for _ in tl.static_range(8):
        if len(acc) > 1:
            joined = ()
            for i in tl.static_range(len(acc) // 2):
                joined = joined + (tl.join(acc[i], acc[i + len(acc) // 2]),)
            acc = joined
    if BLOCK_M == 1:
        whole = tl.reshape(acc[0], (WARPS_N, WARPS_K, 8, 4, TILES, 2))
        whole = tl.sum(whole, 1)  # N, g, q, tile, half
        whole = tl.sum(tl.where(tl.arange(0, 4)[None, None, :, None, None] == 0, whole, 0.0), 2)
        whole = tl.reshape(tl.permute(whole, (0, 2, 3, 1)), (BLOCK_N, 1))
    else:
        whole = tl.reshape(acc[0], (WARPS_N, WARPS_K, 8, 4, TILES, 2, BLOCK_M // 8, 2))
        whole = tl.permute(tl.sum(whole, 1), (0, 3, 4, 1, 5, 2, 6))
        whole = tl.reshape(whole, (BLOCK_N, BLOCK_M))
    if KIND == "fp8":  # x was made 2^64 times as large, the numbers 2^120 times smaller
        whole *= 2.0**56
    return whole
