"""MXFP4 experts of many rows on Hopper, with roles for warps: one loads, two groups of four widen numbers and multiply.

e2m1 times a power of two is a bfloat16, exactly: so scales are folded into the numbers as they are widened, and a sum runs
over all of K on the tensor cores. A group has two blocks of 64 of the weights' rows (gate and up, of one column), and widens
half of a block while the tensor cores multiply the half before. The weights are the left operand, of which a thread has columns
two by two; it reads eight that are neighbours, and so x and what lies between the products have their columns in another order
(`placed`): numbers go from bytes to operands without being moved. Written in Gluon, for Triton itself has no such roles on this
card: neither the interpreter nor another card runs it.
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

from headrace.kernels.experts_sort import Sorted, placed, tile_end, tile_expert, tile_first
from headrace.kernels.gluon_launch import grid_dependency
from headrace.kernels.launch import pdl, takes_gluon
from headrace.kernels.narrow import NarrowMatrix, are_mxfp4

ROWS = 128  # of x in a tile
PART = 32  # of them that are loaded at once
STAGES = 4  # steps of 128 columns on their way: 64 bytes, whose low halves are 64 columns and their high halves 64 more

# Four bytes side by side -> bfloat16 of their low halves, of bytes 0 and 2 in $0 and of 1 and 3 in $1, and of their high ones
# in $2 and $3. $5 and $9: the halves' scales times 2^94, twice. A code's bits as a bfloat16's are e2m1 times 2^-126: what comes
# out is 2^-32 of the weight, so that no scale up to 2^33 is too large.
_WIDEN = gl.constexpr("""{.reg .b32 a, b, w;
mov.b32 w, $4;
shl.b32 a, w, 12;
shl.b32 b, w, 6;
and.b32 b, b, 0x01c001c0;
lop3.b32 b, a, 0x80008000, b, 0xea;
mul.rn.bf16x2 $0, b, $5;
shl.b32 a, w, 4;
shr.u32 b, w, 2;
and.b32 b, b, 0x01c001c0;
lop3.b32 b, a, 0x80008000, b, 0xea;
mul.rn.bf16x2 $1, b, $5;
shl.b32 a, w, 8;
shl.b32 b, w, 2;
and.b32 b, b, 0x01c001c0;
lop3.b32 b, a, 0x80008000, b, 0xea;
mul.rn.bf16x2 $2, b, $9;
shr.u32 b, w, 6;
and.b32 b, b, 0x01c001c0;
lop3.b32 b, w, 0x80008000, b, 0xea;
mul.rn.bf16x2 $3, b, $9;}""")
_FIRST = gl.constexpr("{.reg .b32 s, c; prmt.b32 s, $1, 0, 0x1010; mov.b32 c, 0x6e806e80; mul.rn.bf16x2 $0, s, c;}")
_SECOND = gl.constexpr("{.reg .b32 s, c; prmt.b32 s, $1, 0, 0x3232; mov.b32 c, 0x6e806e80; mul.rn.bf16x2 $0, s, c;}")

# Registers of half of a block's bytes [64, 32]: of two rows eight side by side; of gate and up the rows lie as the next product
# wants its columns
_AS_THEY_ARE = gl.constexpr(gl.DistributedLinearLayout(
    [[0, 1], [0, 2], [0, 4], [8, 0]], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 32]
))  # fmt: skip
_IN_ORDER = gl.constexpr(gl.DistributedLinearLayout(
    [[0, 1], [0, 2], [0, 4], [1, 0]], [[0, 8], [0, 16], [2, 0], [8, 0], [16, 0]], [[4, 0], [32, 0]], [], [64, 32]
))  # fmt: skip


@gluon.jit
def _load(x_desc, w_desc, rings, at, STEPS: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr):
    """The one warp's part: each step's bytes of 128 rows of the weights from `row` on and of 128 from `next_row` on, two boxes,
    and the rows of x."""
    x_ring, w_ring, full, free = rings
    _of_expert, row, next_row, _column, place, _end = at
    for i in range(STEPS):
        stage = i % STAGES
        ready = full.index(stage)
        mbarrier.wait(free.index(stage), (i // STAGES & 1) ^ 1)
        mbarrier.expect(ready, 2 * 128 * 64 + PARTS * 32 * 128 * 2)
        tma.async_copy_global_to_shared(w_desc, [row, i * 64], ready, w_ring.index(2 * stage))
        tma.async_copy_global_to_shared(w_desc, [next_row, i * 64], ready, w_ring.index(2 * stage + 1))
        for j in gl.static_range(PARTS):
            low = x_ring.index(2 * stage).slice(32 * j, 32, 0)
            high = x_ring.index(2 * stage + 1).slice(32 * j, 32, 0)
            tma.async_copy_global_to_shared(x_desc, [place + 32 * j, i * 128], ready, low)
            tma.async_copy_global_to_shared(x_desc, [place + 32 * j, i * 128 + 64], ready, high)


@gluon.jit
def _left(block, GLU: gl.constexpr, left: gl.constexpr):
    """Numbers [64, 32] as the left operand, in the registers where they are."""
    if GLU:
        block = gl.reshape(gl.permute(gl.reshape(block, (2, 2, 2, 2, 2, 2, 32)), (0, 3, 5, 1, 2, 4, 6)), (64, 32))
    block = gl.reshape(gl.permute(gl.reshape(block, (64, 4, 4, 2)), (0, 2, 1, 3)), (64, 32))
    return gl.convert_layout(block, left, assert_trivial=True)


@gluon.jit
def _widen(block, scales, half: gl.constexpr, GLU: gl.constexpr, bytes: gl.constexpr, left: gl.constexpr):
    """Half of a block's bytes in shared memory, and four scales of each row -> the low and the high halves' numbers."""
    raw = block.slice(32 * half, 32, 1).load(bytes)
    PICK: gl.constexpr = _SECOND if half else _FIRST
    low = gl.inline_asm_elementwise(PICK, "=r,r", [scales.to(gl.uint32)], gl.uint32, True, 1)
    high = gl.inline_asm_elementwise(PICK, "=r,r", [(scales >> 32).to(gl.uint32)], gl.uint32, True, 1)
    none = gl.full([64, 32], 0, gl.uint32, bytes)
    low, high = gl.inline_asm_elementwise(
        _WIDEN, "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r", [raw, none + low[:, None], none + high[:, None]],
        (gl.bfloat16, gl.bfloat16), True, 4,
    )  # fmt: skip
    return _left(low, GLU, left), _left(high, GLU, left)


@gluon.jit
def _add(acc, low, high, x_ring, stage, half: gl.constexpr, ROWS: gl.constexpr, HIGH: gl.constexpr):
    """Begins to add the products of half of a block with rows of x, of low halves alone or of both."""
    x_low = x_ring.index(2 * stage).slice(0, ROWS, 0).slice(32 * half, 32, 1)
    acc = warpgroup_mma(low, x_low.permute((1, 0)), acc, is_async=True)
    if HIGH:
        x_high = x_ring.index(2 * stage + 1).slice(0, ROWS, 0).slice(32 * half, 32, 1)
        acc = warpgroup_mma(high, x_high.permute((1, 0)), acc, is_async=True)
    return acc


@gluon.jit
def _add_step(
    above, below, low, high, one, other, of_above, of_below, x_ring, stage,
    ROWS: gl.constexpr, HIGH: gl.constexpr, GLU: gl.constexpr, bytes: gl.constexpr, left: gl.constexpr,
):  # fmt: skip
    """Begins to add a step's products of both blocks; low and high are the first half of the block above. Those of the last
    half of the block below, and nothing before, are still on their way in the end."""
    LAST: gl.constexpr = 2 if HIGH else 1
    above = _add(above, low, high, x_ring, stage, 0, ROWS, HIGH)
    low, high = _widen(one, of_above, 1, GLU, bytes, left)
    above = _add(above, low, high, x_ring, stage, 1, ROWS, HIGH)
    above = warpgroup_mma_init(warpgroup_mma_wait(LAST, deps=[above]))
    low, high = _widen(other, of_below, 0, GLU, bytes, left)
    below = _add(below, low, high, x_ring, stage, 0, ROWS, HIGH)
    above = warpgroup_mma_init(warpgroup_mma_wait(LAST, deps=[above]))
    low, high = _widen(other, of_below, 1, GLU, bytes, left)
    return above, _add(below, low, high, x_ring, stage, 1, ROWS, HIGH)


@gluon.jit
def _store(y, out_ptr, target, ok, column, width, apart: gl.constexpr):
    """y [64, M] of columns from `column` on, to rows `target` [M] of out."""
    y = gl.convert_layout(gl.permute(y.to(gl.bfloat16), (1, 0)), apart)
    columns = column + gl.arange(0, 64, layout=gl.SliceLayout(0, apart))
    at = target.to(gl.int64)[:, None] * width + columns[None, :]
    gl.store(out_ptr + at, y, mask=ok[:, None] & (columns < width)[None, :])


@gluon.jit
def _multiply(
    group, rings, tensors, at, sizes, clamp,
    GLU: gl.constexpr, CHOSEN: gl.constexpr, CLAMPED: gl.constexpr, STEPS: gl.constexpr, HALF: gl.constexpr,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A group's part: its two blocks of 64 rows of the weights."""
    x_ring, w_ring, full, free = rings
    scales_ptr, bias_ptr, order_ptr, factors_ptr, shares_ptr, out_ptr = tensors
    of_expert, row, next_row, column, place, end = at
    N, total_rows, out_width = sizes
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    apart: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    bytes: gl.constexpr = _IN_ORDER if GLU else _AS_THEY_ARE
    # its blocks: of gate and up 64 rows of each box, else all of one
    box: gl.constexpr = 0 if GLU else group
    next_box: gl.constexpr = 1 if GLU else group
    start: gl.constexpr = 64 * group if GLU else 0
    next_start: gl.constexpr = 64 * group if GLU else 64
    r = gl.arange(0, 64, layout=gl.SliceLayout(1, bytes))
    first_row = row + 64 * group if GLU else row + 128 * group
    second_row = next_row + 64 * group if GLU else row + 128 * group + 64
    above_scales = gl.minimum(first_row + r, total_rows - 1) * STEPS
    below_scales = gl.minimum(second_row + r, total_rows - 1) * STEPS
    zeros = gl.full([64, BLOCK_M], 0.0, gl.float32, sums)
    above = warpgroup_mma_init(zeros)
    below = warpgroup_mma_init(zeros)
    of_above = gl.load(scales_ptr + above_scales)
    of_below = gl.load(scales_ptr + below_scales)
    mbarrier.wait(full.index(0), 0)
    low, high = _widen(w_ring.index(box).slice(start, 64, 0), of_above, 0, GLU, bytes, left)
    for i in range(STEPS - 1):
        stage = i % STAGES
        next_above = gl.load(scales_ptr + above_scales + i + 1)
        next_below = gl.load(scales_ptr + below_scales + i + 1)
        one = w_ring.index(2 * stage + box).slice(start, 64, 0)
        other = w_ring.index(2 * stage + next_box).slice(next_start, 64, 0)
        above, below = _add_step(
            above, below, low, high, one, other, of_above, of_below, x_ring, stage, BLOCK_M, True, GLU, bytes, left
        )  # fmt: skip
        coming = (i + 1) % STAGES
        mbarrier.wait(full.index(coming), (i + 1) // STAGES & 1)
        low, high = _widen(w_ring.index(2 * coming + box).slice(start, 64, 0), next_above, 0, GLU, bytes, left)
        of_above = next_above
        of_below = next_below
        above, below = warpgroup_mma_wait(0, deps=[above, below])
        gl.thread_barrier()
        mbarrier.arrive(free.index(stage), count=1)
        above = warpgroup_mma_init(above)
        below = warpgroup_mma_init(below)
    LAST: gl.constexpr = (STEPS - 1) % STAGES
    one = w_ring.index(2 * LAST + box).slice(start, 64, 0)
    other = w_ring.index(2 * LAST + next_box).slice(next_start, 64, 0)
    above, below = _add_step(
        above, below, low, high, one, other, of_above, of_below, x_ring, LAST, BLOCK_M, not HALF, GLU, bytes, left
    )  # fmt: skip
    a, b = warpgroup_mma_wait(0, deps=[above, below])
    MORE: gl.constexpr = 2.0**32
    a = a * MORE
    b = b * MORE
    m = place + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, sums))
    pair = gl.load(order_ptr + gl.minimum(m, end - 1))
    if factors_ptr is not None:
        factor = gl.load(factors_ptr + pair // CHOSEN)[None, :]
        a = a * factor
        b = b * factor
    r = gl.arange(0, 64, layout=gl.SliceLayout(1, sums))
    r = column + (64 * group + placed(r) if GLU else 128 * group + r)
    if bias_ptr is not None:
        bias = bias_ptr + of_expert
        if GLU:
            a = a + gl.load(bias + r, mask=r < N, other=0.0).to(gl.float32)[:, None]
            b = b + gl.load(bias + N + r, mask=r < N, other=0.0).to(gl.float32)[:, None]
        else:
            a = a + gl.load(bias + r, mask=r < N, other=0.0).to(gl.float32)[:, None]
            b = b + gl.load(bias + r + 64, mask=r + 64 < N, other=0.0).to(gl.float32)[:, None]
    target = place + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, apart))
    ok = target < end
    if GLU:
        if CLAMPED:
            a = gl.where(a > clamp, clamp, a)  # what is no number stays so
            b = gl.where(b > clamp, clamp, gl.where(b < -clamp, -clamp, b))
            y = (b + 1.0) * a / (1.0 + gl.exp(-1.702 * a))
        else:
            y = b * a / (1.0 + gl.exp(-a))
        y = gl.where((r < N)[:, None], y, 0.0)
        _store(y, out_ptr, target, ok, column + 64 * group, out_width, apart)
    else:
        share = gl.load(shares_ptr + pair)[None, :]
        target = gl.load(order_ptr + gl.minimum(target, end - 1))
        _store(a * share, out_ptr, target, ok, column + 128 * group, out_width, apart)
        _store(b * share, out_ptr, target, ok, column + 128 * group + 64, out_width, apart)


