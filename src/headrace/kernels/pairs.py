"""A bfloat16 as the sum of two FP8 numbers: what tensor cores multiply FP8 weights by, as they lie in memory.

Eight bits of a bfloat16 count, four of an e4m3. So of a block of numbers, as much larger as makes its largest one 128 to 256,
each is the sum of a high part, its first four bits, and a low one, the rest: to the bit where it is at least 1 / 512 of the
largest, and else to 2^-16 of that. Two products with FP8 weights thus stand for one with bfloat16 ones, at the same cost on
Hopper, and no weight passes through registers.

Hopper adds up FP8 products with 14 bits or so, not 24: so sums of a block of K are short, and joined in float32.
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

from headrace.kernels.launch import jit, tl

# Four numbers, times a factor and 2^-120, so that their exponents are FP8's: codes of high and low parts. Of them the sign is
# bit 15, the rest bits 4 to 10.
PAIR_TEXT = """{.reg .b32 a, b, c, d, t, u;
mov.b32 u, 0x80008000;
fma.rn.bf16x2 a, $2, $4, u;
fma.rn.bf16x2 b, $3, $5, u;
mov.b32 t, 0x03800380;
fma.rn.bf16x2 a, a, t, u;
fma.rn.bf16x2 b, b, t, u;
and.b32 c, a, 0xfff0fff0;
and.b32 d, b, 0xfff0fff0;
mov.b32 t, 0xbf80bf80;
fma.rn.bf16x2 c, c, t, a;
fma.rn.bf16x2 d, d, t, b;
shr.u32 t, a, 4;
shr.u32 u, b, 4;
prmt.b32 t, t, u, 0x6420;
prmt.b32 u, a, b, 0x7531;
lop3.b32 $0, t, u, 0x7f7f7f7f, 0xe4;
shr.u32 t, c, 4;
shr.u32 u, d, 4;
prmt.b32 t, t, u, 0x6420;
prmt.b32 u, c, d, 0x7531;
lop3.b32 $1, t, u, 0x7f7f7f7f, 0xe4;
}"""
PAIR = tl and tl.constexpr(PAIR_TEXT)


@jit
def exponents(x, AXIS: tl.constexpr):
    """Of the largest along an axis of x bfloat16, biased by 127, at least 8; 255 if one is not finite."""
    bits = x.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF
    return tl.maximum(tl.max(bits, AXIS) >> 7, 8)


@jit
def size(exponent):
    """What sums of a block's products have to be multiplied by; NaN where one of its numbers is not finite."""
    return tl.where(exponent == 255, float("nan"), ((exponent - 7) << 23).to(tl.float32, bitcast=True))


@jit
def pairs(x, exponent, ASM: tl.constexpr):
    """x [K, M] bfloat16 -> [K, 2 M] FP8: high and low part of each column, times 2^(134 - exponent), beside each other."""
    if ASM:
        factor = tl.broadcast_to(((261 - exponent) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)[None, :], x.shape)
        TWO: tl.constexpr = (tl.uint8, tl.uint8)
        high, low = tl.inline_asm_elementwise(PAIR, "=&r,=&r,r,r,r,r", [x, factor], dtype=TWO, is_pure=True, pack=4)
    else:
        wide = x.to(tl.float32) * ((261 - exponent) << 23).to(tl.float32, bitcast=True)[None, :]
        high = (wide.to(tl.int32, bitcast=True) & -0x100000).to(tl.float32, bitcast=True).to(tl.float8e4nv)
        low = (wide - high.to(tl.float32)).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        high = high.to(tl.uint8, bitcast=True)
    both = tl.reshape(tl.join(high, low), (x.shape[0], 2 * x.shape[1]))
    return both.to(tl.float8e4nv, bitcast=True)  # the last: a product's operand made of a reshape is none that Triton 3.6 takes


@jit
def joined(acc):
    """Sums of products with pairs [N, 2 M] -> with the numbers that they are of [N, M]."""
    high, low = tl.split(tl.reshape(acc, (acc.shape[0], acc.shape[1] // 2, 2)))
    return high + low
