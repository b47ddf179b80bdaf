"""Which experts a token has, on a card: the router's logits, and of them the chosen experts and their shares.

The logits are float32 products of x and the float32 router whose sums have one order for any number of rows: K is cut at the
same columns always, and the kernel that chooses adds up the parts in their order. Tensor cores multiply bfloat16 rows by the
router in three pieces of eight bits, which together are the router exactly.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from headrace.kernels.launch import gdc_launch_dependents, gdc_wait, jit, next_power_of_2, pdl, tl, touch

BLOCK_E = 16
BLOCK_K = 128
SMALLEST_PART = 128  # columns
MOST_PARTS = 16
PROGRAMS = 256  # that fill a card; where there are as many, one has more rows, and all experts one after the other


class Routing(Protocol):
    """How a token chooses; an ExpertsConfig has it."""

    @property
    def chosen(self) -> int: ...
    @property
    def score(self) -> Literal["softmax", "sigmoid", "chosen"]: ...
    @property
    def renormalize(self) -> bool: ...
    @property
    def scale(self) -> float: ...
    @property
    def groups(self) -> int: ...
    @property
    def groups_chosen(self) -> int: ...


@jit(do_not_specialize=["T"])
def _router_parts(
    x_ptr, router_ptr, out_ptr, T, E, K,
    PART: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, TILES: tl.constexpr,
    PIECES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    rt = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    re = tl.program_id(1) * (TILES * BLOCK_E) + tl.arange(0, BLOCK_E)
    part = tl.program_id(2)
    rk = part * PART + tl.arange(0, BLOCK_K)
    rows = x_ptr + tl.minimum(rt, T - 1)[None, :].to(tl.int64) * K + rk[:, None]
    if PDL:
        line = part * PART + tl.arange(0, PART // 32) * 32
        touch(router_ptr + tl.minimum(re, E - 1)[:, None] * K + tl.minimum(line, K - 1)[None, :])
        gdc_wait()
        gdc_launch_dependents()
    ONCE: tl.constexpr = PART == BLOCK_K  # x is loaded for all tiles of experts
    if ONCE:
        x = tl.load(rows, mask=(rk < K)[:, None], other=0.0)
    for _ in range(TILES):
        router = router_ptr + tl.minimum(re, E - 1)[:, None] * K + rk[None, :]
        acc = tl.zeros([BLOCK_E, BLOCK_T], tl.float32)
        small = tl.zeros([BLOCK_E, BLOCK_T], tl.float32)  # what the router's second and third piece add: chains of their own
        smaller = tl.zeros([BLOCK_E, BLOCK_T], tl.float32)
        for k in range(0, PART, BLOCK_K):
            w = tl.load(router + k, mask=(rk + k < K)[None, :], other=0.0)
            if not ONCE:
                x = tl.load(rows + k, mask=(rk + k < K)[:, None], other=0.0)
            if PIECES:
                first = w.to(tl.bfloat16)
                w -= first.to(tl.float32)
                second = w.to(tl.bfloat16)
                third = (w - second.to(tl.float32)).to(tl.bfloat16)
                smaller = tl.dot(third, x, smaller)
                small = tl.dot(second, x, small)
                acc = tl.dot(first, x, acc)
            else:
                acc = tl.dot(w, x.to(tl.float32), acc, input_precision="ieee")
        acc += small + smaller
        place = (part * T + rt)[None, :].to(tl.int64) * E + re[:, None]
        tl.store(out_ptr + place, acc, mask=(rt < T)[None, :] & (re < E)[:, None])
        re += BLOCK_E


def parts_of(width: int) -> tuple[int, int]:
    """Columns of a part, and how many parts there are."""
    part = max(SMALLEST_PART, next_power_of_2(-(-width // MOST_PARTS)))
    return part, -(-width // part)


def router_tile(rows: int, experts: int, width: int, itemsize: int) -> tuple[int, int]:
    """Rows of a program, and tiles of experts (measured on an H200 with 128 experts of 2048 columns, and with 32 of 2880)."""
    part, parts = parts_of(width)
    if itemsize != 2 or rows <= 64:
        return 16, 1
    of_experts = -(-experts // BLOCK_E)
    larger = [(256, of_experts)] if part == BLOCK_K else []
    larger += [(128, -(-of_experts // n)) for n in (1, 2, 4)]
    for block_t, tiles in larger:
        if tiles > 1 and -(-rows // block_t) * -(-of_experts // tiles) * parts >= PROGRAMS:
            return block_t, tiles
    return 64, 1


def router_parts(x: Tensor, router: Tensor) -> Tensor:
    """x [T, H], router [E, H] float32 -> [parts, T, E] float32, whose sum over the parts are the logits."""
    (rows, width), experts = x.shape, router.shape[0]
    part, parts = parts_of(width)
    out = torch.empty((parts, rows, experts), dtype=torch.float32, device=x.device)
    if rows:
        pieces = x.dtype == torch.bfloat16
        block_t, tiles = router_tile(rows, experts, width, 2 if pieces else 4)
        _router_parts[-(-rows // block_t), -(-experts // (BLOCK_E * tiles)), parts](
            x.contiguous(), router, out, T=rows, E=experts, K=width, PART=part, BLOCK_T=block_t, BLOCK_E=BLOCK_E,
            BLOCK_K=BLOCK_K, TILES=tiles, PIECES=pieces, num_warps=4, num_stages=2, **pdl(x),
        )  # fmt: skip
    return out


@jit
def ordered(bits):
    """The bits of floats as whole numbers of the same order, and back. A warp finds the largest of these in one instruction."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit(do_not_specialize=["T", "sumsq_tiles"])
