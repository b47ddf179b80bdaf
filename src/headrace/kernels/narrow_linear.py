"""Products with narrow weights on a card, wherever the fused decode step does not run: prompts, mixed steps, other families.

Four ways, by the number of rows alone:
- few, and of int8 by rows up to some hundreds: the weights' own kernel (narrow_gemm.py): activations as they are;
- some dozens to hundreds, of int4 in groups of 128 on Hopper: a kernel that widens on the way into the tensor cores
  (folded_gemm.py), with the same numbers as those of whole matrices widened;
- many, FP8 with a scale a row: FP8 tensor cores, activations rounded to FP8 for each row apart (quantize_rows.py), up to some
  hundred rows on Hopper by a kernel of our own (scaled_gemm.py);
- many, of any other form: as many rows of the matrix at a time as stay in the L2 cache are widened to the activations' type,
  and multiplied by cuBLAS.
So a row's result differs with the number of rows by what its sums round differently, but for FP8 also by the rounding of
activations to FP8 above `few_rows`. All of them can be captured in CUDA graphs, and read nothing on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels import folded_tile
from headrace.kernels.activation import Activation, act_mul
from headrace.kernels.folded_product import FoldedProduct
from headrace.kernels.launch import capability
from headrace.kernels.narrow import NarrowMatrix
from headrace.kernels.narrow_gemm import narrow_gemm, takes_many_rows, widen_rows
from headrace.kernels.quantize_rows import Rounded, quantize_gated, quantize_rows
from headrace.kernels.scaled_gemm import ScaledProduct, default_tile, takes

FEW_ROWS = 64
FEW_FOLDED_ROWS = 16  # of int4 where there is a kernel for more
FEW_SCALED_ROWS = 32  # of FP8 where there is a kernel for more: 40 rows of an 8B take 4.2 ms, widened in registers 5.6 (H200)
FEW_ROWS_WIDENED = 128  # up to here widening the matrix costs more than the slower product
MANY_ROWS = 512  # of matrices for which the product is made for so many
WIDENED_BYTES = 32 << 20  # of a matrix at a time


def few_rows(device: torch.device) -> int:
    """Up to so many rows `scaled` products take as they are."""
    return FEW_SCALED_ROWS if takes(device) else FEW_ROWS


def is_scaled(weight: NarrowMatrix) -> bool:
    """Whether many rows are multiplied by it as FP8 by FP8."""
    by_row = weight.kind == "fp8" and weight.group == 0 and weight.zeros is None and weight.scale_rows == 1
    return by_row and not weight.shape[0] % 16 and not weight.shape[1] % 16 and capability(weight.data.device) >= (8, 9)


def rounds(x: Tensor) -> bool:
    """Whether `scaled` products round rows like these [T, K]."""
    return x.dtype == torch.bfloat16 and len(x) > few_rows(x.device)


class NarrowProduct:
    """x [T, K] -> x @ weight.T + bias [T, N] in x's dtype, or bfloat16 if x comes rounded, which only `scaled` ones take."""

    def __init__(self, weight: NarrowMatrix, bias: Tensor | None):
        self.weight, self.bias = weight, bias
        self.scaled = is_scaled(weight)
        assert weight.scales is not None
        self.column_scales = weight.scales.float().t() if self.scaled else weight.scales
        own = self.scaled and takes(weight.data.device)
        self.own = ScaledProduct(weight.data, self.column_scales, bias) if own else None
        self.folded = FoldedProduct(weight, bias) if folded_tile.suits(weight) else None

    @property
    def workspace_bytes(self) -> int:
        """Of what is there for a moment beside x and the product; x in FP8 has room among what is counted for activations."""
        if self.own is not None:
            return self.own.workspace_bytes
        return 0 if self.scaled else max(WIDENED_BYTES, 0 if self.folded is None else self.folded.workspace_bytes)

    def __call__(self, x: Tensor | Rounded, out: Tensor | None = None) -> Tensor:
        if isinstance(x, Rounded):
            return self._scaled(x, torch.bfloat16, out)
        scaled = self.scaled and x.dtype == torch.bfloat16
        if scaled and rounds(x):
            return self._scaled(quantize_rows(x.contiguous()), x.dtype, out)
        if self.folded is not None and x.dtype == torch.bfloat16 and FEW_FOLDED_ROWS < len(x) <= folded_tile.MOST_ROWS:
            return self.folded(x, out)
        if scaled or len(x) <= (MANY_ROWS if takes_many_rows(self.weight, x) else FEW_ROWS_WIDENED):
            return narrow_gemm(x, self.weight, self.bias, out)
        return self._widened(x.contiguous(), out)

    def of_gated(self, gate_up: Tensor, kind: Activation) -> Tensor:
        """gate_up [T, 2 K] -> the product of activation(gate) * up; one kernel less where that is made FP8."""
        if not (self.scaled and rounds(gate_up)):
            return self(act_mul(gate_up, kind))
        return self._scaled(quantize_gated(gate_up, kind), gate_up.dtype)

    def _scaled(self, x: Rounded, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        tile = None if self.own is None else default_tile(x.rows, *self.weight.shape)
        if self.own is not None and tile is not None:
            return self.own(x, tile, out)
        rows = len(x.values) if out is None else x.rows
        return torch._scaled_mm(
            x.values[:rows], self.weight.data.t(), scale_a=x.scales[:rows], scale_b=self.column_scales, bias=self.bias,
            out_dtype=dtype, use_fast_accum=True, out=out,
        )[: x.rows]  # fmt: skip

    def _widened(self, x: Tensor, out: Tensor | None) -> Tensor:
        columns, width = self.weight.shape
        out = x.new_empty(len(x), columns) if out is None else out
        step = max(128, WIDENED_BYTES // (width * x.itemsize) // 128 * 128)
        matrix = x.new_empty(min(step, columns), width)
        for first in range(0, columns, step):
            part = widen_rows(self.weight, first, matrix[: columns - first])
            torch.mm(x, part.t(), out=out[:, first : first + step])
        return out if self.bias is None else out.add_(self.bias)
