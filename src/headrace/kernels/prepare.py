"""The two ends of a step: its rows from four numbers each and the slots' tables; its ids into the table, where the next step
reads them, with the drafts verified. Captured or not: the same kernels.

Row i of a request with k drafts has the drafts 1 .. i before it, and is sampled as the plain run would sample that output
token: the same processed logits, the same counted random number (purpose, seed, output index). Its id is right if all drafts
before it are, that is if each equals the id sampled in the row before it. So the tokens are those of the plain run, one by
one, and not only equal in distribution; and logprobs, penalties, masks and seeds need no rule of their own.

This is the rejection sampling of Leviathan et al. (2023) and Chen et al. (2023) for proposals that are points: a draft d
is accepted with probability p(d), and what replaces it is distributed as p without d. A draft model whose proposals are
drawn with the very random numbers that the target will use makes such points too; the two then agree more often than not
where their distributions do (a coupling: with inverse CDFs over one uniform number, as here, never more often than the
min(1, p/q) of the published scheme, which is the best there is, and which needs the distribution q of every draft).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.kernels.launch import gdc_launch_dependents, gdc_wait, jit, next_power_of_2, on_gpu, pdl, tl
from headrace.kernels.tables import Float, Int, SlotTables

BLOCK = 256  # rows of a program
SLOT, POSITION, NEW_BLOCK, UNVERIFIED = range(4)  # the numbers of a row
IDS, FAILED, KEPT = range(3)  # what comes back of it
COLUMNS = {c.name: int(c) for c in (Float.TEMPERATURE, Float.TOP_P, Float.MIN_P, *Int) if c is not Int.LORA}
TYPES = dict(
    token_ids=torch.int32, positions=torch.int32, slot_mapping=torch.int64, seq_slots=torch.int32, seq_lens=torch.int32,
    temperature=torch.float32, top_p=torch.float32, min_p=torch.float32, top_k=torch.int32, seed=torch.int64,
    output_index=torch.int64, sample_index=torch.int32, guesses=torch.int32,
)  # fmt: skip


@dataclass(slots=True)
class Rows:
    """Outputs of `prepare_rows`, each [R]; see ForwardBatch and SampleInputs for their meaning."""

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
    def empty(cls, rows: int, device: torch.device) -> Rows:
        return cls(**{name: torch.empty(rows, dtype=t, device=device) for name, t in TYPES.items()})

    def part(self, start: int, stop: int) -> Rows:
        """Views of some of the rows."""
        if stop - start == self.token_ids.shape[0]:  # thirteen views take as long as a step's row preparation
            return self
        return Rows(*(getattr(self, name)[start:stop] for name in self.__slots__))


def prepare_rows(numbers: Tensor, turn: Tensor | None, tables: SlotTables, rows: Rows) -> None:
    """Fill `rows` from `numbers`, and enter new blocks into the block tables.

    numbers [4, >= R] int32: for each row its slot, its position (-1: a padded row), the id of the block that this position
    opens (-1: none, or it stands in the table), and, if > 0, that the position is further on by what the slot accepted. A
    padded row reads nothing and gets slot_mapping -1, seq_lens 0, temperature 0.

    With `turn` [1] int32, for captured steps: numbers [pages, 4, >= R] in memory that the device can read, pages a power of
    two; `turn` says which page is next, and is moved on.
    """
    if on_gpu(tables.token_ids):
        launch(numbers, turn, tables, rows)
        return
    if turn is not None:
        numbers = numbers[int(turn) % len(numbers)]
        turn += 1
    found = rows_on_host(numbers[:, : len(rows.token_ids)], tables)
    for name in Rows.__slots__:
        getattr(rows, name).copy_(getattr(found, name))


def new_rows(numbers: Tensor, tables: SlotTables) -> Rows:
    """As `prepare_rows`, into rows of their own."""
    if not on_gpu(numbers):
        return rows_on_host(numbers, tables)
    rows = Rows.empty(numbers.shape[1], numbers.device)
    launch(numbers, None, tables, rows)
    return rows


def launch(numbers: Tensor, turn: Tensor | None, tables: SlotTables, rows: Rows) -> None:
    """See `prepare_rows`. One program where pages are counted; else multiples of 16 rows are one form of the kernel."""
    count = len(rows.token_ids)
    outputs = (getattr(rows, name) for name in rows.__slots__)
    _prepare_rows[(1 if turn is not None else -(-count // BLOCK),)](
        numbers, turn, *tables[:5], *outputs, count, 0 if turn is None else numbers.stride(0), numbers.stride(-2),
        tables.token_ids.stride(0), tables.block_tables.stride(0), PAGES=1 if turn is None else numbers.shape[0],
        PAGED=turn is not None, BLOCK_SIZE=tables.block_size, FLOATS=len(Float), INTS=len(Int),
        BLOCK=BLOCK if turn is None else min(BLOCK, next_power_of_2(count)), num_warps=4, **COLUMNS, **_pdl(turn),
    )  # fmt: skip


def _pdl(turn: Tensor | None) -> dict[str, bool]:
    """Where steps are not captured, other kernels than ours come before and after."""
    return {"PDL": False} if turn is None else pdl(turn)


def rows_on_host(numbers: Tensor, tables: SlotTables) -> Rows:
    """See `prepare_rows`; numbers [4, R]. In numpy: torch takes several times as long for the few rows of a decode step."""
    token_table, block_tables, floats, ints, accepted = (t.numpy() for t in tables[:5])
    slots, positions, new_blocks, unverified = numbers.numpy()
    real, size = positions >= 0, tables.block_size
    at = np.maximum(positions, 0)
    if (unverified > 0).any():
        at += np.where(unverified > 0, accepted[slots], 0)
    opened = real & (new_blocks >= 0)
    if opened.any():
        block_tables[slots[opened], at[opened] // size] = new_blocks[opened]
    column, offset = np.divmod(at, size)
    params, numbered = floats[slots], ints[slots]
    arrays = dict(
        token_ids=token_table[slots, at] * real, positions=at,
        slot_mapping=np.where(real, block_tables[slots, column] * np.int64(size) + offset, -1), seq_slots=slots,
        seq_lens=(at + 1) * real, temperature=np.where(real, params[:, Float.TEMPERATURE], np.float32(0.0)),
        top_p=params[:, Float.TOP_P], min_p=params[:, Float.MIN_P], top_k=numbered[:, Int.TOP_K].astype(np.int32),
        seed=numbered[:, Int.SEED], output_index=at + 1 - numbered[:, Int.PROMPT_LEN],
        sample_index=numbered[:, Int.SAMPLE_INDEX].astype(np.int32), guesses=token_table[slots, at + 1] * real,
    )  # fmt: skip
    return Rows(**{name: torch.from_numpy(values) for name, values in arrays.items()})


@jit
def _prepare_rows(
    numbers, turn, token_table, block_tables, floats, ints, accepted,
    token_ids, positions, slot_mapping, seq_slots, seq_lens, temperature, top_p, min_p, top_k, seed, output_index, sample_index,
    guesses, count, page_stride, number_stride, token_stride, table_stride,
    PAGES: tl.constexpr, PAGED: tl.constexpr, BLOCK_SIZE: tl.constexpr, FLOATS: tl.constexpr, INTS: tl.constexpr,
    BLOCK: tl.constexpr, TEMPERATURE: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr, SEED: tl.constexpr,
    TOP_K: tl.constexpr, SAMPLE_INDEX: tl.constexpr, PROMPT_LEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    page = 0
    if PAGED:
        page = tl.load(turn)
        numbers += (page & (PAGES - 1)) * page_stride
    for first in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        row = first + tl.arange(0, BLOCK)
        there = row < count
        slot = tl.load(numbers + row, there, 0, volatile=True).to(tl.int64)
        position = tl.load(numbers + number_stride + row, there, -1, volatile=True)
        new_block = tl.load(numbers + 2 * number_stride + row, there, -1, volatile=True)
        real = there & (position >= 0)
        unverified = tl.load(numbers + 3 * number_stride + row, there, 0, volatile=True) > 0
        at = tl.maximum(position, 0) + tl.load(accepted + slot, unverified, 0)
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
        tl.store(temperature + row, tl.load(f + TEMPERATURE, real, 0.0), there)
        tl.store(top_p + row, tl.load(f + TOP_P, there, 1.0), there)
        tl.store(min_p + row, tl.load(f + MIN_P, there, 0.0), there)
        tl.store(seed + row, tl.load(i + SEED, there, 0), there)
        tl.store(top_k + row, tl.load(i + TOP_K, there, 0).to(tl.int32), there)
        tl.store(sample_index + row, tl.load(i + SAMPLE_INDEX, there, 0).to(tl.int32), there)
        tl.store(output_index + row, at + 1 - tl.load(i + PROMPT_LEN, there, 0), there)
    if PAGED:
        tl.debug_barrier()  # all threads have read it
        tl.store(turn, page + 1)  # there is one program


def publish(
    token_ids: Tensor, failed: Tensor, rows: Rows, tables: SlotTables, out: Tensor, turn: Tensor | None, verify: bool = False
) -> None:
    """Write sampled ids [R] int32 where the next step reads its input: tables.token_ids[slot, position + 1].

    Not those of padded rows. Also writes ids and `failed` [R] bool to out [3, >= R] int32, or, with `turn`, to the page of
    out [pages, 3, >= R] whose numbers these rows came from. `verify`: rows of one request are neighbours; which of them count
    goes to out too, and how many of a slot do, less one, to tables.accepted (-1: its first row's logits were not usable). A
    failed row does not count: it is computed again in the next step, and fails there if it has to. After a wrong draft come
    ids that nobody reads: the next step begins where they begin.
    """
    if on_gpu(token_ids):
        launch_publish(token_ids, failed, rows, tables, out, turn, verify)
        return
    if turn is not None:
        out = out[(int(turn) - 1) % len(out)]
    _publish_on_host(token_ids.numpy(), failed.numpy(), rows, tables, out.numpy()[:, : len(token_ids)], verify)


def _publish_on_host(
    ids: np.ndarray, failed: np.ndarray, rows: Rows, tables: SlotTables, page: np.ndarray, verify: bool
) -> None:
    """See `publish`; page [3, R]."""
    slots, lengths = rows.seq_slots.numpy(), rows.seq_lens.numpy()
    real = lengths > 0
    tables.token_ids.numpy()[slots[real], lengths[real]] = ids[real]
    page[IDS], page[FAILED] = ids, failed
    if verify:
        begins = np.flatnonzero(np.append(True, slots[1:] != slots[:-1]))
        first_row = np.repeat(begins, np.diff(np.append(begins, len(slots))))
        wrong = (ids != rows.guesses.numpy()) | failed
        before = np.cumsum(wrong) - wrong
        kept = (before == before[first_row]) & ~failed
        accepted = tables.accepted.numpy()
        accepted[slots[real]] = -1
        np.add.at(accepted, slots[real], kept[real])
        page[KEPT] = kept


def launch_publish(token_ids, failed, rows: Rows, tables: SlotTables, out, turn, verify: bool) -> None:
    """See `publish`."""
    count = token_ids.shape[0]
    block = next_power_of_2(count) if turn is not None else BLOCK  # one form for all steps that are not captured, if it can be
    block = max(block, next_power_of_2(count)) if verify else min(block, BLOCK)
    _publish[(-(-count // block),)](
        token_ids, failed, rows.seq_slots, rows.seq_lens, rows.guesses, tables.token_ids, out, turn, tables.accepted, count,
        tables.token_ids.stride(0), 0 if turn is None else out.stride(0), out.stride(-2),
        PAGES=1 if turn is None else out.shape[0], PAGED=turn is not None, BLOCK=block, VERIFY=verify, num_warps=4,
        **_pdl(turn),
    )  # fmt: skip


@jit
def _larger(a, b):
    return tl.maximum(a, b)


@jit(do_not_specialize=["count"])  # it differs from step to step
def _publish(
    token_ids, failed, seq_slots, seq_lens, guesses, token_table, outbox, turn, accepted, count, stride, page_stride,
    box_stride, PAGES: tl.constexpr, PAGED: tl.constexpr, BLOCK: tl.constexpr, VERIFY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = row < count
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    out = outbox + row
    if PAGED:
        out += ((tl.load(turn) - 1) & (PAGES - 1)) * page_stride
    length = tl.load(seq_lens + row, there, 0)
    slot = tl.load(seq_slots + row, there, -1)
    token = tl.load(token_ids + row, there, 0)
    broken = tl.load(failed + row, there, 0) != 0
    tl.store(token_table + slot.to(tl.int64) * stride + length, token, there & (length > 0))
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
