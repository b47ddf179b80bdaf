"""Rows of a captured step that holds prompts, from their sequences: which sequence a row belongs to, its token and its place.

What the host says of such a step is a few numbers for each sequence, however many tokens that computes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.kernels.launch import gdc_launch_dependents, gdc_wait, jit, on_gpu, pdl, tl
from headrace.kernels.prepare import Rows
from headrace.kernels.tables import SlotTables

END = 4  # the number of a sequence behind those of kernels/prepare: rows of the step up to its end
NUMBERS = 5
BLOCK = 32  # rows of a program


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Outputs of `expand_rows`; see ForwardBatch and WantedRows for their meaning."""

    token_ids: Tensor  # [T] int32
    positions: Tensor  # [T] int32
    slot_mapping: Tensor  # [T] int64
    query_start: Tensor  # [S + 1] int32
    index: Tensor  # [S] int64: the sampled rows

    @classmethod
    def empty(cls, rows: int, seqs: int, device: torch.device) -> TokenRows:
        ints = (torch.zeros(n, dtype=torch.int32, device=device) for n in (rows, rows, seqs + 1))
        token_ids, positions, query_start = ints
        slot_mapping, index = (torch.zeros(n, dtype=torch.int64, device=device) for n in (rows, seqs))
        return cls(token_ids, positions, slot_mapping, query_start, index)

    def part(self, rows: int, seqs: int) -> TokenRows:
        """The first ones."""
        of_rows = self.token_ids[:rows], self.positions[:rows], self.slot_mapping[:rows]
        return TokenRows(*of_rows, self.query_start[: seqs + 1], self.index[:seqs])


def expand_rows(inbox: Tensor, turn: Tensor, tables: SlotTables, ends: Rows, rows: TokenRows) -> None:
    """Fill `rows` for S sequences, whose last rows are the first S of `ends`, from the page that `ends` were prepared from.

    inbox [pages, 5, >= 2 S] int32 and turn as of `prepare_rows`. The fifth number of sequence s: rows until its end;
    behind them, of each sampled row its number in the step. Rows of padded sequences (seq_lens 0), and those behind the last
    one, get slot_mapping -1, token and position 0.
    """
    if on_gpu(rows.token_ids):
        launch_expand(inbox, turn, tables, ends, rows)
        return
    numbers = inbox[(int(turn) - 1) % len(inbox), END].numpy()
    for mine, found in zip(
        (rows.token_ids, rows.positions, rows.slot_mapping, rows.query_start, rows.index),
        expand_on_host(numbers, tables, ends, len(rows.token_ids), len(rows.index)), strict=True,
    ):  # fmt: skip
        mine.copy_(torch.from_numpy(found))


def expand_on_host(numbers: np.ndarray, tables: SlotTables, ends: Rows, num_rows: int, num_seqs: int) -> tuple[np.ndarray, ...]:
    """See `expand_rows`; numbers [>= 2 S]: the fifth ones."""
    stops, size = numbers[:num_seqs], tables.block_size
    row = np.arange(num_rows)
    seq = np.searchsorted(stops, row, side="right")
    seq = np.minimum(seq, num_seqs - 1)
    real = (row < stops[-1]) & (ends.seq_lens.numpy()[seq] > 0)
    slot = ends.seq_slots.numpy()[seq]
    at = np.where(real, ends.seq_lens.numpy()[seq] - (stops[seq] - row), 0)
    token = tables.token_ids.numpy()[slot, at] * real
    block = tables.block_tables.numpy()[slot, at // size].astype(np.int64)
    place = np.where(real, block * size + at % size, -1)
    return token, at.astype(np.int32), place, np.append(np.int32(0), stops), numbers[num_seqs : 2 * num_seqs].astype(np.int64)


def launch_expand(inbox: Tensor, turn: Tensor, tables: SlotTables, ends: Rows, rows: TokenRows) -> None:
    """See `expand_rows`."""
    count, seqs, options = len(rows.token_ids), len(rows.index), pdl(turn)
    _take_ends[(1,)](
        inbox, turn, rows.query_start, rows.index, seqs, inbox.stride(0), END * inbox.stride(1), PAGES=len(inbox), num_warps=4,
        **options,
    )  # fmt: skip
    _expand_rows[(-(-count // BLOCK),)](
        rows.query_start, ends.seq_slots, ends.seq_lens, tables.token_ids, tables.block_tables, rows.token_ids, rows.positions,
        rows.slot_mapping, seqs, count, tables.token_ids.stride(0), tables.block_tables.stride(0),
        BLOCK_SIZE=tables.block_size, BLOCK=BLOCK, num_warps=4, **options,
    )  # fmt: skip


@jit(do_not_specialize=["num_seqs"])
def _take_ends(
    inbox, turn, query_start, index, num_seqs, page_stride, first, PAGES: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One program brings them to the device: where many read the host's memory they wait for one another."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    ends = inbox + ((tl.load(turn) - 1) & (PAGES - 1)) * page_stride + first
    tl.store(query_start, 0)
    for s0 in range(0, num_seqs, 128):
        s = s0 + tl.arange(0, 128)
        there = s < num_seqs
        tl.store(query_start + 1 + s, tl.load(ends + s, there, 0, volatile=True), there)
        tl.store(index + s, tl.load(ends + num_seqs + s, there, 0, volatile=True).to(tl.int64), there)


@jit(do_not_specialize=["num_seqs", "count"])
def _expand_rows(
    query_start, seq_slots, seq_lens, token_table, block_tables, token_ids, positions, slot_mapping,
    num_seqs, count, token_stride, table_stride, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    lane = tl.arange(0, 128)
    seq = tl.zeros([BLOCK], tl.int32)  # sequences that end before the row
    stop = tl.full([BLOCK], 2147483647, tl.int32)  # where its own one ends
    for s0 in range(0, num_seqs, 128):
        s = s0 + lane
        there = s < num_seqs
        ends = tl.load(query_start + 1 + s, there, 2147483647)
        after = ends[None, :] > row[:, None]
        seq += tl.sum(((after == 0) & there[None, :]).to(tl.int32), 1)
        stop = tl.minimum(stop, tl.min(tl.where(after, ends[None, :], 2147483647), 1))
    written = row < count
    length = tl.load(seq_lens + seq, written & (seq < num_seqs), 0)
    real = length > 0
    slot = tl.load(seq_slots + seq, real, 0).to(tl.int64)
    at = tl.where(real, length - (stop - row), 0)
    block = tl.load(block_tables + slot * table_stride + at // BLOCK_SIZE, real, 0).to(tl.int64)
    tl.store(token_ids + row, tl.load(token_table + slot * token_stride + at, real, 0), written)
    tl.store(positions + row, at, written)
    tl.store(slot_mapping + row, tl.where(real, block * BLOCK_SIZE + at % BLOCK_SIZE, -1), written)
