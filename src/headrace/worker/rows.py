"""The rows of a step as a few numbers for each sequence, which go to the device in one copy; a kernel reads the rest there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from headrace.kernels.tables import read_rows
from headrace.model.batch import ForwardBatch, WantedRows

ALIGN = 4  # numbers of four bytes, to 16 bytes: kernels are compiled anew for tensors that begin elsewhere
FOR_KERNEL, STARTS, WANTED_STARTS, INDEX = 5, 5, 6, 7  # lines of RowNumbers.lines


class RowNumbers:
    """S sequences of adjacent rows and, behind them, wanted rows as R sequences of one row each.

    lines [9, n] int32: five for `read_rows`; where the sequences' rows begin and end, [S + 1]; the same of the wanted rows; and
    two that hold the index of the wanted rows as int64. `bounds`: tokens in the cache that each sequence has at most.
    """

    def __init__(
        self, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray, slack: np.ndarray | None, wanted: Sequence[int] | None
    ):
        """All but `wanted` (rows; None: all of them) are [S] int32; see BatchState.rows."""
        stops, index = np.cumsum(counts), np.asarray(() if wanted is None else wanted, np.int64)
        num_seqs, num_rows, num_wanted = len(slots), int(stops[-1]), len(index)
        seqs, rows = aligned(num_seqs), aligned(num_rows)
        self.counts, self.num_wanted = counts, None if wanted is None else num_wanted
        self.seqs, self.wanted_seqs = slice(num_seqs), slice(seqs, seqs + num_wanted)
        self.rows, self.wanted_rows = slice(num_rows), slice(rows, rows + num_wanted)
        self.unsure = slack is not None and bool(slack.any())
        lines = self.lines = np.zeros((9, aligned(seqs + num_wanted + 1)), np.int32)
        of_all, alone = lines[:FOR_KERNEL, self.seqs], lines[:FOR_KERNEL, self.wanted_seqs]
        of_all[0], of_all[1], of_all[3, 1:], of_all[4] = slots, starts, stops[:-1], counts
        if slack is not None:
            of_all[2] = slack
        owner = np.searchsorted(stops, index, side="right")
        alone[0], alone[1], alone[2] = slots[owner], (starts + counts - stops)[owner] + index, of_all[2, owner]
        alone[3], alone[4] = rows + np.arange(num_wanted), 1
        lines[STARTS, 1 : num_seqs + 1] = stops
        lines[WANTED_STARTS, : num_wanted + 1] = np.arange(num_wanted + 1)
        lines[INDEX:].reshape(-1).view(np.int64)[:num_wanted] = index
        self.bounds = lines[1] + lines[2] + lines[4]

    def read(
        self, lines: Tensor, token_table: Tensor, block_tables: Tensor, accepted: Tensor, block_size: int
    ) -> tuple[ForwardBatch, WantedRows | None]:
        """The rows as the slots' tables have them; `lines` are those of this object on the device."""
        ids, positions, places, lengths = read_rows(
            lines[:FOR_KERNEL, : self.wanted_seqs.stop], self.wanted_rows.stop, int(self.counts.max()), token_table,
            block_tables, accepted, block_size,
        )  # fmt: skip
        bounds, exact = self.bounds, not self.unsure
        if self.unsure and not lines.is_cuda:
            # attention wants exact numbers on a CPU, where they are no further away than any others
            bounds, exact = lengths.cpu().numpy(), True

        def part(rows: slice, seqs: slice, begins: Tensor, counts: np.ndarray) -> ForwardBatch:
            longer = np.flatnonzero(counts != 1)
            return ForwardBatch(
                token_ids=ids[rows],
                positions=positions[rows],
                slot_mapping=places[rows],
                block_tables=block_tables,
                seq_slots=lines[0, seqs],
                query_start=begins[: len(counts) + 1],
                seq_lens=lengths[seqs],
                num_decodes=int(longer[0]) if longer.size else len(counts),
                query_lens=counts.tolist(),
                context_lens=bounds[seqs].tolist(),
                exact=exact,
            )

        batch = part(self.rows, self.seqs, lines[STARTS], self.counts)
        if self.num_wanted is None:
            return batch, None
        alone = part(self.wanted_rows, self.wanted_seqs, lines[WANTED_STARTS], np.ones(self.num_wanted, np.int32))
        return batch, WantedRows(lines[INDEX:].reshape(-1).view(torch.int64)[: self.num_wanted], alone)


def aligned(count: int) -> int:
    return -(-count // ALIGN) * ALIGN
