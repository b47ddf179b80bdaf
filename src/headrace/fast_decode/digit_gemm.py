"""Matrix products of one row with 4-bit weights on Hopper, by the tensor cores' whole numbers, weights by the copy engine.

A ring of tiles in shared memory is filled before the wait, as in ring_gemm.py: 16 rows of the weights at a time, over all of K
or a part of it (a phase). Each warp has columns of its own, whose part of x it keeps in registers. mma.sync m16n8k32 takes
bytes: of 16 h + l it multiplies the byte itself by 16 x_l, and the high half, left in its place, by x_h - 16 x_l, which is
16 (l x_l + h x_h) for one instruction a word. x is a whole number for that, of 24 bits in units of a warp's largest, so exact
for all that is not 2^16 times smaller; its four digits of base 256 are four of the eight columns that a product has. Sums of a
group are whole numbers below 2^31, freed of its zero (as products with ones are), and scaled in float32. The order of every
sum is fixed. products.py says what is computed; tests/gluon_interpreter.py runs the same text without a card.
"""

# mypy: disable-error-code="assignment, attr-defined, misc, var-annotated"
# (kernels grow tuples of tiles in loops that the compiler unrolls)

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from headrace.fast_decode.digit_tile import IN_PHASE, WARPS, DigitTile
from headrace.fast_decode.epilogues import Plan, sumsq_block
from headrace.fast_decode.ring_ends import column_parameters
from headrace.kernels.activation import activate, soft_cap
from headrace.kernels.gluon_launch import grid_dependency
from headrace.kernels.gluon_rings import ring_barriers
from headrace.kernels.launch import next_power_of_2
from headrace.model.weight import Weight

SCALES_AHEAD = 3  # steps


def _multiply(first: int, of_bytes: str, of_halves: str) -> str:
    """Four mma: `of_bytes` and `of_halves` name registers of the two rows by {0} to {3}; what they meet is $first and on."""
    lines, before = [], "{z, z, z, z}"
    for operand, at in ((of_bytes, first), (of_halves, first + 4)):
        for i in range(2):
            a = operand.format(2 * i, 2 * i + 1, 2 + 2 * i, 3 + 2 * i, 6 + 2 * i, 7 + 2 * i)
            lines.append(f"mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {{d0, d1, d2, d3}}, {{{a}}}, "
                         f"{{${at + 2 * i}, ${at + 2 * i + 1}}}, {before};")  # fmt: skip
            before = "{d0, d1, d2, d3}"
    return "\n".join(lines)


# $0, $1: a row's sum and that of the one 8 below, two digits together. Their words: $2 to $5, $6 to $9; x: $10 to $17
PRODUCTS = gl.constexpr(
    "{.reg .b32 z, d0, d1, d2, d3, m0, m1, m2, m3, n0, n1, n2, n3;\nmov.b32 z, 0;\n"
    + "".join(f"and.b32 m{i}, ${2 + i}, 0xf0f0f0f0; and.b32 n{i}, ${6 + i}, 0xf0f0f0f0;\n" for i in range(4))
    + _multiply(10, "${2}, ${4}, ${3}, ${5}", "m{0}, n{0}, m{1}, n{1}")
    + "\nmad.lo.s32 $0, d1, 256, d0; mad.lo.s32 $1, d3, 256, d2;\n}"
)
# the same of weights that are all one
ONES = gl.constexpr(
    "{.reg .b32 z, o, h, d0, d1, d2, d3;\nmov.b32 z, 0; mov.b32 o, 0x11111111; mov.b32 h, 0x10101010;\n"
    + _multiply(1, "o, o, o, o", "h, h, h, h")
    + "\nmad.lo.s32 $0, d1, 256, d0;\n}"
)
# four numbers -> their digits from -128 to 127, the lowest of all four first
DIGITS = gl.constexpr("""{.reg .b32 v0, v1, v2, v3, t0, t1, t2, t3;
add.s32 v0, $4, 0x00808080; add.s32 v1, $5, 0x00808080; add.s32 v2, $6, 0x00808080; add.s32 v3, $7, 0x00808080;
prmt.b32 t0, v0, v1, 0x5140; prmt.b32 t1, v2, v3, 0x5140; prmt.b32 t2, v0, v1, 0x7362; prmt.b32 t3, v2, v3, 0x7362;
prmt.b32 v0, t0, t1, 0x5410; prmt.b32 v1, t0, t1, 0x7632; prmt.b32 v2, t2, t3, 0x5410; prmt.b32 $3, t2, t3, 0x7632;
xor.b32 $0, v0, 0x80808080; xor.b32 $1, v1, 0x80808080; xor.b32 $2, v2, 0x80808080;
}""")
C_PRODUCTS, C_ONES = gl.constexpr("=&r,=&r" + ",r" * 16), gl.constexpr("=&r" + ",r" * 8)
C_DIGITS = gl.constexpr("=&r,=&r,=&r,=&r,r,r,r,r")


