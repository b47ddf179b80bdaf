"""The experts of one row, or of a few, whose weights are MXFP4: each warp multiplies for itself, by whole numbers.

As experts_row.py. Twice a weight is a whole number from -12 to 12, and so a byte for the tensor cores: two instructions look
four weights up, where four of bfloat16 take a dozen, which are more than the card has time for while it reads them. x comes as
whole numbers too, of two bytes and with a scale for each 32 columns (experts_digits.py).

A warp has 16 rows of the weights, and goes over K in runs of 128 columns: thread 4 g + q holds bytes 16 q to 16 q + 15 of rows
g and g + 8, so of two groups of columns. The eight columns of a product m16n8k32 are the run's four groups, two bytes of x
each, 0 where a thread's weights are of another group: thread 4 g + q gets the sums of group q, which alone it has to scale.
"""

# mypy: disable-error-code="assignment, var-annotated"
# (kernels grow tuples in loops that the compiler unrolls)

from __future__ import annotations

from typing import Any

from torch import Tensor

from headrace.kernels.activation import gated
from headrace.kernels.experts_digits import Digits, new_digits, split_digits, store_digits
from headrace.kernels.experts_few import Choice, choice_of, expert_of
from headrace.kernels.experts_row import Joining, alone, finish_row, row_target
from headrace.kernels.launch import gdc_launch_dependents, gdc_wait, jit, pdl, tl
from headrace.kernels.narrow import NarrowMatrix, assembly, held_width
from headrace.kernels.warp_products import LOAD, LOAD_ONCE, load_words

COLUMNS = 32  # of the gated product a program has: a group of what comes next
WARPS = 2  # that share columns
GLU_AHEAD, DOWN_AHEAD = 6, 4  # runs whose weights are on their way
DOWN_REGISTERS = 128  # of a thread, at most, so that two programs fit into a multiprocessor

_MMA = "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32"
# Byte i of a result is the n-th of eight, by nibble i of the selector; with the nibble's highest bit set it is that byte's
# highest bit, eight times. So weights above 0 give twice their value and 1 by the first eight, and -1 by the second, whose
# selector has that bit turned; those below 0 nothing, and twice their value.
_ABOVE, _BELOW = 0x04030200, 0xFDFEFF00
_ABOVE_REST, _BELOW_REST = "0x0d090705", "0xf4f8fafc"


def _multiply_run() -> Any:
    """$0-$3: sums of a run; $4-$7 and $8-$11: words of rows g and g + 8; $12-$15: x; $16, $17: where its bytes belong;
    $18, $19: the first four bytes of both tables."""
    lines = ["mov.b32 z, 0x0;", *(f"mov.b32 ${i}, z;" for i in range(4))]
    for word in range(4):
        lines += [f"prmt.b32 x0, ${12 + word}, z, $16;", f"prmt.b32 x1, ${12 + word}, z, $17;"]
        for row in range(2):
            given = f"${4 + 4 * row + word}"
            lines += [f"xor.b32 t, {given}, 0x88888888;", f"shr.u32 u, {given}, 16;", "shr.u32 v, t, 16;"]
            tables = (("a", "$18", _ABOVE_REST, (given, "u")), ("b", "$19", _BELOW_REST, ("t", "v")))
            for name, first, rest, selectors in tables:
                lines += [f"prmt.b32 {name}{row + 2 * i}, {first}, {rest}, {selectors[i]};" for i in range(2)]
        for name in ("a", "b"):
            operand = ", ".join(f"{name}{i}" for i in range(4))
            lines.append(f"{_MMA} {{$0, $1, $2, $3}}, {{{operand}}}, {{x0, x1}}, {{$0, $1, $2, $3}};")
    registers = ".reg .b32 z, t, u, v, x0, x1, " + ", ".join(f"{name}{i}" for name in "ab" for i in range(4)) + ";"
    return tl and tl.constexpr("{" + registers + "\n" + "\n".join(lines) + "\n}")


MULTIPLY_RUN = _multiply_run()
RUN_OPERANDS = tl and tl.constexpr(",".join(["=&r"] * 4 + ["r"] * 16))
ABOVE, BELOW = tl and tl.constexpr(_ABOVE), tl and tl.constexpr(_BELOW - (1 << 32))


