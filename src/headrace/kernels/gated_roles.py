"""Gate and up's product and the activation of both, on Hopper, by groups of warps that keep the sums.

The weights are the left operand: a group of four warps has 64 of their rows, 32 of gate and the 32 of up that belong to them,
and multiplies them by 256 rows of x. So a program of three groups has 192 rows of the weights, and an 8B's 24,576 are one wave
of 128 programs, where tiles of 128 by 256 are one and a half. Of 16 rows that the copy engine brings side by side eight are
gate's and eight are up's, which is how a thread holds sums (rows r and r + 8): it has both of a pair, and what is stored is
what the product behind reads. No warp only loads: beside a fourth group of warps a thread would have too few registers for a
product of 256 rows; the first group asks for a step as soon as all have multiplied the one whose place it takes. Written in
Gluon, for Triton itself has no such roles on this card: neither the interpreter nor another card runs it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from headrace.kernels.gluon_launch import grid_dependency
from headrace.kernels.launch import num_multiprocessors, pdl

STAGES = 4  # steps of 64 columns on their way
BAND = 8  # tiles of rows of x between which weights stay in the L2 cache


@gluon.jit
def _place(tile, tiles_m, tiles_n, BAND: gl.constexpr):
    """The place of a tile: of up to BAND tiles of rows of x those of the same weights are neighbours in time."""
    first = tile // (BAND * tiles_n) * BAND
    height = gl.minimum(tiles_m - first, BAND)
    rest = tile - first * tiles_n
    return first + rest % height, rest // height


@gluon.jit
def _ask_weights(
    w_desc, w_ring, full, stage, n, i, pred, GROUPS: gl.constexpr, BLOCK_M: gl.constexpr
):  # fmt: skip
    """A step's weights; and its barrier is told of all bytes that come."""
    ready = full.index(stage)
    mbarrier.expect(ready, (GROUPS * 64 + BLOCK_M) * 128, pred=pred)
    for g in gl.static_range(GROUPS):
        block = w_ring.index(GROUPS * stage + g)._reinterpret(w_desc.dtype, [4, 2, 8, 64], w_desc.layout)
        tma.async_copy_global_to_shared(w_desc, [4 * (n * GROUPS + g), 0, 0, i * 64], ready, block, pred=pred)


@gluon.jit
def _ask(
    descs, rings, sizes, tile, i, step, GROUPS: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr
):  # fmt: skip
    """Asks for step i of a tile when all groups have multiplied `step`, whose place it takes; gives the next one."""
    x_desc, w_desc, _out_desc = descs
    x_ring, w_ring, full, free = rings
    tiles_m, tiles_n, steps = sizes
    stage = step % STAGES
    mbarrier.wait(free.index(stage), step // STAGES & 1)
    there = tile < tiles_m * tiles_n
    m, n = _place(gl.minimum(tile, tiles_m * tiles_n - 1), tiles_m, tiles_n, BAND)
    _ask_weights(w_desc, w_ring, full, stage, n, i, there, GROUPS, BLOCK_M)
    tma.async_copy_global_to_shared(x_desc, [m * BLOCK_M, i * 64], full.index(stage), x_ring.index(stage), pred=there)
    last = i == steps - 1
    return gl.where(last, tile + gl.num_programs(0), tile), gl.where(last, 0, i + 1)


@gluon.jit
def _multiply(
    group: gl.constexpr, descs, rings, sizes,
    GROUPS: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr, KIND: gl.constexpr,
):  # fmt: skip
    """A group's part. What it stores goes through its own part of the last two stages of weights, which it gives back then."""
    _x_desc, _w_desc, out_desc = descs
    x_ring, w_ring, full, free = rings
    tiles_m, tiles_n, steps = sizes
    HALF: gl.constexpr = BLOCK_M // 2
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    step = 0
    next_tile = gl.program_id(0)
    next_i = STAGES
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        acc = warpgroup_mma_init(gl.full([64, BLOCK_M], 0.0, gl.float32, sums))
        for i in range(steps):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), step // STAGES & 1)
            w = w_ring.index(GROUPS * stage + group)
            acc = warpgroup_mma(w, x_ring.index(stage).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_init(warpgroup_mma_wait(1, deps=[acc]))
            if i > 0 and i < steps - 1:
                gl.thread_barrier()  # all warps have multiplied it
                mbarrier.arrive(free.index((step - 1) % STAGES))
                if group == 0:
                    next_tile, next_i = _ask(
                        descs, rings, sizes, next_tile, next_i, step - 1, GROUPS, BLOCK_M, STAGES, BAND
                    )  # fmt: skip
            step += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        gate, up = gl.split(gl.permute(gl.reshape(acc, (4, 2, 8, BLOCK_M)), (0, 2, 3, 1)))
        if KIND == "silu":
            y = up * gate / (1.0 + gl.exp(-gate))
        else:  # gelu_tanh, see activation.py
            y = up * gate / (1.0 + gl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))
        y = gl.permute(gl.reshape(y.to(out_desc.dtype), (32, BLOCK_M)), (1, 0))
        low, high = gl.split(gl.permute(gl.reshape(y, (2, HALF, 32)), (1, 2, 0)))
        last = (step - 1) % STAGES
        before = (step - 2) % STAGES
        gl.thread_barrier()
        m, n = _place(tile, tiles_m, tiles_n, BAND)
        column = (n * GROUPS + group) * 32
        one = w_ring.index(GROUPS * before + group)._reinterpret(out_desc.dtype, [HALF, 32], out_desc.layout)
        other = w_ring.index(GROUPS * last + group)._reinterpret(out_desc.dtype, [HALF, 32], out_desc.layout)
        one.store(low)
        other.store(high)
        fence_async_shared()
        gl.thread_barrier()
        tma.async_copy_shared_to_global(out_desc, [m * BLOCK_M, column], one)
        tma.async_copy_shared_to_global(out_desc, [m * BLOCK_M + HALF, column], other)
        tma.store_wait(0)
        gl.thread_barrier()
        mbarrier.arrive(free.index(before))
        mbarrier.arrive(free.index(last))
        if group == 0:
            for s in gl.static_range(2):
                next_tile, next_i = _ask(
                    descs, rings, sizes, next_tile, next_i, step - 2 + s, GROUPS, BLOCK_M, STAGES, BAND
                )  # fmt: skip


