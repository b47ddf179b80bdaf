"""The router of few rows: its logits in one kernel, from which each program of the experts' kernels chooses by itself.

So there is no kernel that chooses, and none that waits for it. Logits come from memory with the same bits for every program,
and are compared as whole numbers: all programs of a row choose the same experts in the same order. A program of the router's
kernel has one expert's logit over all columns, so that nothing is summed by another; its weights are loaded before the wait.
Programs behind these make whole numbers of x, if the experts want them (experts_digits.py).
"""

# mypy: disable-error-code="assignment, var-annotated"
# (kernels grow tuples in loops that the compiler unrolls)

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from headrace.kernels.experts_digits import Digits, row_digits
from headrace.kernels.experts_route import Routing, Squares, ordered
from headrace.kernels.launch import gdc_launch_dependents, gdc_wait, jit, next_power_of_2, pdl, tl

BLOCK_K = 128  # columns of a step: 16 bytes of the router for each thread of the one warp


@jit(do_not_specialize=["sumsq_tiles"])
def _row_logits(
    x_ptr, router_ptr, bias_ptr, sumsq_ptr, logits_ptr, factors_ptr, numbers_ptr, scales_ptr, E, sumsq_tiles, eps,
    K: tl.constexpr, BLOCK_K: tl.constexpr, SUMSQ_BLOCK: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:  # at once: the next kernel reads nothing before its own wait
        gdc_launch_dependents()
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    expert = tl.program_id(0)
    row = tl.program_id(1)
    if WIDTH > 0:  # noqa: SIM102  (the compiler decides this one)
        if expert >= E:
            if PDL:
                gdc_wait()
            row_digits(x_ptr, numbers_ptr, scales_ptr, row, expert - E, K, WIDTH)
            return
    rk = tl.arange(0, BLOCK_K)
    steps = ()
    for i in tl.static_range(STEPS):
        k = i * BLOCK_K + rk
        if (i + 1) * BLOCK_K <= K:
            steps = steps + (tl.load(router_ptr + expert * K + k),)
        else:
            steps = steps + (tl.load(router_ptr + expert * K + k, mask=k < K, other=0.0),)
    bias = 0.0
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + expert).to(tl.float32)
    if PDL:
        gdc_wait()
    tile = tl.arange(0, SUMSQ_BLOCK)
    squares = tl.load(sumsq_ptr + row * sumsq_tiles + tile, mask=tile < sumsq_tiles, other=0.0)
    acc = tl.zeros([BLOCK_K], tl.float32)
    x_ptr += row.to(tl.int64) * K
    for i in tl.static_range(STEPS):
        k = i * BLOCK_K + rk
        if (i + 1) * BLOCK_K <= K:
            x = tl.load(x_ptr + k)
        else:
            x = tl.load(x_ptr + k, mask=k < K, other=0.0)
        acc += steps[i] * x.to(tl.float32)
    factor = tl.rsqrt(tl.sum(squares, 0) / K + eps)
    tl.store(logits_ptr + row * E + expert, tl.sum(acc, 0) * factor + bias)
    if expert == 0:
        tl.store(factors_ptr + row, factor)


@jit
def _keys(logits_ptr, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr):
    """Logits [BLOCK_E] as whole numbers of the same order, and themselves. What is no number is the least. Read from the L2
    cache: it may be before a wait."""
    WORST: tl.constexpr = -3e38
    experts = tl.arange(0, BLOCK_E)
    logits = tl.load(logits_ptr + experts, mask=experts < EXPERTS, other=0.0, cache_modifier=".cg")
    keys = tl.where(logits > WORST, logits, WORST) + 0.0  # a zero has no sign
    return tl.where(experts < EXPERTS, ordered(keys.to(tl.int32, bitcast=True)), -(1 << 31)), logits


@jit
def _first_of(keys, BLOCK_E: tl.constexpr):
    """The expert of the largest key, of equals the first, that key, and the keys without it."""
    experts = tl.arange(0, BLOCK_E)
    top = tl.max(keys, 0)
    at = tl.min(tl.where(keys == top, experts, BLOCK_E), 0)
    return at, top, tl.where(experts == at, -(1 << 31), keys)


@jit
def best_experts(logits_ptr, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, CHOSEN: tl.constexpr):
    """The experts of the highest logits, best first, of equals the lower id, and their logits; and all logits [BLOCK_E]."""
    keys, logits = _keys(logits_ptr, EXPERTS, BLOCK_E)
    ids = ()
    best = ()
    for _ in tl.static_range(CHOSEN):
        at, top, keys = _first_of(keys, BLOCK_E)
        ids = ids + (at,)
        best = best + (ordered(top).to(tl.float32, bitcast=True),)
    return ids, best, logits


