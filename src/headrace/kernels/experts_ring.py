"""MXFP4 experts of few rows as experts_warp.py and experts_warp_tiles.py have them, whose weights the copy engine brings (TMA),
on Hopper, in Gluon: what experts_ring_row.py and experts_ring_tiles.py share.

There weights pass through registers, of which a program has none left for what is on its way while it multiplies: the
assembler asks for the next ones when the last are used up. Here a ring of steps in shared memory is filled by copies that need
none. A step is two runs of 128 columns, one for each half of the warps; a thread reads from it the 16 bytes of each of its two
rows that it multiplies. Neither the interpreter nor another card runs it: there those compute the same.
"""

# mypy: disable-error-code="assignment"
# (kernels grow tuples in loops that the compiler unrolls)

from __future__ import annotations

from typing import Any

from torch import int32
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from headrace.kernels.activation import gated
from headrace.kernels.experts_digits import Digits
from headrace.kernels.experts_warp import ABOVE, BELOW, with_registers, word_lines, x_lines
from headrace.kernels.launch import pdl
from headrace.kernels.narrow import NarrowMatrix, held_width

COLUMNS = 32  # of the gated product a program has, and 16 of the next one for each of four experts
BYTES = gl.constexpr(2 * COLUMNS * 128)  # of a step
# Of a step, [32, 32] words: thread 4 g + q of a warp has words 4 q to 4 q + 3 of a run of row g of eight.
WORDS = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [4, 2], [1, 0]))
SUMS = gl.constexpr(gl.BlockedLayout([1, 1], [8, 4], [4, 2], [1, 0]))  # [32, 8]: the sums of a group, of two runs
# Both rows' words of a thread as they lie in the ring: [gate or up, row, word], or [tile * 16 + row, word].
GATED = gl.constexpr(gl.DistributedLinearLayout(
    [[0, 0, 1], [0, 0, 2], [1, 0, 0]], [[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
    [[0, 0, 16], [0, 8, 0], [0, 16, 0]], [], [2, 32, 32],
))  # fmt: skip
APART = gl.constexpr(gl.DistributedLinearLayout(
    [[0, 1], [0, 2], [8, 0]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], [[0, 16], [16, 0], [32, 0]], [], [64, 32]
))  # fmt: skip


def _multiply_run(rows: int) -> Any:
    """Of each row of x four sums of the products of a run: $0 and on; then four words of each of a thread's two rows of the
    weights, and of each row of x; where bytes of x belong and the tables, of each of four elements."""
    words = 4 * rows
    first, more, above, below = (f"${words + 8 + 4 * (rows + i)}" for i in range(4))
    lines = []
    for word in range(4):
        lines += word_lines((f"${words + word}", f"${words + 4 + word}"), above, below)
        for r in range(rows):
            sums = ", ".join(f"${4 * r + i}" for i in range(4))
            lines += x_lines(f"${words + 8 + 4 * r + word}", (first, more), sums if word else "z, z, z, z", sums)
    return gl.constexpr(with_registers(lines))


def _operands(rows: int) -> Any:
    return gl.constexpr(",".join(["=&r"] * 4 * rows + ["r"] * (24 + 4 * rows)))


RUN_1, RUN_2 = _multiply_run(1), _multiply_run(2)
OPERANDS_1, OPERANDS_2 = _operands(1), _operands(2)
TWO = gl.constexpr((gl.int32,) * 2)


@gluon.jit
def grid_dependency(what: gl.constexpr):
    """griddepcontrol, by every thread (see launch.py)."""
    thread = gl.arange(0, 256, layout=gl.BlockedLayout([1], [32], [8], [0]))
    gl.inline_asm_elementwise("griddepcontrol." + what + "; mov.u32 $0, $1;", "=r,r", [thread], gl.int32, False, 1)


@gluon.jit
def new_ring(weights, STAGES: gl.constexpr, GATE: gl.constexpr):
    """Places of STAGES steps, and barriers that say when one has come."""
    if GATE:
        ring = gl.allocate_shared_memory(gl.int32, [STAGES, 2, 32, 32], weights.layout)
    else:
        ring = gl.allocate_shared_memory(gl.int32, [STAGES, 64, 32], weights.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    return ring, full


@gluon.jit
def ask(weights, ring, full, experts, first, N, step, STAGES: gl.constexpr, GATE: gl.constexpr):
    """For a step: of an expert gate and up rows, or 64 rows; or of four 16 rows each. Past the matrix's end comes 0."""
    stage = step % STAGES
    mbarrier.expect(full.index(stage), BYTES)
    if GATE:
        tma.async_copy_global_to_shared(weights, [2 * experts[0], first, step * 32], full.index(stage), ring.index(stage))
    else:
        EACH: gl.constexpr = 64 // len(experts)
        for j in gl.static_range(len(experts)):
            place = ring.index(stage).slice(EACH * j, EACH, 0)
            tma.async_copy_global_to_shared(weights, [experts[j] * N + first, step * 32], full.index(stage), place)


@gluon.jit
def _constants():
    """As experts_warp.constants_of."""
    row = gl.arange(0, 32, layout=gl.SliceLayout(1, WORDS))[:, None] % 8
    group = gl.arange(0, 32, layout=gl.SliceLayout(0, WORDS))[None, :] % 16 // 4
    none = (row + group) * 0
    own, low = row // 2 % 2 == group // 2, row // 4 + none == 0
    same = none * gl.program_id(2)
    first = gl.where(own, gl.where(low, 0x4140, 0x1404), 0x4444)
    return first, gl.where(own, gl.where(low, 0x4342, 0x3424), 0x4444), same + ABOVE, same + BELOW


@gluon.jit
def _load_step(xs, above_at, below_at, step, RUNS: gl.constexpr):
    """Of a step what is not the copy engine's: rows of x with their scales, and the weights' scales; 0 past the last run."""
    run = 2 * step + gl.arange(0, 32, layout=gl.SliceLayout(0, WORDS))[None, :] // 16
    of_words = (run < RUNS) & (gl.arange(0, 32, layout=gl.SliceLayout(1, WORDS)) >= 0)[:, None]
    run = 2 * step + gl.arange(0, 8, layout=gl.SliceLayout(0, SUMS))[None, :] // 4
    there = (run < RUNS) & (gl.arange(0, 32, layout=gl.SliceLayout(1, SUMS)) >= 0)[:, None]
    found = ()
    for r in gl.static_range(len(xs)):
        x, scales = xs[r]
        x, scales = gl.load(x + step * 64, mask=of_words, other=0), gl.load(scales + step * 8, mask=there, other=0.0)
        found = found + ((x, scales),)
    above, below = gl.load(above_at + step * 8, mask=there, other=0.0), gl.load(below_at + step * 8, mask=there, other=0.0)
    return found, above, below


@gluon.jit
def _multiply(a, b, x, c):
    """The sums of a step of each row of x."""
    if len(x) == 1:
        sums = (gl.inline_asm_elementwise(RUN_1, OPERANDS_1, [a, b, x[0][0], c[0], c[1], c[2], c[3]], gl.int32, True, 4),)
    else:
        given = [a, b, x[0][0], x[1][0], c[0], c[1], c[2], c[3]]
        sums = gl.inline_asm_elementwise(RUN_2, OPERANDS_2, given, TWO, True, 4)
    return sums


@gluon.jit
def ring_sums(
    weights, ring, full, experts, first, N, xs, above_at, below_at, K: gl.constexpr, STAGES: gl.constexpr, GATE: gl.constexpr
):  # fmt: skip
    """For each row of x two sums [32], of both rows of the weights that threads have; STAGES steps are on their way."""
    RUNS: gl.constexpr = K // 128
    STEPS: gl.constexpr = (RUNS + 1) // 2
    constants = _constants()
    acc = ()
    for _ in gl.static_range(2 * len(xs)):
        acc = acc + (gl.full([32, 8], 0.0, gl.float32, SUMS),)
    x, above, below = _load_step(xs, above_at, below_at, 0, RUNS)
    for i in range(STEPS):
        following = _load_step(xs, above_at, below_at, i + 1, RUNS)
        mbarrier.wait(full.index(i % STAGES), i // STAGES & 1)
        if GATE:
            a, b = gl.split(gl.permute(ring.index(i % STAGES).load(GATED), (1, 2, 0)))
        else:
            both = gl.reshape(ring.index(i % STAGES).load(APART), (4, 2, 8, 32))
            a, b = gl.split(gl.permute(both, (0, 2, 3, 1)))
        if i + STAGES < STEPS:
            gl.thread_barrier()  # all warps have read the place
            ask(weights, ring, full, experts, first, N, i + STAGES, STAGES, GATE)
        a = gl.convert_layout(gl.reshape(a, (32, 32)), WORDS, assert_trivial=True)
        b = gl.convert_layout(gl.reshape(b, (32, 32)), WORDS, assert_trivial=True)
        sums = _multiply(a, b, x, constants)
        above, below = above.to(gl.float32), below.to(gl.float32)
        new = ()
        for r in gl.static_range(len(xs)):
            high, low = gl.split(gl.reshape(sums[r], (32, 8, 2, 2)))
            of_a, of_b = gl.split(high * 256 + low)
            of_a = gl.convert_layout(of_a, SUMS, assert_trivial=True).to(gl.float32)
            of_b = gl.convert_layout(of_b, SUMS, assert_trivial=True).to(gl.float32)
            new = new + (acc[2 * r] + of_a * (x[r][1] * above), acc[2 * r + 1] + of_b * (x[r][1] * below))
        acc = new
        x, above, below = following
    found = ()
    for r in gl.static_range(2 * len(xs)):
        found = found + (gl.sum(acc[r], 1),)
    return found


@gluon.jit
def of_x(x_ptr, scales_ptr, row, of_scales, K: gl.constexpr):
    """As experts_warp.of_x, of x as words: of a row of x, or of one for each of 32 of the weights, in both layouts."""
    at = gl.arange(0, 32, layout=gl.SliceLayout(1, WORDS))
    word = gl.arange(0, 32, layout=gl.SliceLayout(0, WORDS))
    place = at * 0 + row * (K // 2) + at % 2 * (K // 4) + at % 8 // 4 * 16
    group = gl.arange(0, 8, layout=gl.SliceLayout(0, SUMS))
    of_scales = gl.arange(0, 32, layout=gl.SliceLayout(1, SUMS)) * 0 + of_scales * (K // 32)
    x = x_ptr + place[:, None] + (word // 16 * 32 + word % 16)[None, :]
    return x, scales_ptr + of_scales[:, None] + group[None, :]


@gluon.jit
def of_scales(scales_ptr, row, K: gl.constexpr):
    group = gl.arange(0, 8, layout=gl.SliceLayout(0, SUMS))
    return scales_ptr + row.to(gl.int64)[:, None] * (K // 32) + group[None, :]


@gluon.jit
def store_gated(
    g, u, factor, bias_ptr, out_ptr, out_scales_ptr, expert, pair, part, N, clamp, WIDTH: gl.constexpr, ACTIVATION: gl.constexpr
):  # fmt: skip
    """A pair's gated columns from 32 * part on, as whole numbers (experts_digits.split_digits)."""
    column = part * 32 + gl.arange(0, 32, layout=gl.SliceLayout(1, SUMS))
    g, u = g * factor, u * factor
    if bias_ptr is not None:
        bias = bias_ptr + expert * (2 * N) + column
        g += gl.load(bias, mask=column < N, other=0.0).to(gl.float32)
        u += gl.load(bias + N, mask=column < N, other=0.0).to(gl.float32)
    y = gl.where(column < N, gated(g, u, clamp, ACTIVATION), 0.0)  # past its end a row is 0
    top = gl.max(y.to(gl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    exponent = gl.maximum(top >> 23, 40)
    larger = ((267 - exponent) << 23).to(gl.float32, bitcast=True)
    n = (y * larger + 12582912.0).to(gl.int32, bitcast=True) - 0x4B400000
    low = ((n + 128) & 255) - 128
    place = out_ptr + pair.to(gl.int64) * (2 * WIDTH) + column
    gl.store(place, ((n - low) >> 8).to(gl.int8))
    gl.store(place + WIDTH, low.to(gl.int8))
    scale = gl.where(top < 0x7F800000, ((exponent - 14) << 23).to(gl.float32, bitcast=True), float("nan"))
    gl.store(out_scales_ptr + pair * (WIDTH // 32) + part, scale)


def tiles(weight: NarrowMatrix, shape: tuple[int, ...], block: list[int]) -> TensorDescriptor:
    words = weight.data.view(int32).view(shape)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=len(block))
    return TensorDescriptor(words, list(words.shape), list(words.stride()), block, layout)


def gated_tiles(weight: NarrowMatrix, columns: int) -> TensorDescriptor:
    return tiles(weight, (-1, columns, held_width(weight) // 8), [2, 32, 32])


def options(x: Digits, weight: NarrowMatrix, stages: int) -> dict[str, Any]:
    width = held_width(weight)
    return {
        "x_ptr": x.numbers.view(int32), "x_scales_ptr": x.scales, "scales_ptr": weight.scales, "K": width,
        "STAGES": min(stages, -(-width // 256)), "num_warps": 8, **pdl(x.scales),
    }  # fmt: skip