@gluon.jit(do_not_specialize=["tiles_m", "tiles_n", "steps"])
def _gated_roles(
    x_desc, w_desc, out_desc, tiles_m, tiles_n, steps,
    GROUPS: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr, KIND: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    swizzled: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], w_desc.dtype)
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, 64], x_desc.layout)
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [GROUPS * STAGES, 64, 64], swizzled)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(free.index(s), count=GROUPS)
    fence_async_shared()
    gl.thread_barrier()
    # weights are nobody's result: the first come before what the kernel waits for
    m, n = _place(gl.program_id(0), tiles_m, tiles_n, BAND)
    for s in gl.static_range(STAGES):
        _ask_weights(w_desc, w_ring, full, s, n, s, True, GROUPS, BLOCK_M)
    if PDL:
        grid_dependency("wait")
    for s in gl.static_range(STAGES):
        tma.async_copy_global_to_shared(x_desc, [m * BLOCK_M, s * 64], full.index(s), x_ring.index(s))
    descs = (x_desc, w_desc, out_desc)
    rings = (x_ring, w_ring, full, free)
    sizes = (tiles_m, tiles_n, steps)
    if GROUPS == 3:
        gl.warp_specialize(
            [
                (_multiply, (0, descs, rings, sizes, GROUPS, BLOCK_M, STAGES, BAND, KIND)),
                (_multiply, (1, descs, rings, sizes, GROUPS, BLOCK_M, STAGES, BAND, KIND)),
                (_multiply, (2, descs, rings, sizes, GROUPS, BLOCK_M, STAGES, BAND, KIND)),
            ],
            [4, 4], [168, 168],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (0, descs, rings, sizes, GROUPS, BLOCK_M, STAGES, BAND, KIND)),
                (_multiply, (1, descs, rings, sizes, GROUPS, BLOCK_M, STAGES, BAND, KIND)),
            ],
            [4], [240],
        )  # fmt: skip
    if PDL:
        grid_dependency("launch_dependents")


def _layout(box: list[int], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(box, gl.bfloat16 if dtype == torch.bfloat16 else gl.float16)


def launch(x: Tensor, weight: Tensor, kind: str, out: Tensor, groups: int, block_m: int) -> None:
    """x [T, K], weight [2 I, K] (gate, then up) -> out [T, I], activation(gate) * up, in float32 and rounded once."""
    (rows, width), inner = x.shape, len(weight) // 2
    w_box, x_box, out_box = [4, 2, 8, 64], [block_m, 64], [block_m // 2, 32]
    w_strides = [8 * width, inner * width, width, 1]
    tiles_m, tiles_n = -(-rows // block_m), -(-inner // (32 * groups))
    _gated_roles[(min(tiles_m * tiles_n, num_multiprocessors(x.device)),)](
        TensorDescriptor.from_tensor(x, x_box, _layout(x_box, x.dtype)),
        TensorDescriptor(weight, [inner // 8, 2, 8, width], w_strides, w_box, _layout(w_box, x.dtype)),
        TensorDescriptor.from_tensor(out, out_box, _layout(out_box, x.dtype)),
        tiles_m, tiles_n, -(-width // 64), GROUPS=groups, BLOCK_M=block_m, STAGES=STAGES, BAND=BAND, KIND=kind, num_warps=4,
        **pdl(x),
    )  # fmt: skip
