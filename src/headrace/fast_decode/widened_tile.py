"""The tile of widened_gemm.py, apart from the kernel: that needs Gluon, and a card that has what it is for."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from headrace.fast_decode.ring_tile import runs
from headrace.fast_decode.skinny_gemm import AllRows, GemmTile
from headrace.kernels.folded_tile import SHARED_BYTES, factor_bytes, groups_held
from headrace.kernels.launch import next_power_of_2
from headrace.kernels.narrow import RUN
from headrace.model.weight import Kind, Weight

MAX_ROWS = 64


@dataclass(frozen=True, slots=True)
class WidenedTile(AllRows):
    """One program's work: block_n columns (of a gated product as many gate rows and up rows) over 1 / splits of K, `stages`
    times `runs` runs of 128 columns on their way, as many before the wait. Each warp has 16 rows of the weights, of a gated
    product perhaps 16 of each kind."""

    block_n: int
    splits: int
    stages: int
    num_warps: int = 4
    runs: int = 1

    @property
    def num_stages(self) -> int:
        """Of Triton's own pipeline."""
        return 1

    def of_one_kind(self) -> WidenedTile:
        """Where gate and up are multiplied as rows of one kind: as many as the warps have."""
        return replace(self, block_n=16 * self.num_warps)

    def otherwise(self, gated: bool) -> GemmTile:
        """What multiplies by the same parts of K where the kernel does not run."""
        return GemmTile(self.block_n * (2 if gated else 1), RUN, self.splits, 8 if self.block_n > 64 or gated else 4, 3)


def row_block(rows: int) -> int:
    """Rows of a program's tile when there are `rows`."""
    return max(8, next_power_of_2(rows))


def takes(weight: Weight, x: Tensor, tile: WidenedTile, columns: int) -> bool:
    """Whether the kernel is for these: whole tiles, as many rows as warps have, room for all, and a form that `suits`."""
    parts, kinds = RUN * tile.runs * tile.splits, weight.shape[0] // columns
    whole = weight.shape[1] % parts == 0 and columns % tile.block_n == 0
    own = 16 * tile.num_warps in (tile.block_n, kinds * tile.block_n)
    return suits(weight) and whole and own and runs(x) and shared_bytes(weight, len(x), tile, columns) <= SHARED_BYTES


def shared_bytes(weight: Weight, rows: int, tile: WidenedTile, columns: int) -> int:
    """Of a program's rings, and of the scales and zeros of its part of K."""
    held, groups = tile.block_n * weight.shape[0] // columns, weight.shape[1] // RUN // tile.splits
    step = tile.runs * run_bytes(weight.kind, held, row_block(rows))
    return min(tile.stages, groups // tile.runs) * step + factors_bytes(weight.kind, held, groups, factor_bytes(weight))


def run_bytes(kind: Kind, held: int, block_m: int) -> int:
    """Of both operands, of so many rows of the weights and of x."""
    return (RUN if kind == "int8" else RUN // 2) * held + 2 * RUN * block_m


def factors_bytes(kind: Kind, held: int, groups: int, each: int = 3) -> int:
    """Of the scales and zeros of so many rows of the weights, `each` of a group; of 8 bits none are held."""
    return 0 if kind == "int8" else each * held * groups_held(groups)


def suits(weight: Weight) -> bool:
    """4 bits in groups of 128, with zeros that are whole or none; 8 with a scale for each row."""
    if weight.kind == "int4":
        return weight.group == RUN and (weight.zeros is None or weight.zeros.dtype.itemsize == 1)
    return weight.kind == "int8" and weight.group == 0 and weight.zeros is None
