"""Matrix products of some dozens of rows with weights of 4 or 8 bits on Hopper: rings, and numbers widened in registers.

Both operands come by the copy engine as they lie in memory. A step of the loop is a run of 128 columns, or two: each warpgroup
widens the codes of 64 rows of the weights to bfloat16, straight into the left operand of the tensor cores. The sums of a run
of 4 bits are one group's and are scaled in float32. Programs are small, several to a multiprocessor: while one's products run,
another one widens. The order of every sum is fixed. products.py says what is computed; tests/gluon_interpreter.py runs the
same text without a card.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from headrace.fast_decode.epilogues import Plan, sumsq_block
from headrace.fast_decode.ring_ends import column_parameters, norm_factors, store_joined, store_projected
from headrace.fast_decode.widened_tile import WidenedTile, row_block
from headrace.kernels.activation import activate
from headrace.kernels.folded_gemm import less_zeros
from headrace.kernels.folded_tile import groups_held
from headrace.kernels.gluon_launch import grid_dependency
from headrace.kernels.gluon_rings import ask, ask_rows, leave_part, ring_barriers, sum_parts
from headrace.kernels.narrow import INT4_2, INT8_2, RUN
from headrace.model.weight import Weight


@gluon.jit
def _ask_weights(
    w_tiles, w_ring, full, i, n0, N, at, BYTES: gl.constexpr, BLOCK_N: gl.constexpr, PARTS: gl.constexpr, GLU: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Those of step i into the ring; its barrier waits for the rows, too. Gate and up rows are two tiles, or halves of one."""
    if PARTS == 1 and GLU:
        stage = i % STAGES
        mbarrier.expect(full.index(stage), BYTES)
        for j in gl.static_range(2):
            half = w_ring.index(stage).slice(j * BLOCK_N, BLOCK_N, 0)
            tma.async_copy_global_to_shared(w_tiles, [n0 + j * N, at], full.index(stage), half)
    else:
        ask(w_tiles, w_ring, full, i, n0, N, at, STAGES, PARTS, BYTES)


@gluon.jit
def _widened(w, kept_zeros, run, r: gl.constexpr, KIND: gl.constexpr, ZEROS: gl.constexpr, left: gl.constexpr):
    """Run r of a tile, whose zeros are those of `run`, in bfloat16: columns 0 to 63 and 64 to 127."""
    if KIND == "int8":
        low = gl.inline_asm_elementwise(INT8_2, "=r,r", [w.slice(0, 64, 1).load(left)], gl.bfloat16, True, 2)
        high = gl.inline_asm_elementwise(INT8_2, "=r,r", [w.slice(64, 64, 1).load(left)], gl.bfloat16, True, 2)
    else:
        raw = w.slice(64 * r, 64, 1).load(left)
        less = less_zeros(gl.full(raw.shape, 0, gl.int32, left), kept_zeros, run, ZEROS, left)
        low, high = gl.inline_asm_elementwise(
            INT4_2, "=r,=r,r,r,r,r,r", [raw, less, less], (gl.bfloat16, gl.bfloat16), True, 2
        )
    return low, high


@gluon.jit
def _begin(acc, numbers, low_x, high_x, KIND: gl.constexpr):
    """A run's products, which join the sums of 8 bits, and begin those of a group of 4."""
    acc = warpgroup_mma(numbers[0], low_x, acc, use_acc=KIND == "int8", is_async=True)
    return warpgroup_mma(numbers[1], high_x, acc, is_async=True)


@gluon.jit
def _ended(acc, new, numbers, kept, run, KIND: gl.constexpr, sums: gl.constexpr):
    """The sums with a run's products, which are waited for."""
    new, _low, _high = warpgroup_mma_wait(0, deps=[new, numbers[0], numbers[1]])
    if KIND == "int4":
        new = acc + new * kept.index(run).load(gl.SliceLayout(1, sums)).to(gl.float32)[:, None]
    return new