def _route(
    parts_ptr, bias_ptr, correction_ptr, sumsq_ptr, ids_ptr, shares_ptr, factors_ptr, T, scale, sumsq_tiles, eps,
    WIDTH: tl.constexpr, SUMSQ_BLOCK: tl.constexpr, PARTS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr,
    GROUPS_CHOSEN: tl.constexpr, CHOSEN: tl.constexpr, BLOCK_C: tl.constexpr, SCORE: tl.constexpr,
    RENORMALIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    WORST: tl.constexpr = -3e38  # of an expert that there is; others, and those that are taken, are below
    NONE: tl.constexpr = float("-inf")
    TAKEN: tl.constexpr = -(1 << 31)
    row = tl.program_id(0)
    groups, members = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_S)
    experts = groups[:, None] * SIZE + members[None, :]
    there = (groups < GROUPS)[:, None] & (members < SIZE)[None, :]
    bias = tl.zeros([BLOCK_G, BLOCK_S], tl.float32)
    correction = bias
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + experts, mask=there, other=0.0).to(tl.float32)
    if correction_ptr is not None:
        correction = tl.load(correction_ptr + experts, mask=there, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    logits = tl.load(parts_ptr + row.to(tl.int64) * (GROUPS * SIZE) + experts, mask=there, other=0.0)
    for part in tl.static_range(1, PARTS):
        logits += tl.load(parts_ptr + (part * T + row).to(tl.int64) * (GROUPS * SIZE) + experts, mask=there, other=0.0)
    if SUMSQ_BLOCK > 0:
        tile = tl.arange(0, SUMSQ_BLOCK)
        squares = tl.load(sumsq_ptr + row * sumsq_tiles + tile, mask=tile < sumsq_tiles, other=0.0)
        factor = tl.rsqrt(tl.sum(squares, 0) / WIDTH + eps)
        tl.store(factors_ptr + row, factor)
        logits = logits * factor
    if bias_ptr is not None:
        logits += bias
    if SCORE == "softmax":
        highest = tl.max(tl.max(tl.where(there, logits, NONE), 1), 0)
        scores = tl.where(there, tl.exp(logits - highest), 0.0)
        scores = scores / tl.sum(tl.sum(scores, 1), 0)
    elif SCORE == "sigmoid":
        scores = tl.sigmoid(logits)
    else:
        scores = logits
    choice = scores + correction if correction_ptr is not None else scores
    choice = tl.where(there, tl.where(choice > WORST, choice, WORST), NONE)  # what is no number is chosen last
    if GROUPS_CHOSEN < GROUPS:
        best = tl.max(choice, 1)
        at = tl.argmax(choice, 1)
        second = tl.max(tl.where(members[None, :] == at[:, None], NONE, choice), 1)
        of_groups = tl.where(groups < GROUPS, tl.maximum(best + second, WORST), NONE)
        kept = tl.zeros([BLOCK_G], tl.int32)
        for _ in tl.static_range(GROUPS_CHOSEN):
            taken = groups == tl.argmax(of_groups, 0)
            kept = tl.where(taken, 1, kept)
            of_groups = tl.where(taken, NONE, of_groups)
        choice = tl.where(kept[:, None] > 0, choice, NONE)
    keys = ordered((tl.reshape(choice, (BLOCK_G * BLOCK_S,)) + 0.0).to(tl.int32, bitcast=True))  # a zero has no sign
    scores = tl.reshape(scores, (BLOCK_G * BLOCK_S,))
    places, columns = tl.arange(0, BLOCK_G * BLOCK_S), tl.arange(0, BLOCK_C)
    ids = tl.zeros([BLOCK_C], tl.int32)
    shares = tl.full([BLOCK_C], NONE if SCORE == "chosen" else 0.0, tl.float32)
    for j in tl.static_range(CHOSEN):
        top = tl.max(keys, 0)
        at = tl.min(tl.where(keys == top, places, BLOCK_G * BLOCK_S), 0)  # of equals the first
        if correction_ptr is not None:
            score = tl.sum(tl.where(places == at, scores, 0.0), 0)
        else:
            score = ordered(top).to(tl.float32, bitcast=True)
        ids = tl.where(columns == j, at // BLOCK_S * SIZE + at % BLOCK_S, ids)
        shares = tl.where(columns == j, score, shares)
        keys = tl.where(places == at, TAKEN, keys)
    shares += 0.0 * tl.sum(tl.where(tl.reshape(there, (BLOCK_G * BLOCK_S,)), scores, 0.0), 0)  # no number, if one is none
    if SCORE == "chosen":
        shares = tl.exp(shares - tl.max(shares, 0))
        shares = shares / tl.sum(shares, 0)
    elif RENORMALIZE:
        shares = shares / (tl.sum(shares, 0) + 1e-20)
    place = row.to(tl.int64) * CHOSEN + columns
    tl.store(ids_ptr + place, ids, mask=columns < CHOSEN)
    tl.store(shares_ptr + place, shares * scale, mask=columns < CHOSEN)


class Squares(NamedTuple):
    """Of rows that still have to be divided by their norm: parts [T, tiles] float32 of the sums of squares of what they are
    made of (fast_decode/epilogues.py), its width and the norm's epsilon."""

    sums: Tensor
    width: int
    eps: float


def route_parts(
    parts: Tensor, router_bias: Tensor | None, correction: Tensor | None, routing: Routing, squares: Squares | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`route` of the sum of `parts` [P, T, E] times the rows' norm factors, and `router_bias` [E]; and the factors [T]: None
    without `squares`."""
    number, rows, experts = parts.shape
    size, chosen = experts // routing.groups, routing.chosen
    ids = torch.empty((rows, chosen), dtype=torch.int32, device=parts.device)
    shares = torch.empty((rows, chosen), dtype=torch.float32, device=parts.device)
    factors = None if squares is None else torch.empty(rows, dtype=torch.float32, device=parts.device)
    if rows:
        sums, width, eps = squares or (None, 0, 0.0)
        _route[rows,](
            parts, router_bias, correction, sums, ids, shares, factors, T=rows, scale=routing.scale,
            sumsq_tiles=0 if sums is None else sums.shape[1], eps=eps, WIDTH=width,
            SUMSQ_BLOCK=0 if sums is None else max(64, next_power_of_2(sums.shape[1])), PARTS=number, GROUPS=routing.groups,
            SIZE=size, BLOCK_G=next_power_of_2(routing.groups), BLOCK_S=next_power_of_2(size),
            GROUPS_CHOSEN=routing.groups_chosen if routing.groups > 1 else 1, CHOSEN=chosen, BLOCK_C=next_power_of_2(chosen),
            SCORE=routing.score, RENORMALIZE=routing.renormalize, num_warps=1, **pdl(parts),
        )  # fmt: skip
    return ids, shares, factors


def route(logits: Tensor, correction: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """logits [T, E] float32, correction [E] -> ids [T, k] int32, best first (of equals the lower id), and shares [T, k]."""
    return route_parts(logits.contiguous()[None], None, correction, routing)[:2]


def choose(
    x: Tensor, router: Tensor, router_bias: Tensor | None, correction: Tensor | None, routing: Routing
) -> tuple[Tensor, Tensor]:
    """x [T, H], router [E, H] float32, router_bias, correction [E] -> ids and shares as `route` gives them."""
    return route_parts(router_parts(x, router), router_bias, correction, routing)[:2]
