"""Edits of the logits before sampling: masks, bad words, bans, bias, user processors, penalties; vectorized over rows.

Order, as in vLLM: token masks (allowed_token_ids, grammars), bad words, banned tokens (min_tokens), logit_bias, user
processors, then repetition, frequency and presence penalty. Hard bans are -inf, which no later stage lifts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from headrace.errors import ParameterError
from headrace.kernels.sample import add_mask
from headrace.sampling.params import LogitsProcessor

IN_PROMPT = 1 << 30  # of a count: the token occurs in the prompt; the bits below count its occurrences in the output
NEG_INF = float("-inf")


@dataclass(slots=True)
class TokenMask:
    """Bit v % 32 of word v / 32 set: token v is allowed in that row."""

    bits: Tensor  # [Q, ceil(V / 32)] int32
    rows: Tensor  # [Q] int64: of the logits, none twice


@dataclass(slots=True)
class BadWords:
    """B (row, word) pairs: the last token of a word is banned when the output so far ends with the tokens before it."""

    rows: Tensor  # [B] int64: row of the logits
    prefixes: Tensor  # [B, P] int32: the tokens before the last, right-aligned, -1 in front
    last: Tensor  # [B] int64
    history: Tensor  # [slots, L] int32: all tokens of each slot, prompt first
    slots: Tensor  # [B] int64: row of `history`
    prompt_lens: Tensor  # [B] int64: the prompt does not count
    lengths: Tensor  # [B] int64: tokens that exist before the one to be sampled


@dataclass(slots=True)
class Penalties:
    """Of Q of the rows; neutral values (1, 0, 0) leave a row's bits unchanged."""

    counts: Tensor  # [num_slots, V] int32, see load_counts
    slots: Tensor  # [Q] int64: row of `counts`
    repetition: Tensor  # [Q] float32
    presence: Tensor  # [Q] float32
    frequency: Tensor  # [Q] float32
    rows: Tensor | None = None  # [Q] int64: of the logits, none twice; None: all of them


@dataclass(slots=True)
class UserProcessor:
    row: int
    processors: Sequence[LogitsProcessor]
    output_ids: list[int]
    failed: Callable[[Exception], None]  # told what one of them raises


@dataclass(slots=True)
class LogitsEdits:
    """What is to be done to one step's logits; flat lists name (row, token) pairs."""

    masks: list[TokenMask] = field(default_factory=list)
    bad_words: BadWords | None = None
    banned: tuple[Tensor, Tensor] | None = None  # rows [N] int64, tokens [N] int64
    bias: tuple[Tensor, Tensor, Tensor] | None = None  # rows, tokens [N] int64 (no pair twice), values [N] float32
    processors: list[UserProcessor] = field(default_factory=list)
    penalties: Penalties | None = None

    @property
    def only_masks(self) -> bool:
        """Nothing is computed with logits that stay: they can be of any dtype."""
        return not (self.bad_words or self.banned or self.bias or self.processors or self.penalties)


def apply_edits(logits: Tensor, edits: LogitsEdits) -> None:
    """Apply all stages in order to logits [R, V] float32 (of any dtype for masks alone), in place."""
    for mask in edits.masks:
        add_mask(logits, mask.bits, mask.rows)
    if edits.bad_words is not None:
        apply_bad_words(logits, edits.bad_words)
    if edits.banned is not None:
        logits.index_put_(edits.banned, logits.new_full((), NEG_INF))  # assigning the number itself would wait for the device
    if edits.bias is not None:
        rows, tokens, values = edits.bias
        logits.index_put_((rows, tokens), values, accumulate=True)
    for user in edits.processors:
        apply_processors(logits, user)
    if edits.penalties is not None:
        apply_penalties(logits, edits.penalties)