@gluon.jit(do_not_specialize=["M", "sumsq_tiles", "sumsq_out_tiles"])
def _widened_kernel(
    x_tiles, w_tiles, scales_ptr, zeros_ptr, bias_ptr, sumsq_ptr, out_ptr, residual_ptr, norm_ptr, sumsq_out_ptr, partials_ptr,
    tickets_ptr,
    M, N, K, sumsq_tiles, sumsq_out_tiles, eps, scale, softcap, norm_offset,
    KIND: gl.constexpr, ZEROS: gl.constexpr, RUNS: gl.constexpr, STEPS: gl.constexpr, GROUPS_BLOCK: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, SPLITS: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
    MODE: gl.constexpr, SUMSQ_BLOCK: gl.constexpr, ACTIVATION: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    GLU: gl.constexpr = MODE == "glu"
    TILE_N: gl.constexpr = 16 * WARPS  # rows of the weights, of which each warp has 16
    ALL: gl.constexpr = 2 * BLOCK_N if GLU else BLOCK_N
    PARTS: gl.constexpr = ALL // TILE_N
    IN_RUN: gl.constexpr = 128 if KIND == "int8" else 64  # bytes of a row
    BYTES: gl.constexpr = RUNS * (IN_RUN * ALL + 256 * BLOCK_M)  # of a step
    HALVES: gl.constexpr = 2 * RUNS
    GROUPS: gl.constexpr = STEPS * RUNS  # of the program's part of K
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    flat: gl.constexpr = gl.BlockedLayout([4, 1], [min(32, BLOCK_N // 4), max(1, 128 // BLOCK_N)], [1, WARPS], [0, 1])
    pairs: gl.constexpr = gl.BlockedLayout(
        [4, 1, 2], [min(32, BLOCK_N // 4), max(1, 128 // BLOCK_N), 1], [1, WARPS, 1], [2, 0, 1]
    )  # fmt: skip
    squares: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [WARPS, 1], [1, 0])
    table: gl.constexpr = gl.BlockedLayout([4, 1], [8, 4], [1, WARPS], [0, 1])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    square: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    if PDL:
        grid_dependency("launch_dependents", WARPS)
    tile = gl.program_id(0)
    split = gl.program_id(1)
    n0 = tile * BLOCK_N
    first = split * GROUPS
    w_ring = gl.allocate_shared_memory(gl.uint8, [STAGES * PARTS, TILE_N, IN_RUN * RUNS], w_tiles.layout)
    x_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES * HALVES, BLOCK_M, 64], x_tiles.layout)
    full = ring_barriers(STAGES)
    for i in range(0, min(STEPS, STAGES)):
        at = (first + i * RUNS) * IN_RUN
        _ask_weights(w_tiles, w_ring, full, i, n0, N, at, BYTES, BLOCK_N, PARTS, GLU, STAGES)
    kept = w_ring
    kept_zeros = w_ring
    if KIND == "int4":
        kept = gl.allocate_shared_memory(scales_ptr.dtype.element_ty, [GROUPS_BLOCK * PARTS, TILE_N], plain)
        run = gl.arange(0, GROUPS_BLOCK, layout=gl.SliceLayout(1, table))
        row = gl.arange(0, ALL, layout=gl.SliceLayout(0, table))
        of_row = (n0 + row % BLOCK_N + row // BLOCK_N * N) * (GROUPS * SPLITS) + first
        places = of_row[None, :] + gl.minimum(run, GROUPS - 1)[:, None]
        found = gl.load(scales_ptr + places)
        kept._reinterpret(scales_ptr.dtype.element_ty, [GROUPS_BLOCK, ALL], square).store(found)
        if ZEROS:
            kept_zeros = gl.allocate_shared_memory(gl.uint8, [GROUPS_BLOCK * PARTS, TILE_N], plain)
            kept_zeros._reinterpret(gl.uint8, [GROUPS_BLOCK, ALL], square).store(gl.load(zeros_ptr + places))
    rn = n0 + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, flat))
    rm = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, flat))
    norm, bias = column_parameters(
        norm_ptr, bias_ptr, rn, rn < N, norm_offset, split, gl.SliceLayout(1, flat), BLOCK_N, MODE, HAS_BIAS, SPLITS
    )  # fmt: skip
    place = rm[None, :] * N + rn[:, None]
    ok = (rm < M)[None, :] & (rn < N)[:, None]
    if PDL:
        grid_dependency("wait", WARPS)
    for i in range(0, min(STEPS, STAGES)):
        ask_rows(x_tiles, x_ring, full, i, 0, (first + i * RUNS) * 128, HALVES, STAGES)
    # what the epilogue reads is asked for now: behind the sums its latency would show
    if SUMSQ_BLOCK > 0:
        of_x = gl.minimum(gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, squares)), M - 1)
        part = gl.arange(0, SUMSQ_BLOCK, layout=gl.SliceLayout(0, squares))
        sumsq = gl.load(
            sumsq_ptr + of_x[:, None] * sumsq_tiles + part[None, :], mask=(part < sumsq_tiles)[None, :], other=0.0,
            cache_modifier=".cg",
        )  # fmt: skip
    gl.thread_barrier()
    zeros = gl.full([TILE_N, BLOCK_M], 0.0, gl.float32, sums)
    acc = zeros
    up_acc = zeros
    for i in range(0, STEPS):
        stage = i % STAGES
        mbarrier.wait(full.index(stage), i // STAGES & 1)
        for r in gl.static_range(RUNS):
            of_run = (i * RUNS + r) * PARTS
            low_x = x_ring.index(stage * HALVES + 2 * r).permute((1, 0))
            high_x = x_ring.index(stage * HALVES + 2 * r + 1).permute((1, 0))
            numbers = _widened(w_ring.index(stage * PARTS), kept_zeros, of_run, r, KIND, ZEROS, left)
            new = _begin(acc if KIND == "int8" else zeros, numbers, low_x, high_x, KIND)
            if KIND == "int8":
                acc = _ended(acc, new, numbers, kept, of_run, KIND, sums)
            if PARTS == 2:
                up_numbers = _widened(w_ring.index(stage * PARTS + 1), kept_zeros, of_run + 1, r, KIND, ZEROS, left)
                up_new = _begin(up_acc if KIND == "int8" else zeros, up_numbers, low_x, high_x, KIND)
                up_acc = _ended(up_acc, up_new, up_numbers, kept, of_run + 1, KIND, sums)
            if KIND == "int4":  # only now: gate's products run while up's numbers are widened
                acc = _ended(acc, new, numbers, kept, of_run, KIND, sums)
        if i + STAGES < STEPS:
            gl.thread_barrier()  # all warps have read the place
            later = first + (i + STAGES) * RUNS
            _ask_weights(w_tiles, w_ring, full, i, n0, N, later * IN_RUN, BYTES, BLOCK_N, PARTS, GLU, STAGES)
            ask_rows(x_tiles, x_ring, full, i, 0, later * 128, HALVES, STAGES)
    if GLU:
        if PARTS == 1:
            both = gl.permute(gl.reshape(acc, [2, BLOCK_N, BLOCK_M]), (1, 2, 0))
            acc, up_acc = gl.split(gl.convert_layout(both, pairs))
        up = gl.convert_layout(up_acc, flat)
    y = gl.convert_layout(acc, flat)
    if KIND == "int8":
        y = y * gl.load(scales_ptr + rn).to(gl.float32)[:, None]
        if GLU:
            up = up * gl.load(scales_ptr + N + rn).to(gl.float32)[:, None]
    if SUMSQ_BLOCK > 0:
        factor = norm_factors(sumsq, K, eps, flat)
        y = y * factor[None, :]
        if GLU:
            up = up * factor[None, :]
    if GLU:
        gl.store(out_ptr + place, (activate(y, ACTIVATION) * up).to(out_ptr.dtype.element_ty), mask=ok)
    elif MODE == "project":
        store_projected(y, bias, scale, softcap, out_ptr, place, ok, split, M, N, HAS_SOFTCAP)
    else:
        SIZE: gl.constexpr = BLOCK_N * BLOCK_M
        slab = partials_ptr + tile * (SPLITS * SIZE) + rm[None, :] * BLOCK_N + (rn - n0)[:, None]
        if leave_part(y, slab, split, tickets_ptr + tile, SIZE, SPLITS):
            before = gl.load(residual_ptr + place, mask=ok, other=0.0)
            y = sum_parts(y, slab, tickets_ptr + tile, SIZE, SPLITS)
            store_joined(
                y, before, bias, norm, scale, residual_ptr, out_ptr, sumsq_out_ptr, sumsq_out_tiles, tile, place, ok, rm, M
            )  # fmt: skip


def plan(tile: WidenedTile, x: Tensor, weight: Weight, columns: int, sumsq: Tensor | None) -> Plan:
    rows, width = x.shape
    block_m, block_n, groups = row_block(rows), tile.block_n, width // RUN // tile.splits
    steps = groups // tile.runs
    x_box, w_box = [block_m, 64], [min(block_n, 16 * tile.num_warps), (128 if weight.kind == "int8" else 64) * tile.runs]
    layout = gl.NVMMASharedLayout.get_default_for(w_box, gl.uint8)
    own = {
        "x_tiles": TensorDescriptor.from_tensor(x, x_box, gl.NVMMASharedLayout.get_default_for(x_box, gl.bfloat16)),
        "w_tiles": TensorDescriptor.from_tensor(weight.data.view(torch.uint8), w_box, layout), "KIND": weight.kind,
        "scales_ptr": weight.scales, "zeros_ptr": weight.zeros, "ZEROS": weight.zeros is not None, "RUNS": tile.runs,
        "STEPS": steps, "GROUPS_BLOCK": groups_held(groups), "BLOCK_M": block_m,
        "STAGES": min(tile.stages, steps), "WARPS": tile.num_warps, "SUMSQ_BLOCK": sumsq_block(sumsq, 64),
    }  # fmt: skip
    return Plan(_widened_kernel, (columns // block_n, tile.splits), own)
