"""FP8 keys and values inside the kernels that write them, as cache/fp8.py defines them, bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.launch import capability, jit, tl


def fp8_kind(q: Tensor, scales: Tensor | None) -> int:
    """How a kernel reads the cache for queries q, or for what it hands on in FP8, as models in bfloat16 alone do: 0 as it is, 1
    from FP8, 2 so and in bfloat16 on a card."""
    if scales is None:
        return 0
    return 2 if q.dtype in (torch.bfloat16, torch.float8_e4m3fn) and capability(q.device) >= (8, 9) else 1


@jit
def exponents(x, AXIS: tl.constexpr):
    """Of the largest along an axis of x bfloat16, biased by 127, at least 8; 255 if one is not finite."""
    bits = x.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF
    return tl.maximum(tl.max(bits, AXIS) >> 7, 8)


@jit
def size(exponent):
    """2^(exponent - 134); NaN where one of the numbers is not finite."""
    return tl.where(exponent == 255, float("nan"), ((exponent - 7) << 23).to(tl.float32, bitcast=True))


@jit
def pairs(x, model: tl.constexpr, FP8: tl.constexpr):
    """(even, odd) numbers of x, int16, in which two of FP8 lie side by side, in the model's dtype: exact but for NaN, whose
    vector has a scale that is NaN.

    So they are moved as numbers of 16 bits are, which shared memory can transpose on the way to the tensor cores. FP8 == 2:
    bfloat16 on a card. Sign, exponent and mantissa are put where bfloat16 has them, two numbers at a time, and multiplied by
    2^120 for the other bias of the exponent: a fraction of what conversions cost there.
    """
    if FP8 == 2:
        even, odd = tl.inline_asm_elementwise(
            "{ .reg .b32 s, e, m, z; mov.b32 m, 0x7b807b80; mov.b32 z, 0x80008000;"
            " shl.b32 s, $2, 8; shl.b32 e, $2, 4; and.b32 e, e, 0x07f007f0;"
            " lop3.b32 s, s, 0x80008000, e, 0xea; fma.rn.bf16x2 $0, s, m, z;"
            " shr.u32 e, $2, 4; and.b32 e, e, 0x07f007f0; lop3.b32 s, $2, 0x80008000, e, 0xea; fma.rn.bf16x2 $1, s, m, z; }",
            "=&r,=r,r", [x], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        even = (x & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32).to(model)
        odd = ((x >> 8) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32).to(model)
    return even, odd


@jit
def half_pairs(x, half: tl.constexpr, FP8: tl.constexpr):
    """As `pairs`, but of a model in bfloat16 as float16, to the bit: one instruction for two."""
    if FP8 == 2:
        even, odd = tl.inline_asm_elementwise(
            "{ .reg .b32 t; .reg .b16 a, b; prmt.b32 t, $2, 0, 0x3120; mov.b32 {a, b}, t;"
            " cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }",
            "=&r,=r,r", [x], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        even, odd = pairs(x, half, FP8)
    return even, odd


@jit
def halves_of(q):
    """Queries [.., n] in bfloat16 -> float16, which has more bits, times what makes the largest of each 128 to 256, and what
    products with them are multiplied by (NaN where one is not finite); others as they are, and 1."""
    if q.dtype == tl.bfloat16:
        exponent = exponents(q, len(q.shape) - 1)
        factor = ((261 - exponent) << 23).to(tl.float32, bitcast=True)
        q, back = (q.to(tl.float32) * factor[:, None]).to(tl.float16), size(exponent)
    else:
        back = tl.max(q, len(q.shape) - 1) * 0.0 + 1.0
    return q, back


@jit
def log2_and_inverse(scales, FP8: tl.constexpr):
    """Of scales, which are normal numbers or NaN, by an instruction each."""
    if FP8 == 2:
        log2, inverse = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $2; rcp.approx.ftz.f32 $1, $2;", "=&f,=f,f", [scales], dtype=(tl.float32, tl.float32),
            is_pure=True, pack=1,
        )  # fmt: skip
    else:
        log2, inverse = tl.log2(scales), 1.0 / scales
    return log2, inverse


@jit
def largest(x):
    """Of the magnitudes of x [.., n] float32 along the last axis; infinite where something is not finite."""
    return tl.max(tl.where(x == x, tl.abs(x), float("inf")), len(x.shape) - 1)


@jit
def fp8_factors(top):
    """What numbers of at most `top` are multiplied by, and the scale that takes them back."""
    top = tl.maximum(top, 1e-30)
    scale = tl.where(top < float("inf"), tl.div_rn(top, 448.0), float("nan"))
    return tl.div_rn(448.0, top), scale  # the quick division would round otherwise than the reference


@jit
def nearest_fp8(x):
    """x float32, at most 448 in magnitude -> the nearest number that e4m3 has, still as float32, so that its conversion to e4m3
    is exact. To convert there and back would give the same, but ptxas 12.8 compiles both conversions side by side wrongly."""
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    small = (x + 24576.0) - 24576.0  # the last bit of these sums is 2^-9
    return tl.where(tl.abs(x) < 0.015625, small, normal)


@jit
def store_head(
    cache, scales, low, high, tail, low_at, tail_at, half, rest, scale_at, there,
    HALF: tl.constexpr, REST: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Heads [PACK, ..] into the cache, each in three parts (see kernels/qkv.py); in FP8 their scales [PACK, 1] too."""
    kept = cache.dtype.element_ty
    if FP8:
        low, high, tail = low.to(tl.float32), high.to(tl.float32), tail.to(tl.float32)
        top = tl.maximum(largest(low), largest(high))
        if REST > 0:
            top = tl.maximum(top, largest(tail))
        factor, scale = fp8_factors(top[:, None])
        low, high, tail = low * factor, high * factor, tail * factor
        tl.store(scales + scale_at, scale, mask=there)
    tl.store(cache + low_at, low.to(kept), mask=half)
    tl.store(cache + HALF + low_at, high.to(kept), mask=half)
    if REST > 0:
        tl.store(cache + tail_at, tail.to(kept), mask=rest)
