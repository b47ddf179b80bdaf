"""The experts of one row, or of a few, whose weights are MXFP4: each warp multiplies for itself, by whole numbers.

As experts_row.py. Twice a weight is a whole number from -12 to 12, and so a byte for the tensor cores: two instructions look
four weights up, where four of bfloat16 take a dozen, which are more than the card has time for while it reads them. x comes as
whole numbers too, of two bytes and with a scale for each 32 columns (experts_digits.py).

A warp has 16 rows of the weights, and goes over K in runs of 128 columns: thread 4 g + q holds bytes 16 q to 16 q + 15 of rows
g and g + 8, so of two groups of columns. The eight columns of a product m16n8k32 are the run's four groups, two bytes of x
each, 0 where a thread's weights are of another group: thread 4 g + q gets the sums of group q, which alone it has to scale.
"""

# mypy: disable-error-code="assignment, attr-defined, var-annotated"
# (kernels grow tuples in loops that the compiler unrolls)

from __future__ import annotations

from typing import Any

from torch import Tensor

from headrace.kernels.experts_digits import Digits, new_digits, split_digits, store_digits
from headrace.kernels.experts_ends import Joining, alone, finish_row, open_gate, row_target
from headrace.kernels.experts_few import Choice, choice_of, expert_of
from headrace.kernels.launch import gdc_launch_dependents, gdc_wait, hold, jit, pdl, tl
from headrace.kernels.narrow import NarrowMatrix, assembly, held_width
from headrace.kernels.warp_words import LOAD, LOAD_ONCE, load_words, types

COLUMNS = 32  # of the gated product a program has: a group of what comes next
WARPS = 2  # that share columns
AHEAD = 2  # runs whose weights are on their way
GLU_REGISTERS, DOWN_REGISTERS = 80, 128  # of a thread, at most, so that three and two programs fit into a multiprocessor

_MMA = "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32"
# Byte i of a result is the n-th of eight, by nibble i of the selector; with the nibble's highest bit set it is that byte's
# highest bit, eight times. So weights above 0 give twice their value and 1 by the first eight, and -1 by the second, whose
# selector has that bit turned; those below 0 nothing, and twice their value.
_ABOVE, _BELOW = 0x04030200, 0xFDFEFF00
_ABOVE_REST, _BELOW_REST = "0x0d090705", "0xf4f8fafc"


def _multiply_word(rows: int) -> Any:
    """Of each row of x four sums that grow by the products with a word of each of a thread's two rows of the weights: $0 and on
    the sums, as many before; then the two words, the first four bytes of both tables, where bytes of x belong, and x."""
    words = 8 * rows
    a, b, first, second, places = (f"${words + i}" for i in range(5))
    lines = []
    for row, given in enumerate((a, b)):
        lines += [f"xor.b32 t, {given}, 0x88888888;", f"shr.u32 u, {given}, 16;", "shr.u32 v, t, 16;"]
        tables = (("a", first, _ABOVE_REST, (given, "u")), ("b", second, _BELOW_REST, ("t", "v")))
        for name, table, rest, selectors in tables:
            lines += [f"prmt.b32 {name}{row + 2 * i}, {table}, {rest}, {selectors[i]};" for i in range(2)]
    for r in range(rows):
        x = f"${words + 6 + r}"
        lines += [f"prmt.b32 x0, {x}, z, {places};", f"prmt.b32 x1, {x}, z, ${words + 5};"]
        sums = ", ".join(f"${4 * r + i}" for i in range(4))
        before = ", ".join(f"${4 * rows + 4 * r + i}" for i in range(4))
        for name, c in (("a", before), ("b", sums)):
            operand = ", ".join(f"{name}{i}" for i in range(4))
            lines.append(f"{_MMA} {{{sums}}}, {{{operand}}}, {{x0, x1}}, {{{c}}};")
    registers = ".reg .b32 z, t, u, v, x0, x1, " + ", ".join(f"{name}{i}" for name in "ab" for i in range(4)) + ";"
    return tl and tl.constexpr("{" + registers + "\nmov.b32 z, 0x0;\n" + "\n".join(lines) + "\n}")


def _operands(rows: int) -> Any:
    return tl and tl.constexpr(",".join(["=&r"] * 4 * rows + ["r"] * (5 * rows + 6)))


