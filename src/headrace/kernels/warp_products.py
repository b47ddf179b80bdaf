"""Narrow weights times a few rows of x by the tensor cores, where each warp does all by itself: words of the weights go from
memory into its registers, become bfloat16 there, and are multiplied where they lie. Nothing passes through shared memory.

A warp has tiles of 16 rows of the weights, and goes over K in runs of 64 bytes a row: thread 4 g + q of it holds bytes 16 q to
16 q + 15 of rows g and g + 8. mma.sync m16n8k16 wants of that thread four numbers of each of the two rows for a product, and of
x, as its second operand, four of row g (of eight): those of the same columns. In which order columns are summed is free, so a
thread multiplies what it has loaded. Of 4 bits two numbers take a shift and a lop3: 0x4300 | n is 128 + n as bfloat16, and the
sums are freed of 128, and of the zero, by the sums of x, which are products with ones.

PTX, so for cards (80 and newer) and bfloat16. A value of a thread is an element of a tensor [threads]: these are the only
tensors whose place in registers is known. tests/ptx_interpreter.py runs the same text without a card.
"""

# mypy: disable-error-code="assignment, var-annotated"
# (kernels grow tuples of tiles in loops that the compiler unrolls)

from __future__ import annotations

from typing import Any

from headrace.kernels.launch import jit, tl

RUN_BYTES = 64  # of a row of the weights, for a warp at a time
_MMA = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"


def _text(lines: list[str], registers: str = "") -> Any:
    return tl and tl.constexpr("{" + registers + "\n" + "\n".join(lines) + "\n}")


def _constraints(outputs: int, inputs: int, kind: str = "r", more: int = 0) -> Any:
    """Of outputs of a kind, words that go in, and `more` of the outputs' kind. Outputs are written before all is read."""
    return tl and tl.constexpr(",".join([f"=&{kind}"] * outputs + ["r"] * inputs + [kind] * more))


def _convert_int4(ordered: bool) -> Any:
    """Four words of 4-bit numbers -> eight registers of the low halves and eight of the high ones, 128 + n each.

    A pair is of bytes 0 and 2, or 1 and 3, of a word; `ordered`: 0 and 1, or 2 and 3, as the columns of x lie, for an
    instruction a word more.
    """
    lines = []
    for word in range(4):
        lines.append(f"prmt.b32 w, ${16 + word}, 0, 0x3120;" if ordered else f"mov.b32 w, ${16 + word};")
        for part, shift in enumerate((0, 8, 4, 12)):
            out = word * 2 + part if part < 2 else 8 + word * 2 + part - 2
            lines.append(f"shr.u32 t, w, {shift};")
            lines.append(f"lop3.b32 ${out}, t, 0x000f000f, 0x43004300, 0xea;")
    return _text(lines, ".reg .b32 t, w;")


def _convert_bytes(body: str) -> Any:
    """Four words -> eight registers of two numbers; see kernels/narrow.py for the instructions."""
    lines = []
    for word in range(4):
        for pair in range(2):
            names = {"{in}": f"${8 + word}", "{out}": f"${2 * word + pair}", "{spread}": ("0x4140", "0x4342")[pair]}
            names["{spread signed}"] = ("0x9180", "0xb3a2")[pair]
            part = body
            for name, value in names.items():
                part = part.replace(name, value)
            lines.append(part)
    return _text(lines, ".reg .b32 t, a, b, c;")


CONVERT_INT4, CONVERT_INT4_ORDERED = _convert_int4(False), _convert_int4(True)
# without the difference of the exponents' biases: 2^120 times too small, which x makes up for (2^64) and the sums (2^56)
CONVERT_FP8 = _convert_bytes("""prmt.b32 t, {in}, 0, {spread signed};
shl.b32 t, t, 4;
and.b32 {out}, t, 0x87f087f0;""")
CONVERT_INT8 = _convert_bytes("""prmt.b32 t, {in}, 0, {spread};
lop3.b32 a, t, 0x007f007f, 0x43004300, 0xea;
lop3.b32 b, t, 0x00800080, 0x43004300, 0xea;
mov.b32 c, 0xbf80bf80;
fma.rn.bf16x2 {out}, b, c, a;""")
SCALE_X = _text(["mov.b32 c, 0x5f805f80;", *(f"mul.rn.bf16x2 ${i}, ${8 + i}, c;" for i in range(8))], ".reg .b32 c;")
PAIR_X = _text(
    [
        f"prmt.b32 ${2 * i + odd}, ${16 + 2 * i}, ${17 + 2 * i}, {('0x5410', '0x7632')[odd]};"
        for i in range(8)
        for odd in range(2)
    ]
)


def _multiply(count: int) -> Any:
    """count mmas: A of `2 count` registers for a row, as many for the row 8 below; B of as many; what they are added to."""
    a, b, x, c = (4 + 2 * count * i for i in range(4))
    before = f"{{${c}, ${c + 1}, ${c + 2}, ${c + 3}}}"
    lines = [
        f"{_MMA} {{$0, $1, $2, $3}}, {{${a + 2 * i}, ${b + 2 * i}, ${a + 2 * i + 1}, ${b + 2 * i + 1}}}, "
        f"{{${x + 2 * i}, ${x + 2 * i + 1}}}, {'{$0, $1, $2, $3}' if i else before};"
        for i in range(count)
    ]
    return _text(lines)


