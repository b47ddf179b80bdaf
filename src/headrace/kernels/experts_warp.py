"""The experts of one row, or of a few, whose weights are MXFP4: each warp multiplies for itself, by the tensor cores.

As experts_row.py, with the instructions of warp_products.py: words of the weights become bfloat16 in registers, times their
scale. (A scale is a power of two, so this is exact; it cannot wait for the sums, which are of columns with several scales.)
A warp of the first kernel has eight gate rows and the eight up rows beside them, and a part of their columns; one of the second
16 rows of one expert.
"""

# mypy: disable-error-code="assignment, var-annotated"
# (kernels grow tuples in loops that the compiler unrolls)

from __future__ import annotations

from torch import Tensor

from headrace.kernels.activation import gated
from headrace.kernels.experts_few import Choice, choice_of, expert_of
from headrace.kernels.experts_row import Joining, alone, finish_row, row_target
from headrace.kernels.launch import gdc_launch_dependents, gdc_wait, jit, pdl, tl
from headrace.kernels.narrow import NarrowMatrix, assembly, held_width
from headrace.kernels.warp_products import (
    C_16_6,
    CONVERT_FP4,
    LOAD,
    LOAD_ONCE,
    LOAD_TWO,
    M_8,
    MULTIPLY_8,
    load_words,
)

GLU_WARPS = 4  # that share a program's columns
DOWN_WARPS = 2  # of each expert
AHEAD = 4  # runs whose weights are on their way


@jit
def _load_two(pointers):
    """Eight bytes of each thread."""
    TWO: tl.constexpr = (tl.uint32, tl.uint32)
    return tl.inline_asm_elementwise(LOAD_TWO, "=r,=r,l", [pointers.to(tl.int64)], dtype=TWO, is_pure=False, pack=1)


@jit
def _load_row(weights, scales, run, RUNS: tl.constexpr):
    """A row's four words of a run, and two with its scales; past the last run those of that one."""
    run = tl.minimum(run, RUNS - 1)
    words = load_words(weights + run * 64, LOAD_ONCE)
    factors = _load_two(scales + run * 4)
    return words[0], words[1], words[2], words[3], factors[0], factors[1]


@jit
def _load_half_x(x, column, COLUMNS: tl.constexpr, WHOLE: tl.constexpr):
    if WHOLE:
        found = load_words(x + column, LOAD) + load_words(x + column + 8, LOAD)
    else:
        here = column < COLUMNS
        x += tl.where(here, column, 0)
        a, b = load_words(x, LOAD), load_words(x + 8, LOAD)
        found = (
            tl.where(here, a[0], 0), tl.where(here, a[1], 0), tl.where(here, a[2], 0), tl.where(here, a[3], 0),
            tl.where(here, b[0], 0), tl.where(here, b[1], 0), tl.where(here, b[2], 0), tl.where(here, b[3], 0),
        )  # fmt: skip
    return found


@jit
def _load_x(x, run, piece, COLUMNS: tl.constexpr, WHOLE: tl.constexpr):
    """What the thread's bytes are multiplied by: 16 columns of low halves and 16 of high ones. Unless all warps' runs are WHOLE
    what lies past the row's end counts as 0, as of the weights it may be anything."""
    column = run * 128 + piece * 16
    return _load_half_x(x, column, COLUMNS, WHOLE) + _load_half_x(x, column + 64, COLUMNS, WHOLE)


@jit
def _pair(word, shift, DTYPE: tl.constexpr):
    """One of a word's two scales, 2^64 times as large, as bfloat16 twice in a register. It is a power of two."""
    scale = (word >> shift).to(tl.uint16).to(DTYPE, bitcast=True).to(tl.float32) * 2.0**64
    return (scale.to(tl.uint32, bitcast=True) >> 16) * 0x10001


@jit
def _convert(row, shift, DTYPE: tl.constexpr):
    """A row's numbers as operands, times 2^-62."""
    SIXTEEN: tl.constexpr = (tl.uint32,) * 16
    given = (row[0], row[1], row[2], row[3], _pair(row[4], shift, DTYPE), _pair(row[5], shift, DTYPE))
    return tl.inline_asm_elementwise(CONVERT_FP4, C_16_6, given, dtype=SIXTEEN, is_pure=True, pack=1)


@jit
def _add_run(acc, upper, lower, x, shift, DTYPE: tl.constexpr):
    FOUR: tl.constexpr = (tl.float32,) * 4
    given = _convert(upper, shift, DTYPE) + _convert(lower, shift, DTYPE) + x + acc
    return tl.inline_asm_elementwise(MULTIPLY_8, M_8, given, dtype=FOUR, is_pure=True, pack=1)


