"""MXFP4 experts of some rows by the copy engine: pairs are sorted by expert, two to a program (experts_ring.py)."""

# mypy: disable-error-code="assignment"
# (kernels grow tuples in loops that the compiler unrolls)

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from headrace.kernels.experts_digits import Digits, new_digits
from headrace.kernels.experts_ring import (
    COLUMNS,
    SUMS,
    ask,
    gated_tiles,
    grid_dependency,
    new_ring,
    of_scales,
    of_x,
    options,
    ring_sums,
    store_gated,
    tiles,
)
from headrace.kernels.experts_sort import Sorted
from headrace.kernels.experts_warp_tiles import ROWS
from headrace.kernels.narrow import NarrowMatrix, held_width


@gluon.jit(do_not_specialize=["clamp"])
def _ring_tiles(
    weights, x_ptr, x_scales_ptr, scales_ptr, bias_ptr, order_ptr, tiles_ptr, factors_ptr, shares_ptr, out_ptr, out_scales_ptr,
    N, clamp,
    CHOSEN: gl.constexpr, K: gl.constexpr, WIDTH: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, GATE: gl.constexpr,
    ACTIVATION: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """As experts_warp_tiles._warp_tiles."""
    part = gl.program_id(0)
    first = part * (32 if GATE else 64)
    ring, full = new_ring(weights, STAGES, GATE)
    if PDL:
        grid_dependency("wait")
        grid_dependency("launch_dependents")
    entry = tiles_ptr + 3 * gl.program_id(1)
    expert = gl.load(entry)
    if expert >= 0:
        for step in gl.static_range(STAGES):
            ask(weights, ring, full, (expert,), first, N, step, STAGES, GATE)
        at, end = gl.load(entry + 1), gl.load(entry + 2)
        row = gl.arange(0, 32, layout=gl.SliceLayout(1, SUMS))
        if GATE:
            above = of_scales(scales_ptr, expert * (2 * N) + gl.minimum(first + row, N - 1), K)
            below = above + N.to(gl.int64) * (K // 32)
        else:
            above = of_scales(scales_ptr, expert * N + gl.minimum(first + row // 8 * 16 + row % 8, N - 1), K)
            below = of_scales(scales_ptr, expert * N + gl.minimum(first + row // 8 * 16 + row % 8 + 8, N - 1), K)
        pairs, xs = (), ()
        for r in gl.static_range(ROWS):
            pair = gl.load(order_ptr + gl.minimum(at + r, end - 1))  # rows past the expert's last repeat it, unstored
            of = (pair // CHOSEN).to(gl.int64)
            pairs = pairs + (pair,)
            xs = xs + (of_x(x_ptr, x_scales_ptr, of, of, K),)
        found = ring_sums(weights, ring, full, (expert,), first, N, xs, above, below, K, STAGES, GATE)
        for r in gl.static_range(ROWS):
            if at + r < end:
                a, b = found[2 * r], found[2 * r + 1]
                if GATE:
                    factor = gl.load(factors_ptr + pairs[r] // CHOSEN)
                    store_gated(
                        a, b, factor, bias_ptr, out_ptr, out_scales_ptr, expert, pairs[r], part, N, clamp, WIDTH, ACTIVATION
                    )  # fmt: skip
                else:
                    column = first + row // 8 * 16 + row % 8
                    if bias_ptr is not None:
                        a += gl.load(bias_ptr + expert * N + column, mask=column < N, other=0.0).to(gl.float32)
                        b += gl.load(bias_ptr + expert * N + column + 8, mask=column + 8 < N, other=0.0).to(gl.float32)
                    share = gl.load(shares_ptr + pairs[r])
                    out = out_ptr + pairs[r].to(gl.int64) * N + column
                    gl.store(out, a * share, mask=column < N)
                    gl.store(out + 8, b * share, mask=column + 8 < N)


def ring_tiles_glu(
    x: Digits, weight: NarrowMatrix, bias: Tensor | None, pairs: Sorted, chosen: int, inner: int, columns: int, *,
    activation: str, clamp: float, factors: Tensor | None, stages: int,
) -> Digits:  # fmt: skip
    """As experts_warp_tiles.warp_tiles_glu."""
    out = new_digits(len(pairs.order), inner, x.scales.device)
    _ring_tiles[inner // COLUMNS, len(pairs.tiles)](
        gated_tiles(weight, columns), bias_ptr=bias, order_ptr=pairs.order, tiles_ptr=pairs.tiles, factors_ptr=factors,
        shares_ptr=None, out_ptr=out.numbers, out_scales_ptr=out.scales, N=columns, clamp=clamp, CHOSEN=chosen, WIDTH=inner,
        ROWS=ROWS, GATE=True, ACTIVATION="clamped" if clamp else activation, **options(x, weight, stages),
    )  # fmt: skip
    return out


def ring_tiles_down(
    x: Digits, weight: NarrowMatrix, bias: Tensor | None, pairs: Sorted, shares: Tensor, columns: int, *, stages: int
) -> Tensor:  # fmt: skip
    """As experts_warp_tiles.warp_tiles_down."""
    out = torch.empty(len(pairs.order), columns, dtype=torch.float32, device=x.scales.device)
    _ring_tiles[-(-columns // 64), len(pairs.tiles)](
        tiles(weight, (-1, held_width(weight) // 8), [64, 32]), bias_ptr=bias, order_ptr=pairs.order, tiles_ptr=pairs.tiles,
        factors_ptr=None, shares_ptr=shares, out_ptr=out, out_scales_ptr=None, N=columns, clamp=0.0, CHOSEN=1, WIDTH=0,
        ROWS=ROWS, GATE=False, ACTIVATION="", **options(x, weight, stages),
    )  # fmt: skip
    return out