WORD_1, WORD_2 = _multiply_word(1), _multiply_word(2)
OPERANDS_1, OPERANDS_2 = _operands(1), _operands(2)
INT_4, INT_8 = types("int32", 4), types("int32", 8)
ABOVE, BELOW = tl and tl.constexpr(_ABOVE), tl and tl.constexpr(_BELOW - (1 << 32))


@jit
def load_run(rows, run, own):
    """Of each of a thread's two rows the four words of a warp's run, and the scale of the group whose sums the thread gets."""
    place = tl.minimum(run, own - 1)  # past a warp's last run it is that again, multiplied by nothing
    found = ()
    for i in tl.static_range(2):
        weights, scales = rows[i]
        found = found + ((load_words(weights + place * 64, LOAD_ONCE), tl.load(scales + place * 4)),)
    return found


@jit
def constants_of(lane):
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
def load_x(xs, run, own):
    """Of each row of x the columns of a run, and the scale of the group whose sums the thread gets."""
    place = tl.minimum(run, own - 1)
    found = ()
    for r in tl.static_range(len(xs)):
        x, scales = xs[r]
        found = found + ((load_words(x + place * 128, LOAD), tl.load(scales + place * 4, mask=run < own, other=0.0)),)
    return found


@jit
def add_run(acc, weights, x, constants):
    """acc, for each row of x of a thread's two rows of the weights, + the products of a run."""
    ROWS: tl.constexpr = len(x)
    upper, lower = weights
    sums = ()
    for _ in tl.static_range(4 * ROWS):
        sums = sums + (tl.zeros(acc[0].shape, tl.int32),)
    for word in tl.static_range(4):
        given = sums + (upper[0][word], lower[0][word], constants[2], constants[3], constants[0], constants[1])
        for r in tl.static_range(ROWS):
            given = given + (x[r][0][word],)
        if ROWS == 1:
            sums = tl.inline_asm_elementwise(WORD_1, OPERANDS_1, given, dtype=INT_4, is_pure=True, pack=1)
        else:
            sums = tl.inline_asm_elementwise(WORD_2, OPERANDS_2, given, dtype=INT_8, is_pure=True, pack=1)
    above, below = upper[1].to(tl.float32), lower[1].to(tl.float32)
    new = ()
    for r in tl.static_range(ROWS):
        d0, d1, d2, d3 = sums[4 * r], sums[4 * r + 1], sums[4 * r + 2], sums[4 * r + 3]
        new = new + (
            acc[2 * r] + (d0 * 256 + d1).to(tl.float32) * (x[r][1] * above),
            acc[2 * r + 1] + (d2 * 256 + d3).to(tl.float32) * (x[r][1] * below),
        )
    return new


@jit
def add_runs(rows, runs, xs, constants, own, OWN: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr):
    """Each thread's sums over the runs of its warp, OWN or fewer; `runs`: the first AHEAD of them. As many are on their way,
    and one of x."""
    acc = ()
    for _ in tl.static_range(2 * len(xs)):
        acc = acc + (tl.zeros(own.shape, tl.float32),)
    LAST: tl.constexpr = (OWN - 1) // AHEAD * AHEAD
    x = load_x(xs, 0, own)
    for first in range(0, LAST, AHEAD):
        following = ()
        for i in tl.static_range(AHEAD):
            following = following + (load_run(rows, first + AHEAD + i, own),)
            next_x = load_x(xs, first + i + 1, own)
            if PDL:
                hold()
            acc = add_run(acc, runs[i], x, constants)
            x = next_x
        runs = following
    for i in tl.static_range(OWN - LAST):
        acc = add_run(acc, runs[i], x, constants)
        if i + 1 < OWN - LAST:
            x = load_x(xs, LAST + i + 1, own)
    return acc


@jit
def load_first(rows, own, AHEAD: tl.constexpr):
    """The runs that `add_runs` begins with."""
    runs = ()
    for i in tl.static_range(AHEAD):
        runs = runs + (load_run(rows, i, own),)
    return runs


