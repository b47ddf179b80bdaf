"""MXFP4 experts of one row by the copy engine: each program chooses for itself (experts_ring.py)."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from headrace.kernels.experts_digits import Digits, new_digits
from headrace.kernels.experts_few import Choice
from headrace.kernels.experts_ring import (
    COLUMNS,
    SUMS,
    WORDS,
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
from headrace.kernels.experts_row import Joining
from headrace.kernels.launch import next_power_of_2
from headrace.kernels.narrow import NarrowMatrix, held_width

JOINED = gl.constexpr(gl.BlockedLayout([1, 1], [4, 8], [1, 8], [0, 1]))  # [4, 16]: experts, columns


@gluon.jit
def _ordered(bits):
    """As experts_route.ordered."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@gluon.jit
def _keys(logits_ptr, COUNT: gl.constexpr, BLOCK_E: gl.constexpr, CACHE: gl.constexpr):
    """As experts_few._keys; the experts; and whether a logit is no number. All warps have all of them."""
    experts = gl.arange(0, BLOCK_E, layout=gl.BlockedLayout([1], [32], [8], [0]))
    logits = gl.load(logits_ptr + experts, mask=experts < COUNT, other=0.0, cache_modifier=CACHE)
    keys = _ordered((gl.where(logits > -3e38, logits, -3e38) + 0.0).to(gl.int32, bitcast=True))
    nothing = gl.max(((logits != logits) & (experts < COUNT)).to(gl.int32), 0)
    return gl.where(experts < COUNT, keys, -(1 << 31)), experts, nothing


@gluon.jit
def _first_of(keys, experts, BLOCK_E: gl.constexpr):
    top = gl.max(keys, 0)
    at = gl.min(gl.where(keys == top, experts, BLOCK_E), 0)
    return at, top, gl.where(experts == at, -(1 << 31), keys)


