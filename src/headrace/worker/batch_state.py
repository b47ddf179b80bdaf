"""What the device knows of the running requests: one row per slot, changed only where something changed.

The id at (slot, position) is the input of the row that computes it, whoever put it there: the prompt was uploaded when the
request got its slot, a sampled id is written by the sampler. So a decode row needs nothing from the host but its numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from headrace.cache.memory import zeros
from headrace.kernels.prepare import Rows, new_rows
from headrace.kernels.tables import WRITE, Float, Int, SlotTables, enter
from headrace.model.batch import ForwardBatch, WantedRows
from headrace.scheduler.plan import Admitted, NewBlocks, StepPlan
from headrace.worker.staging import Staging

TOKEN_IDS, BLOCKS, FLOATS, INTS = range(4)  # the tables that the host writes, as int32
ALIGN = 16  # rows, on a GPU: tensors begin at 16 bytes, and the kernel has one form for all their numbers


class TableWrite(NamedTuple):
    """New values in a row of a table."""

    table: int
    slot: int
    column: int
    values: Sequence[int] | np.ndarray


class Prepared(NamedTuple):
    """The rows of a step: all of them, and those that are sampled, each as a sequence of its own."""

    batch: ForwardBatch
    wanted: WantedRows | None  # the sampled rows, where only these are read
    rows: Rows  # of the sampled rows


class BatchState:
    """Slot-indexed tensors. Slot `max_num_seqs` belongs to the padded rows of CUDA graphs.

    `admitted` holds by slot what its request said at admission; `host_floats`, `host_ints` are parameter tables on the host.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device):
        slots = max_num_seqs + 1
        self.dummy_slot, self.block_size, self.device = max_num_seqs, block_size, device
        self.align = 1 if device.type == "cpu" else ALIGN
        self.staging = Staging(device)
        self.tables = SlotTables(
            token_ids=zeros((slots, max_model_len + 1), torch.int32, device),
            block_tables=zeros((slots, -(-max_model_len // block_size)), torch.int32, device),
            floats=zeros((slots, len(Float)), torch.float32, device),
            ints=zeros((slots, len(Int)), torch.int64, device),
            accepted=zeros((slots,), torch.int32, device),
            block_size=block_size,
        )
        self.token_ids, self.block_tables = self.tables.token_ids, self.tables.block_tables
        self.admitted: list[Admitted | None] = [None] * slots
        self.adapters: Any = {"": 0}  # SamplingParams.lora -> Int.LORA; or the AdapterPool
        self.host_floats = np.zeros((slots, len(Float)), np.float32)
        self.host_ints = np.zeros((slots, len(Int)), np.int64)
        self.host_floats[:, Float.TOP_P] = self.host_floats[:, Float.REPETITION_PENALTY] = 1.0

    @staticmethod
    def bytes(max_num_seqs: int, max_model_len: int, block_size: int) -> int:
        """Device memory of the tables."""
        per_slot = 4 * (max_model_len + 1) + 4 * -(-max_model_len // block_size) + 4 * len(Float) + 8 * len(Int) + 4
        return (max_num_seqs + 1) * per_slot

    def request(self, slot: int) -> Admitted:
        """What is known of the request in a slot that somebody has."""
        admitted = self.admitted[slot]
        assert admitted is not None
        return admitted

    def apply(self, plan: StepPlan) -> None:
        """Bring the tables up to what `plan` says."""
        self.staging.next_step()
        writes = [write for new in plan.admitted for write in self._load(new)]
        self.enter(writes + block_writes(plan.new_blocks))

    def _load(self, new: Admitted) -> tuple[TableWrite, ...]:
        slot, p = new.slot, new.params
        self.admitted[slot] = new
        self.host_floats[slot] = [getattr(p, column.name.lower()) for column in Float]
        self.host_ints[slot] = (as_int64(new.seed), p.top_k or 0, p.sample_index, new.num_prompt, self.adapters[p.lora])
        return (
            TableWrite(TOKEN_IDS, slot, 0, new.token_ids),
            TableWrite(BLOCKS, slot, 0, new.block_ids),
            TableWrite(FLOATS, slot, 0, self.host_floats[slot].view(np.int32)),
            TableWrite(INTS, slot, 0, self.host_ints[slot].view(np.int32)),
        )

    def enter(self, writes: Sequence[TableWrite]) -> None:
        """Write into the tables: one copy and one kernel, however much there is."""
        if not writes:
            return
        lengths = [len(w.values) for w in writes]
        ends = np.cumsum([len(writes) * WRITE, *lengths]).tolist()
        packet = np.empty(ends[-1], np.int32)
        packet[: ends[0]] = [
            number
            for w, length, begin in zip(writes, lengths, ends, strict=False)
            for number in (w.table, w.slot, w.column, length, begin)
        ]
        for w, begin, end in zip(writes, ends, ends[1:], strict=False):
            packet[begin:end] = w.values
        floats, ints = self.tables.floats.view(torch.int32), self.tables.ints.view(torch.int32)
        enter(self.staging.upload(packet), len(writes), max(lengths), (self.token_ids, self.block_tables, floats, ints))

    def prepare(
        self, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray, unverified: np.ndarray | None = None,
        sampled: np.ndarray | None = None, only_sampled: bool = False,
    ) -> Prepared:  # fmt: skip
        """The rows of S sequences that compute `counts` tokens each, from positions `starts` on; all [S] int32.

        Where `unverified` > 0 the sequence starts later, by what its slot accepted, at most so much (see StepPlan). `sampled`:
        rows whose parameters are wanted, in order (None: all); `only_sampled`: nothing else is read of any row.
        """
        layout = Layout(slots, starts, counts, unverified, sampled, self.align)
        arrays = [layout.numbers, np.append(np.int32(0), np.cumsum(counts, dtype=np.int32))]
        if only_sampled:
            assert sampled is not None
            arrays += [sampled.astype(np.int64), np.arange(len(sampled) + 1, dtype=np.int32)]
        numbers, query_start, *of_wanted = self.staging.upload_all(*arrays)
        rows = new_rows(numbers, self.tables)
        picked = rows.part(layout.sampled.start, layout.sampled.stop)
        batch = self._batch(rows, layout.rows, layout.sequences, query_start, counts, layout)
        if not only_sampled:
            return Prepared(batch, None, picked)
        index, begins = of_wanted
        alone = self._batch(rows, layout.sampled, layout.sampled, begins, np.ones(len(index), np.int32), layout)
        return Prepared(batch, WantedRows(index, alone), picked)

    def _batch(
        self, rows: Rows, of_rows: slice, of_seqs: slice, query_start: torch.Tensor, counts: np.ndarray, layout: Layout
    ) -> ForwardBatch:
        bounds, exact = layout.bounds[of_seqs], not layout.unverified
        if layout.unverified and self.device.type == "cpu":
            # attention wants exact numbers on a CPU, where they are no further away than any others
            bounds, exact = rows.seq_lens[of_seqs].numpy(), True
        longer = np.flatnonzero(counts != 1)
        computed, sequences = rows.part(of_rows.start, of_rows.stop), rows.part(of_seqs.start, of_seqs.stop)
        return ForwardBatch(
            token_ids=computed.token_ids,
            positions=computed.positions,
            slot_mapping=computed.slot_mapping,
            block_tables=self.block_tables,
            seq_slots=sequences.seq_slots,
            query_start=query_start,
            seq_lens=sequences.seq_lens,
            num_decodes=int(longer[0]) if longer.size else len(counts),
            query_lens=counts.tolist(),
            context_lens=bounds.tolist(),
            exact=exact,
            adapted=bool(self.host_ints[layout.numbers[0, of_seqs], Int.LORA].any()),
        )


class Layout:
    """The numbers of a step's rows for `prepare_rows`, and behind them once more those of each sequence's last row, and of the
    rows that are sampled, so far as these are others: what attention and sampler read of them then lies together."""

    def __init__(
        self, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray, unverified: np.ndarray | None,
        sampled: np.ndarray | None, align: int,
    ):  # fmt: skip
        """See BatchState.prepare; each of the three begins at a multiple of `align` rows."""
        num_rows = int(counts.sum())
        self.unverified = unverified is not None and bool(unverified.any())
        self.rows = self.sequences = self.sampled = slice(0, num_rows)
        if num_rows == len(counts) and (sampled is None or len(sampled) == num_rows):  # decodes alone: nearly always
            self.numbers = np.full((4, aligned(num_rows, align)), -1, np.int32)
            self.numbers[0, num_rows:] = 0
            self.numbers[0, :num_rows], self.numbers[1, :num_rows] = slots, starts
            if self.unverified:
                assert unverified is not None
                self.numbers[3, :num_rows] = unverified
        else:
            self._lay_out(slots, starts, counts, unverified, sampled, align)
        self.bounds = self.numbers[1] + 1
        if self.unverified:
            self.bounds += np.maximum(self.numbers[3], 0)

    def _lay_out(
        self, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray, unverified: np.ndarray | None,
        sampled: np.ndarray | None, align: int,
    ) -> None:  # fmt: skip
        stops, num_rows = np.cumsum(counts), self.rows.stop
        parts = [np.arange(num_rows)]
        if num_rows != len(counts):
            self.sequences = self._add(parts, stops - 1, align)
        if sampled is not None and len(sampled) != num_rows:
            self.sampled = self._add(parts, sampled, align)
        self.numbers = np.full((4, sum(aligned(len(p), align) for p in parts)), -1, np.int32)
        self.numbers[0] = 0
        owner = np.repeat(np.arange(len(counts)), counts)
        begin = 0
        for part in parts:
            of, here = owner[part], slice(begin, begin + len(part))
            self.numbers[0, here] = slots[of]
            self.numbers[1, here] = (starts + counts - stops)[of] + part
            if self.unverified:
                assert unverified is not None
                self.numbers[3, here] = unverified[of]
            begin += aligned(len(part), align)

    @staticmethod
    def _add(parts: list[np.ndarray], rows: np.ndarray, align: int) -> slice:
        begin = sum(aligned(len(part), align) for part in parts)
        parts.append(rows)
        return slice(begin, begin + len(rows))


def aligned(count: int, align: int = ALIGN) -> int:
    return -(-count // align) * align


def block_writes(new_blocks: Sequence[NewBlocks]) -> list[TableWrite]:
    return [TableWrite(BLOCKS, slot, column, blocks) for slot, column, blocks in new_blocks]


def as_int64(seed: int) -> int:
    """The same 64 bits as a signed number, which is what a tensor holds."""
    return (seed + 2**63) % 2**64 - 2**63
