"""A product whose tiles fill less than half of a card, as two: each of one half of the sum, by cuBLAS at the same time.

cuBLAS splits such a sum in its own way, and adds its parts up by another kernel, or does not split it. A norm that reads a
product to add it to the residual stream adds two halves up as well. An 8B's down and its norm take an H200 41 us instead of 46
with 256 rows, 35 instead of 56 with 192, 32 instead of 35 with 128; its o 18 instead of 20, 16 instead of 21, 15 instead of 16.
Of ten shapes none lost more than 2 % with up to 256 rows; with 320 a 4B's down does (39 us for 34).
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.launch import num_multiprocessors

MORE_ROWS, MOST_ROWS, TILE = 64, 512, 128  # more rows than these; rows and columns of a tile
ODD_ROWS = range(513, 577)  # half a tile too many: of large sums two products take 5 to 25 % less than cuBLAS's one


def halves_fit(rows: int, transposed: Tensor) -> bool:
    """Whether so many rows by a matrix [in, out] take less time in halves."""
    width, columns = transposed.shape
    tiles = -(-rows // TILE) * -(-columns // TILE)
    fit = rows <= MOST_ROWS and 2 * tiles <= num_multiprocessors(transposed.device)
    fit = fit or (rows in ODD_ROWS and width > 2 * columns)
    return rows > MORE_ROWS and fit and width % 256 == 0 and transposed.itemsize == 2


def in_halves(x: Tensor, transposed: Tensor) -> Tensor:
    """x [T, in], transposed [in, out], a matrix [out, in] as it lies -> [2, T, out], whose sum is the product."""
    return torch.bmm(x.view(len(x), 2, -1).transpose(0, 1), transposed.view(2, -1, transposed.shape[1]))
