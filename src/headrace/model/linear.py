"""A weight matrix as a product: where the way to multiply by it is chosen, once, at load time."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.activation import Activation, act_mul
from headrace.kernels.gated_product import gated_product
from headrace.kernels.halves import halves_fit, in_halves
from headrace.kernels.launch import on_gpu
from headrace.kernels.narrow_linear import NarrowProduct
from headrace.model.packed import packed_product
from headrace.model.weight import Weight, dequantized

Reduce = Callable[[Tensor], Tensor]  # partial products [T, out] -> their sum over all who hold a part of the matrix
Product = Callable[[Tensor], Tensor]
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
        self.gated: Callable[[Tensor, Activation], Tensor] = lambda x, kind: act_mul(self(x), kind)

    def __call__(self, x: Tensor) -> Tensor:
        return self.product(x) if self.reduce is None else self.reduce(self.product(x))

    def add_to(self, total: Tensor, x: Tensor) -> None:
        """total [T, out] += what a call gives, in place."""
        total += self(x)

    def halves(self, rows: int) -> Product | None:
        """x -> [2, T, out], whose sum a call gives, where so many rows take less time so and somebody adds it anyway."""
        return None


class MatrixLinear(Linear):
    """A product by cuBLAS, which can also add it to what is there: the sum is formed in float32 and rounded once."""

    def __init__(self, weight: Tensor, reduce: Reduce | None = None):
        self.transposed, self.fuses_add = weight.t(), reduce is None
        super().__init__(lambda x: torch.mm(x, self.transposed), reduce)
        self.into = lambda out, x: torch.mm(x, self.transposed, out=out)
        self.gated = lambda x, kind: gated_product(x, weight, kind)

    def add_to(self, total: Tensor, x: Tensor) -> None:
        """As Linear; a norm after it then reads and writes half of what it does with the sum."""
        total.addmm_(x, self.transposed)

    def halves(self, rows: int) -> Product | None:
        return (lambda x: in_halves(x, self.transposed)) if halves_fit(rows, self.transposed) else None


class NarrowLinear(Linear):
    """A product with narrow weights on a card, as they are held."""

    def __init__(self, weight: Weight, bias: Tensor | None, reduce: Reduce | None = None):
        product = NarrowProduct(weight, bias)
        super().__init__(product, reduce)
        self.into = lambda out, x: product(x, out)
        self.workspace_bytes, self.takes_rounded = product.workspace_bytes, product.scaled
        self.of_gated = product.of_gated if product.scaled and reduce is None else None


def make_linear(weight: Weight, bias: Tensor | None = None, reduce: Reduce | None = None) -> Linear:
    """The product by `weight`, in the form that is fastest on its device. Raises ValueError for a kind without one."""
    matrix = weight.data
    if weight.kind != "float":
        if on_gpu(matrix):
            return NarrowLinear(weight, bias, reduce)
        matrix, bias = dequantized(weight, torch.float32), None if bias is None else bias.float()
        return Linear(lambda x: F.linear(x.float(), matrix, bias).to(x.dtype), reduce)
    if on_gpu(matrix) and bias is None:
        return MatrixLinear(matrix, reduce)
    return Linear(packed_product(matrix, bias) or (lambda x: F.linear(x, matrix, bias)), reduce)
