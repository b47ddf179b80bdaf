"""What the device knows of the running requests: one row per slot, changed only where something changed.

The id at (slot, position) is the input of the row that computes it, whoever put it there: the prompt was uploaded when the
request got its slot, a sampled id is written by the sampler. So a decode row needs nothing from the host but its numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from headrace.cache.kv_cache import zeros
from headrace.engine.plan import Chunk, Decodes, StepPlan
from headrace.engine.request import Request
from headrace.model.batch import ForwardBatch
from headrace.worker.staging import Staging

# columns of the parameter tables, one row per slot
FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
INTS = ("seed", "top_k", "sample_index", "prompt_len")


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
        for request in admitted:
            self._load(request)
        if admitted:
            self.staging.upload_into(self.floats, self.host_floats)
            self.staging.upload_into(self.ints, self.host_ints)
        decodes = plan.decodes
        blocks = [(decodes.slots[row], index, block) for row, index, block in decodes.new_blocks]
        self.append_blocks(blocks + new_blocks(plan.others))
        return admitted

    def _load(self, request: Request) -> None:
        slot, p = request.slot, request.params
        ids = np.asarray(request.token_ids(0, request.num_known), np.int32)
        self.staging.upload_into(self.token_ids[slot, : ids.size], ids)
        blocks = np.asarray(request.block_ids, np.int32)
        self.staging.upload_into(self.block_tables[slot, : blocks.size], blocks)
        self.host_floats[slot] = [getattr(p, name) for name in FLOATS]
        self.host_ints[slot] = (as_int64(request.seed), p.top_k or 0, p.sample_index, len(request.prompt_ids))

    def append_blocks(self, blocks: list[tuple[int, int, int]]) -> None:
        """Enter blocks, (slot, index, block), into the slots' tables."""
        if not blocks:
            return
        rows, columns, values = self.staging.upload(np.asarray(blocks, np.int64).T.copy())
        self.block_tables.index_put_((rows, columns), values.to(torch.int32))

    def rows(
        self, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray, slack: np.ndarray | None = None
    ) -> ForwardBatch:
        """The rows of sequences that compute `counts` tokens each, from positions `starts` on; all [S] int32.

        Where `slack` > 0 the sequence starts later, by what its slot accepted, at most so much (Chunk.slack).
        """
        query_start = np.zeros(len(slots) + 1, np.int32)
        np.cumsum(counts, out=query_start[1:])
        # row r of sequence i is at position starts[i] + (r - query_start[i])
        positions = np.arange(query_start[-1], dtype=np.int32) + np.repeat(starts - query_start[:-1], counts)
        up = self.staging.upload
        row_slots, row_positions = up(np.repeat(slots, counts).astype(np.int64)), up(positions)
        contexts = starts + counts
        seq_slots, seq_lens, context_lens = up(slots), up(contexts), contexts.tolist()
        exact = True
        if slack is not None and slack.any():
            row_positions = row_positions + self.shift(row_slots, np.repeat(slack, counts))
            seq_lens = seq_lens + self.shift(seq_slots, slack)
            # attention wants exact numbers on a CPU, where they are no further away than any others
            exact = self.device.type != "cuda"
            context_lens = seq_lens.tolist() if exact else (contexts + slack).tolist()
        longer = np.flatnonzero(counts != 1)
        return ForwardBatch(
            token_ids=self.token_ids[row_slots, row_positions],
            positions=row_positions,
            slot_mapping=self.slot_mapping(row_slots, row_positions),
            block_tables=self.block_tables,
            seq_slots=seq_slots,
            query_start=up(query_start),
            seq_lens=seq_lens,
            num_decodes=int(longer[0]) if longer.size else len(slots),
            query_lens=counts.tolist(),
            context_lens=context_lens,
            exact=exact,
        )

    def shift(self, slots: Tensor, slack: np.ndarray) -> Tensor:
        """How much further on than the host knows each row is [R] int32: what its slot [R] accepted, where slack [R] > 0."""
        return self.accepted[slots] * self.staging.upload((slack > 0).astype(np.int32))

    def slot_mapping(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Place of each row in the KV cache [T] int64."""
        blocks = self.block_tables[slots, positions // self.block_size].to(torch.int64)
        return blocks * self.block_size + positions % self.block_size


def new_blocks(chunks: Sequence[Chunk]) -> list[tuple[int, int, int]]:
    """(slot, index, block) of those that chunks append to the tables of slots that the device knows."""
    return [(c.slot, c.block_offset + i, b) for c in chunks if not c.admitted for i, b in enumerate(c.new_blocks)]


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
