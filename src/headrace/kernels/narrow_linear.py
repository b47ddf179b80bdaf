"""Products with narrow weights on a card, wherever the fused decode step does not run: prompts, mixed steps, other families.

Three ways, by the number of rows alone:
- few, and of int8 by rows up to some hundreds: the weights' own kernel (narrow_gemm.py): activations as they are;
- many, FP8 with a scale a row: FP8 tensor cores, activations rounded to FP8 for each row apart (quantize_rows.py);
- many, of any other form: as many rows of the matrix at a time as stay in the L2 cache are widened to the activations' type,
  and multiplied by cuBLAS.
So a row's result differs with the number of rows by what its sums round differently, but for FP8 also by the rounding of
activations to FP8 above `FEW_ROWS`. All of them can be captured in CUDA graphs, and read nothing on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.activation import Activation, act_mul
from headrace.kernels.launch import capability
from headrace.kernels.narrow import NarrowMatrix
from headrace.kernels.narrow_gemm import narrow_gemm, takes_many_rows, widen_rows
from headrace.kernels.quantize_rows import quantize_gated, quantize_rows

FEW_ROWS = 64
FEW_ROWS_WIDENED = 128  # up to here widening the matrix costs more than the slower product
MANY_ROWS = 512  # of matrices for which the product is made for so many
WIDENED_BYTES = 32 << 20  # of a matrix at a time


class NarrowProduct:
    """x [T, K] -> x @ weight.T + bias [T, N] in x's dtype."""

    def __init__(self, weight: NarrowMatrix, bias: Tensor | None):
        self.weight, self.bias = weight, bias
        rows, width = weight.shape
        by_row = weight.kind == "fp8" and weight.group == 0 and weight.zeros is None and weight.scale_rows == 1
        self.scaled = by_row and rows % 16 == 0 and width % 16 == 0 and capability(weight.data.device) >= (8, 9)
        assert weight.scales is not None
        self.column_scales = weight.scales.float().t() if self.scaled else weight.scales

    @property
    def workspace_bytes(self) -> int:
        """Of what is there for a moment beside x and the product; x in FP8 has room among what is counted for activations."""
        return 0 if self.scaled else WIDENED_BYTES

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        scaled = self.scaled and x.dtype == torch.bfloat16
        most = FEW_ROWS if scaled else MANY_ROWS if takes_many_rows(self.weight, x) else FEW_ROWS_WIDENED
        if len(x) <= most:
            return narrow_gemm(x, self.weight, self.bias, out)
        if not scaled:
            return self._widened(x.contiguous(), out)
        return self._scaled(*quantize_rows(x.contiguous()), x.dtype, out)

    def of_gated(self, gate_up: Tensor, kind: Activation) -> Tensor:
        """gate_up [T, 2 K] -> the product of activation(gate) * up; one kernel less where that is made FP8."""
        if len(gate_up) <= FEW_ROWS or not self.scaled or gate_up.dtype != torch.bfloat16:
            return self(act_mul(gate_up, kind))
        return self._scaled(*quantize_gated(gate_up, kind), gate_up.dtype)

    def _scaled(self, values: Tensor, scales: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        return torch._scaled_mm(
            values, self.weight.data.t(), scale_a=scales, scale_b=self.column_scales, bias=self.bias, out_dtype=dtype,
            use_fast_accum=True, out=out,
        )  # fmt: skip

    def _widened(self, x: Tensor, out: Tensor | None) -> Tensor:
        columns, width = self.weight.shape
        out = x.new_empty(len(x), columns) if out is None else out
        step = max(128, WIDENED_BYTES // (width * x.itemsize) // 128 * 128)
        matrix = x.new_empty(min(step, columns), width)
        for first in range(0, columns, step):
            part = widen_rows(self.weight, first, matrix[: columns - first])
            torch.mm(x, part.t(), out=out[:, first : first + step])
        return out if self.bias is None else out.add_(self.bias)
