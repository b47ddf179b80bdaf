"""A weight matrix as a callable: where the way to multiply by it is chosen, once, at load time."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Linear = Callable[[Tensor], Tensor]  # x [T, in] -> [T, out]

# Rows that oneDNN lays the packed weight out for. Eight is right for 1 to 128 (measured); prefill gains nothing elsewhere.
_PACK_FOR_ROWS = 8
# float32 is packed only for matrices of so many rows: below, plain sgemm is faster at one row and even at 32.
_PACK_FLOAT32_ROWS = 16384


def make_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """x @ weight.T + bias for weight [out, in]; on the CPU packed for oneDNN where that is faster."""
    if weight.device.type == "cpu" and torch.backends.mkldnn.is_available():
        if weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return _packed(weight, bias)
        if weight.dtype == torch.float32 and weight.shape[0] >= _PACK_FLOAT32_ROWS:
            return _packed(weight, bias)
    if weight.is_cuda and bias is None:
        return MatrixLinear(weight)
    return lambda x: F.linear(x, weight, bias)


class MatrixLinear:
    """A product by cuBLAS, which can also add it to what is there: the sum is formed in float32 and rounded once."""

    def __init__(self, weight: Tensor):
        self.transposed = weight.t()

    def __call__(self, x: Tensor) -> Tensor:
        return torch.mm(x, self.transposed)

    def into(self, out: Tensor, x: Tensor) -> Tensor:
        """`out` [T, out], which gets x @ weight.T."""
        return torch.mm(x, self.transposed, out=out)

    def add_to(self, total: Tensor, x: Tensor) -> None:
        """total [T, out] += x @ weight.T, in place; a norm after it then reads and writes half of what it does with the sum."""
        total.addmm_(x, self.transposed)


def _packed(weight: Tensor, bias: Tensor | None) -> Linear:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_FOR_ROWS)
    multiply = torch.ops.mkldnn._linear_pointwise
    return lambda x: multiply(x, packed, bias, "none", [], "")