@gluon.jit(do_not_specialize=["clamp"])
def _ring_glu(
    weights, x_ptr, x_scales_ptr, scales_ptr, bias_ptr, logits_ptr, factors_ptr, out_ptr, out_scales_ptr, N, clamp,
    COUNT: gl.constexpr, BLOCK_E: gl.constexpr, K: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr,
    ACTIVATION: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    chosen = gl.program_id(0)
    first = gl.program_id(1) * 32
    ring, full = new_ring(weights, STAGES, True)
    if PDL:
        grid_dependency("wait")
        grid_dependency("launch_dependents")
    keys, experts, _ = _keys(logits_ptr, COUNT, BLOCK_E, "")
    for _ in range(chosen):
        _, _, keys = _first_of(keys, experts, BLOCK_E)
    expert, _, _ = _first_of(keys, experts, BLOCK_E)
    for step in gl.static_range(STAGES):
        ask(weights, ring, full, (expert,), first, N, step, STAGES, True)
    factor = gl.load(factors_ptr)
    row = expert * (2 * N) + gl.minimum(first + gl.arange(0, 32, layout=gl.SliceLayout(1, SUMS)), N - 1)
    above = of_scales(scales_ptr, row, K)
    xs = (of_x(x_ptr, x_scales_ptr, 0, 0, K),)
    g, u = ring_sums(weights, ring, full, (expert,), first, N, xs, above, above + N.to(gl.int64) * (K // 32), K, STAGES, True)
    store_gated(
        g, u, factor, bias_ptr, out_ptr, out_scales_ptr, expert, chosen, gl.program_id(1), N, clamp, WIDTH, ACTIVATION
    )  # fmt: skip


@gluon.jit
def _of_four(slot, given):
    return gl.where(slot == 0, given[0], gl.where(slot == 1, given[1], gl.where(slot == 2, given[2], given[3])))


@gluon.jit
def _ring_down(
    weights, x_ptr, x_scales_ptr, scales_ptr, bias_ptr, logits_ptr, out_ptr, residual_ptr, norm_ptr, sumsq_ptr, N, scale,
    norm_offset, share_scale,
    COUNT: gl.constexpr, BLOCK_E: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Of four experts, weighed by a softmax over them."""
    first = gl.program_id(0) * 16
    ring, full = new_ring(weights, STAGES, False)
    keys, experts, nothing = _keys(logits_ptr, COUNT, BLOCK_E, ".cg")
    e0, t0, keys = _first_of(keys, experts, BLOCK_E)
    e1, t1, keys = _first_of(keys, experts, BLOCK_E)
    e2, t2, keys = _first_of(keys, experts, BLOCK_E)
    e3, t3, keys = _first_of(keys, experts, BLOCK_E)
    chosen = (e0, e1, e2, e3)
    for i in gl.static_range(STAGES):
        ask(weights, ring, full, chosen, first, N, i, STAGES, False)
    best = _ordered(t0).to(gl.float32, bitcast=True)
    s1 = gl.exp(_ordered(t1).to(gl.float32, bitcast=True) - best)
    s2 = gl.exp(_ordered(t2).to(gl.float32, bitcast=True) - best)
    s3 = gl.exp(_ordered(t3).to(gl.float32, bitcast=True) - best)
    row = gl.arange(0, 32, layout=gl.SliceLayout(1, SUMS))
    above = of_scales(scales_ptr, _of_four(row // 8, chosen) * N + first + row % 8, K)
    xs = (of_x(x_ptr, x_scales_ptr, gl.arange(0, 32, layout=gl.SliceLayout(1, WORDS)) // 8, row // 8, K),)
    column = first + gl.arange(0, 16, layout=gl.SliceLayout(0, JOINED))
    before = gl.load(residual_ptr + column, cache_modifier=".cg")
    norm = gl.load(norm_ptr + column).to(gl.float32) + norm_offset
    if PDL:
        grid_dependency("wait")
        grid_dependency("launch_dependents")
    upper, lower = ring_sums(weights, ring, full, chosen, first, N, xs, above, above + 8 * (K // 32), K, STAGES, False)
    y = gl.permute(gl.join(gl.reshape(upper, (4, 8)), gl.reshape(lower, (4, 8))), (0, 2, 1))
    y = gl.convert_layout(gl.reshape(y, (4, 16)), JOINED)
    slot = gl.arange(0, 4, layout=gl.SliceLayout(1, JOINED))
    if bias_ptr is not None:
        y += gl.load(bias_ptr + _of_four(slot, chosen)[:, None] * N + column[None, :]).to(gl.float32)
    shares = _of_four(slot, (1.0, s1, s2, s3)) * (gl.where(nothing > 0, float("nan"), share_scale) / (1.0 + s1 + s2 + s3))
    r = before + scale * gl.sum(y * shares[:, None], 0)
    gl.store(residual_ptr + column, r)
    gl.store(sumsq_ptr + gl.program_id(0), gl.sum(r * r, 0))
    gl.store(out_ptr + column, (r * norm).to(out_ptr.dtype.element_ty))


def _logits(choice: Choice) -> dict[str, Any]:
    assert choice.logits is not None
    count = choice.logits.shape[1]
    return {"logits_ptr": choice.logits, "COUNT": count, "BLOCK_E": next_power_of_2(count)}


def ring_glu(
    x: Digits, weight: NarrowMatrix, bias: Tensor | None, choice: Choice, inner: int, columns: int, *, activation: str,
    clamp: float, factors: Tensor | None, stages: int,
) -> Digits:  # fmt: skip
    """As experts_warp.warp_glu, of one row. `stages`: steps of the weights on their way; of all programs of a multiprocessor
    not so many that the kernels behind lack an L1 cache."""
    out = new_digits(choice.chosen, inner, x.scales.device)
    _ring_glu[choice.chosen, inner // COLUMNS](
        gated_tiles(weight, columns), bias_ptr=bias, factors_ptr=factors, out_ptr=out.numbers, out_scales_ptr=out.scales,
        N=columns, clamp=clamp, WIDTH=inner, ACTIVATION="clamped" if clamp else activation, **_logits(choice),
        **options(x, weight, stages),
    )  # fmt: skip
    return out


def ring_down(
    x: Digits, weight: NarrowMatrix, bias: Tensor | None, choice: Choice, out: Joining, *, stages: int
) -> Tensor:  # fmt: skip
    """As experts_warp.warp_down, of one row."""
    assert choice.routing is not None
    columns = out.total.shape[1]
    target = out.arguments(columns // 16)
    _ring_down[columns // 16,](
        tiles(weight, (-1, held_width(weight) // 8), [16, 32]), bias_ptr=bias, N=columns, share_scale=choice.routing.scale,
        **target, **_logits(choice), **options(x, weight, stages),
    )  # fmt: skip
    return target["sumsq_ptr"]
