"""Edits of the logits before sampling: masks, bad words, bans, bias, user processors, penalties; vectorized over rows.

Order, as in vLLM: token masks (allowed_token_ids, grammars), bad words, banned tokens (min_tokens), logit_bias, user
processors, then repetition, frequency and presence penalty. Hard bans are -inf, which no later stage lifts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headrace.errors import ParameterError
from headrace.kernels.mask import add_mask
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
    """Of all R rows; neutral values (1, 0, 0) leave a row's bits unchanged."""

    counts: Tensor  # [num_slots, V] int32, see load_counts
    slots: Tensor  # [R] int64: row of `counts`
    repetition: Tensor  # [R] float32
    presence: Tensor  # [R] float32
    frequency: Tensor  # [R] float32


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
        logits[edits.banned] = NEG_INF
    if edits.bias is not None:
        rows, tokens, values = edits.bias
        logits.index_put_((rows, tokens), values, accumulate=True)
    for user in edits.processors:
        apply_processors(logits, user)
    if edits.penalties is not None:
        apply_penalties(logits, edits.penalties)


def pack_mask(token_ids: Sequence[int], vocab_size: int) -> Tensor:
    """The mask row [ceil(V / 32)] int32 that allows just `token_ids`, on the CPU."""
    allowed = torch.zeros(-(-vocab_size // 32) * 32, dtype=torch.int32)
    allowed[torch.tensor(token_ids, dtype=torch.int64)] = 1
    bits = allowed.view(-1, 32) << torch.arange(32, dtype=torch.int32)
    return bits.sum(-1, dtype=torch.int32)  # each bit once: bit 31 wraps into the sign, as it should


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
    counts = penalties.counts[penalties.slots]
    repetition = penalties.repetition[:, None]
    penalized = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits.copy_(torch.where(counts != 0, penalized, logits))
    outputs = counts & (IN_PROMPT - 1)
    logits.sub_(penalties.frequency[:, None] * outputs)
    logits.sub_(penalties.presence[:, None] * (outputs > 0))


def load_counts(counts: Tensor, slot: int, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
    """Set a slot's row of counts [num_slots, V] int32 from all known ids: at admission and when a request resumes."""
    row = counts[slot]
    row.zero_()
    if output_ids:
        ids = torch.tensor(output_ids, dtype=torch.int64).to(counts.device)
        row.index_put_((ids,), torch.ones_like(ids, dtype=torch.int32), accumulate=True)
    if prompt_ids:
        ids = torch.tensor(list(set(prompt_ids)), dtype=torch.int64).to(counts.device)
        row[ids] |= IN_PROMPT


def count_tokens(counts: Tensor, slots: Tensor, token_ids: Tensor, kept: Tensor | None = None) -> None:
    """Add one occurrence of token_ids [R] in the outputs of slots [R] (int64), where `kept` [R]; pairs may repeat."""
    ones = torch.ones_like(slots, dtype=torch.int32) if kept is None else kept.to(torch.int32)
    counts.index_put_((slots, token_ids.long()), ones, accumulate=True)