@jit
def of_weights(w_ptr, scales_ptr, row, lane, first_run, K: tl.constexpr):
    """Pointers of each thread at its bytes of a row from a run on, and at the scales of its sums."""
    return w_ptr + row * (K // 2) + first_run * 64 + lane % 4 * 16, scales_ptr + row * (K // 32) + first_run * 4 + lane % 4


@jit
def of_x(x_ptr, scales_ptr, row, lane, first_run, K: tl.constexpr):
    """The same of x: at the bytes that it multiplies by."""
    x = x_ptr + row * (2 * K) + lane // 4 % 2 * K + first_run * 128 + lane // 16 * 64 + lane % 4 * 16
    return x, scales_ptr + row * (K // 32) + first_run * 4 + lane % 4


@jit
def own_runs(warp, RUNS: tl.constexpr, WARPS: tl.constexpr):
    """How many runs a warp has."""
    OWN: tl.constexpr = (RUNS + WARPS - 1) // WARPS
    return tl.minimum(RUNS - warp * OWN, OWN)


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
    gate, gate_scales = of_weights(w_ptr, scales_ptr, of_row, lane, warp * OWN, K)
    up, up_scales = of_weights(w_ptr, scales_ptr, of_row + N, lane, warp * OWN, K)
    x, x_scales = of_x(x_ptr, x_scales_ptr, row.to(tl.int64), lane, warp * OWN, K)
    rows, own = ((gate, gate_scales), (up, up_scales)), own_runs(warp, RUNS, WARPS)
    runs = load_first(rows, own, AHEAD)
    acc = add_runs(rows, runs, ((x, x_scales),), constants_of(lane), own, OWN, AHEAD, PDL)
    column = first + tl.arange(0, 32)
    g = tl.reshape(tl.sum(tl.sum(tl.reshape(acc[0], (4, WARPS, 8, 4)), 3), 1), (32,)) * factor
    u = tl.reshape(tl.sum(tl.sum(tl.reshape(acc[1], (4, WARPS, 8, 4)), 3), 1), (32,)) * factor
    y = open_gate(g, u, bias_ptr, expert * (2 * N), column, N, clamp, ACTIVATION)
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
    above, above_scales = of_weights(w_ptr, scales_ptr, above, lane, warp * OWN, K)
    below, below_scales = of_weights(w_ptr, scales_ptr, below, lane, warp * OWN, K)
    column = first + tl.arange(0, 16)
    before, norm = row_target(residual_ptr, norm_ptr, row, column, N, norm_offset)
    x, x_scales = of_x(x_ptr, x_scales_ptr, (row * CHOSEN + chosen).to(tl.int64), lane, warp * OWN, K)
    rows, own = ((above, above_scales), (below, below_scales)), own_runs(warp, RUNS, WARPS)
    runs = load_first(rows, own, AHEAD)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    acc = add_runs(rows, runs, ((x, x_scales),), constants_of(lane), own, OWN, AHEAD, PDL)
    y = tl.join(tl.sum(tl.reshape(acc[0], (CHOSEN, WARPS, 8, 4)), 3), tl.sum(tl.reshape(acc[1], (CHOSEN, WARPS, 8, 4)), 3))
    y = tl.reshape(tl.permute(tl.sum(y, 1), (0, 2, 1)), (CHOSEN, 16))
    if bias_ptr is not None:
        bias = bias_ptr + of_slot[:, None] * N + column[None, :]
        y += tl.load(bias, mask=held[:, None] & (column < N)[None, :], other=0.0).to(tl.float32)
    y = tl.sum(tl.where(held[:, None], y * share[:, None], 0.0), 0)  # rows of experts elsewhere were not written
    finish_row(y, before, norm, out_ptr, residual_ptr, sumsq_ptr, row, column, N, scale, 1)


def takes_warps(x: Tensor, gate_up: NarrowMatrix, down: NarrowMatrix, chosen: int) -> bool:
    """Whether these kernels do: of MXFP4 with any scales of 16 bits, on a card, for bfloat16 rows."""
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
        AHEAD=min(AHEAD, -(-width // 128 // WARPS)), ACTIVATION="clamped" if clamp else activation,
        num_warps=4 * WARPS, maxnreg=GLU_REGISTERS, **pdl(x.scales),
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
        **choice.share_arguments(), **target, K=width, WARPS=WARPS, AHEAD=min(AHEAD, -(-width // 128 // WARPS)),
        num_warps=WARPS * choice.chosen, maxnreg=DOWN_REGISTERS, **pdl(x.scales),
    )  # fmt: skip
    return target["sumsq_ptr"]
