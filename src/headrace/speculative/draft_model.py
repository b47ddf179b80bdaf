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
from headrace.sampling.params import GREEDY_EPS
from headrace.sampling.sampler import SampleInputs, choose
from headrace.scheduler.plan import Chunk
from headrace.worker.batch_state import FLOATS, INTS, BatchState
from headrace.worker.sampling import tail_of

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
        self._drafted: list[Chunk | None] = [None] * slots  # the last drafts, until it is known how many were right
        self._marked = [0] * slots  # blocks from the beginning that need no further look at `_filled`
        self._filled = np.zeros(kv.num_blocks, np.bool_)  # by block: all its tokens have been computed by this model, too

    def placed(self, chunks: Sequence[Chunk]) -> None:
        size = self.kv.block_size
        for c in chunks:
            before = self._drafted[c.slot]
            self._drafted[c.slot] = None
            if c.admitted:
                hit = c.start // size  # blocks that were in the index
                self._filled[c.new_blocks[hit:]] = False
                known = self._filled[c.new_blocks[:hit]]
                self._marked[c.slot] = hit if known.all() else int(known.argmin())
                self._seen[c.slot] = size * self._marked[c.slot]
                continue
            if c.new_blocks:
                self._filled[c.new_blocks] = False
            if before is not None:
                self._seen[c.slot] = self._computed(before, c)

    @torch.inference_mode()
    def propose(self, chunks: Sequence[Chunk]) -> None:
        if not chunks:
            return
        chunks = sorted(chunks, key=lambda c: -c.num_drafts)  # those that draft longer come first
        numbers = np.asarray([(c.slot, c.start, c.slack) for c in chunks], np.int32).T.copy()
        hidden = self._catch_up(chunks)
        for i in range(chunks[0].num_drafts):
            count = sum(c.num_drafts > i for c in chunks)
            slots, starts, slack = numbers[:, :count]
            if i and self.graphs is not None and count <= self.graphs.sizes[-1]:
                self._replay(slots, starts + i, slack)
                continue
            hidden = hidden[:count]
            if i:
                hidden = self._step(hidden, slots, starts + i, slack)
            self._sample(hidden, slots, starts + i, slack)
        for c in chunks:
            self._drafted[c.slot] = c

    # ---- what other drafters do otherwise

    def _stop(self, chunk: Chunk) -> int:
        """The rows of a chunk's request that can be computed before the first draft: those before this position."""
        return chunk.start + 1

    def _computed(self, drafted: Chunk, chunk: Chunk) -> int:
        """How many tokens from the beginning have been seen, for sure, when `chunk` follows the one that was drafted for."""
        if chunk.slack:
            return drafted.start + 1
        return min(chunk.start, drafted.start + drafted.num_drafts)  # those before it are those that were accepted

    def _forward(self, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray, slack: np.ndarray | None = None) -> Tensor:
        """Known rows: hidden states [T, H]."""
        batch = self.state.rows(slots, starts, counts, slack)
        batch.token_ids.clamp_(max=len(self.decoder.embedding) - 1)  # the target may know more ids
        return self.decoder.forward(batch, self.kv)

    def _step(self, hidden: Tensor, slots: np.ndarray, places: np.ndarray, slack: np.ndarray) -> Tensor:
        """One row each, of the drafts at `places`; `hidden` [R, H] is what the row before it gave."""
        return self._forward(slots, places, np.ones_like(slots), slack)

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.decoder.logits(hidden)[:, : self._vocab_size]

    def _target_ids(self, token_ids: Tensor) -> Tensor:
        return token_ids

    # ---- pieces

    def _catch_up(self, chunks: Sequence[Chunk]) -> Tensor:
        """Compute what has not been seen of each chunk's tokens up to its start: hidden states [C, H] of the last ones.

        Where it is not known how far those go (Chunk.slack), up to the most that they can be: what lies behind the start is
        computed from wrong drafts and overwritten later. The device picks the row that is the last one.
        """
        pieces: list[list[tuple[int, int, int, int]]] = [[]]  # of each forward pass: chunk, position, count, row that is wanted
        room = self._most_rows
        for i in sorted(range(len(chunks)), key=lambda i: chunks[i].start - self._seen[chunks[i].slot]):
            c, last = chunks[i], self._stop(chunks[i]) - 1
            place, stop = min(self._seen[c.slot], last), last + 1 + c.slack
            while place < stop:
                if not room or (c.slack and room < stop - place):  # the row that is picked must be in this piece
                    pieces.append([])
                    room = self._most_rows
                count = min(stop - place, room)
                pieces[-1].append((i, place, count, self._most_rows - room + min(last - place, count - 1)))
                place, room = place + count, room - count
        hidden = None
        for piece in pieces:
            index, starts, counts, rows = np.asarray(piece, np.int32).T.copy()
            slots, slack = np.asarray([(chunks[i].slot, chunks[i].slack) for i in index], np.int32).T.copy()
            states = self._forward(slots, starts, counts)
            if hidden is None:
                hidden = states.new_empty((len(chunks), states.shape[1]))
            where, picked, on = self.state.staging.upload(np.stack([index, rows, slots]).astype(np.int64))
            if slack.any():
                picked = (picked + self.state.shift(on, slack)).clamp(min=0)
            hidden[where] = states[picked]
        for c in chunks:
            full = self._stop(c) // self.kv.block_size
            self._filled[c.request.block_ids[self._marked[c.slot] : full]] = True
            self._marked[c.slot] = full
        assert hidden is not None
        return hidden

    def _replay(self, slots: np.ndarray, places: np.ndarray, slack: np.ndarray) -> None:
        """A step of one row each; the id lands in the token table."""
        assert self.graphs is not None
        numbers = np.stack([slots, places, np.full_like(slots, -1), slack])
        self.graphs.replay(numbers, int((places + slack).max()) + 1, tail_of(self.state, slots))

    def _sample(self, hidden: Tensor, slots: np.ndarray, places: np.ndarray, slack: np.ndarray) -> None:
        """Write to the token table what follows the tokens at (slots, places) [R]."""
        state = self.state
        logits = self._logits(hidden)
        where = state.staging.upload(np.stack([slots, places]).astype(np.int64))
        if slack.any():
            where[1] += state.shift(where[0], slack)
        floats, ints = state.floats[where[0]].T, state.ints[where[0]].T
        host_floats, host_ints = state.host_floats[slots], state.host_ints[slots]
        inputs = SampleInputs(
            temperature=floats[FLOATS.index("temperature")].contiguous(),
            top_k=ints[INTS.index("top_k")].int(),
            top_p=floats[FLOATS.index("top_p")].contiguous(),
            min_p=floats[FLOATS.index("min_p")].contiguous(),
            seed=ints[INTS.index("seed")].contiguous(),
            output_index=where[1] + 1 - ints[INTS.index("prompt_len")],
            sample_index=ints[INTS.index("sample_index")].int(),
            all_greedy=bool((host_floats[:, FLOATS.index("temperature")] < GREEDY_EPS).all()),
            any_top_k=bool((host_ints[:, INTS.index("top_k")] > 0).any()),
            any_top_p=bool((host_floats[:, FLOATS.index("top_p")] < 1.0).any()),
            any_min_p=bool((host_floats[:, FLOATS.index("min_p")] > 0.0).any()),
        )
        token_ids, _ = choose(logits, inputs)
        state.token_ids.index_put_((where[0], where[1] + 1), self._target_ids(token_ids))
