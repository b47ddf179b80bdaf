"""What the device knows of the running requests: one row per slot, changed only where something changed.

The id at (slot, position) is the input of the row that computes it, whoever put it there: the prompt was uploaded when the
request got its slot, a sampled id is written by the sampler. So a decode row needs nothing from the host but its numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.cache.kv_cache import zeros
from headrace.kernels.tables import PIECE, enter
from headrace.model.batch import ForwardBatch, WantedRows
from headrace.scheduler.plan import Chunk, Decodes, StepPlan
from headrace.scheduler.request import Request
from headrace.worker.rows import RowNumbers
from headrace.worker.staging import Staging

# columns of the parameter tables, one row per slot
FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
INTS = ("seed", "top_k", "sample_index", "prompt_len")
TOKEN_IDS, BLOCKS, PARAM_FLOATS, PARAM_INTS = range(4)  # the tables, as int32


class Piece(NamedTuple):
    """New values in a row of a table."""

    table: int
    slot: int
    column: int
    values: Sequence[int] | np.ndarray


class BatchState:
    """Slot-indexed tensors. Slot `max_num_seqs` belongs to the padded rows of CUDA graphs.

    token_ids [slots, max_model_len + 1] int32; block_tables [slots, blocks per sequence] int32;
    floats [slots, len(FLOATS)] float32; ints [slots, len(INTS)] int64; accepted [slots] int32: how many drafts of the last
    step that had some were right, -1 if its logits were not usable; rows behind it, which the host placed without this number,
    are moved on by it (`shift`).
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device):
        slots = max_num_seqs + 1
        self.dummy_slot, self.block_size, self.device = max_num_seqs, block_size, device
        self.staging = Staging(device)
        self.token_ids = zeros((slots, max_model_len + 1), torch.int32, device)
        self.block_tables = zeros((slots, -(-max_model_len // block_size)), torch.int32, device)
        self.floats = zeros((slots, len(FLOATS)), torch.float32, device)
        self.ints = zeros((slots, len(INTS)), torch.int64, device)
        self.accepted = zeros((slots,), torch.int32, device)
        self.host_floats = np.zeros((slots, len(FLOATS)), np.float32)
        self.host_ints = np.zeros((slots, len(INTS)), np.int64)
        self.host_floats[:, FLOATS.index("top_p")] = self.host_floats[:, FLOATS.index("repetition_penalty")] = 1.0

    @staticmethod
    def bytes(max_num_seqs: int, max_model_len: int, block_size: int) -> int:
        """Device memory of the tables."""
        per_slot = 4 * (max_model_len + 1) + 4 * -(-max_model_len // block_size) + 4 * len(FLOATS) + 8 * len(INTS) + 4
        return (max_num_seqs + 1) * per_slot

    def apply(self, plan: StepPlan) -> list[Request]:
        """Bring the tables up to what `plan` says; returns the requests that got a slot with this step."""
        self.staging.next_step()
        admitted = [c.request for c in plan.others if c.admitted]
        pieces = [piece for request in admitted for piece in self._load(request)]
        decodes = plan.decodes
        pieces += [Piece(BLOCKS, decodes.slots[row], index, [block]) for row, index, block in decodes.new_blocks]
        self.enter(pieces + new_blocks(plan.others))
        return admitted

    def _load(self, request: Request) -> tuple[Piece, ...]:
        slot, p = request.slot, request.params
        self.host_floats[slot] = [getattr(p, name) for name in FLOATS]
        self.host_ints[slot] = (as_int64(request.seed), p.top_k or 0, p.sample_index, len(request.prompt_ids))
        return (
            Piece(TOKEN_IDS, slot, 0, request.known_ids()),
            Piece(BLOCKS, slot, 0, request.block_ids),
            Piece(PARAM_FLOATS, slot, 0, self.host_floats[slot].view(np.int32)),
            Piece(PARAM_INTS, slot, 0, self.host_ints[slot].view(np.int32)),
        )

    def enter(self, pieces: Sequence[Piece]) -> None:
        """Write pieces of the tables: one copy and one kernel, however many there are."""
        if not pieces:
            return
        lengths = [len(p.values) for p in pieces]
        ends = np.cumsum([len(pieces) * PIECE, *lengths]).tolist()
        packet = np.empty(ends[-1], np.int32)
        packet[: ends[0]] = [
            number
            for p, length, begin in zip(pieces, lengths, ends, strict=False)
            for number in (p.table, p.slot, p.column, length, begin)
        ]
        for p, begin, end in zip(pieces, ends, ends[1:], strict=False):
            packet[begin:end] = p.values
        tables = self.token_ids, self.block_tables, self.floats.view(torch.int32), self.ints.view(torch.int32)
        enter(self.staging.upload(packet), len(pieces), max(lengths), tables)

    def rows(self, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray, slack: np.ndarray | None = None) -> ForwardBatch:
        """The rows of sequences that compute `counts` tokens each, from positions `starts` on; all [S] int32.

        Where `slack` > 0 the sequence starts later, by what its slot accepted, at most so much (Chunk.slack).
        """
        return self.rows_and_wanted(slots, starts, counts, slack, None)[0]

    def rows_and_wanted(
        self, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray, slack: np.ndarray | None, wanted: Sequence[int] | None
    ) -> tuple[ForwardBatch, WantedRows | None]:
        """As `rows`, and those of the rows that are `wanted` (perhaps none) on their own; None: all are."""
        rows = RowNumbers(slots, starts, counts, slack, wanted)
        lines = self.staging.upload(rows.lines)
        return rows.read(lines, self.token_ids, self.block_tables, self.accepted, self.block_size)

    def shift(self, slots: Tensor, slack: np.ndarray) -> Tensor:
        """How much further on than the host knows each row is [R] int32: what its slot [R] accepted, where slack [R] > 0."""
        return self.accepted[slots] * self.staging.upload((slack > 0).astype(np.int32))


def new_blocks(chunks: Sequence[Chunk]) -> list[Piece]:
    """Those that chunks append to the tables of slots that the device knows."""
    return [Piece(BLOCKS, c.slot, c.block_offset, c.new_blocks) for c in chunks if c.new_blocks and not c.admitted]


def sequences(decodes: Decodes, others: Sequence[Chunk]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Slot, first position and number of tokens of each sequence of a step: [S] int32."""
    if not others:  # nearly always
        starts = np.asarray(decodes.offsets) + decodes.now
        return np.asarray(decodes.slots), starts.astype(np.int32), np.ones(len(starts), np.int32)
    count = len(others)
    slots = np.concatenate([decodes.slots, np.fromiter((c.slot for c in others), np.int32, count)])
    starts = np.concatenate([decodes.offsets, np.fromiter((c.start for c in others), np.int64, count)])
    starts[: len(decodes)] += decodes.now
    counts = np.ones(len(slots), np.int32)
    counts[len(decodes) :] = [c.num_tokens for c in others]
    return slots, starts.astype(np.int32), counts


def slack_of(decodes: Decodes, others: Sequence[Chunk]) -> np.ndarray:
    """Chunk.slack of each sequence of a step: [S] int32."""
    return np.asarray([0] * len(decodes) + [c.slack for c in others], np.int32)


def as_int64(seed: int) -> int:
    """The same 64 bits as a signed number, which is what a tensor holds."""
    return (seed + 2**63) % 2**64 - 2**63
