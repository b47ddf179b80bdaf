"""The tile of folded_gemm.py, apart from the kernel, which needs Gluon: which weights and rows it is for, and its defaults."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.kernels.launch import capability, next_power_of_2, takes_gluon
from headrace.kernels.narrow import RUN, NarrowMatrix

MOST_ROWS = 512
BLOCK_M = 128  # rows of a tile, at most
PROGRAMS = 132  # one to each multiprocessor
SHARED_BYTES = 225 * 1024  # that all programs on one have together
FORMS = (17, 33, *range(65, MOST_ROWS, BLOCK_M))  # numbers of rows, of which each has another tile


@dataclass(frozen=True, slots=True)
class FoldedTile:
    """One program's work: block_n columns, each warpgroup's in one block of 64 or two, of block_m rows over 1 / splits of K,
    `stages` runs of 128 columns on their way."""

    block_m: int
    block_n: int
    splits: int
    stages: int
    num_warps: int = 4


def suits(weight: NarrowMatrix) -> bool:
    """4 bits in groups of 128, with zeros that are whole or none, on Hopper; rows whose scales leave the rings room."""
    whole = weight.zeros is None or weight.zeros.dtype == torch.uint8
    of_kind = weight.kind == "int4" and weight.group == RUN and weight.scale_rows == 1 and whole
    return of_kind and capability(weight.data.device)[0] == 9 and takes_gluon() and has_room(weight)


def factor_bytes(weight: NarrowMatrix) -> int:
    """Of a group's scale and zero in shared memory."""
    return sum(t.itemsize for t in (weight.scales, weight.zeros) if t is not None)


def groups_held(groups: int) -> int:
    """Of so many of a row, whose scales lie in shared memory, with those that fill up."""
    return max(32, next_power_of_2(groups))


def has_room(weight: NarrowMatrix) -> bool:
    """Whether the largest tile that `default_tile` has, of all of a row, fits with its shortest ring."""
    factors = factor_bytes(weight) * 128 * groups_held(weight.shape[1] // RUN)
    return factors + 2 * _step_bytes(BLOCK_M, 128) <= SHARED_BYTES


def _step_bytes(block_m: int, block_n: int) -> int:
    """Of a run of both operands."""
    return RUN // 2 * block_n + 2 * RUN * block_m


def default_tile(rows: int, columns: int, width: int) -> FoldedTile:
    """The fastest of some dozens for an 8B's four matrices on an H200, or nearly: tiles of 128 columns where these, with parts
    of 3,072 of K, are some 200 programs, of which two are on a multiprocessor; else tiles of 64, and parts down to 2,048."""
    block_m, runs = min(BLOCK_M, max(32, next_power_of_2(rows))), width // RUN
    tiles_m = -(-rows // block_m)

    def split(tiles: int, most: int, least: int, splits: int = 1) -> int:
        while tiles * splits * 2 <= most and runs % (2 * splits) == 0 and runs // (2 * splits) >= least:
            splits *= 2
        return splits

    block_n = 128
    tiles = tiles_m * -(-columns // block_n)
    splits = split(tiles, 2 * PROGRAMS, 24)
    if tiles * splits < 1.4 * PROGRAMS:
        block_n = 64
        tiles = tiles_m * -(-columns // block_n)
        splits = split(tiles, 2 * PROGRAMS, 24)
        if tiles * splits <= PROGRAMS // 2:
            splits = split(tiles, PROGRAMS, 16, splits)
    factors = 3 * block_n * groups_held(runs // splits)
    room = SHARED_BYTES // (2 if tiles * splits > PROGRAMS else 1) - 1024 - factors
    return FoldedTile(block_m, block_n, splits, max(2, min(6, room // _step_bytes(block_m, block_n))))
