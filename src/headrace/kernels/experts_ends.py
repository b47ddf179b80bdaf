"""How kernels of experts end: the gate of a first product opens, the result of a second joins the residual stream."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headrace.kernels.activation import gated
from headrace.kernels.launch import jit, tl


@jit
def open_gate(g, u, bias_ptr, of_expert, column, N, clamp, ACTIVATION: tl.constexpr):
    """Columns of an expert's gated product, 0 past its end; `of_expert`: where its biases begin, those of gates."""
    if bias_ptr is not None:
        bias = bias_ptr + of_expert + column
        g += tl.load(bias, mask=column < N, other=0.0).to(tl.float32)
        u += tl.load(bias + N, mask=column < N, other=0.0).to(tl.float32)
    return tl.where(column < N, gated(g, u, clamp, ACTIVATION), 0.0)


@jit
def row_target(residual_ptr, norm_ptr, row, column, N, norm_offset):
    """The residual that columns of a row's result join, and the next norm's weights. Neither is of the kernel before: they may
    be read ahead of the wait, and had better be, as the weights are in no cache."""
    before = 0.0
    norm = 0.0
    if residual_ptr is not None:
        before = tl.load(residual_ptr + row.to(tl.int64) * N + column, mask=column < N, other=0.0, cache_modifier=".cg")
        norm = tl.load(norm_ptr + column, mask=column < N, other=0.0).to(tl.float32) + norm_offset
    return before, norm


@jit
def finish_row(y, before, norm, out_ptr, residual_ptr, sumsq_ptr, row, column, N, scale, AXIS: tl.constexpr):
    """Columns of a row's result to where they belong; with a residual they join it, and out gets it times the next norm's
    weight, sumsq [T, programs along the columns] its part of the sum of squares. AXIS: of the programs, along the columns."""
    at = row.to(tl.int64) * N + column
    if residual_ptr is not None:
        y = before + scale * y
        tl.store(residual_ptr + at, y, mask=column < N)
        tl.store(sumsq_ptr + row * tl.num_programs(AXIS) + tl.program_id(AXIS), tl.sum(tl.where(column < N, y * y, 0.0), 0))
        y = y * norm
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=column < N)


class Joining(NamedTuple):
    """A residual stream that the result joins: total [T, H] float32 += scale * result; normed [T, H] becomes total * (norm +
    offset), and the returned sums of squares are as `Squares` has them."""

    total: Tensor
    normed: Tensor
    norm: Tensor
    scale: float
    norm_offset: float

    def arguments(self, tiles: int) -> dict:
        sums = torch.empty((len(self.total), tiles), dtype=torch.float32, device=self.total.device)
        return {
            "out_ptr": self.normed, "residual_ptr": self.total, "norm_ptr": self.norm, "sumsq_ptr": sums, "scale": self.scale,
            "norm_offset": self.norm_offset,
        }  # fmt: skip


def alone(out: Tensor) -> dict:
    """The arguments of a result that joins nothing."""
    none = dict.fromkeys(("residual_ptr", "norm_ptr", "sumsq_ptr"))
    return {"out_ptr": out, "scale": 1.0, "norm_offset": 0.0, **none}