def pack_mask(token_ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """The mask row [ceil(V / 32)] int32 that allows just `token_ids`."""
    allowed = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    allowed[np.asarray(token_ids, np.int64)] = True
    return np.packbits(allowed, bitorder="little").view("<i4")


def apply_bad_words(logits: Tensor, words: BadWords) -> None:
    """Ban the last token of each word whose first tokens are the tail of the row's output."""
    width = words.prefixes.shape[1]
    position = words.lengths[:, None] - width + torch.arange(width, device=logits.device)
    there = words.history[words.slots[:, None], position.clamp(min=0)] == words.prefixes
    match = ((there & (position >= words.prompt_lens[:, None])) | (words.prefixes < 0)).all(-1)
    # added, not assigned: two words may end in the same token, and only one of them match
    ban = torch.zeros_like(match, dtype=logits.dtype).masked_fill_(match, NEG_INF)
    logits.index_put_((words.rows, words.last), ban, accumulate=True)


def apply_processors(logits: Tensor, user: UserProcessor) -> None:
    """Run one request's processors on its row. What was -inf stays so: a processor cannot lift a mask.

    Where one raises, or returns something else than [V] numbers, the row becomes NaN: it fails, and no other row.
    """
    before = logits[user.row]
    row = before.clone()
    try:
        for processor in user.processors:
            row = _checked(processor(user.output_ids, row), before)
        logits[user.row] = row.to(before).masked_fill(before == NEG_INF, NEG_INF)
    except Exception as e:
        user.failed(e)
        logits[user.row] = torch.nan


def _checked(result: object, before: Tensor) -> Tensor:
    if isinstance(result, Tensor) and result.shape == before.shape:
        return result
    shown = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
    raise ParameterError("logits_processors", shown, f"processors that return a tensor {tuple(before.shape)}")


def apply_penalties(logits: Tensor, penalties: Penalties) -> None:
    """Repetition over prompt and output (Keskar et al. 2019: divides a positive logit, multiplies a negative one), then
    frequency and presence over the output (OpenAI: subtracted)."""
    rows = logits if penalties.rows is None else logits[penalties.rows]
    counts = penalties.counts[penalties.slots]
    repetition = penalties.repetition[:, None]
    penalized = torch.where(rows > 0, rows / repetition, rows * repetition)
    rows = torch.where(counts != 0, penalized, rows)
    outputs = counts & (IN_PROMPT - 1)
    rows.sub_(penalties.frequency[:, None] * outputs)
    rows.sub_(penalties.presence[:, None] * (outputs > 0))
    if penalties.rows is None:
        logits.copy_(rows)
    else:
        logits.index_copy_(0, penalties.rows, rows)


def token_counts(prompt_ids: np.ndarray, output_ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """For `load_counts`: the ids that occur, and the count of each: [2, N] int64."""
    counts = np.bincount(output_ids, minlength=vocab_size)
    counts[prompt_ids] |= IN_PROMPT
    ids = np.flatnonzero(counts)
    return np.stack([ids, counts[ids]])


def load_counts(counts: Tensor, slot: int, found: Tensor) -> None:
    """Set a slot's row of counts [num_slots, V] int32 to `found`, made by `token_counts`: when a request gets the slot."""
    row = counts[slot]
    row.zero_()
    row.index_put_((found[0],), found[1].int())


def count_tokens(counts: Tensor, slots: Tensor, token_ids: Tensor, kept: Tensor | None = None) -> None:
    """Add one occurrence of token_ids [R] in the outputs of slots [R] (int64), where `kept` [R]; pairs may repeat."""
    ones = torch.ones_like(slots, dtype=torch.int32) if kept is None else kept.to(torch.int32)
    counts.index_put_((slots, token_ids.long()), ones, accumulate=True)


def counts_with_drafts(counts: Tensor, slots: Tensor, rows: Tensor, drafts: Tensor) -> Tensor:
    """Token counts (load_counts) of each row [R, V] int32: of its slot [R], and of the drafts before it.

    rows, drafts [N] int64: `drafts[n]` stands before row `rows[n]`.
    """
    own = counts[slots]
    return own.index_put_((rows, drafts), torch.ones_like(rows, dtype=torch.int32), accumulate=True)