@gluon.jit
def _load_any(
    x_desc, w_desc, rings, at, parts, STEPS: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    if parts == 1:
        _load(x_desc, w_desc, rings, at, STEPS, 1, STAGES)
    elif parts == 2:
        _load(x_desc, w_desc, rings, at, STEPS, 2, STAGES)
    else:
        _load(x_desc, w_desc, rings, at, STEPS, BLOCK_M // 32, STAGES)


@gluon.jit
def _rest(
    group, rings, tensors, column, place, end, out_width,
    GLU: gl.constexpr, STEPS: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Instead of `_multiply`: what is loaded is free at once, and columns of the next product's x are 0."""
    _x_ring, _w_ring, full, free = rings
    _scales_ptr, _bias_ptr, _order_ptr, _factors_ptr, _shares_ptr, out_ptr = tensors
    for i in range(STEPS):
        mbarrier.wait(full.index(i % STAGES), i // STAGES & 1)
        gl.thread_barrier()
        mbarrier.arrive(free.index(i % STAGES), count=1)
    if GLU:
        apart: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        target = place + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, apart))
        columns = column + 64 * group + gl.arange(0, 64, layout=gl.SliceLayout(0, apart))
        at = target.to(gl.int64)[:, None] * out_width + columns[None, :]
        zeros = gl.full([BLOCK_M, 64], 0.0, gl.bfloat16, apart)
        gl.store(out_ptr + at, zeros, mask=(target < end)[:, None] & (columns < out_width)[None, :])


@gluon.jit
def _multiply_any(
    group, rings, tensors, at, sizes, clamp, parts,
    GLU: gl.constexpr, CHOSEN: gl.constexpr, CLAMPED: gl.constexpr, STEPS: gl.constexpr, HALF: gl.constexpr,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """By products of 32 or 64 rows where the tile has no more: a sum is the same. A group behind the last column has none."""
    _of_expert, _row, _next_row, column, place, end = at
    N, _total_rows, out_width = sizes
    if column + (64 if GLU else 128) * group >= N:
        _rest(group, rings, tensors, column, place, end, out_width, GLU, STEPS, BLOCK_M, STAGES)
    elif parts == 1:
        _multiply(group, rings, tensors, at, sizes, clamp, GLU, CHOSEN, CLAMPED, STEPS, HALF, 32, STAGES)
    elif parts == 2:
        _multiply(group, rings, tensors, at, sizes, clamp, GLU, CHOSEN, CLAMPED, STEPS, HALF, 64, STAGES)
    else:
        _multiply(group, rings, tensors, at, sizes, clamp, GLU, CHOSEN, CLAMPED, STEPS, HALF, BLOCK_M, STAGES)


@gluon.jit(do_not_specialize=["clamp"])
def _roles_tiles(
    x_desc, w_desc, scales_ptr, bias_ptr, order_ptr, tiles_ptr, factors_ptr, shares_ptr, out_ptr, N, total_rows, out_width,
    clamp,
    GLU: gl.constexpr, CHOSEN: gl.constexpr, CLAMPED: gl.constexpr, STEPS: gl.constexpr, HALF: gl.constexpr,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    if PDL:
        grid_dependency("wait")
    slot = gl.program_id(1)
    expert = tile_expert(tiles_ptr, slot)
    if expert < 0:
        return
    place, end = tile_first(tiles_ptr, slot), tile_end(tiles_ptr, slot)
    parts = gl.minimum((end - place + 31) // 32, BLOCK_M // 32)
    if GLU:
        column = gl.program_id(0) * 128
        of_expert = expert * (2 * N)
        row = of_expert + column
        next_row = row + N
    else:
        column = gl.program_id(0) * 256
        of_expert = expert * N
        row = of_expert + column
        next_row = row + 128
    x_ring = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, BLOCK_M, 64], x_desc.layout)
    w_ring = gl.allocate_shared_memory(gl.uint8, [2 * STAGES, 128, 64], w_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=2)  # by each group
    fence_async_shared()
    rings = (x_ring, w_ring, full, free)
    tensors = (scales_ptr, bias_ptr, order_ptr, factors_ptr, shares_ptr, out_ptr)
    at = (of_expert, row, next_row, column, place, end)
    sizes = (N, total_rows, out_width)
    gl.warp_specialize(
        [
            (_multiply_any, (0, rings, tensors, at, sizes, clamp, parts, GLU, CHOSEN, CLAMPED, STEPS, HALF, BLOCK_M, STAGES)),
            (_multiply_any, (1, rings, tensors, at, sizes, clamp, parts, GLU, CHOSEN, CLAMPED, STEPS, HALF, BLOCK_M, STAGES)),
            (_load_any, (x_desc, w_desc, rings, at, parts, STEPS, BLOCK_M, STAGES)),
        ],
        [4, 1], [240, 24],  # warps and registers of a thread; the first group has as many as the second
    )  # fmt: skip
    if PDL:
        grid_dependency("launch_dependents")


def takes(x: Tensor, gate_up: NarrowMatrix, down: NarrowMatrix, activation: str, clamp: float) -> bool:
    """Whether the kernel is for these, on a card that has it."""
    return takes_gluon() and are_mxfp4(gate_up, down) and x.dtype == torch.bfloat16 and (clamp > 0 or activation == "silu")


def glu(
    x: Tensor, weight: NarrowMatrix, bias: Tensor | None, pairs: Sorted, out: Tensor, columns: int, inner: int, *, chosen: int,
    clamp: float, factors: Tensor | None,
) -> None:  # fmt: skip
    """x [P, K] in the order of the sort, 0 past `inner`, times `factors` [T] -> out [P, W], gated products in that order, 0
    past `columns`; the columns of both are `placed`."""
    _launch(x, weight, bias, pairs, out, columns, inner, chosen, clamp, factors, None)


def down(x: Tensor, weight: NarrowMatrix, bias: Tensor | None, pairs: Sorted, shares: Tensor, out: Tensor, inner: int) -> None:
    """x [P, K] in the order of the sort, 0 past `inner`, its columns `placed` -> out [P, N], what each pair adds."""
    _launch(x, weight, bias, pairs, out, out.shape[1], inner, 1, 0.0, None, shares)


def _launch(
    x: Tensor, weight: NarrowMatrix, bias: Tensor | None, pairs: Sorted, out: Tensor, columns: int, inner: int, chosen: int,
    clamp: float, factors: Tensor | None, shares: Tensor | None,
) -> None:  # fmt: skip
    assert weight.scales is not None
    (rows, num_bytes), glu = weight.data.shape, shares is None
    x_box, w_box = [PART, 64], [128, 64]
    _roles_tiles[(-(-out.shape[1] // (128 if glu else 256)), len(pairs.tiles))](
        TensorDescriptor.from_tensor(x, x_box, gl.NVMMASharedLayout.get_default_for(x_box, gl.bfloat16)),
        TensorDescriptor.from_tensor(weight.data, w_box, gl.NVMMASharedLayout.get_default_for(w_box, gl.uint8)),
        weight.scales.view(torch.int64), bias, pairs.order, pairs.tiles, factors, shares, out, N=columns, total_rows=rows,
        out_width=out.shape[1], clamp=clamp, GLU=glu, CHOSEN=chosen, CLAMPED=clamp > 0, STEPS=num_bytes // 64,
        HALF=inner <= 2 * num_bytes - 64, BLOCK_M=ROWS, STAGES=STAGES, num_warps=4, **pdl(x),
    )  # fmt: skip
