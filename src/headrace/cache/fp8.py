"""Keys and values in FP8: float8_e4m3fn, and a float32 scale for each vector, that of one token and KV head.

A scale follows from its vector alone, so what is stored does not depend on when, in which chunk or beside whom a token was
computed: whatever the schedule, the same numbers are read. It takes the vector's largest number to the largest of FP8, so
that one stays as it is; the others keep four significant bits, fewer where they are less than 1/28,672 of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

DTYPE = torch.float8_e4m3fn
LARGEST = 448.0  # of DTYPE
SMALLEST = 1e-30  # vectors of smaller numbers are kept as zeros

Scales = tuple[Tensor, Tensor] | tuple[None, None]  # of a layer's keys and values


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., head_dim] -> (DTYPE [..., head_dim], scales [...]); x is about the product of both.

    A vector in which something is not finite has a scale that is NaN, and so is all that is read of it; it changes no other.
    """
    wide = x.float()
    top = wide.abs().amax(-1).nan_to_num(torch.inf, torch.inf).clamp_min(SMALLEST)
    largest = torch.full_like(top, LARGEST)  # torch divides tensors exactly, by numbers it multiplies with the reciprocal
    scales = torch.where(top < torch.inf, top / largest, torch.nan)
    return (wide * (largest / top)[..., None]).to(DTYPE), scales


def dequantize(data: Tensor, scales: Tensor) -> Tensor:
    """The other way, in float32."""
    return data.float() * scales[..., None]


def write(data: Tensor, scales: Tensor, x: Tensor, slots: Tensor) -> None:
    """Store x [T, kv_heads, head_dim] at slots [T] of data [blocks, block_size, kv_heads, head_dim] and its scales."""
    block_size = data.shape[1]
    narrow, factors = quantize(x)
    data.view(torch.uint8).flatten(0, 1).index_copy_(0, slots, narrow.view(torch.uint8))
    scales[slots // block_size, :, slots % block_size] = factors


def read(data: Tensor, scales: Tensor, slots: Tensor, out: Tensor) -> Tensor:
    """`out` [T, kv_heads, head_dim], which gets what `write` has stored at slots [T]."""
    block_size = data.shape[1]
    narrow = data.view(torch.uint8).flatten(0, 1).index_select(0, slots).view(DTYPE)
    return torch.mul(narrow.to(out.dtype), scales[slots // block_size, :, slots % block_size, None], out=out)