def _sum(count: int) -> Any:
    lines = []
    for i in range(count):
        c = "{$0, $1, u, v}" if i else "{z, z, z, z}"
        lines.append(f"{_MMA} {{$0, $1, u, v}}, {{o, o, o, o}}, {{${2 + 2 * i}, ${3 + 2 * i}}}, {c};")
    return _text(["mov.f32 z, 0f00000000;", "mov.b32 o, 0x3f803f80;", *lines], ".reg .f32 z, u, v;\n.reg .b32 o;")


LOAD = tl and tl.constexpr("ld.global.v4.b32 {$0, $1, $2, $3}, [$4];")
LOAD_ONCE = tl and tl.constexpr("ld.global.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4];")
MULTIPLY_8, MULTIPLY_4 = _multiply(8), _multiply(4)
SUM_8, SUM_4 = _sum(8), _sum(4)
C_16_4, C_8_4, C_16_16, C_8_8 = _constraints(16, 4), _constraints(8, 4), _constraints(16, 16), _constraints(8, 8)
M_8, M_4, S_8, S_4 = _constraints(4, 48, "f", 4), _constraints(4, 24, "f", 4), _constraints(2, 16, "f"), _constraints(2, 8, "f")


@jit
def load_words(pointers, INSTRUCTION: tl.constexpr):
    """16 bytes of each thread."""
    WORDS: tl.constexpr = (tl.uint32, tl.uint32, tl.uint32, tl.uint32)
    return tl.inline_asm_elementwise(
        INSTRUCTION, "=r,=r,=r,=r,l", [pointers.to(tl.int64)], dtype=WORDS, is_pure=False, pack=1
    )  # fmt: skip


@jit
def _convert_row(words, KIND: tl.constexpr, ORDERED: tl.constexpr):
    """A row's four words as operands."""
    EIGHT: tl.constexpr = (tl.uint32,) * 8
    SIXTEEN: tl.constexpr = (tl.uint32,) * 16
    if KIND == "int4" and ORDERED:
        out = tl.inline_asm_elementwise(CONVERT_INT4_ORDERED, C_16_4, words, dtype=SIXTEEN, is_pure=True, pack=1)
    elif KIND == "int4":
        out = tl.inline_asm_elementwise(CONVERT_INT4, C_16_4, words, dtype=SIXTEEN, is_pure=True, pack=1)
    elif KIND == "fp8":
        out = tl.inline_asm_elementwise(CONVERT_FP8, C_8_4, words, dtype=EIGHT, is_pure=True, pack=1)
    else:
        out = tl.inline_asm_elementwise(CONVERT_INT8, C_8_4, words, dtype=EIGHT, is_pure=True, pack=1)
    return out


@jit
def _load_run_x(pointers, KIND: tl.constexpr):
    """The columns of x that a thread's 16 bytes are multiplied by."""
    x = load_words(pointers, LOAD) + load_words(pointers + 8, LOAD)
    if KIND == "int4":
        x = x + load_words(pointers + 64, LOAD) + load_words(pointers + 72, LOAD)
    return x


@jit
def _prepare_x(x, KIND: tl.constexpr, ORDERED: tl.constexpr):
    """As the second operand of the products."""
    if KIND == "int4" and not ORDERED:
        SIXTEEN: tl.constexpr = (tl.uint32,) * 16
        x = tl.inline_asm_elementwise(PAIR_X, C_16_16, x, dtype=SIXTEEN, is_pure=True, pack=1)
    elif KIND == "fp8":
        EIGHT: tl.constexpr = (tl.uint32,) * 8
        x = tl.inline_asm_elementwise(SCALE_X, C_8_8, x, dtype=EIGHT, is_pure=True, pack=1)
    return x


@jit
def _products(upper, lower, x, before, KIND: tl.constexpr):
    """before + a tile's products: of rows g and g + 8, columns 2 q and 2 q + 1 each."""
    D: tl.constexpr = (tl.float32,) * 4
    if KIND == "int4":
        out = tl.inline_asm_elementwise(MULTIPLY_8, M_8, upper + lower + x + before, dtype=D, is_pure=True, pack=1)
    else:
        out = tl.inline_asm_elementwise(MULTIPLY_4, M_4, upper + lower + x + before, dtype=D, is_pure=True, pack=1)
    return out


@jit
def _sums_of_x(x, KIND: tl.constexpr):
    """Of columns 2 q and 2 q + 1."""
    D: tl.constexpr = (tl.float32,) * 2
    if KIND == "int4":
        out = tl.inline_asm_elementwise(SUM_8, S_8, x, dtype=D, is_pure=True, pack=1)
    else:
        out = tl.inline_asm_elementwise(SUM_4, S_4, x, dtype=D, is_pure=True, pack=1)
    return out


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
        a = a + (_convert_row(words[i], KIND, TILES == 1),)
    parts, of_xs = (), ()
    for n in tl.static_range(COLUMN_TILES):
        x = _prepare_x(xs[n], KIND, TILES == 1)
        if OF_SUMS:
            of_xs = of_xs + (_sums_of_x(x, KIND),)
        for tile in tl.static_range(TILES):
            none = tl.zeros(acc[0].shape, tl.float32)
            if OF_SUMS or GROUPED:
                before = (none, none, none, none)
            elif PAIR == 1:
                before = (acc[2 * tile], none, acc[2 * tile + 1], none)
            else:
                before = _pair(acc, 2 * tile * COLUMN_TILES + n) + _pair(acc, (2 * tile + 1) * COLUMN_TILES + n)
            parts = parts + (_products(a[2 * tile], a[2 * tile + 1], x, before, KIND),)
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
