"""Into the slots' tables and out of them, for steps with prefill: one kernel for whatever is new, one for all rows.

Both read small int32 arrays that come in one copy each, however many requests were admitted. Neither is captured, and both
run once per step: no programmatic launch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from headrace.kernels.launch import jit, on_gpu, tl

PIECE = 5  # table, row, column, count, where its values are
BLOCK = 1024


def enter(packet: Tensor, num_pieces: int, longest: int, tables: Sequence[Tensor]) -> None:
    """Write pieces of rows into four `tables` [slots, any] int32.

    packet [n] int32 begins with PIECE numbers for each piece: the table, the row, its first column, how many columns (at most
    `longest`) and where in the packet their values begin. No two pieces overlap.
    """
    (enter_triton if on_gpu(packet) else enter_reference)(packet, num_pieces, longest, tables)


def enter_reference(packet: Tensor, num_pieces: int, longest: int, tables: Sequence[Tensor]) -> None:
    """See `enter`."""
    for table, row, column, count, source in packet[: num_pieces * PIECE].view(-1, PIECE).tolist():
        tables[table][row, column : column + count] = packet[source : source + count]


def enter_triton(packet: Tensor, num_pieces: int, longest: int, tables: Sequence[Tensor]) -> None:
    """See `enter`."""
    strides = (table.stride(0) for table in tables)
    _enter[(-(-longest // BLOCK), num_pieces)](packet, *tables, *strides, PIECE=PIECE, BLOCK=BLOCK, num_warps=4)


@jit
def _enter(
    packet, first, second, third, fourth, first_stride, second_stride, third_stride, fourth_stride,
    PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    piece = packet + tl.program_id(1) * PIECE
    table, row, column = tl.load(piece), tl.load(piece + 1).to(tl.int64), tl.load(piece + 2)
    count, source = tl.load(piece + 3), tl.load(piece + 4)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = i < count
    values = tl.load(packet + source + i, there, 0)
    if table == 0:
        tl.store(first + row * first_stride + column + i, values, there)
    elif table == 1:
        tl.store(second + row * second_stride + column + i, values, there)
    elif table == 2:
        tl.store(third + row * third_stride + column + i, values, there)
    else:
        tl.store(fourth + row * fourth_stride + column + i, values, there)


def read_rows(
    numbers: Tensor, num_rows: int, longest: int, token_table: Tensor, block_tables: Tensor, accepted: Tensor, block_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ids [T] int32, positions [T] int32 and places in the KV cache [T] int64 of the rows of S sequences; S lengths, int32.

    numbers [5, S] int32: slot, first position, slack (if > 0 the sequence is further on by what its slot accepted), first row
    and number of rows (at most `longest`) of each sequence. Rows of no sequence are left as they happen to be.
    """
    run = read_rows_triton if on_gpu(numbers) else read_rows_reference
    return run(numbers, num_rows, longest, token_table, block_tables, accepted, block_size)


def read_rows_reference(
    numbers: Tensor, num_rows: int, longest: int, token_table: Tensor, block_tables: Tensor, accepted: Tensor, block_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `read_rows`. In numpy: torch takes several times as long for the few rows of a decode step."""
    id_of, block_of, moved, (slots, starts, slack, firsts, counts) = (
        t.cpu().numpy() for t in (token_table, block_tables, accepted, numbers)
    )
    starts = starts + np.where(slack > 0, moved[slots], 0)
    further = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    rows, at, slots = further + np.repeat(firsts, counts), further + np.repeat(starts, counts), np.repeat(slots, counts)
    ids, positions, places = np.zeros(num_rows, np.int32), np.zeros(num_rows, np.int32), np.zeros(num_rows, np.int64)
    ids[rows], positions[rows] = id_of[slots, at], at
    places[rows] = block_of[slots, at // block_size].astype(np.int64) * block_size + at % block_size
    on_device = [torch.from_numpy(a).to(numbers.device) for a in (ids, positions, places, starts + counts)]
    return on_device[0], on_device[1], on_device[2], on_device[3]


def read_rows_triton(
    numbers: Tensor, num_rows: int, longest: int, token_table: Tensor, block_tables: Tensor, accepted: Tensor, block_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `read_rows`."""
    count = numbers.shape[1]
    ids, positions = (torch.empty(num_rows, dtype=torch.int32, device=numbers.device) for _ in range(2))
    places = torch.empty(num_rows, dtype=torch.int64, device=numbers.device)
    lengths = torch.empty(count, dtype=torch.int32, device=numbers.device)
    _read_rows[(-(-longest // BLOCK), count)](
        numbers, token_table, block_tables, accepted, ids, positions, places, lengths, numbers.stride(0),
        token_table.stride(0), block_tables.stride(0), BLOCK_SIZE=block_size, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return ids, positions, places, lengths


@jit(do_not_specialize=["stride"])  # it differs from step to step
def _read_rows(
    numbers, token_table, block_tables, accepted, ids, positions, places, lengths, stride, token_stride, table_stride,
    BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(1)
    mine = numbers + sequence
    slot, start, slack = tl.load(mine).to(tl.int64), tl.load(mine + stride), tl.load(mine + 2 * stride)
    first, count = tl.load(mine + 3 * stride), tl.load(mine + 4 * stride)
    start += tl.load(accepted + slot, slack > 0, 0)
    if tl.program_id(0) == 0:
        tl.store(lengths + sequence, start + count)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = i < count
    at = start + i
    block = tl.load(block_tables + slot * table_stride + at // BLOCK_SIZE, there, 0).to(tl.int64)
    tl.store(ids + first + i, tl.load(token_table + slot * token_stride + at, there, 0), there)
    tl.store(positions + first + i, at, there)
    tl.store(places + first + i, block * BLOCK_SIZE + at % BLOCK_SIZE, there)
