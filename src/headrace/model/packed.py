"""A float matrix that oneDNN has laid out for its products on a CPU, where that is faster than to multiply it as it lies."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# Rows that oneDNN lays the packed weight out for. Eight is right for 1 to 128 (measured); prefill gains nothing elsewhere.
_FOR_ROWS = 8
# float32 is packed only for matrices of so many rows: below, plain sgemm is faster at one row and even at 32.
_FLOAT32_ROWS = 16384


def packed_product(matrix: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor] | None:
    """x [T, in] -> x @ matrix.T + bias; None if `matrix` [out, in] is better left as it is."""
    if matrix.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return None
    bfloat16 = matrix.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if not bfloat16 and (matrix.dtype != torch.float32 or matrix.shape[0] < _FLOAT32_ROWS):
        return None
    packed = torch.ops.mkldnn._reorder_linear_weight(matrix, _FOR_ROWS)
    multiply = torch.ops.mkldnn._linear_pointwise
    return lambda x: multiply(x, packed, bias, "none", [], "")
