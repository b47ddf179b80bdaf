"""A weight matrix as a product: where the way to multiply by it is chosen, once, at load time."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.activation import Activation
from headrace.kernels.narrow_linear import NarrowProduct
from headrace.model.weight import Weight, dequantized

# Rows that oneDNN lays the packed weight out for. Eight is right for 1 to 128 (measured); prefill gains nothing elsewhere.
_PACK_FOR_ROWS = 8
# float32 is packed only for matrices of so many rows: below, plain sgemm is faster at one row and even at 32.
_PACK_FLOAT32_ROWS = 16384

Reduce = Callable[[Tensor], Tensor]  # partial products [T, out] -> their sum over all who hold a part of the matrix
MakeLinear = Callable[[Weight, Tensor | None, Reduce | None], "Linear"]


class Linear:
    """x [T, in] -> x @ weight.T + bias [T, out].

    With `reduce` the matrix is one of several parts of the input's columns: what all of them give is added up before anybody
    sees it, and only one of them has the bias.
    """

    fuses_add = False  # `add_to` is cheaper than the product and an addition apart
    into: Callable[[Tensor, Tensor], Tensor] | None = None  # (out [T, out], x) -> out, which gets the product
    of_gated: Callable[[Tensor, Activation], Tensor] | None = None  # (gate_up, kind) -> what a call gives of act_mul of them
    takes_rounded = False  # a call takes rows in FP8 as well, where there are many (quantize_rows.py)
    workspace_bytes = 0  # beside what it gives

    def __init__(self, product: Callable[[Tensor], Tensor], reduce: Reduce | None = None):
        self.product, self.reduce = product, reduce

    def __call__(self, x: Tensor) -> Tensor:
        return self.product(x) if self.reduce is None else self.reduce(self.product(x))

    def add_to(self, total: Tensor, x: Tensor) -> None:
        """total [T, out] += what a call gives, in place."""
        total += self(x)


class MatrixLinear(Linear):
    """A product by cuBLAS, which can also add it to what is there: the sum is formed in float32 and rounded once."""

    def __init__(self, weight: Tensor, reduce: Reduce | None = None):
        self.transposed = weight.t()
        super().__init__(lambda x: torch.mm(x, self.transposed), reduce)
        self.fuses_add = reduce is None
        self.into = lambda out, x: torch.mm(x, self.transposed, out=out)

    def add_to(self, total: Tensor, x: Tensor) -> None:
        """As Linear; a norm after it then reads and writes half of what it does with the sum."""
        if self.fuses_add:
            total.addmm_(x, self.transposed)
        else:
            super().add_to(total, x)


class NarrowLinear(Linear):
    """A product with narrow weights on a card, as they are held."""

    def __init__(self, weight: Weight, bias: Tensor | None, reduce: Reduce | None = None):
        product = NarrowProduct(weight, bias)
        super().__init__(product, reduce)
        self.into = lambda out, x: product(x, out)
        self.workspace_bytes, self.takes_rounded = product.workspace_bytes, product.scaled
        self.of_gated = product.of_gated if product.scaled and reduce is None else None


def make_linear(weight: Weight, bias: Tensor | None = None, reduce: Reduce | None = None) -> Linear:
    """The product by `weight`; on the CPU packed for oneDNN where that is faster, and what is narrow widened once. Raises
    ValueError for a kind without one."""
    matrix = weight.data
    if weight.kind != "float":
        if matrix.is_cuda:
            return NarrowLinear(weight, bias, reduce)
        matrix, bias = dequantized(weight, torch.float32), None if bias is None else bias.float()
        return Linear(lambda x: F.linear(x.float(), matrix, bias).to(x.dtype), reduce)
    if matrix.device.type == "cpu" and torch.backends.mkldnn.is_available():
        bfloat16 = matrix.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        if bfloat16 or (matrix.dtype == torch.float32 and matrix.shape[0] >= _PACK_FLOAT32_ROWS):
            return Linear(_packed(matrix, bias), reduce)
    if matrix.is_cuda and bias is None:
        return MatrixLinear(matrix, reduce)
    return Linear(lambda x: F.linear(x, matrix, bias), reduce)


def _packed(matrix: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    packed = torch.ops.mkldnn._reorder_linear_weight(matrix, _PACK_FOR_ROWS)
    multiply = torch.ops.mkldnn._linear_pointwise
    return lambda x: multiply(x, packed, bias, "none", [], "")
