"""The gated activation of the feed-forward part, the gate of attention's output, and the soft cap of scores and logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.launch import Launcher, gdc_launch_dependents, gdc_wait, jit, on_gpu, pdl, tl

Activation = Literal["silu", "gelu_tanh", "gelu", "relu2", "xielu"]  # the last: see model/xielu.py


def act(x: Tensor, kind: Activation) -> Tensor:
    """The activation alone; relu2 (relu(x)^2) has no other form."""
    if kind == "silu":
        return F.silu(x)
    if kind == "relu2":
        return F.relu(x).square_()
    return F.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")


def act_mul_reference(gate_up: Tensor, kind: Activation) -> Tensor:
    """See `act_mul`."""
    gate, up = gate_up.chunk(2, -1)
    return act(gate, kind).mul_(up)  # a second rounding below float32, for half the memory traffic


@jit
def activate(x, KIND: tl.constexpr):
    """silu, gelu_tanh or gelu of a float32 tensor."""
    if KIND == "silu":
        y = x * tl.sigmoid(x)
    elif KIND == "gelu_tanh":  # 0.5 (1 + tanh u) = sigmoid(2 u); 2 sqrt(2 / pi)
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    return y


@jit
def gated(gate, up, clamp, KIND: tl.constexpr):
    """activation(gate) * up of float32 tensors; "clamped": gpt-oss's, with gate at most `clamp` and up within it."""
    if KIND == "clamped":
        gate = tl.where(gate > clamp, clamp, gate)  # what is no number stays so
        up = tl.where(up > clamp, clamp, tl.where(up < -clamp, -clamp, up))
        y = (up + 1.0) * gate * tl.sigmoid(1.702 * gate)
    else:
        y = activate(gate, KIND) * up
    return y


@jit
def soft_cap(x, cap):
    """cap * tanh(x / cap)"""
    return cap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * x * (1.0 / cap))))


@jit
def _act_mul(gate_up_ptr, out_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr):
    PARTS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK  # of a row, neighbours
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    column = tl.program_id(0) % PARTS * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(gate_up_ptr + row * (2 * WIDTH) + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * (2 * WIDTH) + WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + column, (activate(x, KIND) * up).to(out_ptr.dtype.element_ty), mask=mask)


_launcher = Launcher(_act_mul)


@dataclass(frozen=True, slots=True)
class ActTile:
    """Elements and warps of a program."""

    block: int = 1024
    num_warps: int = 4


def act_mul_triton(gate_up: Tensor, kind: Activation, *, tile: ActTile = ActTile()) -> Tensor:
    """See `act_mul`."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        grid = rows * -(-width // tile.block)
        _launcher(grid, (gate_up.contiguous(), out), (), num_warps=tile.num_warps, WIDTH=width, BLOCK=tile.block, KIND=kind)
    return out


def act_mul(gate_up: Tensor, kind: Activation) -> Tensor:
    """activation(gate) * up with gate_up [T, 2I] = (gate, up) -> [T, I], each computed in float32."""
    return (act_mul_triton if on_gpu(gate_up) else act_mul_reference)(gate_up, kind)


@jit(do_not_specialize=["gate_stride"])
def _gate_rows(x_ptr, gate_ptr, gate_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    PARTS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    column = tl.program_id(0) % PARTS * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(x_ptr + row * WIDTH + column, (x * tl.sigmoid(gate)).to(x_ptr.dtype.element_ty), mask=mask)


def gate_rows_triton(x: Tensor, gate: Tensor) -> None:
    """See `gate_rows`: x [T, N], contiguous, in place."""
    (rows, width), block = x.shape, 1024
    if rows:
        _gate_rows[(rows * -(-width // block),)](x, gate, gate.stride(0), WIDTH=width, BLOCK=block, num_warps=4, **pdl(x))


def gate_rows(x: Tensor, gate: Tensor) -> Tensor:
    """x [T, N] times sigmoid(gate) [T, N], whose rows may be parts of wider ones; x may be changed in place."""
    if not on_gpu(x):
        return x * torch.sigmoid(gate)
    x = x.contiguous()
    gate_rows_triton(x, gate)
    return x
