"""Narrow weights inside a kernel: bytes to numbers in registers, and the sums of their products with scales and zeros.

`NarrowMatrix` says what a kernel reads. What the numbers stand for is in headrace.model.weight: w = (data - zero) * scale.

Tensor cores multiply the numbers as bfloat16, which holds every code exactly; scales join the float32 sums of a group, or of
the whole row at the end. So a product is as exact as one by the float32 weights themselves. With `ASM` the conversion takes
about two instructions a weight; without it (Triton's interpreter, float32 models) it is plain arithmetic.

A 4-bit byte holds column j of a run of 128 low and column 64 + j high. A tile of bytes thus makes two tiles of weights, which
multiply two tiles of x. A `span` is as many bytes of a row as have one scale (for each half, of 4 bits).
"""

# mypy: disable-error-code="assignment, var-annotated"
# (kernels grow tuples of tiles in loops that the compiler unrolls)

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from headrace.kernels.launch import capability, jit, tl

RUN = 128  # columns whose 4-bit numbers lie together


class NarrowMatrix(Protocol):
    """The part of a `Weight` that kernels read; see there."""

    @property
    def data(self) -> Tensor: ...
    @property
    def scales(self) -> Tensor | None: ...
    @property
    def zeros(self) -> Tensor | None: ...
    @property
    def kind(self) -> Any: ...
    @property
    def group(self) -> int: ...
    @property
    def scale_rows(self) -> int: ...
    @property
    def shape(self) -> tuple[int, int]: ...


def packed(kind: str) -> int:
    """Numbers in a byte."""
    return 2 if kind in ("int4", "fp4") else 1


def held_width(weight: NarrowMatrix) -> int:
    """Columns of a row as it is held: of packed numbers whole runs, those past the last column included."""
    return weight.data.shape[1] * packed(weight.kind)


