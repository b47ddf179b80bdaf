"""The two ends of a captured step: its rows from four numbers each and the slots' tables; its ids into table and mailbox.

The kernel at the end also verifies drafts: which rows count, and how many drafts of a slot were right.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels.launch import gdc_launch_dependents, gdc_wait, jit, next_power_of_2, on_gpu, pdl, tl
from headrace.kernels.verify import kept_rows, note_accepted


@dataclass(slots=True)
class DecodeRows:
    """Outputs of `prepare_decode`, each [R], at fixed addresses; see ForwardBatch and SampleInputs for their meaning."""

    token_ids: Tensor  # int32
    positions: Tensor  # int32
    slot_mapping: Tensor  # int64
    seq_slots: Tensor  # int32
    seq_lens: Tensor  # int32
    temperature: Tensor  # float32
    top_p: Tensor  # float32
    min_p: Tensor  # float32
    top_k: Tensor  # int32
    seed: Tensor  # int64
    output_index: Tensor  # int64
    sample_index: Tensor  # int32
    guesses: Tensor  # int32: what stands behind the row's token, its draft if it has one

    @classmethod
    def empty(cls, rows: int, device: torch.device) -> DecodeRows:
        types = dict(
            token_ids=torch.int32, positions=torch.int32, slot_mapping=torch.int64, seq_slots=torch.int32,
            seq_lens=torch.int32, temperature=torch.float32, top_p=torch.float32, min_p=torch.float32, top_k=torch.int32,
            seed=torch.int64, output_index=torch.int64, sample_index=torch.int32, guesses=torch.int32,
        )  # fmt: skip
        return cls(**{name: torch.zeros(rows, dtype=t, device=device) for name, t in types.items()})

    def first(self, rows: int) -> DecodeRows:
        """Views of the first rows."""
        return DecodeRows(*(getattr(self, name)[:rows] for name in self.__slots__))


def prepare_decode(
    inbox: Tensor, turn: Tensor, token_table: Tensor, block_tables: Tensor, floats: Tensor, ints: Tensor, accepted: Tensor,
    rows: DecodeRows, *, block_size: int,
) -> None:  # fmt: skip
    """Fill `rows` from the next page of `inbox`, enter new blocks into the block tables, and count the page in `turn`.

    inbox [pages, 4, >= R] int32, in memory that the device can read, its pages a power of two; turn [1] int32. A page has, for
    each row: slot, position (-1: a padded row), id of the block that this position opens (-1: none), and, if > 0, that the
    position is further on by what the slot accepted. token_table [slots, L], block_tables [slots, B] and accepted [slots]
    int32, floats [slots, 6] float32 and ints [slots, 4] int64 as in worker.batch_state. A padded row reads nothing and gets
    slot_mapping -1, seq_lens 0, temperature 0.
    """
    if on_gpu(turn):
        launch(inbox, turn, token_table, block_tables, floats, ints, accepted, rows, block_size)
        return
    numbers = inbox[int(turn) % len(inbox), :, : len(rows.token_ids)]
    prepare_decode_reference(numbers, token_table, block_tables, floats, ints, accepted, rows, block_size=block_size)
    turn += 1


def launch(inbox, turn, token_table, block_tables, floats, ints, accepted, rows: DecodeRows, block_size: int) -> None:
    count = len(rows.token_ids)
    outputs = (getattr(rows, name) for name in rows.__slots__)
    _prepare_decode[(1,)](
        inbox, turn, token_table, block_tables, floats, ints, accepted, *outputs, count, inbox.stride(0), inbox.stride(1),
        token_table.stride(0), block_tables.stride(0), PAGES=inbox.shape[0], BLOCK_SIZE=block_size, FLOATS=floats.shape[1],
        INTS=ints.shape[1], BLOCK=min(256, next_power_of_2(count)), num_warps=4, **pdl(turn),
    )  # fmt: skip


def prepare_decode_reference(
    numbers, token_table, block_tables, floats, ints, accepted, rows: DecodeRows, *, block_size: int
) -> None:
    """See `prepare_decode`."""
    slots, positions, new_blocks, slack = numbers.long()
    real = positions >= 0
    at = positions.clamp(min=0) + torch.where(slack > 0, accepted[slots], 0)
    opened = real & (new_blocks >= 0)
    block_tables[slots[opened], at[opened] // block_size] = new_blocks[opened].int()
    blocks = block_tables[slots, at // block_size].long()
    rows.seq_slots.copy_(slots)
    rows.positions.copy_(at)
    rows.token_ids.copy_(torch.where(real, token_table[slots, at], 0))
    rows.guesses.copy_(torch.where(real, token_table[slots, at + 1], 0))
    rows.slot_mapping.copy_(torch.where(real, blocks * block_size + at % block_size, -1))
    rows.seq_lens.copy_(torch.where(real, at + 1, 0))
    rows.temperature.copy_(torch.where(real, floats[slots, 0], 0.0))
    rows.top_p.copy_(floats[slots, 1])
    rows.min_p.copy_(floats[slots, 2])
    rows.seed.copy_(ints[slots, 0])
    rows.top_k.copy_(ints[slots, 1])
    rows.sample_index.copy_(ints[slots, 2])
    rows.output_index.copy_(at + 1 - ints[slots, 3])


@jit
def _prepare_decode(
    inbox, turn, token_table, block_tables, floats, ints, accepted,
    token_ids, positions, slot_mapping, seq_slots, seq_lens, temperature, top_p, min_p, top_k, seed, output_index, sample_index,
    guesses, count, page_stride, number_stride, token_stride, table_stride,
    PAGES: tl.constexpr, BLOCK_SIZE: tl.constexpr, FLOATS: tl.constexpr, INTS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    page = tl.load(turn)
    numbers = inbox + (page & (PAGES - 1)) * page_stride
    for first in range(0, count, BLOCK):
        row = first + tl.arange(0, BLOCK)
        there = row < count
        slot = tl.load(numbers + row, there, 0, volatile=True).to(tl.int64)
        position = tl.load(numbers + number_stride + row, there, -1, volatile=True)
        new_block = tl.load(numbers + 2 * number_stride + row, there, -1, volatile=True)
        real = there & (position >= 0)
        unsure = tl.load(numbers + 3 * number_stride + row, there, 0, volatile=True) > 0
        at = tl.maximum(position, 0) + tl.load(accepted + slot, unsure, 0)
        place = block_tables + slot * table_stride + at // BLOCK_SIZE
        # a row's block is the new one or the table's: no read after a write
        block = tl.where(new_block >= 0, new_block, tl.load(place, real & (new_block < 0), 0)).to(tl.int64)
        tl.store(place, new_block, real & (new_block >= 0))
        tl.store(seq_slots + row, slot.to(tl.int32), there)
        tl.store(positions + row, at, there)
        tokens = token_table + slot * token_stride + at
        tl.store(token_ids + row, tl.load(tokens, real, 0), there)
        tl.store(guesses + row, tl.load(tokens + 1, real, 0), there)
        tl.store(slot_mapping + row, tl.where(real, block * BLOCK_SIZE + at % BLOCK_SIZE, -1), there)
        tl.store(seq_lens + row, tl.where(real, at + 1, 0), there)
        f, i = floats + slot * FLOATS, ints + slot * INTS
        tl.store(temperature + row, tl.load(f, real, 0.0), there)
        tl.store(top_p + row, tl.load(f + 1, there, 1.0), there)
        tl.store(min_p + row, tl.load(f + 2, there, 0.0), there)
        tl.store(seed + row, tl.load(i, there, 0), there)
        tl.store(top_k + row, tl.load(i + 1, there, 0).to(tl.int32), there)
        tl.store(sample_index + row, tl.load(i + 2, there, 0).to(tl.int32), there)
        tl.store(output_index + row, at + 1 - tl.load(i + 3, there, 0), there)
    tl.debug_barrier()  # all threads have read it
    tl.store(turn, page + 1)  # there is one program


def publish(
    token_ids: Tensor, failed: Tensor, rows: DecodeRows, token_table: Tensor, outbox: Tensor, turn: Tensor,
    accepted: Tensor | None = None,
) -> None:  # fmt: skip
    """Write sampled ids [R] int32 where the next step reads its input, token_table[slot, position + 1], not of padded rows.

    Also writes ids and `failed` [R] bool to the page of outbox [pages, 3, >= R] int32 whose numbers these rows came from; and,
    with `accepted` [slots] int32, verifies the drafts: which rows count, and how many drafts of a slot were right (see
    kernels/verify.py). Rows of one request are neighbours.
    """
    if on_gpu(token_ids):
        launch_publish(token_ids, failed, rows, token_table, outbox, turn, accepted)
        return
    real = rows.seq_lens > 0
    slots = rows.seq_slots.long()
    token_table[slots[real], rows.seq_lens[real].long()] = token_ids[real]
    page = outbox[(int(turn) - 1) % len(outbox), :, : len(token_ids)]
    page[0], page[1] = token_ids, failed
    if accepted is not None:
        _, counts = torch.unique_consecutive(slots, return_counts=True)
        kept = kept_rows(token_ids, rows.guesses, failed, (counts.cumsum(0) - counts).repeat_interleave(counts))
        note_accepted(accepted, slots[real], kept[real])
        page[2] = kept


def launch_publish(token_ids, failed, rows: DecodeRows, token_table, outbox, turn, accepted) -> None:
    count = token_ids.shape[0]
    block = next_power_of_2(count) if accepted is not None else min(256, next_power_of_2(count))
    _publish[(-(-count // block),)](
        token_ids, failed, rows.seq_slots, rows.seq_lens, rows.guesses, token_table, outbox, turn, accepted, count,
        token_table.stride(0), outbox.stride(0), outbox.stride(1), PAGES=outbox.shape[0], BLOCK=block,
        VERIFY=accepted is not None, num_warps=4, **pdl(token_ids),
    )  # fmt: skip


@jit
def _larger(a, b):
    return tl.maximum(a, b)


@jit
def _publish(
    token_ids, failed, seq_slots, seq_lens, guesses, token_table, outbox, turn, accepted, count, stride, page_stride,
    box_stride, PAGES: tl.constexpr, BLOCK: tl.constexpr, VERIFY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = row < count
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    page = (tl.load(turn) - 1) & (PAGES - 1)
    length = tl.load(seq_lens + row, there, 0)
    slot = tl.load(seq_slots + row, there, -1)
    token = tl.load(token_ids + row, there, 0)
    broken = tl.load(failed + row, there, 0) != 0
    tl.store(token_table + slot.to(tl.int64) * stride + length, token, there & (length > 0))
    out = outbox + page * page_stride + row
    tl.store(out, token, there)
    tl.store(out + box_stride, broken.to(tl.int32), there)
    if VERIFY:  # one program has all rows; a neighbour's numbers are loaded once more
        follows = there & (row > 0) & (tl.load(seq_slots + row - 1, there & (row > 0), -1) == slot)
        leads = there & (row + 1 < count) & (tl.load(seq_slots + row + 1, row + 1 < count, -1) == slot)
        wrong = (token != tl.load(guesses + row, there, 0)) | broken
        wrong_before = tl.load(token_ids + row - 1, follows, 0) != tl.load(guesses + row - 1, follows, 0)
        wrong_before |= tl.load(failed + row - 1, follows, 0) != 0
        first = tl.associative_scan(tl.where(follows, 0, row), 0, _larger)  # row of the same request
        last_wrong = tl.associative_scan(tl.where(follows & wrong_before, row, -1), 0, _larger)
        kept = (last_wrong < first) & (broken == 0)
        tl.store(out + 2 * box_stride, kept.to(tl.int32), there)
        ends = kept & ((leads == 0) | wrong | (tl.load(failed + row + 1, leads, 0) != 0))
        none = (follows == 0) & (kept == 0)
        tl.store(accepted + slot, tl.where(none, -1, row - first), there & (length > 0) & (ends | none))