@gluon.jit
def split_registers(x, COUNT: gl.constexpr, LEVELS: gl.constexpr, THREADS: gl.constexpr, one: gl.constexpr):
    """x [THREADS, COUNT], whose second axis lies in a thread's registers -> COUNT tensors [THREADS]."""
    parts = (x,)
    for level in gl.static_range(LEVELS):
        new = ()
        for i in gl.static_range(len(parts)):
            a, b = gl.split(gl.permute(gl.reshape(parts[i], [THREADS, 2, (COUNT >> level) // 2]), (0, 2, 1)))
            new = new + (a, b)
        parts = new
    out = ()
    for i in gl.static_range(len(parts)):
        out = out + (gl.convert_layout(gl.reshape(parts[i], [THREADS]), one),)
    return out


@gluon.jit
def _ask(
    w_tiles, w_ring, full, i: gl.constexpr, first, second, TILES: gl.constexpr, APART: gl.constexpr, SEGMENTS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """The weights of step i into the ring."""
    stage: gl.constexpr = i % STAGES
    segment: gl.constexpr = i // TILES * SEGMENTS
    below: gl.constexpr = i % TILES * APART
    mbarrier.expect(full.index(stage), 2 * SEGMENTS * 8 * 128)
    tma.async_copy_global_to_shared(w_tiles, [segment, first + below, 0], full.index(stage), w_ring.index(stage * 2))
    tma.async_copy_global_to_shared(w_tiles, [segment, second + below, 0], full.index(stage), w_ring.index(stage * 2 + 1))


@gluon.jit
def _float(word, part: gl.constexpr, DTYPE: gl.constexpr):
    """The 16-bit number of a word [int32] that is the `part`th."""
    if gl.bfloat16 == DTYPE:
        if part == 0:
            bits = word << 16
        else:
            bits = word & -65536
        found = bits.to(gl.float32, bitcast=True)
    else:
        if part == 1:
            word = word >> 16
        found = word.to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
    return found


@gluon.jit
def _load_factors(scales_ptr, zeros_ptr, places, at: gl.constexpr, ZEROS: gl.constexpr):
    """A thread's words of scales, and zeros, of four groups of its two rows."""
    scales, zeros = (), ()
    for half in gl.static_range(2):
        place = places[half] + at
        scales = scales + (gl.load((scales_ptr + place).to(gl.pointer_type(gl.int64), bitcast=True)),)
        if ZEROS:
            zeros = zeros + (gl.load((zeros_ptr + place).to(gl.pointer_type(gl.int32), bitcast=True)),)
    return scales, zeros


@gluon.jit
def _load_x(x_ptr, base):
    """Of two groups that are two apart, low columns and high ones: eight words of two numbers."""
    words = ()
    for i in gl.static_range(4):
        word = gl.load((x_ptr + (base + i // 2 * 256 + i % 2 * 64)).to(gl.pointer_type(gl.int64), bitcast=True))
        words = words + (word.to(gl.int32), (word >> 32).to(gl.int32))
    return words


@gluon.jit
def _operands(words, WARPS: gl.constexpr, one: gl.constexpr, held: gl.constexpr):
    """What `_load_x` gives -> the products' second operands, eight registers for each of four groups (whole bytes' four, then
    high halves' four), and what a unit of the thread's sums is."""
    THREADS: gl.constexpr = 32 * WARPS
    FOUR: gl.constexpr = (gl.int32, gl.int32, gl.int32, gl.int32)
    x = ()
    for i in gl.static_range(8):
        x = x + (_float(words[i], 0, gl.bfloat16), _float(words[i], 1, gl.bfloat16))
    most = x[0].to(gl.int32, bitcast=True) & 0x7FFFFFFF  # as whole numbers they are in order, and NaN is above all
    for i in gl.static_range(1, 16):
        most = gl.maximum(most, x[i].to(gl.int32, bitcast=True) & 0x7FFFFFFF)
    most = gl.reshape(most, [WARPS, 32])
    most = gl.expand_dims(gl.max(most, 1), 1) + gl.zeros_like(most)
    exponent = gl.maximum(gl.convert_layout(gl.reshape(most, [THREADS]), one) >> 23, 28)
    factor = ((277 - exponent) << 23).to(gl.float32, bitcast=True)  # the largest becomes 2^23 and more
    unit = ((exponent - 27) << 23).to(gl.float32, bitcast=True)
    unit = gl.where(exponent == 255, float("nan"), unit)
    parts = ()  # [pair of groups][kind][group's parity, place]
    for i in gl.static_range(2):
        of_bytes, of_halves = (), ()
        for b in gl.static_range(4):
            a = (x[8 * i + b] * factor).to(gl.int32) << 4
            of_bytes = of_bytes + (a,)
            of_halves = of_halves + ((x[8 * i + 4 + b] * factor).to(gl.int32) - a,)
        for kind in gl.static_range(2):
            codes = gl.inline_asm_elementwise(DIGITS, C_DIGITS, of_bytes if kind == 0 else of_halves, FOUR, True, 1)
            codes = gl.join(gl.join(codes[0], codes[2]), gl.join(codes[1], codes[3]))  # [THREADS, digit, digit]
            # [warp, group's parity, place, quarter, digit, twice] -> [warp, twice, digit, quarter, register]
            codes = gl.permute(gl.reshape(gl.join(codes, codes), [WARPS, 2, 4, 4, 4, 2]), (0, 5, 4, 3, 1, 2))
            codes = gl.convert_layout(gl.reshape(codes, [WARPS, 2, 4, 4, 8]), held)
            parts = parts + (split_registers(gl.reshape(codes, [THREADS, 8]), 8, 3, THREADS, one),)
    operands = ()
    for j in gl.static_range(4):
        low, high = parts[j // 2 * 2], parts[j // 2 * 2 + 1]
        if j % 2 == 0:
            operands = operands + low[:4] + high[:4]
        else:
            operands = operands + low[4:] + high[4:]
    quarter = gl.arange(0, THREADS, layout=one) % 2
    return operands, unit * gl.where(quarter == 0, 0.5, 32768.0)  # half: of a digit there are two columns


@gluon.jit(do_not_specialize=["sumsq_tiles"])
def _digit_kernel(
    x_ptr, w_tiles, scales_ptr, zeros_ptr, bias_ptr, sumsq_ptr, out_ptr, residual_ptr, norm_ptr, sumsq_out_ptr,
    N, K, sumsq_tiles, eps, scale, softcap, norm_offset,
    GROUPS: gl.constexpr, ZEROS: gl.constexpr, PHASES: gl.constexpr, TILES: gl.constexpr, COLUMNS_BLOCK: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr, WARPS: gl.constexpr, MODE: gl.constexpr,
    SUMSQ_BLOCK: gl.constexpr, ACTIVATION: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_SOFTCAP: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    TWO: gl.constexpr = (gl.int32, gl.int32)
    THREADS: gl.constexpr = 32 * WARPS
    SEGMENTS: gl.constexpr = 2 * WARPS  # of 256 columns, in a phase
    IN_PHASE: gl.constexpr = 4 * WARPS  # groups
    STEPS: gl.constexpr = PHASES * TILES
    APART: gl.constexpr = 8 if MODE == "glu" else 16  # columns of steps that follow each other
    SLOTS: gl.constexpr = COLUMNS_BLOCK // APART
    PARTS: gl.constexpr = 2 if MODE == "glu" else 1
    one: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    # [segment, row, word]; lanes have rows in such an order that those which read at once read from all banks
    words_of: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 16], [1, 0, 0]], [[0, 0, 4], [0, 0, 8], [0, 4, 0], [0, 1, 0], [0, 2, 0]],
        [[2, 0, 0], [4, 0, 0], [8, 0, 0]], [], [SEGMENTS, 8, 32],
    )  # fmt: skip
    # [warp, twice, digit, quarter, register]: as mma.sync wants its second operand
    operands_of: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 0, 0, 1], [0, 0, 0, 0, 2], [0, 0, 0, 0, 4]],
        [[0, 0, 0, 1, 0], [0, 0, 0, 2, 0], [0, 0, 1, 0, 0], [0, 0, 2, 0, 0], [0, 1, 0, 0, 0]],
        [[1, 0, 0, 0, 0], [2, 0, 0, 0, 0], [4, 0, 0, 0, 0]], [], [WARPS, 2, 4, 4, 8],
    )  # fmt: skip
    kept_of: gl.constexpr = gl.BlockedLayout([1, WARPS], [32, 1], [WARPS, 1], [1, 0])
    of_column: gl.constexpr = gl.SliceLayout(1, kept_of)
    squares: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    if PDL:
        grid_dependency("launch_dependents", WARPS)
    tile = gl.program_id(0)
    w_ring = gl.allocate_shared_memory(gl.int32, [STAGES * 2, SEGMENTS, 8, 32], w_tiles.layout)
    kept = gl.allocate_shared_memory(gl.float32, [PHASES * SLOTS * 2, 8, WARPS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    full = ring_barriers(STAGES)
    first = tile * BLOCK_N
    second = first + 8  # of a gated product the up rows of the same columns
    if MODE == "glu":
        second = first + N
    for i in gl.static_range(STAGES):
        _ask(w_tiles, w_ring, full, i, first, second, TILES, APART, SEGMENTS, STAGES)
    thread = gl.arange(0, THREADS, layout=one)
    warp, lane, g = thread // 32, thread % 32, thread // 4 % 8
    row = g % 2 * 4 + g // 2
    places = ((first + row) * GROUPS + warp * 4, (second + row) * GROUPS + warp * 4)
    scales, zeros = (), ()
    for i in gl.static_range(AHEAD):
        found = _load_factors(scales_ptr, zeros_ptr, places, i % TILES * APART * GROUPS + i // TILES * IN_PHASE, ZEROS)
        scales, zeros = scales + found[0], zeros + found[1]
    rc = gl.arange(0, COLUMNS_BLOCK, layout=of_column)
    rn = first + rc
    ok = rc < BLOCK_N
    norm, bias = column_parameters(
        norm_ptr, bias_ptr, rn, ok, norm_offset, 0, of_column, COLUMNS_BLOCK, MODE, HAS_BIAS, 1
    )  # fmt: skip
    base = warp * 512 + lane // 16 * 128 + lane % 4 * 16 + lane // 4 % 4 * 4
    if PDL:
        grid_dependency("wait", WARPS)
    xs = _load_x(x_ptr, base)
    if SUMSQ_BLOCK > 0:
        part = gl.arange(0, SUMSQ_BLOCK, layout=squares)
        sumsq = gl.load(sumsq_ptr + part, mask=part < sumsq_tiles, other=0.0)
    if MODE == "residual":
        before = gl.load(residual_ptr + rn, mask=ok, other=0.0)
    for i in gl.static_range(STEPS):
        if i % TILES == 0:
            b, unit = _operands(xs, WARPS, one, operands_of)
            ones = ()
            for j in gl.static_range(4):
                ones = ones + (gl.inline_asm_elementwise(ONES, C_ONES, b[8 * j : 8 * j + 8], gl.int32, True, 1),)
            if i + TILES < STEPS:
                xs = _load_x(x_ptr, base + (i // TILES + 1) * (512 * WARPS))
        mbarrier.wait(full.index(i % STAGES), i // STAGES & 1)
        words = ()
        for half in gl.static_range(2):
            loaded = w_ring.index(i % STAGES * 2 + half).load(words_of)
            # warp, segment, row's bits, group of the segment, quarter, word -> thread, group, word
            loaded = gl.permute(gl.reshape(loaded, [WARPS, 2, 2, 2, 2, 2, 4, 4]), (0, 3, 4, 2, 6, 1, 5, 7))
            words = words + (split_registers(gl.reshape(loaded, [THREADS, 16]), 16, 4, THREADS, one),)
        if i + AHEAD < STEPS:
            found = _load_factors(
                scales_ptr, zeros_ptr, places, (i + AHEAD) % TILES * APART * GROUPS + (i + AHEAD) // TILES * IN_PHASE, ZEROS
            )  # fmt: skip
            scales, zeros = scales + found[0], zeros + found[1]
        acc = (gl.full([THREADS], 0.0, gl.float32, one), gl.full([THREADS], 0.0, gl.float32, one))
        for j in gl.static_range(4):
            both = words[0][4 * j : 4 * j + 4] + words[1][4 * j : 4 * j + 4]
            sums = gl.inline_asm_elementwise(PRODUCTS, C_PRODUCTS, both + b[8 * j : 8 * j + 8], TWO, True, 1)
            new = ()
            for half in gl.static_range(2):
                word = scales[2 * i + half]
                word = (word >> 32).to(gl.int32) if j >= 2 else word.to(gl.int32)
                if ZEROS:
                    sum_j = sums[half] - (zeros[2 * i + half] >> (8 * j) & 255) * ones[j]
                else:
                    sum_j = sums[half] - 8 * ones[j]
                new = new + (acc[half] + sum_j.to(gl.float32) * _float(word, j % 2, scales_ptr.dtype.element_ty),)
            acc = new
        for half in gl.static_range(2):
            of_rows = gl.sum(gl.reshape(acc[half] * unit, [WARPS, 8, 4]), 2)
            of_rows = gl.permute(gl.reshape(of_rows, [WARPS, 2, 2, 2]), (3, 1, 2, 0))  # g's bits as of rows, warp
            if MODE == "glu":
                slot = (i // TILES * 2 + half) * SLOTS + i % TILES
            else:
                slot = (i // TILES * SLOTS + i % TILES) * 2 + half
            kept.index(slot).store(gl.reshape(of_rows, [8, WARPS]))
        if i + STAGES < STEPS:
            gl.thread_barrier()  # all warps have read the place
            _ask(w_tiles, w_ring, full, i + STAGES, first, second, TILES, APART, SEGMENTS, STAGES)
    gl.thread_barrier()
    whole = kept._reinterpret(gl.float32, [PHASES * PARTS, COLUMNS_BLOCK, WARPS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    y = gl.sum(whole.index(0).load(kept_of), 1)
    up = gl.sum(whole.index(PARTS - 1).load(kept_of), 1)
    for p in gl.static_range(1, PHASES):
        y += gl.sum(whole.index(p * PARTS).load(kept_of), 1)
        up += gl.sum(whole.index(p * PARTS + PARTS - 1).load(kept_of), 1)
    if SUMSQ_BLOCK > 0:
        factor = gl.rsqrt(gl.sum(sumsq, 0) / K + eps)
        y, up = y * factor, up * factor
    if MODE == "glu":
        gl.store(out_ptr + rn, (activate(y, ACTIVATION) * up).to(out_ptr.dtype.element_ty), mask=ok)
    elif MODE == "project":
        y = (y + bias) * scale
        if HAS_SOFTCAP:
            y = soft_cap(y, softcap)
        gl.store(out_ptr + rn, y.to(out_ptr.dtype.element_ty), mask=ok)
    else:
        r = before + scale * (y + bias)
        gl.store(residual_ptr + rn, r, mask=ok)
        gl.store(out_ptr + rn, (r * norm).to(out_ptr.dtype.element_ty), mask=ok)
        gl.store(sumsq_out_ptr + tile, gl.sum(gl.where(ok, r * r, 0.0), 0))


def plan(tile: DigitTile, x: Tensor, weight: Weight, columns: int, sumsq: Tensor | None) -> Plan:
    rows, width = weight.shape
    # rows beside each other in segments of 256 columns, 128 bytes: a box of them is what a step has of eight rows
    w_tiles = TensorDescriptor(
        weight.data.view(torch.int32), [width // 256, rows, 32], [32, width // 8, 1], [2 * WARPS, 8, 32],
        gl.NVMMASharedLayout(128, 32, 3),
    )  # fmt: skip
    phases, tiles = width // IN_PHASE, tile.block_n // (8 if rows != columns else 16)
    stages = min(tile.stages, phases * tiles)
    own = {
        "x_ptr": x, "w_tiles": w_tiles, "scales_ptr": weight.scales, "zeros_ptr": weight.zeros, "K": width,
        "GROUPS": width // 128, "ZEROS": weight.zeros is not None, "PHASES": phases, "TILES": tiles,
        "COLUMNS_BLOCK": next_power_of_2(tile.block_n), "STAGES": stages, "AHEAD": min(stages, SCALES_AHEAD), "WARPS": WARPS,
        "SUMSQ_BLOCK": sumsq_block(sumsq, 128),
    }  # fmt: skip
    if tile.registers:
        own["maxnreg"] = tile.registers
    return Plan(_digit_kernel, (columns // tile.block_n,), own)
