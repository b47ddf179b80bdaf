"""Matrix products of up to 64 rows with FP8 weights and activations, on Hopper's FP8 tensor cores: a ring as of ring_gemm.py.

Both operands are multiplied as the copy engine brings them, none is converted. Activations are as kernels/rounded.py has them:
a step of the loop is a chunk of columns, before which the sums become such in units of its size. The tensor cores add up in
about 14 bits, as they do for products of more rows (narrow_linear.py). The order of every sum is fixed. Neither the interpreter
nor another card runs it: there torch computes the same (products.py).
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from headrace.fast_decode.epilogues import Plan, sumsq_block
from headrace.fast_decode.ring_ends import column_parameters, norm_factors, store_projected
from headrace.fast_decode.ring_tile import row_block
from headrace.fast_decode.rounded_tile import RoundedTile
from headrace.kernels.activation import activate
from headrace.kernels.gluon_launch import grid_dependency
from headrace.kernels.gluon_rings import ask, leave_part, ring_barriers, sum_parts
from headrace.kernels.launch import next_power_of_2
from headrace.kernels.rounded import put
from headrace.model.weight import Weight


@gluon.jit(do_not_specialize=["M", "sumsq_tiles", "sumsq_out_tiles"])
def _rounded_kernel(
    x_tiles, w_tiles, sizes_ptr, scales_ptr, bias_ptr, sumsq_ptr, out_ptr, residual_ptr, norm_ptr, sumsq_out_ptr, partials_ptr,
    tickets_ptr, out_sizes_ptr,
    M, N, K, sizes_stride, sumsq_tiles, sumsq_out_tiles, eps, scale, softcap, norm_offset,
    SCALE_ROWS: gl.constexpr, STEPS: gl.constexpr, STEPS_BLOCK: gl.constexpr, CHUNK: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, SPLITS: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
    MODE: gl.constexpr, SUMSQ_BLOCK: gl.constexpr, ACTIVATION: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr, PAIR: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    PARTS: gl.constexpr = 2 if MODE == "glu" else 1
    XS: gl.constexpr = 2 if PAIR else 1
    BYTES: gl.constexpr = CHUNK * (PARTS * BLOCK_N + XS * BLOCK_M)  # of a step
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 32])
    of_row: gl.constexpr = gl.SliceLayout(0, sums)
    flat: gl.constexpr = gl.BlockedLayout([4, 1], [BLOCK_N // 4, 128 // BLOCK_N], [1, WARPS], [0, 1])
    squares: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [WARPS, 1], [1, 0])
    table: gl.constexpr = gl.BlockedLayout([1, 4], [32 * 4 // BLOCK_M, BLOCK_M // 4], [WARPS, 1], [1, 0])
    tile = gl.program_id(0)
    split = gl.program_id(1)
    n0 = tile * BLOCK_N
    k_start = split * (STEPS * CHUNK)
    if PDL:
        grid_dependency("launch_dependents", WARPS)
    w_ring = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * PARTS, BLOCK_N, CHUNK], w_tiles.layout)
    x_ring = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * XS, BLOCK_M, CHUNK], x_tiles.layout)
    size_ring = gl.allocate_shared_memory(gl.float32, [STEPS_BLOCK, BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = ring_barriers(STAGES)
    for i in range(0, min(STEPS, STAGES)):
        ask(w_tiles, w_ring, full, i, n0, N, k_start + i * CHUNK, STAGES, PARTS, BYTES)
    rn = n0 + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, flat))
    rm = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, flat))
    s = gl.load(scales_ptr + gl.minimum(rn, N - 1) // SCALE_ROWS).to(gl.float32)
    up_s = s
    if MODE == "glu":
        up_s = gl.load(scales_ptr + (gl.minimum(rn, N - 1) + N) // SCALE_ROWS).to(gl.float32)
    norm, bias = column_parameters(
        norm_ptr, bias_ptr, rn, rn < N, norm_offset, split, gl.SliceLayout(1, flat), BLOCK_N, MODE, HAS_BIAS, SPLITS
    )  # fmt: skip
    place = rm[None, :] * N + rn[:, None]
    ok = (rm < M)[None, :] & (rn < N)[:, None]
    if PDL:
        grid_dependency("wait", WARPS)
    for i in range(0, min(STEPS, STAGES)):
        for j in gl.static_range(XS):
            tma.async_copy_global_to_shared(x_tiles, [j * M, k_start + i * CHUNK], full.index(i), x_ring.index(i * XS + j))
    step = gl.arange(0, STEPS_BLOCK, layout=gl.SliceLayout(1, table))
    column = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, table))
    at = (split * STEPS + gl.minimum(step, STEPS - 1)) * sizes_stride
    sizes = gl.load(sizes_ptr + at[:, None] + column[None, :], cache_modifier=".cg")
    # what the epilogue reads is asked for now: behind the sums its latency would show
    if SUMSQ_BLOCK > 0:
        row = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, squares))
        part = gl.arange(0, SUMSQ_BLOCK, layout=gl.SliceLayout(0, squares))
        sumsq = gl.load(
            sumsq_ptr + gl.minimum(row, M - 1)[:, None] * sumsq_tiles + part[None, :], mask=(part < sumsq_tiles)[None, :],
            other=0.0, cache_modifier=".cg",
        )  # fmt: skip
    size_ring._reinterpret(gl.float32, [STEPS_BLOCK, BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])).store(sizes)
    gl.thread_barrier()
    acc = gl.full([BLOCK_N, BLOCK_M], 0.0, gl.float32, sums)
    up_acc, acc_2, up_acc_2 = acc, acc, acc  # of pairs the second codes' sums by themselves
    size = size_ring.index(0).load(of_row)
    for i in range(0, STEPS):
        stage = i % STAGES
        next_size = size_ring.index(i).load(of_row)
        ratio = (size / next_size)[None, :]
        size = next_size
        mbarrier.wait(full.index(stage), i // STAGES & 1)
        w, x = w_ring.index(stage * PARTS), x_ring.index(stage * XS).permute((1, 0))
        up_w, x_2 = w_ring.index(stage * PARTS + PARTS - 1), x_ring.index(stage * XS + XS - 1).permute((1, 0))
        acc = warpgroup_mma(w, x, acc * ratio, is_async=True)
        if PAIR:
            acc_2 = warpgroup_mma(w, x_2, acc_2 * ratio, is_async=True)
        if MODE == "glu":
            up_acc = warpgroup_mma(up_w, x, up_acc * ratio, is_async=True)
            if PAIR:
                up_acc_2 = warpgroup_mma(up_w, x_2, up_acc_2 * ratio, is_async=True)
                acc, acc_2, up_acc, up_acc_2 = warpgroup_mma_wait(0, deps=[acc, acc_2, up_acc, up_acc_2])
            else:
                acc, up_acc = warpgroup_mma_wait(0, deps=[acc, up_acc])
        elif PAIR:
            acc, acc_2 = warpgroup_mma_wait(0, deps=[acc, acc_2])
        else:
            acc = warpgroup_mma_wait(0, deps=[acc])
        if i + STAGES < STEPS:
            gl.thread_barrier()  # all warps have read the place
            k = k_start + (i + STAGES) * CHUNK
            ask(w_tiles, w_ring, full, i, n0, N, k, STAGES, PARTS, BYTES)
            for j in gl.static_range(XS):
                tma.async_copy_global_to_shared(x_tiles, [j * M, k], full.index(stage), x_ring.index(stage * XS + j))
    if PAIR:
        acc, up_acc = acc + acc_2 * 0.0625, up_acc + up_acc_2 * 0.0625
    y = gl.convert_layout(acc * size[None, :], flat) * s[:, None]
    if SUMSQ_BLOCK > 0:
        factor = norm_factors(sumsq, K, eps, flat)
        y = y * factor[None, :]
    out_sizes = rm
    OUT: gl.constexpr = out_ptr.dtype.element_ty
    if gl.float8e4nv == OUT:
        out_sizes = out_sizes_ptr + tile * sizes_stride + rm
    if MODE == "glu":
        up = gl.convert_layout(up_acc * size[None, :], flat) * up_s[:, None]
        if SUMSQ_BLOCK > 0:
            up = up * factor[None, :]
        put(out_ptr + place, activate(y, ACTIVATION) * up, ok, out_sizes, rm < M, M * N, 0, PAIR)
    elif MODE == "project":
        store_projected(y, bias, scale, softcap, out_ptr, place, ok, split, M, N, HAS_SOFTCAP)
    else:
        SIZE: gl.constexpr = BLOCK_N * BLOCK_M
        slab = partials_ptr + tile * (SPLITS * SIZE) + rm[None, :] * BLOCK_N + (rn - n0)[:, None]
        if leave_part(y, slab, split, tickets_ptr + tile, SIZE, SPLITS):
            before = gl.load(residual_ptr + place, mask=ok, other=0.0)
            y = sum_parts(y, slab, tickets_ptr + tile, SIZE, SPLITS)
            r = before + scale * (y + bias[:, None])
            gl.store(residual_ptr + place, r, mask=ok)
            put(out_ptr + place, r * norm[:, None], ok, out_sizes, rm < M, M * N, 0, PAIR)
            gl.store(sumsq_out_ptr + rm * sumsq_out_tiles + tile, gl.sum(r * r, 0), mask=rm < M)


def plan(
    tile: RoundedTile, x: Tensor, weight: Weight, columns: int, sumsq: Tensor | None, sizes: Tensor, out_sizes: Tensor | None
) -> Plan:
    rows, width = x.shape[-2:]
    chunk, block_n = width // sizes.shape[0], tile.block_n
    steps = width // chunk // tile.splits
    assert weight.scales is not None and steps * chunk * tile.splits == width and columns % block_n == 0
    data = weight.data.view(torch.float8_e4m3fn)

    def tiles(matrix: Tensor, height: int) -> TensorDescriptor:
        shape = [height, chunk]
        return TensorDescriptor.from_tensor(matrix, shape, gl.NVMMASharedLayout.get_default_for(shape, gl.float8e4nv))

    own = {
        "PAIR": x.dim() == 3, "x_tiles": tiles(x.view(-1, width), row_block(rows)), "w_tiles": tiles(data, block_n),
        "sizes_ptr": sizes,
        "sizes_stride": sizes.stride(0), "out_sizes_ptr": out_sizes, "scales_ptr": weight.scales,
        "SCALE_ROWS": weight.scale_rows, "BLOCK_M": row_block(rows), "STEPS": steps, "CHUNK": chunk,
        "STEPS_BLOCK": next_power_of_2(steps), "STAGES": min(tile.stages * 128 // chunk, steps), "WARPS": tile.num_warps,
        "SUMSQ_BLOCK": sumsq_block(sumsq, 64),
    }  # fmt: skip
    return Plan(_rounded_kernel, (columns // block_n, tile.splits), own)
