"""Activations as FP8 (e4m3) with a scale for each row, for products of FP8 by FP8; also straight from a gated activation."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.activation import Activation, act_mul_reference, activate
from headrace.kernels.launch import Launcher, gdc_launch_dependents, gdc_wait, jit, next_power_of_2, on_gpu, tl

FP8_MAX = 448.0  # the largest number of e4m3
SMALLEST = 1e-12  # scale: rows of zeros stay zeros


def quantize_rows_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `quantize_rows`."""
    x = x.float()
    scales = (x.abs().amax(1, keepdim=True) / FP8_MAX).clamp_(min=SMALLEST)
    return (x / scales).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scales


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


_launcher = Launcher(_quantize_rows)
_gated_launcher = Launcher(_quantize_gated)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, K] -> (e4m3 [T, K], float32 scales [T, 1]), whose product is about x. A row's numbers depend on nothing else."""
    if not on_gpu(x):
        return quantize_rows_reference(x)
    rows, width = x.shape
    out, scales = x.new_empty(x.shape, dtype=torch.float8_e4m3fn), x.new_empty((rows, 1), dtype=torch.float32)
    if rows:
        block = next_power_of_2(width)
        _launcher(rows, (x, out, scales), (), num_warps=min(8, max(1, block // 512)), WIDTH=width, BLOCK=block)
    return out, scales


def quantize_gated(gate_up: Tensor, kind: Activation) -> tuple[Tensor, Tensor]:
    """gate_up [T, 2 K] -> what `quantize_rows` gives of activation(gate) * up [T, K], to the bit."""
    if not on_gpu(gate_up):
        return quantize_rows_reference(act_mul_reference(gate_up, kind))
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((rows, width), dtype=torch.float8_e4m3fn)
    scales = gate_up.new_empty((rows, 1), dtype=torch.float32)
    if rows:
        block = next_power_of_2(width)
        warps = min(8, max(1, block // 512))  # more are slower, here as there: the largest is waited for (measured on an H200)
        _gated_launcher(rows, (gate_up.contiguous(), out, scales), (), num_warps=warps, WIDTH=width, BLOCK=block, KIND=kind)
    return out, scales
