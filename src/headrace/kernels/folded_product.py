"""A matrix of 4-bit weights as a product by folded_gemm.py."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.folded_tile import BLOCK_M, PROGRAMS, default_tile
from headrace.kernels.narrow import NarrowMatrix


class FoldedProduct:
    """x [M, K] bfloat16 -> x @ weight.T + bias [M, N], of up to MOST_ROWS rows; for weights that folded_tile `suits`."""

    def __init__(self, weight: NarrowMatrix, bias: Tensor | None):
        self.weight, self.bias = weight, bias
        self._tickets = torch.zeros(2 * PROGRAMS, dtype=torch.int32, device=weight.data.device)

    @property
    def workspace_bytes(self) -> int:
        """Of parts of sums, at most."""
        return 2 * PROGRAMS * BLOCK_M * 128 * 4

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        from headrace.kernels.folded_gemm import folded_gemm  # which needs Gluon

        tile = default_tile(len(x), *self.weight.shape)
        return folded_gemm(x.contiguous(), self.weight, self.bias, tile, self._tickets, out)