@jit
def _row_sums(d, SHARING: tl.constexpr, WARPS: tl.constexpr):
    """A sum of each thread [SHARING * WARPS * 32] -> [SHARING, 8], those of warps that share columns added up."""
    whole = tl.sum(tl.reshape(d, (SHARING, WARPS, 8, 4)), 1)
    return tl.sum(tl.where(tl.arange(0, 4)[None, None, :] == 0, whole, 0.0), 2) * 2.0**62


@jit(do_not_specialize=["first_expert", "clamp"])
def _warp_glu(
    x_ptr, w_ptr, scales_ptr, bias_ptr, ids_ptr, logits_ptr, factors_ptr, out_ptr, N, out_width, first_expert, count, clamp,
    CHOSEN: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr,
    WARPS: tl.constexpr, AHEAD: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    RUNS: tl.constexpr = K // 128
    OWN: tl.constexpr = (RUNS + WARPS - 1) // WARPS
    first = tl.program_id(0) * 8
    pair = tl.program_id(1)
    row = pair // CHOSEN
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert = expert_of(pair, row, ids_ptr, logits_ptr, EXPERTS, BLOCK_E, CHOSEN) - first_expert
    if (expert < 0) | (expert >= count):
        return
    column = first + tl.arange(0, 8)
    place = out_ptr + pair.to(tl.int64) * out_width + column
    if first >= N:  # past its end a row is 0
        tl.store(place, tl.zeros([8], out_ptr.dtype.element_ty), mask=column < out_width)
        return
    factor = 1.0
    if factors_ptr is not None:
        factor = tl.load(factors_ptr + row)
    t = tl.arange(0, WARPS * 32)
    lane, warp = t % 32, t // 32
    shift = lane % 4 // 2 * 16
    of_row = expert.to(tl.int64) * (2 * N) + tl.minimum(first + lane // 4, N - 1)
    beside = of_row + N
    weights = (w_ptr + of_row * (K // 2) + lane % 4 * 16, w_ptr + beside * (K // 2) + lane % 4 * 16)
    scales = (scales_ptr + of_row * (K // 32), scales_ptr + beside * (K // 32))
    x = x_ptr + row.to(tl.int64) * COLUMNS + t * 0
    zero = tl.zeros([WARPS * 32], tl.float32)
    acc = (zero, zero, zero, zero)
    runs = ()
    for i in tl.static_range(OWN + AHEAD):
        if i < OWN:
            upper = _load_row(weights[0], scales[0], warp * OWN + i, RUNS)
            lower = _load_row(weights[1], scales[1], warp * OWN + i, RUNS)
            runs = runs + ((upper, lower),)
        if i >= AHEAD:
            xs = _load_x(x, warp * OWN + i - AHEAD, lane % 4, COLUMNS, ((WARPS - 1) * OWN + i - AHEAD + 1) * 128 <= COLUMNS)
            acc = _add_run(acc, runs[i - AHEAD][0], runs[i - AHEAD][1], xs, shift, scales_ptr.dtype.element_ty)
    g = tl.sum(_row_sums(acc[0], 1, WARPS), 0) * factor
    u = tl.sum(_row_sums(acc[2], 1, WARPS), 0) * factor
    if bias_ptr is not None:
        bias = bias_ptr + expert * (2 * N) + column
        g += tl.load(bias, mask=column < N, other=0.0).to(tl.float32)
        u += tl.load(bias + N, mask=column < N, other=0.0).to(tl.float32)
    y = tl.where(column < N, gated(g, u, clamp, ACTIVATION), 0.0)
    tl.store(place, y.to(out_ptr.dtype.element_ty), mask=column < out_width)


@jit(do_not_specialize=["first_expert"])
def _warp_down(
    x_ptr, w_ptr, scales_ptr, bias_ptr, ids_ptr, shares_ptr, logits_ptr, out_ptr, residual_ptr, norm_ptr, sumsq_ptr,
    N, first_expert, count, scale, norm_offset, share_scale,
    CHOSEN: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, SCORE: tl.constexpr, RENORMALIZE: tl.constexpr,
    K: tl.constexpr, WARPS: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    RUNS: tl.constexpr = K // 128
    OWN: tl.constexpr = (RUNS + WARPS - 1) // WARPS
    THREADS: tl.constexpr = CHOSEN * WARPS * 32
    row = tl.program_id(1)
    first = tl.program_id(0) * 16
    ids, shares = choice_of(
        row, ids_ptr, shares_ptr, logits_ptr, share_scale, EXPERTS, BLOCK_E, CHOSEN, SCORE, RENORMALIZE
    )  # fmt: skip
    t = tl.arange(0, THREADS)
    lane, warp, chosen = t % 32, t // 32 % WARPS, t // 32 // WARPS
    slot = tl.arange(0, CHOSEN)
    expert = t * 0
    of_slot = slot * 0
    share = slot * 0.0
    for j in tl.static_range(CHOSEN):
        expert = tl.where(chosen == j, ids[j] - first_expert, expert)
        of_slot = tl.where(slot == j, ids[j] - first_expert, of_slot)
        share = tl.where(slot == j, shares[j], share)
    expert = tl.where((expert >= 0) & (expert < count), expert, 0)
    held = (of_slot >= 0) & (of_slot < count)
    shift = lane % 4 // 2 * 16
    above = expert.to(tl.int64) * N + tl.minimum(first + lane // 4, N - 1)
    below = expert.to(tl.int64) * N + tl.minimum(first + lane // 4 + 8, N - 1)
    weights = (w_ptr + above * (K // 2) + lane % 4 * 16, w_ptr + below * (K // 2) + lane % 4 * 16)
    scales = (scales_ptr + above * (K // 32), scales_ptr + below * (K // 32))
    column = first + tl.arange(0, 16)
    before, norm = row_target(residual_ptr, norm_ptr, row, column, N, norm_offset)
    x = x_ptr + (row * CHOSEN + chosen).to(tl.int64) * K
    zero = tl.zeros([THREADS], tl.float32)
    acc = (zero, zero, zero, zero)
    runs = ()
    for i in tl.static_range(OWN + AHEAD):
        if i < OWN:
            upper = _load_row(weights[0], scales[0], warp * OWN + i, RUNS)
            lower = _load_row(weights[1], scales[1], warp * OWN + i, RUNS)
            runs = runs + ((upper, lower),)
        if PDL and i + 1 == AHEAD:
            gdc_wait()
            gdc_launch_dependents()
        if i >= AHEAD:
            xs = _load_x(x, warp * OWN + i - AHEAD, lane % 4, K, ((WARPS - 1) * OWN + i - AHEAD + 1) * 128 <= K)
            acc = _add_run(acc, runs[i - AHEAD][0], runs[i - AHEAD][1], xs, shift, scales_ptr.dtype.element_ty)
    y = tl.join(_row_sums(acc[0], CHOSEN, WARPS), _row_sums(acc[2], CHOSEN, WARPS))
    y = tl.reshape(tl.permute(y, (0, 2, 1)), (CHOSEN, 16))
    if bias_ptr is not None:
        bias = bias_ptr + of_slot[:, None] * N + column[None, :]
        y += tl.load(bias, mask=held[:, None] & (column < N)[None, :], other=0.0).to(tl.float32)
    y = tl.sum(tl.where(held[:, None], y * share[:, None], 0.0), 0)  # rows of experts elsewhere were not written
    finish_row(y, before, norm, out_ptr, residual_ptr, sumsq_ptr, row, column, N, scale)


def takes_warps(x: Tensor, gate_up: NarrowMatrix, down: NarrowMatrix, chosen: int) -> bool:
    """Whether these kernels do: of MXFP4, on a card, for bfloat16 rows of whole sixteens."""
    fit = all(w.kind == "fp4" and w.group == 32 and w.scales is not None and w.scales.itemsize == 2 for w in (gate_up, down))
    return fit and assembly(x) > 0 and x.shape[1] % 16 == 0 and chosen in (1, 2, 4, 8)


def warp_glu(
    x: Tensor, weight: NarrowMatrix, bias: Tensor | None, choice: Choice, out: Tensor, columns: int, *, first: int, count: int,
    activation: str, clamp: float, factors: Tensor | None = None,
) -> None:  # fmt: skip
    """As experts_row.row_glu."""
    assert weight.scales is not None
    _warp_glu[-(-out.shape[1] // 8), choice.rows * choice.chosen](
        x, weight.data, weight.scales, bias, factors_ptr=factors, out_ptr=out, N=columns, out_width=out.shape[1],
        first_expert=first, count=count, clamp=clamp, **choice.arguments(), K=held_width(weight), COLUMNS=x.shape[1],
        WARPS=GLU_WARPS, AHEAD=min(AHEAD, -(-held_width(weight) // 128 // GLU_WARPS)),
        ACTIVATION="clamped" if clamp else activation, num_warps=GLU_WARPS, **pdl(x),
    )  # fmt: skip


def warp_down(
    x: Tensor, weight: NarrowMatrix, bias: Tensor | None, choice: Choice, out: Tensor | Joining, *, first: int, count: int
) -> Tensor | None:
    """As experts_row.row_down."""
    assert weight.scales is not None
    rows, columns = (out if isinstance(out, Tensor) else out.total).shape
    tiles = -(-columns // 16)
    target = alone(out) if isinstance(out, Tensor) else out.arguments(tiles)
    _warp_down[tiles, rows](
        x, weight.data, weight.scales, bias, N=columns, first_expert=first, count=count, **choice.arguments(),
        **choice.share_arguments(), **target, K=held_width(weight), WARPS=DOWN_WARPS,
        AHEAD=min(AHEAD, -(-held_width(weight) // 128 // DOWN_WARPS)), num_warps=DOWN_WARPS * choice.chosen, **pdl(x),
    )  # fmt: skip
    return target["sumsq_ptr"]
