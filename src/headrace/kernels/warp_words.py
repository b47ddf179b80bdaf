"""What warps do with words of narrow weights that they have loaded themselves: conversion to bfloat16, and products (PTX).

So for cards (80 and newer) and bfloat16. A value of a thread is an element of a tensor [threads]: these are the only tensors
whose place in registers is known. tests/ptx_interpreter.py runs the same text without a card.
"""

# mypy: disable-error-code="assignment, var-annotated"
# (kernels give tuples of one length or another)

from __future__ import annotations

from typing import Any

from headrace.kernels.launch import jit, tl

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


def types(name: str, count: int) -> Any:
    """What an instruction gives. Not to be made within a kernel: later Tritons take such a tuple apart."""
    return tl and tl.constexpr((getattr(tl, name),) * count)


UINT_2, UINT_4, UINT_8, UINT_16 = (types("uint32", count) for count in (2, 4, 8, 16))
FLOAT_2, FLOAT_4 = types("float32", 2), types("float32", 4)
LOAD = tl and tl.constexpr("ld.global.v4.b32 {$0, $1, $2, $3}, [$4];")
LOAD_ONCE = tl and tl.constexpr("ld.global.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4];")
MULTIPLY_8, MULTIPLY_4 = _multiply(8), _multiply(4)
SUM_8, SUM_4 = _sum(8), _sum(4)
C_16_4, C_8_4, C_16_16, C_8_8 = _constraints(16, 4), _constraints(8, 4), _constraints(16, 16), _constraints(8, 8)
M_8, M_4, S_8, S_4 = _constraints(4, 48, "f", 4), _constraints(4, 24, "f", 4), _constraints(2, 16, "f"), _constraints(2, 8, "f")


@jit
def load_words(pointers, INSTRUCTION: tl.constexpr):
    """16 bytes of each thread."""
    return tl.inline_asm_elementwise(
        INSTRUCTION, "=r,=r,=r,=r,l", [pointers.to(tl.int64)], dtype=UINT_4, is_pure=False, pack=1
    )  # fmt: skip


@jit
def convert_row(words, KIND: tl.constexpr, ORDERED: tl.constexpr):
    """A row's four words as operands."""
    if KIND == "int4" and ORDERED:
        out = tl.inline_asm_elementwise(CONVERT_INT4_ORDERED, C_16_4, words, dtype=UINT_16, is_pure=True, pack=1)
    elif KIND == "int4":
        out = tl.inline_asm_elementwise(CONVERT_INT4, C_16_4, words, dtype=UINT_16, is_pure=True, pack=1)
    elif KIND == "fp8":
        out = tl.inline_asm_elementwise(CONVERT_FP8, C_8_4, words, dtype=UINT_8, is_pure=True, pack=1)
    else:
        out = tl.inline_asm_elementwise(CONVERT_INT8, C_8_4, words, dtype=UINT_8, is_pure=True, pack=1)
    return out


@jit
def prepare_x(x, KIND: tl.constexpr, ORDERED: tl.constexpr):
    """As the second operand of the products."""
    if KIND == "int4" and not ORDERED:
        x = tl.inline_asm_elementwise(PAIR_X, C_16_16, x, dtype=UINT_16, is_pure=True, pack=1)
    elif KIND == "fp8":
        x = tl.inline_asm_elementwise(SCALE_X, C_8_8, x, dtype=UINT_8, is_pure=True, pack=1)
    return x


@jit
def add_products(upper, lower, x, before, KIND: tl.constexpr):
    """before + a tile's products: of rows g and g + 8, columns 2 q and 2 q + 1 each."""
    if KIND == "int4":
        out = tl.inline_asm_elementwise(MULTIPLY_8, M_8, upper + lower + x + before, dtype=FLOAT_4, is_pure=True, pack=1)
    else:
        out = tl.inline_asm_elementwise(MULTIPLY_4, M_4, upper + lower + x + before, dtype=FLOAT_4, is_pure=True, pack=1)
    return out


@jit
def sums_of_x(x, KIND: tl.constexpr):
    """Of columns 2 q and 2 q + 1."""
    if KIND == "int4":
        out = tl.inline_asm_elementwise(SUM_8, S_8, x, dtype=FLOAT_2, is_pure=True, pack=1)
    else:
        out = tl.inline_asm_elementwise(SUM_4, S_4, x, dtype=FLOAT_2, is_pure=True, pack=1)
    return out
