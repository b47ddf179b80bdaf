"""Rows of x as whole numbers of two bytes, with a scale for each 32 columns: what MXFP4 experts are multiplied by.

A group's largest number has 14 bits and a sign, so that of the bfloat16 in it those above 1 / 64 of it are exact; what others
lose is less than a 16,000th part of it. The two bytes lie apart, each a row of its own: the tensor cores take them so.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headrace.kernels.launch import gdc_launch_dependents, gdc_wait, jit, pdl, tl


class Digits(NamedTuple):
    """numbers [T, 2, W] int8: n = 256 * first + second; scales [T, W / 32] float32: half of what n has to be multiplied by."""

    numbers: Tensor
    scales: Tensor


@jit
def split_digits(x):
    """x [..., 32] float32 -> two bytes of each number, and [...] half of the scale; no number if one of x is none."""
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    top = tl.max(bits, len(x.shape) - 1)
    exponent = tl.maximum(top >> 23, 40)  # of less than 2^-87 not all bits are kept
    larger = ((267 - exponent) << 23).to(tl.float32, bitcast=True)
    # the sum's fraction is a whole number, to the nearest
    n = (x * tl.expand_dims(larger, len(x.shape) - 1) + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    low = ((n + 128) & 255) - 128
    scale = tl.where(top < 0x7F800000, ((exponent - 14) << 23).to(tl.float32, bitcast=True), float("nan"))
    return ((n - low) >> 8).to(tl.int8), low.to(tl.int8), scale


@jit
def store_digits(given, numbers_ptr, scales_ptr, row, group, WIDTH: tl.constexpr):
    """Those of a group, or of several from `group` on, of a row."""
    high, low, scale = given
    if len(high.shape) == 1:
        column = group * 32 + tl.arange(0, 32)
        place = scales_ptr + row * (WIDTH // 32) + group
    else:
        groups = group + tl.arange(0, high.shape[0])
        column = groups[:, None] * 32 + tl.arange(0, 32)[None, :]
        place = scales_ptr + row * (WIDTH // 32) + groups
    numbers = numbers_ptr + row.to(tl.int64) * (2 * WIDTH) + column
    tl.store(numbers, high)
    tl.store(numbers + WIDTH, low)
    tl.store(place, scale)


@jit
def row_digits(x_ptr, numbers_ptr, scales_ptr, row, run, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """128 columns of a row; past its end it is 0."""
    column = run * 128 + tl.arange(0, 4)[:, None] * 32 + tl.arange(0, 32)[None, :]
    x = tl.load(x_ptr + row.to(tl.int64) * COLUMNS + column, mask=column < COLUMNS, other=0.0).to(tl.float32)
    store_digits(split_digits(x), numbers_ptr, scales_ptr, row, run * 4, WIDTH)


@jit
def _digits_kernel(x_ptr, numbers_ptr, scales_ptr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row_digits(x_ptr, numbers_ptr, scales_ptr, tl.program_id(1), tl.program_id(0), COLUMNS, WIDTH)


def new_digits(rows: int, width: int, device: torch.device) -> Digits:
    return Digits(
        torch.empty(rows, 2, width, dtype=torch.int8, device=device),
        torch.empty(rows, width // 32, dtype=torch.float32, device=device),
    )


def digits(x: Tensor, width: int) -> Digits:
    """x [T, H] as numbers, zeros behind them up to `width`, a multiple of 128."""
    out = new_digits(len(x), width, x.device)
    _digits_kernel[width // 128, len(x)](x.contiguous(), *out, COLUMNS=x.shape[1], WIDTH=width, num_warps=1, **pdl(x))
    return out
