"""MXFP4 experts of some rows, by whole numbers: as experts_warp.py, where a program's numbers serve two rows of its expert.

Pairs are sorted by expert (experts_sort.py), so that each expert is read about once; what looking the weights up takes is
shared by a tile's rows. A row's sums are exact or have one order: they do not depend on what is beside it.
"""

# mypy: disable-error-code="assignment, var-annotated"
# (kernels grow tuples in loops that the compiler unrolls)

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace.kernels.experts_digits import Digits, new_digits, split_digits, store_digits
from headrace.kernels.experts_ends import open_gate
from headrace.kernels.experts_sort import Sorted, tile_end, tile_expert, tile_first
from headrace.kernels.experts_warp import add_runs, constants_of, load_first, of_weights, of_x, own_runs
from headrace.kernels.launch import gdc_launch_dependents, gdc_wait, jit, pdl, tl
from headrace.kernels.narrow import NarrowMatrix, held_width

ROWS = 2  # of x that a program multiplies by: with four it has no registers left for what is on its way
WARPS = 2  # that share columns
AHEAD = 2  # runs whose weights are on their way
REGISTERS = 128


@jit(do_not_specialize=["clamp"])
def _warp_tiles(
    x_ptr, x_scales_ptr, w_ptr, scales_ptr, bias_ptr, order_ptr, tiles_ptr, factors_ptr, shares_ptr, out_ptr, out_scales_ptr, N,
    clamp,
    CHOSEN: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, WARPS: tl.constexpr, AHEAD: tl.constexpr,
    GLU: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    RUNS: tl.constexpr = K // 128
    OWN: tl.constexpr = (RUNS + WARPS - 1) // WARPS  # runs of a warp
    COLUMNS: tl.constexpr = 32 if GLU else 64
    first = tl.program_id(0) * COLUMNS
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.program_id(1)
    expert = tile_expert(tiles_ptr, slot)
    if expert < 0:
        return
    at, end = tile_first(tiles_ptr, slot), tile_end(tiles_ptr, slot)
    t = tl.arange(0, WARPS * 128)
    lane, warp, tile = t % 32, t // 32 % WARPS, t // 32 // WARPS
    if GLU:
        of_row = expert.to(tl.int64) * (2 * N) + tl.minimum(first + tile * 8 + lane // 4, N - 1)
        beside = of_row + N
    else:
        of_row = expert.to(tl.int64) * N + tl.minimum(first + tile * 16 + lane // 4, N - 1)
        beside = expert.to(tl.int64) * N + tl.minimum(first + tile * 16 + lane // 4 + 8, N - 1)
    above, above_scales = of_weights(w_ptr, scales_ptr, of_row, lane, warp * OWN, K)
    below, below_scales = of_weights(w_ptr, scales_ptr, beside, lane, warp * OWN, K)
    pairs, xs = (), ()
    for r in tl.static_range(ROWS):
        pair = tl.load(order_ptr + tl.minimum(at + r, end - 1))  # rows past the expert's last repeat it, unstored
        row = pair // CHOSEN if GLU else pair
        pairs = pairs + (pair,)
        xs = xs + (of_x(x_ptr, x_scales_ptr, row.to(tl.int64), lane, warp * OWN, K),)
    rows, own = ((above, above_scales), (below, below_scales)), own_runs(warp, RUNS, WARPS)
    runs = load_first(rows, own, AHEAD)
    acc = add_runs(rows, runs, xs, constants_of(lane), own, OWN, AHEAD, PDL)
    column = first + tl.arange(0, COLUMNS)
    for r in tl.static_range(ROWS):
        if at + r < end:
            a = tl.sum(tl.sum(tl.reshape(acc[2 * r], (4, WARPS, 8, 4)), 3), 1)
            b = tl.sum(tl.sum(tl.reshape(acc[2 * r + 1], (4, WARPS, 8, 4)), 3), 1)
            if GLU:
                g, u = tl.reshape(a, (32,)), tl.reshape(b, (32,))
                if factors_ptr is not None:
                    factor = tl.load(factors_ptr + pairs[r] // CHOSEN)
                    g, u = g * factor, u * factor
                y = open_gate(g, u, bias_ptr, expert * (2 * N), column, N, clamp, ACTIVATION)
                store_digits(split_digits(y), out_ptr, out_scales_ptr, pairs[r], tl.program_id(0), WIDTH)
            else:
                y = tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (64,))
                if bias_ptr is not None:
                    y += tl.load(bias_ptr + expert * N + column, mask=column < N, other=0.0).to(tl.float32)
                y = y * tl.load(shares_ptr + pairs[r])
                tl.store(out_ptr + pairs[r].to(tl.int64) * N + column, y, mask=column < N)


def warp_tiles_glu(
    x: Digits, weight: NarrowMatrix, bias: Tensor | None, pairs: Sorted, chosen: int, inner: int, columns: int, *,
    activation: str, clamp: float, factors: Tensor | None,
) -> Digits:  # fmt: skip
    """x [T, H], times `factors` -> gated products of each pair, zeros past `columns` up to `inner` of them. `pairs` are sorted
    in tiles of ROWS."""
    assert weight.scales is not None
    out = new_digits(len(pairs.order), inner, x.scales.device)
    _warp_tiles[inner // 32, len(pairs.tiles)](
        *x, weight.data, weight.scales, bias, pairs.order, pairs.tiles, factors, None, *out, N=columns, clamp=clamp,
        CHOSEN=chosen, WIDTH=inner, GLU=True, ACTIVATION="clamped" if clamp else activation, **_options(weight, x),
    )  # fmt: skip
    return out


def warp_tiles_down(
    x: Digits, weight: NarrowMatrix, bias: Tensor | None, pairs: Sorted, shares: Tensor, columns: int
) -> Tensor:  # fmt: skip
    """x [P, K] -> what each pair adds [P, columns] float32."""
    assert weight.scales is not None
    out = torch.empty(len(pairs.order), columns, dtype=torch.float32, device=x.scales.device)
    _warp_tiles[-(-columns // 64), len(pairs.tiles)](
        *x, weight.data, weight.scales, bias, pairs.order, pairs.tiles, None, shares, out, None, N=columns, clamp=0.0,
        CHOSEN=1, WIDTH=0, GLU=False, ACTIVATION="", **_options(weight, x),
    )  # fmt: skip
    return out


def _options(weight: NarrowMatrix, x: Digits) -> dict[str, Any]:
    width = held_width(weight)
    return {
        "K": width, "ROWS": ROWS, "WARPS": WARPS, "AHEAD": min(AHEAD, -(-width // 128 // WARPS)), "num_warps": 4 * WARPS,
        "maxnreg": REGISTERS, **pdl(x.scales),
    }  # fmt: skip