@jit
def _load_row(weights, scales, rest, run: tl.constexpr, LAST: tl.constexpr):
    """A row's four words of a warp's run, and the scale of the group whose sums the thread gets. Of a LAST run, which some
    warps do not have, it is the one before by `rest`."""
    if LAST:
        words, scale = load_words(weights + (run - rest) * 64, LOAD_ONCE), tl.load(scales + (run - rest) * 4)
    else:
        words, scale = load_words(weights + run * 64, LOAD_ONCE), tl.load(scales + run * 4)
    return words, scale


@jit
def _constants(lane):
    """Where bytes of x belong in the operands of a product, for the first and the last two of four columns: of the group that
    the thread's column of the product stands for, low halves or high ones, if the thread's weights are of it; 4: nowhere.
    And the tables, as numbers of which the compiler cannot know that all threads have the same: it would bring them anew."""
    high = lane // 16
    own = lane // 8 % 2 == lane % 4 // 2
    same = lane * tl.program_id(2)
    return (
        tl.where(own, tl.where(high == 0, 0x4140, 0x1404), 0x4444).to(tl.uint32),
        tl.where(own, tl.where(high == 0, 0x4342, 0x3424), 0x4444).to(tl.uint32),
        (same + ABOVE).to(tl.uint32),
        (same + BELOW).to(tl.uint32),
    )


@jit
def _add_run(acc, upper, lower, x, x_scales, constants, rest, run: tl.constexpr, LAST: tl.constexpr):
    """acc, of a thread's two rows, + the products of a run; of a run that the warp does not have nothing."""
    FOUR: tl.constexpr = (tl.int32,) * 4
    if LAST:
        words, scale = load_words(x + (run - rest) * 128, LOAD), tl.load(x_scales + run * 4, mask=rest == 0, other=0.0)
    else:
        words, scale = load_words(x + run * 128, LOAD), tl.load(x_scales + run * 4)
    given = upper[0] + lower[0] + words + constants
    d = tl.inline_asm_elementwise(MULTIPLY_RUN, RUN_OPERANDS, given, dtype=FOUR, is_pure=True, pack=1)
    return (
        acc[0] + (d[0] * 256 + d[1]).to(tl.float32) * (scale * upper[1].to(tl.float32)),
        acc[1] + (d[2] * 256 + d[3]).to(tl.float32) * (scale * lower[1].to(tl.float32)),
    )