def span_bytes(weight: NarrowMatrix, block_k: int) -> int:
    """Bytes of a row in a span, of a step of `block_k` columns."""
    if packed(weight.kind) == 2:
        return min(weight.group or RUN // 2, RUN // 2)
    return min(weight.group or block_k, block_k)


def assembly(x: Tensor) -> int:
    """Which instructions convert for bfloat16 `x`: 80, those of Ampere; 89, that know FP8 too; 0, plain arithmetic."""
    major, minor = capability(x.device)
    if x.dtype != torch.bfloat16 or major < 8:
        return 0
    return 89 if (major, minor) >= (8, 9) else 80


def arguments(weight: NarrowMatrix, x: Tensor) -> dict[str, Any]:
    """What every kernel that multiplies x by `weight` takes, by name; also of kind "float"."""
    scales = weight.scales
    return {
        "w_ptr": weight.data if scales is None else weight.data.view(torch.uint8), "scales_ptr": scales,
        "zeros_ptr": weight.zeros, "KIND": weight.kind, "GROUP": weight.group,
        "GROUPS": 0 if scales is None else scales.shape[1], "SCALE_ROWS": weight.scale_rows, "ZEROS": _zeros(weight),
        "ASM": 0 if scales is None else 89 if _by_halves(weight, x) else assembly(x),
    }  # fmt: skip


def _by_halves(weight: NarrowMatrix, x: Tensor) -> bool:
    """Whether FP8 becomes float16, which x is: one instruction for two."""
    return weight.kind == "fp8" and x.dtype == torch.float16 and capability(x.device) >= (8, 9)


def _zeros(weight: NarrowMatrix) -> int:
    """0: there are none; 1: any numbers; 2: small whole ones, which tensor cores' operands are freed of as they are made."""
    if weight.zeros is None:
        return 0
    return 2 if weight.kind == "int4" and weight.zeros.dtype == torch.uint8 else 1


def bytes_together(block_n: int, num_warps: int, x: Tensor) -> int:
    """Of a row of the weights, in a thread, where tensor cores take them: two where Triton chooses a wgmma."""
    return 2 if capability(x.device)[0] == 9 and block_n % 64 == 0 and num_warps % 4 == 0 else 4


def step_columns(kind: str, block_k: int) -> int:
    """Of a step of a kernel that is asked for `block_k` columns: packed numbers come in whole runs."""
    return max(block_k, RUN) if packed(kind) == 2 else block_k


# Bytes in a register -> bfloat16, two beside each other at a time: {in} -> {0} and, of 4 bits, {1}. A byte is put beside 0x43:
# 0x4300 | n is 128 + n, for n below 128.
# The sum with {less 0} frees it of 128 and of the zero at once, which is exact where the zero is a whole number.
INT4 = """
prmt.b32 both, {in}, 0, {spread};
lop3.b32 a, both, 0x000f000f, 0x43004300, 0xea;
shr.u32 both, both, 4;
lop3.b32 b, both, 0x000f000f, 0x43004300, 0xea;
mov.b32 c, 0x3f803f80;
fma.rn.bf16x2 {0}, a, c, {less 0};
fma.rn.bf16x2 {1}, b, c, {less 1};
"""
# 128 + the low seven bits, less 128 + the eighth
_INT8 = """
prmt.b32 both, {in}, 0, {spread};
lop3.b32 a, both, 0x007f007f, 0x43004300, 0xea;
lop3.b32 b, both, 0x00800080, 0x43004300, 0xea;
mov.b32 c, 0xbf80bf80;
fma.rn.bf16x2 {0}, b, c, a;
"""
# A byte with its sign before it (prmt's bit 8), four bits up: the sign is bfloat16's, exponent and fraction lie where it has
# them. Then times the difference of the exponents' biases: 2^120.
_FP8 = """
prmt.b32 both, {in}, 0, {spread signed};
shl.b32 both, both, 4;
and.b32 both, both, 0x87f087f0;
mov.b32 c, 0x7b807b80;
mov.b32 d, 0x80008000;
fma.rn.bf16x2 {0}, both, c, d;
"""
_FP4 = """
prmt.b32 both, {in}, 0, {spread};
shl.b32 a, both, 12;
and.b32 a, a, 0x80008000;
shl.b32 b, both, 6;
lop3.b32 b, b, 0x01c001c0, a, 0xea;
mov.b32 c, 0x7e807e80;
mov.b32 d, 0x80008000;
fma.rn.bf16x2 {0}, b, c, d;
shl.b32 a, both, 8;
and.b32 a, a, 0x80008000;
shl.b32 b, both, 2;
lop3.b32 b, b, 0x01c001c0, a, 0xea;
fma.rn.bf16x2 {1}, b, c, d;
"""  # 2^126


def written(body: str, names: Mapping[str, str]) -> str:
    """Instructions with what stands for {these}."""
    for name, value in names.items():
        body = body.replace(name, value)
    return body


def _converting(body: str, pairs: int) -> Any:
    """The instructions for so many pairs of bytes, their results in the order of the tensors, as Triton takes them."""
    tensors = 2 if "{1}" in body else 1
    lines = ""
    for pair in range(pairs):
        names = {"{in}": "word", "{spread}": ("0x4140", "0x4342")[pair], "{spread signed}": ("0x9180", "0xb3a2")[pair]}
        names |= {f"{{{tensor}}}": f"${tensor * pairs + pair}" for tensor in range(tensors)}
        # behind the bytes, a register for each byte and half: of one row, so that all of a half are the same
        names |= {f"{{less {half}}}": f"${tensors * pairs + 1 + 2 * pairs * half}" for half in range(2)}
        lines += written(body, names)
    text = f"{{.reg .b32 word, both, a, b, c, d;\nmov.b32 word, ${tensors * pairs};{lines}}}"
    return tl and tl.constexpr(text)


# a thread has two bytes side by side for a wgmma, and four for other products
INT4_2, INT4_4 = _converting(INT4, 1), _converting(INT4, 2)
INT8_2, INT8_4, FP8_2, FP8_4 = _converting(_INT8, 1), _converting(_INT8, 2), _converting(_FP8, 1), _converting(_FP8, 2)
FP4_2, FP4_4 = _converting(_FP4, 1), _converting(_FP4, 2)
# -128 and -136 twice, as bfloat16 in 32 bits
LESS_128, LESS_136 = tl and tl.constexpr(0xC300C300 - (1 << 32)), tl and tl.constexpr(0xC308C308 - (1 << 32))
# For CUDA cores: the number in the top of the fraction of 16 and 256, four shifts for eight numbers.
INT4_FLOAT = tl and tl.constexpr("{ .reg .b32 t, w;\nmov.b32 w, $8;\n" + "".join(f"""{shift};
lop3.b32 ${low}, t, 0x00078000, 0x43800000, 0xea;
lop3.b32 ${low + 4}, t, 0x00780000, 0x41800000, 0xea;
""" for low, shift in enumerate(
    ("shl.b32 t, w, 15", "shl.b32 t, w, 7", "shr.u32 t, w, 1", "shr.u32 t, w, 9"))) + "}")
INT8_FLOAT = tl and tl.constexpr("""{ .reg .b32 t;
xor.b32 t, $4, 0x80808080;
""" + "".join(f"""prmt.b32 $0, t, 0x4b000000, 0x744{byte};
add.rn.f32 $0, $0, 0fCB000080;
""".replace("$0", f"${byte}") for byte in range(4)) + "}")


@jit
def sign_and_rest(code, BITS: tl.constexpr, FRACTION: tl.constexpr):
    """A small float's code (uint8: sign, exponent, FRACTION bits) -> float32, short of the exponent's bias."""
    code = code.to(tl.uint32)
    bits = ((code >> (BITS - 1)) << 31) | ((code & ((1 << (BITS - 1)) - 1)) << (23 - FRACTION))
    return bits.to(tl.float32, bitcast=True)


@jit
def _convert_halves(raw, ASM_2: tl.constexpr, ASM_4: tl.constexpr, BYTES: tl.constexpr):
    if BYTES == 4:
        low, high = tl.inline_asm_elementwise(
            ASM_4, "=r,=r,=r,=r,r", [raw], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        low, high = tl.inline_asm_elementwise(ASM_2, "=r,=r,r", [raw], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2)
    return low, high


@jit
def _convert_int4(raw, zero, high_zero, BYTES: tl.constexpr):
    # -(128 + zero) twice in a register: a small whole number is the end of 128's fraction, as in the numbers themselves
    less = tl.zeros(raw.shape, tl.uint32) + (zero.to(tl.uint32) * 0x10001 | 0xC300C300)
    high_less = tl.zeros(raw.shape, tl.uint32) + (high_zero.to(tl.uint32) * 0x10001 | 0xC300C300)
    if BYTES == 4:
        low, high = tl.inline_asm_elementwise(
            INT4_4, "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r", [raw, less, high_less],
            dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
        )
    else:
        low, high = tl.inline_asm_elementwise(
            INT4_2, "=r,=r,r,r,r,r,r", [raw, less, high_less], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    return low, high


@jit
def _convert(raw, ASM_2: tl.constexpr, ASM_4: tl.constexpr, BYTES: tl.constexpr):
    if BYTES == 4:
        numbers = tl.inline_asm_elementwise(ASM_4, "=r,=r,r", [raw], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        numbers = tl.inline_asm_elementwise(ASM_2, "=r,r", [raw], dtype=tl.bfloat16, is_pure=True, pack=2)
    return numbers


@jit
def widen(
    raw, zero, high_zero, KIND: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr, BYTES: tl.constexpr
):  # fmt: skip
    """A tile of bytes -> the numbers in them, exactly, in DTYPE: low halves and high ones; of 8 bits twice the same.

    Those of int4 less whole zeros from 0 to 127, of a type of integers: [BLOCK_N, 1] or [1, 1], for each half.
    BYTES: that lie together in a thread, 2 or 4; of no meaning to the result.
    """
    if KIND == "int4":
        if ASM > 0:
            low, high = _convert_int4(raw, zero, high_zero, BYTES)
        else:
            low = ((raw & 15).to(tl.float32) - zero.to(tl.float32)).to(DTYPE)
            high = ((raw >> 4).to(tl.float32) - high_zero.to(tl.float32)).to(DTYPE)
    elif KIND == "fp4":
        if ASM > 0:
            low, high = _convert_halves(raw, FP4_2, FP4_4, BYTES)
        else:
            low = (sign_and_rest(raw & 15, 4, 1) * 2.0**126).to(DTYPE)
            high = (sign_and_rest(raw >> 4, 4, 1) * 2.0**126).to(DTYPE)
    elif KIND == "int8":
        if ASM > 0:
            low = _convert(raw, INT8_2, INT8_4, BYTES)
        else:
            low = ((raw ^ 128).to(tl.float32) - 128.0).to(DTYPE)
        high = low
    else:
        if ASM >= 89 and tl.float16 == DTYPE:
            low = raw.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        elif ASM > 0:
            low = _convert(raw, FP8_2, FP8_4, BYTES)
        else:
            low = (sign_and_rest(raw, 8, 3) * 2.0**120).to(DTYPE)
        high = low
    return low, high


@jit
def widen_one_row(raw, KIND: tl.constexpr, ASM: tl.constexpr):
    """As `widen`, in float32 for the CUDA cores; but int4 is 256 + n in the low halves and 16 + n in the high ones, from which
    the products' sums have to be freed: that costs an instruction a weight less."""
    if KIND == "int4":
        if ASM > 0:
            low, high = tl.inline_asm_elementwise(
                INT4_FLOAT, "=r,=r,=r,=r,=r,=r,=r,=r,r", [raw], dtype=(tl.float32, tl.float32), is_pure=True, pack=4
            )
        else:
            low, high = (raw & 15).to(tl.float32) + 256.0, (raw >> 4).to(tl.float32) + 16.0
    elif KIND == "fp8" and ASM >= 89:
        low = raw.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        high = low
    elif KIND == "int8" and ASM > 0:
        low = tl.inline_asm_elementwise(INT8_FLOAT, "=r,=r,=r,=r,r", [raw], dtype=tl.float32, is_pure=True, pack=4)
        high = low
    else:
        low, high = widen(raw, 0, 0, KIND, tl.bfloat16 if ASM > 0 else tl.float32, ASM, 4)
        low, high = low.to(tl.float32), high.to(tl.float32)
    return low, high


@jit
def step_scales(
    pointers, k, GROUP: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr, FOUR: tl.constexpr
):  # fmt: skip
    """Scales, or zeros, of the spans of a step that begins at column k: [BLOCK_N] each, in float32, or as they are if they are
    integers; where halves have different ones, the high one's after the low one's. `pointers`: at the rows' first."""
    WHOLE: tl.constexpr = pointers.dtype.element_ty == tl.uint8
    DTYPE: tl.constexpr = tl.uint8 if WHOLE else tl.float32
    HALVES: tl.constexpr = 2 if FOUR and GROUP < 128 else 1
    IN_RUN: tl.constexpr = 64 // WIDTH if FOUR else 1
    found = ()
    for part in tl.static_range(PARTS):
        for half in tl.static_range(HALVES):
            if FOUR:
                column = k + part // IN_RUN * 128 + part % IN_RUN * WIDTH + half * 64
            else:
                column = k + part * WIDTH
            found = found + (tl.load(pointers + tl.minimum(column // GROUP, GROUPS - 1)).to(DTYPE),)
    return found


@jit
def first_scales(
    pointers, k, GROUP: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr, FOUR: tl.constexpr
):  # fmt: skip
    """Those of whole rows, for good, or of groups as `step_scales`."""
    if GROUP == 0:
        found = step_scales(pointers, 0, 1, 1, 1, WIDTH, False)
    else:
        found = step_scales(pointers, k, GROUP, GROUPS, PARTS, WIDTH, FOUR)
    return found


@jit
def add_products(
    acc, raw, low_x, high_x, scale, high_scale, zero, high_zero,
    KIND: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr,
    BYTES: tl.constexpr,
):  # fmt: skip
    """acc [BLOCK_N, BLOCK_M] += the products of a span: raw [BLOCK_N, WIDTH] bytes, x [WIDTH, BLOCK_M] for each half.

    A group's sums are freed of the zero and scaled as float32; of whole rows the caller applies the scale. Whole zeros of int4
    (ZEROS == 2) the numbers are freed of: multiplied by ones, x would have to pass the tensor cores twice.
    """
    FOUR: tl.constexpr = KIND == "int4" or KIND == "fp4"
    APART: tl.constexpr = FOUR and GROUP > 0 and GROUP < 128
    OF_SUMS: tl.constexpr = ZEROS == 1
    if ZEROS == 2:
        low, high = widen(raw, zero[:, None], high_zero[:, None], KIND, DTYPE, ASM, BYTES)
    else:
        usual = tl.full((1, 1), 0 if ZEROS else 8, tl.uint8)
        low, high = widen(raw, usual, usual, KIND, DTYPE, ASM, BYTES)
    if GROUP == 0 and not OF_SUMS:
        acc = tl.dot(low, low_x, acc, input_precision="ieee")
        if FOUR:
            acc = tl.dot(high, high_x, acc, input_precision="ieee")
    else:
        sums = tl.dot(low, low_x, input_precision="ieee")
        if FOUR and not APART:
            sums = tl.dot(high, high_x, sums, input_precision="ieee")
        if OF_SUMS:
            ones = tl.full(low.shape, 1.0, DTYPE)
            of_x = tl.dot(ones, low_x, input_precision="ieee")
            if FOUR and not APART:
                of_x = tl.dot(ones, high_x, of_x, input_precision="ieee")
            sums -= zero[:, None] * of_x
        acc += sums * scale[:, None] if GROUP > 0 else sums
        if APART:
            sums = tl.dot(high, high_x, input_precision="ieee")
            if OF_SUMS:
                sums -= high_zero[:, None] * tl.dot(tl.full(low.shape, 1.0, DTYPE), high_x, input_precision="ieee")
            acc += sums * high_scale[:, None]
    return acc


def are_mxfp4(*matrices: NarrowMatrix) -> bool:
    """e2m1 in groups of 32, whose scales, powers of two, are held as bfloat16."""
    held = [(matrix.kind, matrix.group, None if matrix.scales is None else matrix.scales.dtype) for matrix in matrices]
    return all(form == ("fp4", 32, torch.bfloat16) for form in held)
