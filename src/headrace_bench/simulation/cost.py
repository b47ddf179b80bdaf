"""How long a step takes: by the roofline of a card and a model, or as a recorded trace of steps says (trace_fit.py)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

Hosts = tuple[tuple[float, float], ...]  # (tokens, seconds of the loop for a step of so many at most), by tokens


class Work(NamedTuple):
    """What a step computes."""

    tokens: int  # rows
    seqs: int
    context: int  # tokens whose keys and values its plain decodes read
    pairs: float  # of queries and keys in the attention of its prefills
    sampled: int  # rows whose logits are computed
    used: float  # share of the KV blocks that requests hold


class StepCost(Protocol):
    """Steps have numbers: a model with noise gives each its own, always the same."""

    host: float  # seconds of the loop for a step, beside the device's
    prompt_hosts: Hosts  # the same where it has prompts
    blocking: bool  # the launch is the computation

    def seconds(self, work: Work, step: int) -> float:
        """Of the device."""

    def many_seconds(self, work: Work, step: int, count: int) -> np.ndarray:
        """[count]: of plain decodes from step number `step` on, each with a token more per sequence; `work` is the first's.

        The very numbers that seconds() gives one by one.
        """


@dataclass(slots=True)
class Roofline:
    """Bytes over bandwidth and operations over rate, for one of the ranks that share the work, over the share of this limit
    that steps of so many rows reach; plus the all-reduces.
    """

    weight_bytes: float  # that every step reads
    kv_bytes: float  # of one token
    row_flops: float  # of all matrices but the head, per row
    head_flops: float  # per sampled row
    pair_flops: float  # per pair of query and key
    bandwidth: float
    flops: float
    shares: tuple[tuple[int, float], ...]  # (rows, share of the limit), by rows; in between linear over log(rows)
    host: float
    prompt_shares: tuple[tuple[int, float], ...] = ()  # of steps with prefill, where they have others
    cache_share: float | None = None  # of the decodes' keys and values, where they have another
    expert_bytes: float = 0.0  # of all experts, of which a step reads those that some row chose
    chosen: float = 0.0  # share of them that one row has
    reduces: int = 0  # all-reduces in a step
    reduce_bytes: float = 0.0  # of one row in one of them
    reduce_times: tuple[tuple[float, float], ...] = ()  # (bytes, seconds), by bytes
    link: float = math.inf  # bytes per second of a large all-reduce
    prompt_hosts: Hosts = ()
    blocking: bool = False
    _by_rows: dict[tuple[int, bool], tuple[float, float]] = field(default_factory=dict, repr=False, compare=False)

    def seconds(self, work: Work, step: int) -> float:
        share, reducing = self._of_rows(work.tokens, work.tokens > work.seqs)
        operations = self.row_flops * work.tokens + self.head_flops * work.sampled
        products = max(self._weights(work.tokens) / self.bandwidth, operations / self.flops)
        attention = work.pairs * self.pair_flops / self.flops
        reading = self.kv_bytes / self.bandwidth / (self.cache_share or share)
        return (products + attention) / share + reducing + work.context * reading

    def _weights(self, rows: int) -> float:
        """Bytes that a step of so many rows reads; see headrace_bench/roofline.py."""
        return self.weight_bytes + self.expert_bytes * (1 - (1 - self.chosen) ** rows)

    def many_seconds(self, work: Work, step: int, count: int) -> np.ndarray:
        fixed = self.seconds(work._replace(context=0), step)
        contexts = work.context + work.seqs * np.arange(count)
        return fixed + contexts * (self.kv_bytes / self.bandwidth / (self.cache_share or self._of_rows(work.tokens, False)[0]))

    def _of_rows(self, rows: int, prefill: bool) -> tuple[float, float]:
        """Share of the limit, and seconds of the all-reduces."""
        found = self._by_rows.get((rows, prefill))
        if found is None:
            points = (prefill and self.prompt_shares) or self.shares
            share = float(np.interp(math.log(rows), [math.log(r) for r, _ in points], [s for _, s in points]))
            found = self._by_rows[rows, prefill] = share, self.reduces * self.reduce_seconds(rows)
        return found

    def reduce_seconds(self, rows: int) -> float:
        """Of one all-reduce."""
        if not self.reduces:
            return 0.0
        size, points = rows * self.reduce_bytes, self.reduce_times
        small = float(np.interp(size, [b for b, _ in points], [s for _, s in points]))
        return max(small, size / self.link)


@dataclass(frozen=True, slots=True)
class Constant:
    """Every step takes as long as its rows say: for tests, and for what has no better model."""

    base: float
    per_token: float = 0.0
    host: float = 0.0
    blocking: bool = True
    prompt_hosts: Hosts = ()

    def seconds(self, work: Work, step: int) -> float:
        return self.base + self.per_token * work.tokens

    def many_seconds(self, work: Work, step: int, count: int) -> np.ndarray:
        return np.full(count, self.seconds(work, step))
