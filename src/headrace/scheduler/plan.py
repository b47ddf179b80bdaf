"""What one step does, and what came of it, as messages: the scheduler writes a plan, the worker a result. No torch here.

A plan says all that the worker must know of requests: what is said at their admission is kept there, by slot. So the worker
can be in another process, or in several.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

import msgspec
import numpy as np

from headrace.sampling.params import SamplingParams


class Admitted(msgspec.Struct, array_like=True, eq=False):
    """A request that got a slot with this step: the worker (re)loads what it keeps of the slot."""

    slot: int
    token_ids: array  # int32, all that are known
    num_prompt: int
    num_cached: int  # tokens whose KV was found in the prefix index
    block_ids: list[int]  # the whole table
    params: SamplingParams  # but for what only the host can do: users' functions, grammars
    seed: int
    pooling: str | None
    snapshot: int = -1  # of layers that keep a state: with which one it begins


class NewBlocks(NamedTuple):
    """Blocks appended to the table of a slot that the worker knows, from index `column` on."""

    slot: int
    column: int
    blocks: list[int]


class StepPlan(msgspec.Struct, array_like=True, eq=False):
    """S sequences, each the next tokens of one request: plain decodes first, then decodes with drafts, then prefills.

    The sequence s computes `counts[s]` tokens, at positions [starts[s], starts[s] + counts[s]). If it `samples`, it reaches the
    end of what exists, and its last 1 + drafts[s] rows are sampled: the last rows are guesses of what the rows before them
    sample, and each is verified.

    With `unverified` > 0 the step before this one verifies so many drafts of the request and has not settled: `starts` is that
    of no draft accepted, and the device adds what it did accept (at most so many; -1: the step came to nothing, and this one
    computes its token again).

    The arrays of the plain decodes are the same objects in every step, but for `starts`, as long as the same requests decode.
    """

    step: int
    version: int  # steps of equal versions have the same plain decodes, in the same slots
    num_decodes: int  # leading sequences of one token each that sample: plain decodes, of slots that the worker knows
    ids: list[str]  # of the requests
    slots: np.ndarray  # [S] int32, as all but `samples`
    starts: np.ndarray
    counts: np.ndarray
    drafts: np.ndarray
    unverified: np.ndarray
    samples: np.ndarray  # [S] bool
    admitted: list[Admitted] = []
    new_blocks: list[NewBlocks] = []
    guesses: dict[int, list[int]] = {}  # by sequence, where the host guesses: ids from start + 1 on; else the worker drafts
    kept: list[tuple[int, int]] = []  # (slot, snapshot): the state behind this step is to be kept there

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def is_plain(self) -> bool:
        """Nothing but plain decodes: nearly always."""
        return self.num_decodes == len(self.ids)

    @property
    def is_decode(self) -> bool:
        """Every row samples the next token, or one after drafts, of a request whose slot the worker knows already."""
        return self.is_plain or (not self.admitted and bool((self.samples & (self.counts == 1 + self.drafts)).all()))

    @property
    def num_tokens(self) -> int:
        return self.num_decodes if self.is_plain else int(self.counts.sum())

    @property
    def num_drafts(self) -> int:
        return 0 if self.is_plain else int(self.drafts.sum())

    @property
    def num_prefill(self) -> int:
        """Tokens of sequences that are more than a token and its drafts."""
        return 0 if self.is_plain else int(self.counts[self.counts > 1 + self.drafts].sum())

    @property
    def any_unverified(self) -> bool:
        return not self.is_plain and bool(self.unverified.any())

    @property
    def num_sampled(self) -> np.ndarray:
        """Rows of each sequence whose logits are sampled."""
        return self.counts if self.is_plain else self.samples * (1 + self.drafts)


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Raw logprobs at one position: the actual token first, then the most likely ones. `rank` is the actual one's, from 1."""

    ids: list[int]
    logprobs: list[float]
    rank: int


class StepResult(msgspec.Struct, array_like=True, eq=False):
    """What a step produced. Sequences are those of its plan."""

    token_ids: list[int]  # of all sequences, one after the other
    # how many each sequence got [S]. A plain decode always has one; others none if they do not sample, or have drafts and are
    # to be computed again without (a NaN of theirs reaches the rows before them in attention)
    counts: list[int]
    failed: frozenset[int] = frozenset()  # sequences that have no valid result
    logprobs: dict[int, list[TokenLogprobs]] = {}  # of the sequences that asked for them, of each id
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}  # of the tokens behind start that the sequence's rows predict
    pooled: dict[int, np.ndarray] = {}  # [H]: the sum of the rows, or the last one
