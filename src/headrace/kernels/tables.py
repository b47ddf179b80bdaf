"""Into the slots' tables and out of them, for steps with prefill: one kernel for whatever is new, one for all rows.

Both read small int32 arrays that come in one copy each, however many requests were admitted. Neither is captured, and both
run once per step: no programmatic launch.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    count = numbers.shape[1]
    ids, positions = (torch.empty(num_rows, dtype=torch.int32, device=numbers.device) for _ in range(2))
    places = torch.empty(num_rows, dtype=torch.int64, device=numbers.device)
    lengths = torch.empty(count, dtype=torch.int32, device=numbers.device)
    out = ids, positions, places, lengths
    run = read_rows_triton if on_gpu(numbers) else read_rows_reference
    run(numbers, longest, token_table, block_tables, accepted, block_size, out)
    return out


def read_rows_reference(numbers, longest: int, token_table, block_tables, accepted, block_size: int, out) -> None:
    """See `read_rows`."""
    ids, positions, places, lengths = out
    slots, starts, slack, firsts, counts = numbers.long()
    starts = starts + torch.where(slack > 0, accepted[slots], 0)
    lengths.copy_(starts + counts)
    sequence = torch.repeat_interleave(counts)
    further = torch.arange(len(sequence), device=slots.device) - (counts.cumsum(0) - counts)[sequence]
    rows, slot, at = firsts[sequence] + further, slots[sequence], starts[sequence] + further
    ids[rows], positions[rows] = token_table[slot, at], at.int()
    places[rows] = block_tables[slot, at // block_size].long() * block_size + at % block_size


def read_rows_triton(numbers, longest: int, token_table, block_tables, accepted, block_size: int, out) -> None:
    """See `read_rows`."""
    _read_rows[(-(-longest // BLOCK), numbers.shape[1])](
        numbers, token_table, block_tables, accepted, *out, numbers.stride(0), token_table.stride(0), block_tables.stride(0),
        BLOCK_SIZE=block_size, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


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
