"""Matrix products of 2 to 8 rows with 4-bit weights on Hopper, by the tensor cores in bfloat16, weights by the copy engine.

The ring of digit_gemm.py, in the same steps of 16 rows of the weights, of which each warp has columns of its own; it multiplies
them as kernels/warp_products.py says, by the same instructions for up to eight rows of x. What kernels by warps read again and
again is x, all of it in each program: here programs are few and large. Scales and zeros of all steps lie in shared memory
before the wait. products.py says what is computed; tests/gluon_interpreter.py runs the same text without a card.
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

from headrace.fast_decode.digit_gemm import split_registers
from headrace.fast_decode.digit_tile import IN_PHASE, WARPS, DigitTile
from headrace.fast_decode.epilogues import Plan, sumsq_block
from headrace.fast_decode.ring_gemm import column_parameters
from headrace.kernels.activation import activate, soft_cap
from headrace.kernels.gluon_launch import grid_dependency
from headrace.kernels.gluon_rings import ring_barriers
from headrace.kernels.launch import next_power_of_2
from headrace.kernels.warp_words import C_16_4, C_16_16, CONVERT_INT4, LOAD, M_8, MULTIPLY_8, PAIR_X, S_8, SUM_8
from headrace.model.weight import Weight

ROWS = 8  # of x, that the products' second operand has


@gluon.jit
def _ask(w_tiles, w_ring, full, i, first, TILES: gl.constexpr, APART: gl.constexpr, STAGES: gl.constexpr):
    """The weights of step i into the ring."""
    stage = i % STAGES
    mbarrier.expect(full.index(stage), 2 * 16 * 8 * 128)
    place = [i // TILES * 16, 0, first + i % TILES * APART, 0]
    tma.async_copy_global_to_shared(w_tiles, place, full.index(stage), w_ring.index(stage))


@gluon.jit
def _spread(kept, like: gl.constexpr, WARPS: gl.constexpr, one: gl.constexpr):
    """Scales or zeros of a step [half, row, group] -> for each half and group of a thread a tensor [threads]."""
    found = kept.load(gl.SliceLayout(3, like))[:, :, :, None]
    found = found + gl.full([2, 8, 4 * WARPS, 4], 0, found.dtype, like)
    found = gl.permute(gl.reshape(found, [2, 2, 2, 2, WARPS, 4, 4]), (4, 2, 3, 1, 6, 0, 5))  # row's bits as g's
    return split_registers(gl.reshape(found, [32 * WARPS, 8]), 8, 3, 32 * WARPS, one)


@gluon.jit
def _operands(x_ptr, at):
    """The second operand of the products, sixteen registers for each of four groups of columns from `at` on."""
    FOUR: gl.constexpr = (gl.int32, gl.int32, gl.int32, gl.int32)
    SIXTEEN: gl.constexpr = (gl.int32,) * 16
    words = ()
    for i in gl.static_range(16):
        place = x_ptr + (at + i // 4 * 128 + i // 2 % 2 * 64 + i % 2 * 8)
        words = words + gl.inline_asm_elementwise(LOAD, "=r,=r,=r,=r,l", [place.to(gl.int64)], FOUR, False, 1)
    operands = ()
    for j in gl.static_range(4):
        operands = operands + gl.inline_asm_elementwise(PAIR_X, C_16_16, words[16 * j : 16 * j + 16], SIXTEEN, True, 1)
    return operands


@gluon.jit(do_not_specialize=["M", "sumsq_tiles", "sumsq_out_tiles"])
def _nibble_kernel(
    x_ptr, w_tiles, scales_ptr, zeros_ptr, bias_ptr, sumsq_ptr, out_ptr, residual_ptr, norm_ptr, sumsq_out_ptr,
    M, N, K, sumsq_tiles, sumsq_out_tiles, eps, scale, softcap, norm_offset,
    ROWS: gl.constexpr, GROUPS: gl.constexpr, ZEROS: gl.constexpr, PHASES: gl.constexpr, TILES: gl.constexpr,
    COLUMNS_BLOCK: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, STEPS_BLOCK: gl.constexpr, WARPS: gl.constexpr,
    MODE: gl.constexpr, SUMSQ_BLOCK: gl.constexpr, ACTIVATION: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    TWO: gl.constexpr = (gl.float32, gl.float32)
    FOUR: gl.constexpr = (gl.float32, gl.float32, gl.float32, gl.float32)
    SIXTEEN: gl.constexpr = (gl.int32,) * 16
    THREADS: gl.constexpr = 32 * WARPS
    SEGMENTS: gl.constexpr = 2 * WARPS  # of 256 columns, in a phase
    IN_PHASE: gl.constexpr = 4 * WARPS  # groups
    STEPS: gl.constexpr = PHASES * TILES
    APART: gl.constexpr = 8 if MODE == "glu" else 16  # columns of steps that follow each other
    SLOTS: gl.constexpr = COLUMNS_BLOCK // APART
    PLACES: gl.constexpr = ROWS * WARPS
    one: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    # [segment, half, row, word]; lanes have rows in such an order that those which read at once read from all banks
    words_of: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 16], [1, 0, 0, 0], [0, 1, 0, 0]],
        [[0, 0, 0, 4], [0, 0, 0, 8], [0, 0, 4, 0], [0, 0, 1, 0], [0, 0, 2, 0]],
        [[2, 0, 0, 0], [4, 0, 0, 0], [8, 0, 0, 0]], [], [SEGMENTS, 2, 8, 32],
    )  # fmt: skip
    # [half, row, group, the four threads that have the same]
    factors_of: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1, 0], [0, 0, 2, 0], [1, 0, 0, 0]], [[0, 0, 0, 1], [0, 0, 0, 2], [0, 4, 0, 0], [0, 1, 0, 0], [0, 2, 0, 0]],
        [[0, 0, 4, 0], [0, 0, 8, 0], [0, 0, 16, 0]], [], [2, 8, IN_PHASE, 4],
    )  # fmt: skip
    all_of: gl.constexpr = gl.BlockedLayout([1, 8], [256 // IN_PHASE, IN_PHASE // 8], [WARPS, 1], [1, 0])
    kept_of: gl.constexpr = gl.BlockedLayout([1, PLACES], [32, 1], [WARPS, 1], [1, 0])
    halves_of: gl.constexpr = gl.BlockedLayout([1, 2, 1, PLACES], [4, 1, 8, 1], [WARPS, 1, 1, 1], [3, 2, 1, 0])
    out_of: gl.constexpr = gl.BlockedLayout([1, ROWS], [32, 1], [WARPS, 1], [1, 0])
    of_column: gl.constexpr = gl.SliceLayout(1, out_of)
    of_row: gl.constexpr = gl.SliceLayout(0, out_of)
    squares: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    if PDL:
        grid_dependency("launch_dependents", WARPS)
    tile = gl.program_id(0)
    w_ring = gl.allocate_shared_memory(gl.int32, [STAGES, SEGMENTS, 2, 8, 32], w_tiles.layout)
    s_kept = gl.allocate_shared_memory(scales_ptr.dtype.element_ty, [STEPS_BLOCK, 2, 8, IN_PHASE], plain)
    z_kept = gl.allocate_shared_memory(gl.uint8, [STEPS_BLOCK, 2, 8, IN_PHASE], plain)
    kept = gl.allocate_shared_memory(gl.float32, [SLOTS, 2, 8, PLACES], plain)
    full = ring_barriers(STAGES)
    first = tile * BLOCK_N
    second = first + 8  # of a gated product the up rows of the same columns
    if MODE == "glu":
        second = first + N
    for stage in gl.static_range(STAGES):
        _ask(w_tiles, w_ring, full, stage, first, TILES, APART, STAGES)
    thread = gl.arange(0, THREADS, layout=one)
    warp, lane, g = thread // 32, thread % 32, thread // 4 % 8
    line = gl.arange(0, STEPS_BLOCK * 16, layout=gl.SliceLayout(1, all_of))
    step = gl.minimum(line // 16, STEPS - 1)
    w_row = gl.where(line // 8 % 2 == 0, first, second) + step % TILES * APART + line % 8
    group = gl.arange(0, IN_PHASE, layout=gl.SliceLayout(0, all_of))
    at = (w_row * GROUPS + step // TILES * IN_PHASE)[:, None] + group[None, :]
    s_kept._reinterpret(scales_ptr.dtype.element_ty, [STEPS_BLOCK * 16, IN_PHASE], flat).store(gl.load(scales_ptr + at))
    if ZEROS:
        z_kept._reinterpret(gl.uint8, [STEPS_BLOCK * 16, IN_PHASE], flat).store(gl.load(zeros_ptr + at))
    rc = gl.arange(0, COLUMNS_BLOCK, layout=of_column)
    rn = first + rc
    rm = gl.arange(0, ROWS, layout=of_row)
    place = rn[:, None] + rm[None, :] * N
    ok = (rc < BLOCK_N)[:, None] & (rm < M)[None, :]
    norm, bias = column_parameters(
        norm_ptr, bias_ptr, rn, rc < BLOCK_N, norm_offset, 0, of_column, COLUMNS_BLOCK, MODE, HAS_BIAS, 1
    )  # fmt: skip
    x_place = gl.minimum(g, M - 1) * K + warp * 512 + lane % 4 * 16
    if PDL:
        grid_dependency("wait", WARPS)
    if SUMSQ_BLOCK > 0:
        of_x = gl.minimum(gl.arange(0, ROWS, layout=gl.SliceLayout(1, squares)), M - 1)
        part = gl.arange(0, SUMSQ_BLOCK, layout=gl.SliceLayout(0, squares))
        sumsq = gl.load(
            sumsq_ptr + of_x[:, None] * sumsq_tiles + part[None, :], mask=(part < sumsq_tiles)[None, :], other=0.0
        )  # fmt: skip
    if MODE == "residual":
        before = gl.load(residual_ptr + place, mask=ok, other=0.0)
    none = gl.full([THREADS], 0.0, gl.float32, one)
    for p in range(0, PHASES):
        b = _operands(x_ptr, x_place + p * (512 * WARPS))
        ones = ()
        for j in gl.static_range(4):
            ones = ones + (gl.inline_asm_elementwise(SUM_8, S_8, b[16 * j : 16 * j + 16], TWO, True, 1),)
        for t in range(0, TILES):
            i = p * TILES + t
            mbarrier.wait(full.index(i % STAGES), i // STAGES & 1)
            loaded = gl.reshape(w_ring.index(i % STAGES).load(words_of), [WARPS, 2, 2, 2, 2, 2, 2, 4, 4])
            # warp, segment, half, row's bits, part of the segment, quarter, word -> thread, half, group, word
            loaded = gl.reshape(gl.permute(loaded, (0, 4, 5, 3, 7, 2, 1, 6, 8)), [THREADS, 32])
            words = split_registers(loaded, 32, 5, THREADS, one)
            scales = _spread(s_kept.index(i), factors_of, WARPS, one)
            if ZEROS:
                zeros = _spread(z_kept.index(i), factors_of, WARPS, one)
            acc = (none, none, none, none)  # of row g of the weights two columns, of the one 8 below as many
            for j in gl.static_range(4):
                upper = gl.inline_asm_elementwise(CONVERT_INT4, C_16_4, words[4 * j : 4 * j + 4], SIXTEEN, True, 1)
                lower = gl.inline_asm_elementwise(CONVERT_INT4, C_16_4, words[16 + 4 * j : 20 + 4 * j], SIXTEEN, True, 1)
                operands = upper + lower + b[16 * j : 16 * j + 16] + (none, none, none, none)
                sums = gl.inline_asm_elementwise(MULTIPLY_8, M_8, operands, FOUR, True, 1)
                new = ()
                for half in gl.static_range(2):
                    s = scales[half * 4 + j].to(gl.float32)
                    z = 136.0
                    if ZEROS:  # joins 128: it is the end of that number's fraction
                        z = (zeros[half * 4 + j].to(gl.int32) << 16 | 0x43000000).to(gl.float32, bitcast=True)
                    for c in gl.static_range(2):
                        new = new + (acc[2 * half + c] + (sums[2 * half + c] - z * ones[j][c]) * s,)
                acc = new
            both = ()
            for half in gl.static_range(2):
                of_rows = gl.reshape(gl.join(acc[2 * half], acc[2 * half + 1]), [WARPS, 2, 2, 2, 4, 2])
                # g's bits as of rows, then x's row, warp
                both = both + (gl.reshape(gl.permute(of_rows, (3, 1, 2, 4, 5, 0)), [8, PLACES]),)
            of_step = gl.permute(gl.join(both[0], both[1]), (2, 0, 1))
            slot = kept.index(t)
            if PHASES > 1 and p > 0:
                of_step += slot.load(of_step.type.layout)
            slot.store(of_step)
            if i + STAGES < STEPS:
                gl.thread_barrier()  # all warps have read the place
                _ask(w_tiles, w_ring, full, i + STAGES, first, TILES, APART, STAGES)
    gl.thread_barrier()
    if MODE == "glu":
        whole = kept._reinterpret(gl.float32, [SLOTS, 2, 8, PLACES], gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0]))
        found = gl.sum(gl.reshape(whole.load(halves_of), [SLOTS, 2, 8, ROWS, WARPS]), 4)
        y, up = gl.split(gl.permute(found, (0, 2, 3, 1)))
        up = gl.convert_layout(gl.reshape(up, [COLUMNS_BLOCK, ROWS]), out_of)
    else:
        whole = kept._reinterpret(gl.float32, [COLUMNS_BLOCK, PLACES], flat)
        y = gl.sum(gl.reshape(whole.load(kept_of), [COLUMNS_BLOCK, ROWS, WARPS]), 2)
    y = gl.convert_layout(gl.reshape(y, [COLUMNS_BLOCK, ROWS]), out_of)
    if SUMSQ_BLOCK > 0:
        factor = gl.convert_layout(gl.rsqrt(gl.sum(sumsq, 1) / K + eps), of_row)[None, :]
        y = y * factor
        if MODE == "glu":
            up = up * factor
    if MODE == "glu":
        gl.store(out_ptr + place, (activate(y, ACTIVATION) * up).to(out_ptr.dtype.element_ty), mask=ok)
    elif MODE == "project":
        y = (y + bias[:, None]) * scale
        if HAS_SOFTCAP:
            y = soft_cap(y, softcap)
        gl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), mask=ok)
    else:
        r = before + scale * (y + bias[:, None])
        gl.store(residual_ptr + place, r, mask=ok)
        gl.store(out_ptr + place, (r * norm[:, None]).to(out_ptr.dtype.element_ty), mask=ok)
        gl.store(sumsq_out_ptr + rm * sumsq_out_tiles + tile, gl.sum(gl.where(ok, r * r, 0.0), 0), mask=rm < M)


def plan(tile: DigitTile, x: Tensor, weight: Weight, columns: int, sumsq: Tensor | None) -> Plan:
    rows, width = weight.shape
    # a step's rows are eight, and eight further ones: the next, or of a gated product the up rows of the same columns
    pitch, apart = width // 8, columns if rows != columns else 8
    w_tiles = TensorDescriptor(
        weight.data.view(torch.int32), [width // 256, 2, rows - apart, 32], [32, apart * pitch, pitch, 1],
        [2 * WARPS, 2, 8, 32], gl.NVMMASharedLayout(128, 32, 4),
    )  # fmt: skip
    phases, tiles = width // IN_PHASE, tile.block_n // (8 if rows != columns else 16)
    own = {
        "x_ptr": x, "w_tiles": w_tiles, "scales_ptr": weight.scales, "zeros_ptr": weight.zeros, "M": len(x), "K": width,
        "sumsq_out_tiles": columns // tile.block_n, "ROWS": ROWS, "GROUPS": width // 128, "ZEROS": weight.zeros is not None,
        "PHASES": phases, "TILES": tiles, "COLUMNS_BLOCK": next_power_of_2(tile.block_n),
        "STAGES": min(tile.stages, phases * tiles), "STEPS_BLOCK": next_power_of_2(phases * tiles), "WARPS": WARPS,
        "SUMSQ_BLOCK": sumsq_block(sumsq, 128),
    }  # fmt: skip
    if tile.registers:
        own["maxnreg"] = tile.registers
    return Plan(_nibble_kernel, (columns // tile.block_n,), own)
