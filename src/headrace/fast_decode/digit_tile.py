"""The tile of digit_gemm.py, apart from the kernel: that needs Gluon, and a card that has what it is for."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from headrace.fast_decode.ring_tile import runs
from headrace.fast_decode.skinny_gemm import AllRows
from headrace.fast_decode.warp_gemm import WarpTile
from headrace.model.weight import Weight

MAX_ROWS = 1
WARPS = 8
IN_PHASE = 512 * WARPS  # columns that a program's warps have at once


@dataclass(frozen=True, slots=True)
class DigitTile(AllRows):
    """One program's work: block_n columns of the output over all of K, `stages` steps of 16 weight rows on their way, as many
    before the wait. `registers` of a thread at most, so that programs of several kernels are on a multiprocessor; 0: any."""

    block_n: int
    stages: int
    registers: int = 0
    splits: int = 1  # no other

    @property
    def num_warps(self) -> int:
        return WARPS

    def otherwise(self, gated: bool) -> WarpTile:
        """What multiplies where the kernel does not run; leaves as many sums of squares, where block_n is a power of two."""
        return WarpTile(self.block_n if self.block_n & (self.block_n - 1) == 0 else 8 if gated else 16, 4, 4, 2)


def suits(weight: Weight) -> bool:
    """Whether the kernel takes weights of such a form: groups of 128, scales of 16 bits, zeros that are whole or none."""
    factors = [(weight.scales, 2), (weight.zeros, 1)]
    whole = all(t is None or t.dtype.itemsize == size for t, size in factors)
    return weight.kind == "int4" and weight.group == 128 and whole and weight.shape[1] % IN_PHASE == 0


def takes(weight: Weight, x: Tensor, tile: DigitTile, columns: int) -> bool:
    return suits(weight) and columns % tile.block_n == 0 and runs(x)
