"""What the scheduler is held to: sizes and rules, checked once. Its counters. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headrace.errors import ParameterError


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """All that bounds a step and a request, decided; the worker's tables and the scheduler are made by it.

    Sizes in tokens. Raises ParameterError on a value out of range.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int
    num_snapshots: int = 0  # states that the prefix index can keep; 0: layers have none, or nobody goes on from another's
    max_draft_rows: int = 0  # decodes are filled up to so many rows with drafts; 0: no speculation
    max_drafts: int = 0  # of a request in a step; 0: as many as there are rows for
    enable_prefix_caching: bool = True
    kv_cache_events: Literal["off", "hashes", "tokens"] = "off"  # what the prefix index can tell of what enters and leaves it
    max_itl: float | None = None  # seconds that a step with decodes is expected to take at most, but for one block of prefill
    policy: Literal["fcfs", "priority"] = "fcfs"

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size", "num_blocks"):
            if getattr(self, name) < 1:
                raise ParameterError(name, getattr(self, name), "an integer >= 1")
        if self.policy not in ("fcfs", "priority"):
            raise ParameterError("policy", self.policy, "one of fcfs, priority")

    @property
    def max_len(self) -> int:
        """Tokens at which every request ends; KV is kept for all of them but the last."""
        return min(self.max_model_len, self.num_blocks * self.block_size + 1)

    @property
    def max_decode_rows(self) -> int:
        """Rows of the largest step in which all are sampled: one for each sequence, or those of drafts."""
        return max(self.max_num_seqs, self.max_draft_rows)


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the start."""

    num_preemptions: int = 0
    prefix_query_tokens: int = 0  # prompt tokens looked up in the prefix index, at first admissions
    prefix_hit_tokens: int = 0
