"""A step of one_row.py with narrow weights: a tile of bytes times one row of x, on the CUDA cores.

Sixteen bytes of a row, which one thread loads at once, are summed within it; their sum is scaled, and freed of zeros, by one
scale or by one of each half. So a scale costs an instruction for sixteen weights or more.
"""

from __future__ import annotations

from headrace.kernels.launch import jit, tl
from headrace.kernels.narrow import widen_one_row


@jit
def _load_half(
    ptr, first, last, at: tl.constexpr, half: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, SCALE_ROWS: tl.constexpr, FOUR: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    # the grains first: then each thread loads what its own sums are multiplied by
    byte = at + tl.arange(0, BLOCK // 16)[:, None] * 16
    row = first + tl.arange(0, ROWS)[None, :]
    column = byte // 64 * 128 + byte % 64 + half * 64 if FOUR else byte
    pointers = ptr + (row // SCALE_ROWS).to(tl.int64) * GROUPS + column // GROUP
    if EVEN and at + BLOCK <= WIDTH:
        found = tl.load(pointers)
    else:
        found = tl.load(pointers, mask=(row < last) & (byte < WIDTH), other=0.0)
    return tl.trans(found.to(tl.float32))


@jit
def load_scales(
    ptr, first, last, at: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, SCALE_ROWS: tl.constexpr, FOUR: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Scales or zeros [ROWS, BLOCK / 16] of a step's grains from byte `at` of rows `first` to `last` on; of both halves, which
    may be the same; of whole rows [ROWS, 1]."""
    if GROUP == 0:
        row = first + tl.arange(0, ROWS)
        low = tl.load(ptr + row // SCALE_ROWS, mask=row < last, other=0.0).to(tl.float32)[:, None]
        high = low
    else:
        low = _load_half(ptr, first, last, at, 0, WIDTH, ROWS, BLOCK, GROUP, GROUPS, SCALE_ROWS, FOUR, EVEN)
        high = low
        if FOUR and GROUP < 128:
            high = _load_half(ptr, first, last, at, 1, WIDTH, ROWS, BLOCK, GROUP, GROUPS, SCALE_ROWS, FOUR, EVEN)
    return low, high


@jit
def _load_grains(x_ptr, at: tl.constexpr, half: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, FOUR: tl.constexpr):
    """What BLOCK bytes are multiplied by, sixteen numbers a thread, in two loads, so that each thread gets what belongs to its
    weights; and the sums of the sixteen. There are COLUMNS numbers, all others are 0."""
    FIRST: tl.constexpr = 2 * at if FOUR else at
    r = tl.arange(0, BLOCK // 2)
    byte = r // 8 * 16 + r % 8
    column = byte // 64 * 128 + byte % 64 + half * 64 if FOUR else byte
    column = tl.max_contiguous(tl.multiple_of(column, 8), 8)
    x_ptr += FIRST + column
    if FIRST + (2 * BLOCK if FOUR else BLOCK) <= COLUMNS:
        first = tl.load(x_ptr)
        second = tl.load(x_ptr + 8)
    else:
        first = tl.load(x_ptr, mask=FIRST + column < COLUMNS, other=0.0)
        second = tl.load(x_ptr + 8, mask=FIRST + column + 8 < COLUMNS, other=0.0)
    first = tl.reshape(first, (BLOCK // 16, 8)).to(tl.float32)
    second = tl.reshape(second, (BLOCK // 16, 8)).to(tl.float32)
    x = tl.reshape(tl.permute(tl.join(first, second), (0, 2, 1)), (BLOCK,))
    return x, tl.sum(first, 1) + tl.sum(second, 1)


@jit
def _sums_of_grains(weights, x, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr):
    return tl.sum(tl.reshape(weights * x[None, :], (BLOCK_N, BLOCK // 16, 16)), 2)


@jit
def multiply_add_narrow(
    acc, raw, scales, zeros, x_ptr, at: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """acc [BLOCK_N, BLOCK / 16] += raw [BLOCK_N, BLOCK] bytes from byte `at` of their rows on times x, of COLUMNS numbers."""
    FOUR: tl.constexpr = KIND == "int4" or KIND == "fp4"
    low, high = widen_one_row(raw, KIND, ASM)
    if FOUR and (GROUP == 0 or GROUP >= 128):  # the halves have one scale: what is the same for all rows is summed once
        x, x_sums = _load_grains(x_ptr, at, 0, COLUMNS, BLOCK, FOUR)
        high_x, high_sums = _load_grains(x_ptr, at, 1, COLUMNS, BLOCK, FOUR)
        sums = _sums_of_grains(low, x, BLOCK_N, BLOCK) + _sums_of_grains(high, high_x, BLOCK_N, BLOCK)
        if KIND == "int4":  # n stands in low halves as 256 + n, in high ones as 16 + n
            sums -= (256.0 * x_sums + 16.0 * high_sums)[None, :]
            sums -= zeros[0] * (x_sums + high_sums)[None, :]
        acc += sums * scales[0]
    else:
        for half in tl.static_range(2 if FOUR else 1):
            x, x_sums = _load_grains(x_ptr, at, half, COLUMNS, BLOCK, FOUR)
            sums = _sums_of_grains(low if half == 0 else high, x, BLOCK_N, BLOCK)
            if KIND == "int4":
                sums -= ((256.0 if half == 0 else 16.0) + zeros[half]) * x_sums[None, :]
            elif ZEROS:
                sums -= zeros[half] * x_sums[None, :]
            acc += sums * scales[half]
    return acc
