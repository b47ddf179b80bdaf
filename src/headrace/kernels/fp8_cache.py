"""FP8 keys and values inside the kernels that write them, as cache/fp8.py defines them, bit for bit."""

from __future__ import annotations

from headrace.kernels.launch import jit, tl


@jit
def widened(x, model: tl.constexpr):
    """Cached numbers x as products take them, in the model's dtype; FP8 by way of float16 and float32, which is exact.

    A card has one instruction for two numbers of FP8 to float16, and one for two of float32 to bfloat16; what is between is
    quick as well, while from float16 to bfloat16 it converts a number at a time, at a fraction of the rate.
    """
    if x.dtype == tl.float8e4nv:
        x = x.to(tl.float16).to(tl.float32)
    return x.to(model)


@jit
def largest(x):
    """Of the magnitudes of x [.., n] float32 along the last axis; infinite where something is not finite."""
    return tl.max(tl.where(x == x, tl.abs(x), float("inf")), len(x.shape) - 1)


@jit
def fp8_factors(top):
    """What numbers of at most `top` are multiplied by, and the scale that takes them back."""
    top = tl.maximum(top, 1e-30)
    return tl.div_rn(448.0, top), tl.div_rn(top, 448.0)  # the quick division would round otherwise than the reference


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
