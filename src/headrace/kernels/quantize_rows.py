"""Activations as FP8 (e4m3) with a scale for each row, for products of FP8 by FP8; also straight from a gated activation, and
from the norm of a sum."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headrace.kernels.activation import Activation, act_mul_reference, activate
from headrace.kernels.launch import Launcher, gdc_launch_dependents, gdc_wait, jit, next_power_of_2, on_gpu, tl
from headrace.kernels.norm import add_rms_norm_reference, default_tile

FP8_MAX = 448.0  # the largest number of e4m3
SMALLEST = 1e-12  # scale: rows of zeros stay zeros


class Rounded(NamedTuple):
    """Rows whose product is about that of the rows [T, K] they were made of. Up to 256 have room for a whole tile: of one that
    ends past a tensor the copy engine (TMA) takes longer, own products' and cuBLAS's, than of one full of anything."""

    values: Tensor  # e4m3 [P, K]
    scales: Tensor  # float32 [P, 1]
    rows: int  # T

    def split(self, rows: int) -> list[Rounded]:
        """As of a tensor."""
        parts = zip(self.values.split(rows), self.scales.split(rows), strict=True)
        return [Rounded(*part, min(rows, self.rows - i * rows)) for i, part in enumerate(parts)]


def quantize_rows_reference(x: Tensor) -> Rounded:
    """See `quantize_rows`."""
    x = x.float()
    scales = (x.abs().amax(1, keepdim=True) / FP8_MAX).clamp_(min=SMALLEST)
    return Rounded((x / scales).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scales, len(x))


@jit
def _quantize_rows(x_ptr, out_ptr, scales_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(x_ptr + row * WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    _store(x, row, column, out_ptr, scales_ptr, WIDTH)


@jit
def _store(x, row, column, out_ptr, scales_ptr, WIDTH: tl.constexpr):
    scale = tl.maximum(tl.max(tl.abs(x), 0) / 448.0, 1e-12)
    tl.store(scales_ptr + row, scale)
    tl.store(out_ptr + row * WIDTH + column, (x * (1.0 / scale)).to(out_ptr.dtype.element_ty), mask=column < WIDTH)


@jit
def _quantize_gated(
    gate_up_ptr, out_ptr, scales_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    pointers = gate_up_ptr + row * (2 * WIDTH) + column
    gate = tl.load(pointers, mask=column < WIDTH, other=0.0).to(tl.float32)
    up = tl.load(pointers + WIDTH, mask=column < WIDTH, other=0.0).to(tl.float32)
    x = (activate(gate, KIND) * up).to(gate_up_ptr.dtype.element_ty).to(tl.float32)  # as it would have been stored
    _store(x, row, column, out_ptr, scales_ptr, WIDTH)


@jit
def _quantize_normed(
    x_ptr, residual_ptr, weight_ptr, out_ptr, scales_ptr, sum_ptr, eps, offset, scale,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)[:, None]  # sums go as in norm.py
    column = tl.arange(0, BLOCK)[None, :]
    weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32) + offset  # cold: before the wait
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    place, mask = row * WIDTH + column, (column < WIDTH) & (row >= 0)
    x = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32)
    rounded = (tl.load(residual_ptr + place, mask=mask, other=0.0).to(tl.float32) + scale * x).to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + place, rounded, mask=mask)
    x = rounded.to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / WIDTH + eps) * weight
    x = x.to(sum_ptr.dtype.element_ty).to(tl.float32)  # as it would have been stored
    most = tl.maximum(tl.max(tl.abs(x), 1, keep_dims=True) / 448.0, 1e-12)
    tl.store(scales_ptr + row, most)
    tl.store(out_ptr + place, (x * (1.0 / most)).to(out_ptr.dtype.element_ty), mask=mask)


_launcher = Launcher(_quantize_rows)
_gated_launcher = Launcher(_quantize_gated)
_normed_launcher = Launcher(_quantize_normed)


def _room(x: Tensor, width: int) -> Rounded:
    rows = len(x)
    most = next((most for most in (64, 128, 256) if rows <= most), rows)
    values = x.new_empty((most, width), dtype=torch.float8_e4m3fn)
    return Rounded(values, x.new_empty((most, 1), dtype=torch.float32), rows)


def quantize_rows(x: Tensor) -> Rounded:
    """Of x [T, K]. A row's numbers depend on nothing else."""
    if not on_gpu(x):
        return quantize_rows_reference(x)
    (rows, width), out = x.shape, _room(x, x.shape[1])
    if rows:
        block = next_power_of_2(width)
        _launcher(rows, (x, *out[:2]), (), num_warps=min(8, max(1, block // 512)), WIDTH=width, BLOCK=block)
    return out


def quantize_gated(gate_up: Tensor, kind: Activation) -> Rounded:
    """gate_up [T, 2 K] -> what `quantize_rows` gives of activation(gate) * up [T, K], to the bit."""
    if not on_gpu(gate_up):
        return quantize_rows_reference(act_mul_reference(gate_up, kind))
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = _room(gate_up, width)
    if rows:
        block = next_power_of_2(width)
        warps = min(8, max(1, block // 512))  # more are slower, here as there: the largest is waited for (measured on an H200)
        _gated_launcher(rows, (gate_up.contiguous(), *out[:2]), (), num_warps=warps, WIDTH=width, BLOCK=block, KIND=kind)
    return out


def quantize_normed(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0, scale: float = 1.0
) -> tuple[Rounded, Tensor]:  # fmt: skip
    """What `quantize_rows` gives of the first, and the second part of `add_rms_norm`, to the bit; x and residual [T, H]."""
    if not on_gpu(x):
        normed, total = add_rms_norm_reference(x, residual, weight, eps, offset, scale)
        return quantize_rows_reference(normed), total
    (rows, width), out, total = x.shape, _room(x, x.shape[1]), torch.empty_like(residual)
    if rows:
        _normed_launcher(
            rows, (x.contiguous(), residual.contiguous(), weight, *out[:2], total), (eps, offset, scale),
            num_warps=default_tile(width).num_warps, WIDTH=width, BLOCK=next_power_of_2(width),
        )  # fmt: skip
    return out, total
