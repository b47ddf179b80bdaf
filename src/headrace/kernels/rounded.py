"""Activations of a decode step as FP8 (e4m3), with a size for each row and chunk of columns: by whoever makes them.

A kernel that makes some columns of all rows knows no row's largest number, but its own columns': of these the size makes the
largest one 448, which e4m3 has exactly. (By a power of two it would be rounded, too: in a model with a few very large numbers
that shows.) Sizes lie [chunks, rows] and are from 2^-48 to 2^48, so that a sum in units of one may be multiplied by the ratio
to another: larger numbers are cut off. A chunk with a number that is not finite is NaN.

Of a pair the second code is 16 times the rest of the number: together they have eight bits, as a bfloat16 has, of all numbers
down to 2^-18 of the largest. Codes of pairs are [2, rows, columns].
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.launch import jit, tl
from headrace.kernels.quantize_rows import FP8_MAX

SMALLEST, LARGEST = 2.0**-48, 2.0**48  # size


def rounded_reference(x: Tensor, chunk: int, pair: bool = False) -> tuple[Tensor, Tensor]:
    """x [M, K] -> (e4m3 [M, K], or of a pair [2, M, K], sizes [K / chunk, M])."""
    parts = x.float().unflatten(1, (-1, chunk))
    sizes = (parts.abs().amax(2) / FP8_MAX).clamp(SMALLEST, LARGEST)
    scaled = (parts * (1.0 / sizes)[..., None]).clamp(-FP8_MAX, FP8_MAX).flatten(1)
    codes = scaled.to(torch.float8_e4m3fn)
    if pair:
        codes = torch.stack((codes, ((scaled - codes.float()) * 16).to(torch.float8_e4m3fn)))
    return codes, sizes.t().contiguous()


def numbers(codes: Tensor, sizes: Tensor) -> Tensor:
    """What they stand for: [M, K] float32."""
    wide = codes.float() if codes.dim() == 2 else codes[0].float() + codes[1].float() / 16
    parts = wide.unflatten(1, (sizes.shape[0], -1))
    return (parts * sizes.t()[: len(wide), :, None]).flatten(1)


def keep(out: Tensor, value: Tensor, sizes: Tensor | None) -> None:
    """out = value [M, N]; in FP8, [M, N] or [2, M, N], with `sizes` [chunks, >= M]."""
    if sizes is not None:
        value, own = rounded_reference(value, value.shape[1] // sizes.shape[0], out.dim() == 3)
        sizes[:, : own.shape[1]] = own
    out.copy_(value)


@jit
def put(pointers, y, ok, sizes, sizes_ok, second, AXIS: tl.constexpr, PAIR: tl.constexpr):
    """Store a tile of float32 in the type of what is pointed to: in FP8 as a chunk along AXIS, whose sizes go to `sizes`; the
    second code of a PAIR lies `second` behind the first."""
    DTYPE: tl.constexpr = pointers.dtype.element_ty
    if tl.float8e4nv == DTYPE:
        bits = tl.max(tl.where(ok, y, 0.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF, AXIS)  # NaN is larger than all others
        size = tl.minimum(tl.maximum(bits.to(tl.float32, bitcast=True) * (1.0 / 448.0), 2.0**-48), 2.0**48)
        factor = tl.where(bits < 0x7F800000, 1.0 / size, float("nan"))
        scaled = y * tl.expand_dims(factor, AXIS)
        code = scaled.to(tl.float8e4nv)
        tl.store(pointers, code, mask=ok)
        if PAIR:
            tl.store(pointers + second, ((scaled - code.to(tl.float32)) * 16.0).to(tl.float8e4nv), mask=ok)
        tl.store(sizes, size, mask=sizes_ok)
    else:
        tl.store(pointers, y.to(DTYPE), mask=ok)
