"""A smaller model of the same vocabulary guesses what the larger one will say (Leviathan et al. 2023; Chen et al. 2023).

It has a KV cache of its own, of the same blocks: what the scheduler says of a block holds for both caches, and prefix hits
serve both. It does not run along: when a request is to be drafted for, it first computes, in one forward pass, all tokens
that it has not seen. So requests that never speculate cost it nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from headrace.cache.kv_cache import KVCache
from headrace.model.forward import Forward
from headrace.sampling.sampler import choose
from headrace.scheduler.plan import StepPlan
from headrace.worker.batch_state import BatchState
from headrace.worker.drafter import DraftRow
from headrace.worker.sampling import asked_of

if TYPE_CHECKING:
    from headrace.worker.cuda_graphs import DecodeGraphs


class DraftModel:
    """See Drafter. A draft is sampled as the target will sample: same temperature and filters, same random number.

    `vocab_size` is the target's: models of one family differ in how far they pad their vocabulary.
    """

    def __init__(
        self, decoder: Forward, kv: KVCache, state: BatchState, cost: float, vocab_size: int, max_num_batched_tokens: int,
        graphs: DecodeGraphs | None = None,
    ):  # fmt: skip
        self.graphs = graphs  # of the draft model: capture forward, sampler and the way to the token table
        self.decoder, self.kv, self.state, self.cost = decoder, kv, state, cost
        self._vocab_size, self._most_rows = vocab_size, max_num_batched_tokens
        slots = state.token_ids.shape[0]
        self._seen = [0] * slots  # tokens from the beginning whose keys and values are in the cache
        self._drafted: dict[int, DraftRow] = {}  # by slot: the last drafts, until it is known how many were right
        self._blocks: list[list[int]] = [[] for _ in range(slots)]
        self._marked = [0] * slots  # blocks from the beginning that need no further look at `_filled`
        self._filled = np.zeros(kv.num_blocks, np.bool_)  # by block: all its tokens have been computed by this model, too

    def placed(self, plan: StepPlan) -> None:
        size = self.kv.block_size
        for new in plan.admitted:
            hit = new.num_cached // size  # blocks that were in the index
            self._blocks[new.slot] = new.block_ids.copy()
            self._filled[new.block_ids[hit:]] = False
            known = self._filled[new.block_ids[:hit]]
            self._marked[new.slot] = hit if known.all() else int(known.argmin())
            self._seen[new.slot] = size * self._marked[new.slot]
            self._drafted.pop(new.slot, None)
        for slot, _, blocks in plan.new_blocks:
            self._blocks[slot] += blocks
            self._filled[blocks] = False
        if not self._drafted:
            return
        for slot, start, unverified in zip(*(c.tolist() for c in (plan.slots, plan.starts, plan.unverified)), strict=True):
            before = self._drafted.pop(slot, None)
            if before is not None:
                self._seen[slot] = self._computed(before, start, unverified > 0)

    @torch.inference_mode()
    def propose(self, rows: Sequence[DraftRow]) -> None:
        if not rows:
            return
        rows = sorted(rows, key=lambda r: -r.num_drafts)  # those that draft longer come first
        numbers = np.asarray([(r.slot, r.start, r.unverified) for r in rows], np.int32).T.copy()
        hidden = self._catch_up(rows)
        for i in range(rows[0].num_drafts):
            count = sum(r.num_drafts > i for r in rows)
            slots, starts, unverified = numbers[:, :count]
            if i and self.graphs is not None and count <= self.graphs.sizes[-1]:
                self._replay(slots, starts + i, unverified)
                continue
            hidden = hidden[:count]
            if i:
                hidden = self._step(hidden, slots, starts + i, unverified)
            self._sample(hidden, slots, starts + i, unverified)
        for r in rows:
            self._drafted[r.slot] = r

    # ---- what other drafters do otherwise

    def _stop(self, row: DraftRow) -> int:
        """The rows of a request that can be computed before the first draft: those before this position."""
        return row.start + 1

    def _computed(self, drafted: DraftRow, start: int, behind: bool) -> int:
        """How many tokens from the beginning have been seen, for sure, when the row after `drafted` begins at `start`.

        `behind`: the drafts have not settled, and `start` is that of none accepted. Where `drafted` was itself placed behind
        others, the plan did not say where it really began.
        """
        if behind:
            return start  # its token was the last but one
        if drafted.unverified:
            return start - 1  # if all drafts were right, the last of them was not computed
        return min(start, drafted.start + drafted.num_drafts)  # those before it are those that were accepted

    def _forward(
        self, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray, unverified: np.ndarray | None = None
    ) -> Tensor:
        """Known rows: hidden states [T, H]."""
        batch = self.state.prepare(slots, starts, counts, unverified).batch
        batch.token_ids.clamp_(max=self.decoder.vocab_size - 1)  # the target may know more ids
        return self.decoder.forward(batch, self.kv)

    def _step(self, hidden: Tensor, slots: np.ndarray, places: np.ndarray, unverified: np.ndarray) -> Tensor:
        """One row each, of the drafts at `places`; `hidden` [R, H] is what the row before it gave."""
        return self._forward(slots, places, np.ones_like(slots), unverified)

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.decoder.logits(hidden)[:, : self._vocab_size]

    def _target_ids(self, token_ids: Tensor) -> Tensor:
        return token_ids

    # ---- pieces

    def _catch_up(self, rows: Sequence[DraftRow]) -> Tensor:
        """Compute what has not been seen of each row's request up to its start: hidden states [R, H] of the last ones.

        Where it is not known how far those go (DraftRow.unverified), up to the most that they can be: what lies behind the
        start is computed from wrong drafts and overwritten later. The device picks the row that is the last one.
        """
        pieces: list[list[tuple[int, int, int, int]]] = [[]]  # of each forward pass: index, position, count, wanted row
        room = self._most_rows
        for i in sorted(range(len(rows)), key=lambda i: rows[i].start - self._seen[rows[i].slot]):
            row, last = rows[i], self._stop(rows[i]) - 1
            place, stop = min(self._seen[row.slot], last), last + 1 + row.unverified
            while place < stop:
                if not room or (row.unverified and room < stop - place):  # the row that is picked must be in this piece
                    pieces.append([])
                    room = self._most_rows
                count = min(stop - place, room)
                pieces[-1].append((i, place, count, self._most_rows - room + min(last - place, count - 1)))
                place, room = place + count, room - count
        hidden = None
        for piece in pieces:
            index, starts, counts, wanted = np.asarray(piece, np.int32).T.copy()
            slots, unverified = np.asarray([(rows[i].slot, rows[i].unverified) for i in index], np.int32).T.copy()
            states = self._forward(slots, starts, counts)
            if hidden is None:
                hidden = states.new_empty((len(rows), states.shape[1]))
            columns = np.stack([index, wanted, slots, unverified > 0]).astype(np.int64)
            where, picked, on, moves = self.state.staging.upload(columns)
            if unverified.any():
                picked = (picked + self.state.tables.accepted[on] * moves).clamp(min=0)
            hidden[where] = states[picked]
        for row in rows:
            full = self._stop(row) // self.kv.block_size
            self._filled[self._blocks[row.slot][self._marked[row.slot] : full]] = True
            self._marked[row.slot] = full
        assert hidden is not None
        return hidden

    def _replay(self, slots: np.ndarray, places: np.ndarray, unverified: np.ndarray) -> None:
        """A step of one row each; the id lands in the token table."""
        assert self.graphs is not None
        numbers = np.stack([slots, places, np.full_like(slots, -1), unverified])
        context = int((places + unverified).max()) + 1
        self.graphs.replay(numbers, self.graphs.key_for(numbers.shape[1], context, asked_of(self.state, slots).tail))

    def _sample(self, hidden: Tensor, slots: np.ndarray, places: np.ndarray, unverified: np.ndarray) -> None:
        """Write to the token table what follows the tokens at (slots, places) [R]."""
        rows = self.state.prepare(slots, places, np.ones_like(slots), unverified).rows
        token_ids, _ = choose(self._logits(hidden), asked_of(self.state, slots).inputs(rows))
        where = rows.seq_slots.long(), rows.seq_lens.long()
        self.state.token_ids.index_put_(where, self._target_ids(token_ids))
