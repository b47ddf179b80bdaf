"""What requests do to their logits (bias, bans, masks, penalties), made into the edits of a step.

The arrays of a request are made once, when it gets its slot. Those of a step are put together from them and stay on the device
while the same rows ask for the same: a steady decode builds and uploads nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.cache.kv_cache import zeros
from headrace.kernels.verify import counts_with_drafts
from headrace.sampling.params import SamplingParams
from headrace.sampling.penalties import (
    BadWords,
    LogitsEdits,
    Penalties,
    TokenMask,
    UserProcessor,
    count_tokens,
    load_counts,
    pack_mask,
    token_counts,
)
from headrace.scheduler.plan import Chunk
from headrace.scheduler.request import Request
from headrace.structured_output.manager import GrammarMasks
from headrace.worker.batch_state import FLOATS, BatchState

PENALTIES = [FLOATS.index(name) for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")]


@dataclass(slots=True)
class SlotEdits:
    """What one request does to its logits at every step; only requests that do anything have one."""

    bias_ids: np.ndarray  # [n] int64
    bias: np.ndarray  # [n] float32
    banned: np.ndarray  # [n] int64: at every step
    banned_early: np.ndarray  # [n] int64: these too while fewer than min_tokens exist, those of `banned` among them
    words: list[list[int]]  # bad words of several tokens
    mask: np.ndarray | None  # [ceil(V / 32)] int32
    penalties: bool


@dataclass(slots=True)
class _Fixed:
    """The edits of some rows as far as they are the same in every step, and the bad words' rows."""

    edits: LogitsEdits
    penalty_rows: np.ndarray  # [Q] int64
    words: BadWords | None  # all but `lengths`