@jit
def shares_of(
    best, logits, scale, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, CHOSEN: tl.constexpr, SCORE: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):  # fmt: skip
    """The shares of the chosen experts, of what `best_experts` gives."""
    there = tl.arange(0, BLOCK_E) < EXPERTS
    scores = ()
    total = 0.0
    for j in tl.static_range(CHOSEN):
        score = tl.sigmoid(best[j]) if SCORE == "sigmoid" else tl.exp(best[j] - best[0])
        scores = scores + (score,)
        total += score
    if SCORE == "softmax" and not RENORMALIZE:
        total = tl.sum(tl.where(there, tl.exp(logits - best[0]), 0.0), 0)
    if SCORE == "sigmoid":
        total = total + 1e-20 if RENORMALIZE else 1.0
    factor = scale / total
    nothing = tl.max((there & (logits != logits)).to(tl.int32), 0)  # no number, if one is none
    factor = tl.where(nothing > 0, float("nan"), factor)
    shares = ()
    for j in tl.static_range(CHOSEN):
        shares = shares + (scores[j] * factor,)
    return shares


@jit
def expert_of(pair, row, ids_ptr, logits_ptr, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, CHOSEN: tl.constexpr):
    """The expert of a pair of a token and one of its choices; read after the wait."""
    if BLOCK_E > 0:
        keys, _ = _keys(logits_ptr + row * EXPERTS, EXPERTS, BLOCK_E)
        for _ in range(pair % CHOSEN):
            _, _, keys = _first_of(keys, BLOCK_E)
        expert, _, _ = _first_of(keys, BLOCK_E)
    else:
        expert = tl.load(ids_ptr + pair)
    return expert


@jit
def choice_of(
    row, ids_ptr, shares_ptr, logits_ptr, share_scale, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, CHOSEN: tl.constexpr,
    SCORE: tl.constexpr, RENORMALIZE: tl.constexpr,
):  # fmt: skip
    """A token's experts and their shares. What they are made of was written by a kernel that had ended when the one before let
    this one start: it may be read before the wait, from the L2 cache, as what lies in the multiprocessor's may be older."""
    ids = ()
    shares = ()
    if BLOCK_E > 0:
        ids, best, logits = best_experts(logits_ptr + row * EXPERTS, EXPERTS, BLOCK_E, CHOSEN)
        shares = shares_of(best, logits, share_scale, EXPERTS, BLOCK_E, CHOSEN, SCORE, RENORMALIZE)
    else:
        for j in tl.static_range(CHOSEN):
            ids = ids + (tl.load(ids_ptr + row * CHOSEN + j, cache_modifier=".cg"),)
            shares = shares + (tl.load(shares_ptr + row * CHOSEN + j, cache_modifier=".cg"),)
    return ids, shares


def chooses_by_logits(correction: Tensor | None, routing: Routing) -> bool:
    """Whether the experts of the highest logits are those that are chosen."""
    return correction is None and routing.groups == 1


def row_logits(
    x: Tensor, router: Tensor, router_bias: Tensor | None, squares: Squares, numbers: Digits | None = None
) -> tuple[Tensor, Tensor]:
    """x [T, H], router [E, H] float32, bias [E] -> logits [T, E] of the normed rows, and their norm factors [T]; `numbers`
    become those of x."""
    (rows, width), experts = x.shape, router.shape[0]
    logits = torch.empty((rows, experts), dtype=torch.float32, device=x.device)
    factors = torch.empty(rows, dtype=torch.float32, device=x.device)
    held = 0 if numbers is None else numbers.numbers.shape[2]
    _row_logits[experts + held // 128, rows](
        x, router, router_bias, squares.sums, logits, factors, *(numbers or (None, None)), E=experts,
        sumsq_tiles=squares.sums.shape[1], eps=squares.eps, K=width, BLOCK_K=BLOCK_K,
        SUMSQ_BLOCK=max(256, next_power_of_2(squares.sums.shape[1])), WIDTH=held, num_warps=1, **pdl(x),
    )  # fmt: skip
    return logits, factors


class Choice(NamedTuple):
    """Which experts rows have: `ids` and `shares` [T, k], or the `logits` [T, E] float32 of which `routing` makes them."""

    ids: Tensor | None
    shares: Tensor | None
    logits: Tensor | None = None
    routing: Routing | None = None

    @property
    def rows(self) -> int:
        of = self.logits if self.ids is None else self.ids
        assert of is not None
        return len(of)

    @property
    def chosen(self) -> int:
        if self.ids is not None:
            return self.ids.shape[1]
        assert self.routing is not None
        return self.routing.chosen

    def arguments(self) -> dict[str, Any]:
        """Those of a kernel that learns the experts; BLOCK_E 0: from ids."""
        experts = 0 if self.logits is None else self.logits.shape[1]
        return {
            "ids_ptr": self.ids, "logits_ptr": self.logits, "CHOSEN": self.chosen, "EXPERTS": experts,
            "BLOCK_E": next_power_of_2(experts) if experts else 0,
        }  # fmt: skip

    def share_arguments(self) -> dict[str, Any]:
        """And of one that learns their shares."""
        score, renormalize, scale = "", False, 1.0
        if self.routing is not None:
            score, renormalize, scale = self.routing.score, self.routing.renormalize, self.routing.scale
        return {"shares_ptr": self.shares, "SCORE": score, "RENORMALIZE": renormalize, "share_scale": scale}
