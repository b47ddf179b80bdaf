"""What requests do to their logits (bias, bans, masks, penalties), made into the edits of a step.

The arrays of a request are made once, when it gets its slot. Those of a step are put together from them and stay on the device
while the same rows ask for the same: a steady decode builds and uploads nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.cache.memory import zeros
from headrace.kernels.prepare import Rows
from headrace.kernels.tables import Float, Int
from headrace.sampling.checks import held_off
from headrace.sampling.params import SamplingParams
from headrace.sampling.penalties import (
    BadWords,
    LogitsEdits,
    Penalties,
    TokenMask,
    UserProcessor,
    count_tokens,
    counts_with_drafts,
    load_counts,
    pack_mask,
    token_counts,
)
from headrace.scheduler.plan import Admitted
from headrace.structured_output.manager import GrammarMasks
from headrace.worker.batch_state import BatchState

PENALTIES = (Float.REPETITION_PENALTY, Float.PRESENCE_PENALTY, Float.FREQUENCY_PENALTY)


class SampledRow(NamedTuple):
    """A row that is sampled, as the host knows it."""

    row: int  # of the logits
    slot: int
    output_index: int  # which output token it samples, if no unverified draft is right
    num_before: int  # drafts that stand before its token and with it


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
    min_tokens: int


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

    def load(self, new: Admitted) -> bool:
        """A request got its slot. Whether it does anything to its logits."""
        self._fixed = None
        edits = slot_edits(new.params, self.vocab_size)
        if edits is None:
            self._of_slot.pop(new.slot, None)
            return False
        self._of_slot[new.slot] = edits
        if edits.penalties:
            if self._counts is None:
                self._counts = zeros((self.state.dummy_slot + 1, self.vocab_size), torch.int32, self.state.device)
            ids = np.frombuffer(new.token_ids, np.int32)
            found = token_counts(ids[: new.num_prompt], ids[new.num_prompt :], self.vocab_size)
            load_counts(self._counts, new.slot, self.state.staging.upload(found))
        return True

    def of_step(
        self, special: Sequence[SampledRow], rows: Rows, grammar: GrammarMasks | None, users: Sequence[UserProcessor]
    ) -> LogitsEdits | None:
        """Of all sampled `rows`, of which the `special` ones need more than the fused sampler."""
        asking = [r for r in special if r.slot in self._of_slot]
        if not asking and not users and grammar is None:
            return None
        upload = self.state.staging.upload
        masks: list[TokenMask] = []
        must_end: set[int] = set()  # where the grammar leaves the end token alone, min_tokens cannot ban it
        if grammar is not None:
            must_end = grammar.must_end
            masks.append(TokenMask(upload(grammar.bits), upload(grammar.rows)))
        if not asking:
            return LogitsEdits(masks=masks, processors=list(users))
        early = [r.output_index < self._of_slot[r.slot].min_tokens and r.row not in must_end for r in asking]
        key = np.asarray([(r.row, r.slot, is_early) for r, is_early in zip(asking, early, strict=True)], np.int64)
        same = len(rows.seq_slots), key.tobytes()
        if self._fixed is None or same != self._fixed_for:
            self._fixed = self._fix(key, rows.seq_slots)
            self._fixed_for = same
        fixed = self._fixed.edits
        edits = LogitsEdits(masks + fixed.masks, None, fixed.banned, fixed.bias, list(users))
        if self._fixed.words is not None:
            edits.bad_words = self._fixed.words
            edits.bad_words.lengths = rows.seq_lens[edits.bad_words.rows].long()
        if fixed.penalties is not None:
            edits.penalties = self._with_drafts(fixed.penalties, asking, rows)
        return edits

    def count(self, rows: Rows, token_ids: Tensor, kept: Tensor | None) -> None:
        """Add the sampled ids of a step with penalties, where `kept`."""
        assert self._counts is not None
        count_tokens(self._counts, rows.seq_slots.long(), token_ids, kept)

    def _fix(self, key: np.ndarray, seq_slots: Tensor) -> _Fixed:
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
            slots = seq_slots[at].long()
            repetition, presence, frequency = (self.state.tables.floats[slots, int(column)] for column in PENALTIES)
            everybody = asking.size == len(seq_slots)
            edits.penalties = Penalties(self._counts, slots, repetition, presence, frequency, None if everybody else at)
        words = [(r, slot, w) for r, slot, _ in key.tolist() for w in self._of_slot[slot].words]
        return _Fixed(edits, asking, self._bad_words(words) if words else None)

    def _bad_words(self, words: list[tuple[int, int, list[int]]]) -> BadWords:
        """All but their lengths."""
        upload = self.state.staging.upload
        width = max(len(w) for _, _, w in words) - 1
        prefixes = np.full((len(words), width), -1, np.int32)
        for i, (_, _, w) in enumerate(words):
            prefixes[i, width - len(w) + 1 :] = w[:-1]
        columns = [(r, w[-1], slot, self.state.host_ints[slot, Int.PROMPT_LEN]) for r, slot, w in words]
        rows, last, slots, prompt_lens = upload(np.asarray(columns, np.int64).T.copy())
        return BadWords(rows, upload(prefixes), last, self.state.token_ids, slots, prompt_lens, slots)

    def _with_drafts(self, penalties: Penalties, asking: Sequence[SampledRow], rows: Rows) -> Penalties:
        """Let each row's penalties know the drafts before it."""
        assert self._fixed is not None
        place = {int(r): q for q, r in enumerate(self._fixed.penalty_rows)}
        drafts = [(place[r.row], r.row, r.slot, 1 + i) for r in asking if r.row in place for i in range(r.num_before)]
        if not drafts:
            return penalties
        where, at, slots, back = self.state.staging.upload(np.asarray(drafts, np.int64).T.copy())
        ids = self.state.token_ids[slots, rows.seq_lens[at].long() - back].long()
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
    banned = [w[0] for w in params.bad_word_ids if len(w) == 1]
    bias = params.logit_bias or {}
    edits = SlotEdits(
        bias_ids=np.fromiter(bias.keys(), np.int64, len(bias)),
        bias=np.fromiter(bias.values(), np.float32, len(bias)),
        banned=np.asarray(banned, np.int64),
        banned_early=np.asarray(banned + [t for t in held_off(params) if t < vocab_size], np.int64),
        words=[w for w in params.bad_word_ids if len(w) > 1],
        mask=pack_mask(params.allowed_token_ids, vocab_size) if params.allowed_token_ids else None,
        penalties=bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty not in (None, 1.0)),
        min_tokens=params.min_tokens,
    )
    used = bias or edits.banned_early.size or edits.words or edits.penalties or edits.mask is not None
    return edits if used else None
