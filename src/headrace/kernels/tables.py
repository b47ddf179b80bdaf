"""The slots' tables: what they are, and one kernel that enters whatever is new in a step.

It reads one small int32 array that comes in one copy, however many requests were admitted (read where the host has it, it took
56 us for one of 1,024 tokens, on an H200). It is not captured and runs at most once per step.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from headrace.kernels.launch import Launcher, gdc_launch_dependents, gdc_wait, jit, on_gpu, tl


class Float(enum.IntEnum):
    """Columns of the table of float32 parameters; the names are those of SamplingParams."""

    TEMPERATURE, TOP_P, MIN_P, PRESENCE_PENALTY, FREQUENCY_PENALTY, REPETITION_PENALTY = range(6)


class Int(enum.IntEnum):
    """Columns of the table of int64 parameters. LORA: 0, or one more than the slot of the request's adapter."""

    SEED, TOP_K, SAMPLE_INDEX, PROMPT_LEN, LORA = range(5)


class SlotTables(NamedTuple):
    """What the device knows of the running requests, one row per slot."""

    token_ids: Tensor  # [slots, max_model_len + 1] int32
    block_tables: Tensor  # [slots, blocks per sequence] int32
    floats: Tensor  # [slots, len(Float)] float32
    ints: Tensor  # [slots, len(Int)] int64
    accepted: Tensor  # [slots] int32: drafts of the last step that were right; -1: its logits were not usable
    block_size: int


WRITE = 5  # numbers of a write: table, row, column, count, where its values are
BLOCK = 1024


def enter(packet: Tensor, num_writes: int, longest: int, tables: Sequence[Tensor]) -> None:
    """Write into rows of four `tables` [slots, any] int32.

    packet [n] int32 begins with WRITE numbers for each write: the table, the row, its first column, how many columns (at most
    `longest`) and where in the packet their values begin. No two writes overlap.
    """
    (enter_triton if on_gpu(packet) else enter_reference)(packet, num_writes, longest, tables)


def enter_reference(packet: Tensor, num_writes: int, longest: int, tables: Sequence[Tensor]) -> None:
    """See `enter`."""
    for table, row, column, count, source in packet[: num_writes * WRITE].view(-1, WRITE).tolist():
        tables[table][row, column : column + count] = packet[source : source + count]


@jit(do_not_specialize=["parts"])
def _enter(
    first, second, third, fourth, packet, first_stride, second_stride, third_stride, fourth_stride, parts,
    WRITE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    write = packet + tl.program_id(0) // parts * WRITE
    table, row, column = tl.load(write), tl.load(write + 1).to(tl.int64), tl.load(write + 2)
    count, source = tl.load(write + 3), tl.load(write + 4)
    i = tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
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


_launcher = Launcher(_enter)


def enter_triton(packet: Tensor, num_writes: int, longest: int, tables: Sequence[Tensor]) -> None:
    """See `enter`."""
    parts, strides = -(-longest // BLOCK), tuple(table.stride(0) for table in tables)
    _launcher(parts * num_writes, (*tables, packet), strides, (parts,), num_warps=4, WRITE=WRITE, BLOCK=BLOCK)