@jit
def _of_weights(w_ptr, scales_ptr, row, lane, first_run, K: tl.constexpr):
    """Pointers of each thread at its bytes of a row from a run on, and at the scales of its sums."""
    return w_ptr + row * (K // 2) + first_run * 64 + lane % 4 * 16, scales_ptr + row * (K // 32) + first_run * 4 + lane % 4


@jit
def _of_x(x_ptr, scales_ptr, row, lane, first_run, K: tl.constexpr):
    """The same of x: at the bytes that it multiplies by."""
    x = x_ptr + row * (2 * K) + lane // 4 % 2 * K + first_run * 128 + lane // 16 * 64 + lane % 4 * 16
    return x, scales_ptr + row * (K // 32) + first_run * 4 + lane % 4


@jit
def _past(warp, RUNS: tl.constexpr, WARPS: tl.constexpr):
    """By how many runs a warp's last one lies past the last: none or one, unless there are fewer runs than warps."""
    OWN: tl.constexpr = (RUNS + WARPS - 1) // WARPS
    return tl.maximum((warp + 1) * OWN - RUNS, 0)


@jit(do_not_specialize=["first_expert", "clamp"])
def _warp_glu(
    x_ptr, x_scales_ptr, w_ptr, scales_ptr, bias_ptr, ids_ptr, logits_ptr, factors_ptr, out_ptr, out_scales_ptr, N,
    first_expert, count, clamp,
    CHOSEN: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr,
    WARPS: tl.constexpr, AHEAD: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    RUNS: tl.constexpr = K // 128
    OWN: tl.constexpr = (RUNS + WARPS - 1) // WARPS
    first = tl.program_id(1) * 32
    pair = tl.program_id(0)
    row = pair // CHOSEN
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert = expert_of(pair, row, ids_ptr, logits_ptr, EXPERTS, BLOCK_E, CHOSEN) - first_expert
    if (expert < 0) | (expert >= count):
        return
    factor = 1.0
    if factors_ptr is not None:
        factor = tl.load(factors_ptr + row)
    t = tl.arange(0, WARPS * 128)
    lane, warp, tile = t % 32, t // 32 % WARPS, t // 32 // WARPS
    of_row = expert.to(tl.int64) * (2 * N) + tl.minimum(first + tile * 8 + lane // 4, N - 1)
    gate, gate_scales = _of_weights(w_ptr, scales_ptr, of_row, lane, warp * OWN, K)
    up, up_scales = _of_weights(w_ptr, scales_ptr, of_row + N, lane, warp * OWN, K)
    x, x_scales = _of_x(x_ptr, x_scales_ptr, row.to(tl.int64), lane, warp * OWN, K)
    constants, rest = _constants(lane), _past(warp, RUNS, WARPS)
    zero = tl.zeros([WARPS * 128], tl.float32)
    acc = (zero, zero)
    runs = ()
    for i in tl.static_range(OWN + AHEAD):
        if i < OWN:
            upper = _load_row(gate, gate_scales, rest, i, RUNS % WARPS > 0 and i + 1 == OWN)
            lower = _load_row(up, up_scales, rest, i, RUNS % WARPS > 0 and i + 1 == OWN)
            runs = runs + ((upper, lower),)
        if i >= AHEAD:
            acc = _add_run(
                acc, runs[i - AHEAD][0], runs[i - AHEAD][1], x, x_scales, constants, rest, i - AHEAD,
                RUNS % WARPS > 0 and i - AHEAD + 1 == OWN,
            )  # fmt: skip
    column = first + tl.arange(0, 32)
    g = tl.reshape(tl.sum(tl.sum(tl.reshape(acc[0], (4, WARPS, 8, 4)), 3), 1), (32,)) * factor
    u = tl.reshape(tl.sum(tl.sum(tl.reshape(acc[1], (4, WARPS, 8, 4)), 3), 1), (32,)) * factor
    if bias_ptr is not None:
        bias = bias_ptr + expert * (2 * N) + column
        g += tl.load(bias, mask=column < N, other=0.0).to(tl.float32)
        u += tl.load(bias + N, mask=column < N, other=0.0).to(tl.float32)
    y = tl.where(column < N, gated(g, u, clamp, ACTIVATION), 0.0)  # past its end a row is 0
    store_digits(split_digits(y), out_ptr, out_scales_ptr, pair, tl.program_id(1), WIDTH)


@jit(do_not_specialize=["first_expert"])
def _warp_down(
    x_ptr, x_scales_ptr, w_ptr, scales_ptr, bias_ptr, ids_ptr, shares_ptr, logits_ptr, out_ptr, residual_ptr, norm_ptr,
    sumsq_ptr, N, first_expert, count, scale, norm_offset, share_scale,
    CHOSEN: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, SCORE: tl.constexpr, RENORMALIZE: tl.constexpr,
    K: tl.constexpr, WARPS: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    RUNS: tl.constexpr = K // 128
    OWN: tl.constexpr = (RUNS + WARPS - 1) // WARPS
    THREADS: tl.constexpr = CHOSEN * WARPS * 32
    row = tl.program_id(0)
    first = tl.program_id(1) * 16
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
    above = expert.to(tl.int64) * N + tl.minimum(first + lane // 4, N - 1)
    below = expert.to(tl.int64) * N + tl.minimum(first + lane // 4 + 8, N - 1)
    above, above_scales = _of_weights(w_ptr, scales_ptr, above, lane, warp * OWN, K)
    below, below_scales = _of_weights(w_ptr, scales_ptr, below, lane, warp * OWN, K)
    column = first + tl.arange(0, 16)
    before, norm = row_target(residual_ptr, norm_ptr, row, column, N, norm_offset)
    x, x_scales = _of_x(x_ptr, x_scales_ptr, (row * CHOSEN + chosen).to(tl.int64), lane, warp * OWN, K)
    constants, rest = _constants(lane), _past(warp, RUNS, WARPS)
    zero = tl.zeros([THREADS], tl.float32)
    acc = (zero, zero)
    runs = ()
    for i in tl.static_range(OWN + AHEAD):
        if i < OWN:
            upper = _load_row(above, above_scales, rest, i, RUNS % WARPS > 0 and i + 1 == OWN)
            lower = _load_row(below, below_scales, rest, i, RUNS % WARPS > 0 and i + 1 == OWN)
            runs = runs + ((upper, lower),)
        if PDL and i + 1 == AHEAD:
            gdc_wait()
            gdc_launch_dependents()
        if i >= AHEAD:
            acc = _add_run(
                acc, runs[i - AHEAD][0], runs[i - AHEAD][1], x, x_scales, constants, rest, i - AHEAD,
                RUNS % WARPS > 0 and i - AHEAD + 1 == OWN,
            )  # fmt: skip
    y = tl.join(tl.sum(tl.reshape(acc[0], (CHOSEN, WARPS, 8, 4)), 3), tl.sum(tl.reshape(acc[1], (CHOSEN, WARPS, 8, 4)), 3))
    y = tl.reshape(tl.permute(tl.sum(y, 1), (0, 2, 1)), (CHOSEN, 16))
    if bias_ptr is not None:
        bias = bias_ptr + of_slot[:, None] * N + column[None, :]
        y += tl.load(bias, mask=held[:, None] & (column < N)[None, :], other=0.0).to(tl.float32)
    y = tl.sum(tl.where(held[:, None], y * share[:, None], 0.0), 0)  # rows of experts elsewhere were not written
    finish_row(y, before, norm, out_ptr, residual_ptr, sumsq_ptr, row, column, N, scale, 1)


def takes_warps(x: Tensor, gate_up: NarrowMatrix, down: NarrowMatrix, chosen: int) -> bool:
    """Whether these kernels do: of MXFP4, on a card, for bfloat16 rows."""
    fit = all(w.kind == "fp4" and w.group == 32 and w.scales is not None and w.scales.itemsize == 2 for w in (gate_up, down))
    return fit and assembly(x) > 0 and chosen in (1, 2, 4, 8)


def warp_glu(
    x: Digits, weight: NarrowMatrix, bias: Tensor | None, choice: Choice, inner: int, columns: int, *, first: int, count: int,
    activation: str, clamp: float, factors: Tensor | None = None,
) -> Digits:  # fmt: skip
    """As experts_row.row_glu, of `columns` and zeros up to `inner` of them."""
    assert weight.scales is not None
    pairs, width = choice.rows * choice.chosen, held_width(weight)
    out = new_digits(pairs, inner, x.scales.device)
    _warp_glu[pairs, inner // COLUMNS](
        *x, weight.data, weight.scales, bias, factors_ptr=factors, out_ptr=out.numbers, out_scales_ptr=out.scales, N=columns,
        first_expert=first, count=count, clamp=clamp, **choice.arguments(), K=width, WIDTH=inner, WARPS=WARPS,
        AHEAD=min(GLU_AHEAD, -(-width // 128 // WARPS)), ACTIVATION="clamped" if clamp else activation,
        num_warps=4 * WARPS, **pdl(x.scales),
    )  # fmt: skip
    return out


def warp_down(
    x: Digits, weight: NarrowMatrix, bias: Tensor | None, choice: Choice, out: Tensor | Joining, *, first: int, count: int
) -> Tensor | None:
    """As experts_row.row_down."""
    assert weight.scales is not None
    rows, columns = (out if isinstance(out, Tensor) else out.total).shape
    tiles, width = -(-columns // 16), held_width(weight)
    target = alone(out) if isinstance(out, Tensor) else out.arguments(tiles)
    _warp_down[rows, tiles](
        *x, weight.data, weight.scales, bias, N=columns, first_expert=first, count=count, **choice.arguments(),
        **choice.share_arguments(), **target, K=width, WARPS=WARPS, AHEAD=min(DOWN_AHEAD, -(-width // 128 // WARPS)),
        num_warps=WARPS * choice.chosen, maxnreg=DOWN_REGISTERS, **pdl(x.scales),
    )  # fmt: skip
    return target["sumsq_ptr"]
