"""Activations in float16, for products with FP8 weights: these become float16 by one instruction for two, bfloat16 by six.

Eleven bits of a number count rather than bfloat16's eight, but its size is limited. So a 16th of it is kept: it may be as large
as 2^20, where it is cut off, and down to 2^-13 it keeps eight bits or more. Products write and read these between themselves;
what the head reads, and attention writes, is bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from headrace.kernels.launch import capability, jit, tl

ABOVE = 16  # rows: of so many the large products are by pairs, which are made of bfloat16


def suit(kinds: Iterable[tuple[str, ...]], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the products of a model's layers, of these kinds and the head's, take activations in float16: on Hopper."""
    fp8 = all(kind == "fp8" for layer in kinds for kind in layer[:-1])
    return fp8 and dtype == torch.bfloat16 and capability(device)[0] == 9


@jit
def kept(x, DTYPE: tl.constexpr):
    """float32 numbers as activations of that type."""
    if tl.float16 == DTYPE:
        x = tl.clamp(x * 0.0625, -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL)
    return x.to(DTYPE)


@jit
def of_kept(sums, DTYPE: tl.constexpr):
    """Sums of products with activations of that type -> with what these stand for."""
    if tl.float16 == DTYPE:
        sums *= 16.0
    return sums