class StepEdits:
    """Keeps what the slots ask for, their token counts, and the edits of the last step."""

    def __init__(self, state: BatchState, vocab_size: int):
        self.state, self.vocab_size = state, vocab_size
        self._of_slot: dict[int, SlotEdits] = {}
        self._counts: Tensor | None = None  # [slots, V] int32, made when the first request with penalties comes
        self._fixed_for = (0, b"")  # rows of the step, and those with edits
        self._fixed: _Fixed | None = None

    def load(self, request: Request) -> bool:
        """A request got its slot, all its ids are known to the host. Whether it does anything to its logits."""
        self._fixed = None
        edits = slot_edits(request.params, self.vocab_size)
        if edits is None:
            self._of_slot.pop(request.slot, None)
            return False
        self._of_slot[request.slot] = edits
        if edits.penalties:
            if self._counts is None:
                self._counts = zeros((self.state.dummy_slot + 1, self.vocab_size), torch.int32, self.state.device)
            outputs = np.frombuffer(request.known_ids(), np.int32)[len(request.prompt_ids) :]
            found = token_counts(np.frombuffer(request.prompt_ids, np.int32), outputs, self.vocab_size)
            load_counts(self._counts, request.slot, self.state.staging.upload(found))
        return True

    def of_step(
        self, chunks: list[tuple[int, Chunk]], device_slots: Tensor, positions: Tensor, grammar: GrammarMasks | None
    ) -> LogitsEdits | None:
        """Of the rows that need more than the fused sampler, with their chunks; `positions` [R] is where the new ids go."""
        users = [
            UserProcessor(r, c.request.params.logits_processors, [*c.request.output_ids, *c.drafts], c.request.failed)
            for r, c in chunks
            if c.request.params.logits_processors and c.request.finish_reason is None  # it may have ended in the step before
        ]
        rows = [(r, c) for r, c in chunks if c.slot in self._of_slot]
        if not rows and not users and grammar is None:
            return None
        upload = self.state.staging.upload
        masks: list[TokenMask] = []
        must_end: set[int] = set()  # where the grammar leaves the end token alone, min_tokens cannot ban it
        if grammar is not None:
            masked_rows, bits, must_end = grammar
            masks.append(TokenMask(upload(bits), upload(masked_rows)))
        if not rows:
            return LogitsEdits(masks=masks, processors=users)
        early = [c.output_index < c.request.params.min_tokens and r not in must_end for r, c in rows]
        key = np.asarray([(r, c.slot, is_early) for (r, c), is_early in zip(rows, early, strict=True)], np.int64)
        same = len(device_slots), key.tobytes()
        if self._fixed is None or same != self._fixed_for:
            self._fixed = self._fix(key, rows, device_slots)
            self._fixed_for = same
        fixed = self._fixed.edits
        edits = LogitsEdits(masks + fixed.masks, None, fixed.banned, fixed.bias, users)
        if self._fixed.words is not None:
            edits.bad_words = self._fixed.words
            edits.bad_words.lengths = positions[edits.bad_words.rows]
        if fixed.penalties is not None:
            edits.penalties = self._with_drafts(fixed.penalties, rows, positions)
        return edits

    def count(self, slots: Tensor, token_ids: Tensor, kept: Tensor | None) -> None:
        """Add the sampled ids of a step with penalties, where `kept`."""
        assert self._counts is not None
        count_tokens(self._counts, slots, token_ids, kept)

    def _fix(self, key: np.ndarray, rows: list[tuple[int, Chunk]], device_slots: Tensor) -> _Fixed:
        """`key` [N, 3]: row, slot, and whether its end is banned yet, of the rows with edits."""
        upload = self.state.staging.upload
        of_row = [(int(r), self._of_slot[slot], early) for r, slot, early in key.tolist()]
        edits = LogitsEdits()
        masked = [(r, e.mask) for r, e, _ in of_row if e.mask is not None]
        if masked:
            bits = upload(np.stack([mask for _, mask in masked]))
            edits.masks.append(TokenMask(bits, upload(np.asarray([r for r, _ in masked], np.int64))))
        bans = _pairs([(r, e.banned_early if early else e.banned) for r, e, early in of_row])
        if bans.size:
            banned = upload(bans)
            edits.banned = banned[0], banned[1]
        bias = _pairs([(r, e.bias_ids) for r, e, _ in of_row])
        if bias.size:
            where = upload(bias)
            edits.bias = where[0], where[1], upload(np.concatenate([e.bias for _, e, _ in of_row]))
        asking = np.asarray([r for r, e, _ in of_row if e.penalties], np.int64)
        if asking.size:
            assert self._counts is not None
            at = upload(asking)
            slots = device_slots[at]
            repetition, presence, frequency = (self.state.floats[slots, column] for column in PENALTIES)
            everybody = asking.size == len(device_slots)
            edits.penalties = Penalties(self._counts, slots, repetition, presence, frequency, None if everybody else at)
        words = [(r, c, w) for r, c in rows for w in self._of_slot[c.slot].words]
        return _Fixed(edits, asking, self._bad_words(words) if words else None)

    def _bad_words(self, words: list[tuple[int, Chunk, list[int]]]) -> BadWords:
        """All but their lengths."""
        upload = self.state.staging.upload
        width = max(len(w) for _, _, w in words) - 1
        prefixes = np.full((len(words), width), -1, np.int32)
        for i, (_, _, w) in enumerate(words):
            prefixes[i, width - len(w) + 1 :] = w[:-1]
        columns = [(r, w[-1], c.slot, len(c.request.prompt_ids)) for r, c, w in words]
        rows, last, slots, prompt_lens = upload(np.asarray(columns, np.int64).T.copy())
        return BadWords(rows, upload(prefixes), last, self.state.token_ids, slots, prompt_lens, slots)

    def _with_drafts(self, penalties: Penalties, rows: list[tuple[int, Chunk]], positions: Tensor) -> Penalties:
        """Let each row's penalties know the drafts before it; `positions` [R] is where the rows' own ids go."""
        assert self._fixed is not None
        place = {int(r): q for q, r in enumerate(self._fixed.penalty_rows)}
        drafts = [(place[r], r, c.slot, 1 + i) for r, c in rows if r in place for i in range(c.draft_index)]
        if not drafts:
            return penalties
        where, at, slots, back = self.state.staging.upload(np.asarray(drafts, np.int64).T.copy())
        ids = self.state.token_ids[slots, positions[at] - back].long()
        counts = counts_with_drafts(penalties.counts, penalties.slots, where, ids)
        own = torch.arange(len(counts), device=ids.device)
        return Penalties(counts, own, penalties.repetition, penalties.presence, penalties.frequency, penalties.rows)


def _pairs(ids: Sequence[tuple[int, np.ndarray]]) -> np.ndarray:
    """Each row with each of its ids: [2, N] int64."""
    found = [of_row for _, of_row in ids]
    rows = np.repeat(np.asarray([r for r, _ in ids], np.int64), [len(of_row) for of_row in found])
    return np.stack([rows, np.concatenate(found)])


def slot_edits(params: SamplingParams, vocab_size: int) -> SlotEdits | None:
    """What `params` (complete) do to the logits, or None for nothing."""
    ends = list(params.stop_token_ids or []) if params.min_tokens else []
    if params.min_tokens and not params.ignore_eos:
        ends += params.eos_token_ids
    banned = [w[0] for w in params.bad_word_ids if len(w) == 1]
    bias = params.logit_bias or {}
    edits = SlotEdits(
        bias_ids=np.fromiter(bias.keys(), np.int64, len(bias)),
        bias=np.fromiter(bias.values(), np.float32, len(bias)),
        banned=np.asarray(banned, np.int64),
        banned_early=np.asarray(banned + [t for t in ends if t < vocab_size], np.int64),
        words=[w for w in params.bad_word_ids if len(w) > 1],
        mask=pack_mask(params.allowed_token_ids, vocab_size) if params.allowed_token_ids else None,
        penalties=bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty not in (None, 1.0)),
    )
    used = bias or edits.banned_early.size or edits.words or edits.penalties or edits.mask is not None
    return edits if used else None
