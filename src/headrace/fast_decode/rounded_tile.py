"""The tile of rounded_gemm.py, apart from the kernel, which needs Gluon; and what its products compute, by torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.fast_decode.skinny_gemm import AllRows, GemmTile
from headrace.kernels.launch import capability, takes_gluon
from headrace.model.weight import Weight

MAX_ROWS = 64
PAIR_ROWS = 16  # up to here activations are pairs, as exact as bfloat16: of more these are twice the bytes of a tile of x
STEP = 128  # columns


@dataclass(frozen=True, slots=True)
class RoundedTile(AllRows):
    """One program's work: block_n columns of all rows over 1 / splits of K, `stages` times 128 columns of K on their way, as
    many before the wait. What it leaves is rounded in chunks of block_n columns, 64 or 128."""

    block_n: int
    splits: int
    stages: int
    num_warps: int = 4

    @property
    def num_stages(self) -> int:
        """Of Triton's own pipeline."""
        return 1

    def otherwise(self) -> GemmTile:
        """What multiplies activations that are not rounded: those of steps with adapters, and of ranks."""
        return GemmTile(self.block_n, STEP, self.splits, 4 if self.block_n <= 64 else 8, 3)


def suit(weights: Iterable[Weight], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether products by all of these may take rounded activations: FP8 with one scale for a row or several, on Hopper."""
    fp8 = all(w.kind == "fp8" and w.group == 0 and w.zeros is None for w in weights)
    return fp8 and dtype == torch.bfloat16 and capability(device)[0] == 9


def runs(x: Tensor) -> bool:
    """Whether the kernel runs on what x lies on."""
    return capability(x.device)[0] == 9 and takes_gluon()

