"""Products of some dozens to hundreds of rows with 4-bit weights in groups of 128, on Hopper's tensor cores.

Numbers become bfloat16 times their group's scale on the way into the tensor cores' left operand, rounded as where the whole
matrix is widened first (narrow_gemm.py): so one sum runs over all of K, and while the tensor cores multiply one block of 64
rows a warpgroup widens the next. Both operands come by the copy engine, as they lie in memory. Of several parts of K the last
one to come adds up all, in their order: a row's result is the same in all replays, and depends on no other row. No other card
runs it; tests/gluon_interpreter.py does without one.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from headrace.kernels.folded_tile import FoldedTile, groups_held
from headrace.kernels.gluon_launch import grid_dependency
from headrace.kernels.gluon_rings import ask, ask_rows, leave_part, ring_barriers, sum_parts
from headrace.kernels.launch import pdl
from headrace.kernels.narrow import INT4, LESS_128, LESS_136, RUN, NarrowMatrix, written

# Two bytes side by side -> bfloat16 of their low halves in $0, of the high ones in $1: n is the end of the fraction of 128 + n,
# which $3 frees of 128 and the zero. Then times $5, twice the scale; $7 is what bfloat16 has lost of that.
_CODES = written(INT4, {"{in}": "$2", "{spread}": "0x4140", "{0}": "a", "{1}": "b", "{less 0}": "$3", "{less 1}": "$3"})
_FOLD = gl.constexpr("{.reg .b32 both, a, b, c;" + _CODES + "mul.rn.bf16x2 $0, a, $5;\nmul.rn.bf16x2 $1, b, $5;}")
_FOLD_REST = gl.constexpr(
    "{.reg .b32 both, a, b, c;" + _CODES
    + "mul.rn.bf16x2 c, a, $7;\nfma.rn.bf16x2 $0, a, $5, c;\nmul.rn.bf16x2 c, b, $7;\nfma.rn.bf16x2 $1, b, $5, c;}"
)  # fmt: skip


@gluon.jit
def _twice(x):
    """bfloat16 [rows] -> it in both halves of 32 bits."""
    return (x.to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF) * 0x10001


@gluon.jit
def less_zeros(none, kept_zeros, at, ZEROS: gl.constexpr, left: gl.constexpr):
    """What frees 128 + n of 128 and of the zeros of line `at`, or 8 where there are none; `none`: 0 for each number."""
    less = none + LESS_136
    if ZEROS:  # a zero joins 128, of which it is the end of the fraction
        zero = kept_zeros.index(at).load(gl.SliceLayout(1, left)).to(gl.int32) * 0x10001 | LESS_128
        less = none + zero[:, None]
    return less


@gluon.jit
def _numbers(w, kept, kept_zeros, at, ZEROS: gl.constexpr, left: gl.constexpr):
    """A block's run, with scales and zeros of line `at`, times its scales: columns 0 to 63 and 64 to 127."""
    raw = w.load(left)
    none = gl.full(raw.shape, 0, gl.int32, left)
    less = less_zeros(none, kept_zeros, at, ZEROS, left)
    whole = kept.index(at).load(gl.SliceLayout(1, left))
    scale = whole.to(gl.bfloat16)
    factor = none + _twice(scale)[:, None]
    if whole.dtype == gl.bfloat16:
        low, high = gl.inline_asm_elementwise(
            _FOLD, "=&r,=r,r,r,r,r,r", [raw, less, factor], (gl.bfloat16, gl.bfloat16), True, 2
        )
    else:
        lost = (whole.to(gl.float32) - scale.to(gl.float32)).to(gl.bfloat16)
        rest = none + _twice(lost)[:, None]
        low, high = gl.inline_asm_elementwise(
            _FOLD_REST, "=&r,=r,r,r,r,r,r,r,r", [raw, less, factor, rest], (gl.bfloat16, gl.bfloat16), True, 2
        )
    return low, high


@gluon.jit
def _finish(
    acc, slab, bias_ptr, out_ptr, ticket, split, m0, n0, M, N,
    TILE_N: gl.constexpr, BLOCK_M: gl.constexpr, SPLITS: gl.constexpr, WARPS: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """A block's sums [TILE_N, BLOCK_M] to the output, or to the program that adds them up."""
    flat: gl.constexpr = gl.BlockedLayout([4, 1], [min(32, TILE_N // 4), max(1, 128 // TILE_N)], [1, WARPS], [0, 1])
    SIZE: gl.constexpr = TILE_N * BLOCK_M
    y = gl.convert_layout(acc, flat)
    r = gl.arange(0, TILE_N, layout=gl.SliceLayout(1, flat))
    m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, flat))
    parts = m[None, :] * TILE_N + r[:, None]
    if SPLITS > 1:
        parts = slab + parts
    if leave_part(y, parts, split, ticket, SIZE, SPLITS):
        y = sum_parts(y, parts, ticket, SIZE, SPLITS)
        rn, rm = n0 + r, m0 + m
        if HAS_BIAS:
            y += gl.load(bias_ptr + rn, mask=rn < N, other=0.0).to(gl.float32)[:, None]
        place = rm[None, :].to(gl.int64) * N + rn[:, None]
        gl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), mask=(rm < M)[None, :] & (rn < N)[:, None])


@gluon.jit(do_not_specialize=["M", "tiles_m"])  # or multiples of 16 would be variants
def _folded_gemm(
    x_tiles, w_tiles, scales_ptr, zeros_ptr, bias_ptr, out_ptr, partials_ptr, tickets_ptr, M, N, tiles_m,
    ZEROS: gl.constexpr, STEPS: gl.constexpr, STEPS_BLOCK: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    SPLITS: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr, HAS_BIAS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    TILE_N: gl.constexpr = 16 * WARPS
    PARTS: gl.constexpr = BLOCK_N // TILE_N
    BYTES: gl.constexpr = 64 * BLOCK_N + 256 * BLOCK_M
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    table: gl.constexpr = gl.BlockedLayout([4, 1], [8, 4], [1, WARPS], [0, 1])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    square: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    # parts of a sum, then tiles of rows are neighbours: these read the same weights at about the same time
    split = gl.program_id(0) % SPLITS
    tile = gl.program_id(0) // SPLITS
    m0 = tile % tiles_m * BLOCK_M
    n0 = tile // tiles_m * BLOCK_N
    first = split * STEPS
    w_ring = gl.allocate_shared_memory(gl.uint8, [STAGES * PARTS, TILE_N, 64], w_tiles.layout)
    x_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES * 2, BLOCK_M, 64], x_tiles.layout)
    kept = gl.allocate_shared_memory(scales_ptr.dtype.element_ty, [STEPS_BLOCK * PARTS, TILE_N], plain)
    kept_zeros = kept
    full = ring_barriers(STAGES)
    for i in range(0, min(STEPS, STAGES)):
        ask(w_tiles, w_ring, full, i, n0, TILE_N, (first + i) * 64, STAGES, PARTS, BYTES)
    run = gl.arange(0, STEPS_BLOCK, layout=gl.SliceLayout(1, table))
    row = n0 + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, table))
    places = (gl.minimum(row, N - 1) * (STEPS * SPLITS) + first)[None, :] + gl.minimum(run, STEPS - 1)[:, None]
    kept._reinterpret(scales_ptr.dtype.element_ty, [STEPS_BLOCK, BLOCK_N], square).store(gl.load(scales_ptr + places))
    if ZEROS:
        kept_zeros = gl.allocate_shared_memory(gl.uint8, [STEPS_BLOCK * PARTS, TILE_N], plain)
        kept_zeros._reinterpret(gl.uint8, [STEPS_BLOCK, BLOCK_N], square).store(gl.load(zeros_ptr + places))
    if PDL:
        grid_dependency("wait", WARPS)
        grid_dependency("launch_dependents", WARPS)
    for i in range(0, min(STEPS, STAGES)):
        ask_rows(x_tiles, x_ring, full, i, m0, (first + i) * 128, 2, STAGES)
    gl.thread_barrier()
    none = gl.full([TILE_N, BLOCK_M], 0.0, gl.float32, sums)
    acc = warpgroup_mma_init(none)
    below = warpgroup_mma_init(none)
    mbarrier.wait(full.index(0), 0)
    low, high = _numbers(w_ring.index(0), kept, kept_zeros, 0, ZEROS, left)
    for i in range(0, STEPS - 1):
        stage = i % STAGES
        low_x, high_x = x_ring.index(stage * 2).permute((1, 0)), x_ring.index(stage * 2 + 1).permute((1, 0))
        acc = warpgroup_mma(low, low_x, acc, is_async=True)
        acc = warpgroup_mma(high, high_x, acc, is_async=True)
        if PARTS == 2:
            low, high = _numbers(w_ring.index(stage * PARTS + 1), kept, kept_zeros, i * PARTS + 1, ZEROS, left)
            below = warpgroup_mma(low, low_x, below, is_async=True)
            below = warpgroup_mma(high, high_x, below, is_async=True)
            acc = warpgroup_mma_init(warpgroup_mma_wait(2, deps=[acc]))
        coming = (i + 1) % STAGES
        mbarrier.wait(full.index(coming), (i + 1) // STAGES & 1)
        low, high = _numbers(w_ring.index(coming * PARTS), kept, kept_zeros, (i + 1) * PARTS, ZEROS, left)
        acc, below = warpgroup_mma_wait(0, deps=[acc, below])
        if i + STAGES < STEPS:
            gl.thread_barrier()  # all warps have read the place
            ask(w_tiles, w_ring, full, i, n0, TILE_N, (first + i + STAGES) * 64, STAGES, PARTS, BYTES)
            ask_rows(x_tiles, x_ring, full, i, m0, (first + i + STAGES) * 128, 2, STAGES)
        acc = warpgroup_mma_init(acc)
        below = warpgroup_mma_init(below)
    LAST: gl.constexpr = (STEPS - 1) % STAGES
    low_x, high_x = x_ring.index(LAST * 2).permute((1, 0)), x_ring.index(LAST * 2 + 1).permute((1, 0))
    acc = warpgroup_mma(low, low_x, acc, is_async=True)
    acc = warpgroup_mma(high, high_x, acc, is_async=True)
    if PARTS == 2:
        low, high = _numbers(w_ring.index(LAST * PARTS + 1), kept, kept_zeros, (STEPS - 1) * PARTS + 1, ZEROS, left)
        below = warpgroup_mma(low, low_x, below, is_async=True)
        below = warpgroup_mma(high, high_x, below, is_async=True)
    acc, below = warpgroup_mma_wait(0, deps=[acc, below])
    SLAB: gl.constexpr = TILE_N * BLOCK_M * SPLITS
    slab, ticket = partials_ptr, tickets_ptr
    if SPLITS > 1:
        slab += tile * PARTS * SLAB
        ticket += tile * PARTS
    _finish(acc, slab, bias_ptr, out_ptr, ticket, split, m0, n0, M, N, TILE_N, BLOCK_M, SPLITS, WARPS, HAS_BIAS)
    if PARTS == 2:
        if SPLITS > 1:
            slab += SLAB
            ticket += 1
        _finish(below, slab, bias_ptr, out_ptr, ticket, split, m0, n0 + TILE_N, M, N, TILE_N, BLOCK_M, SPLITS, WARPS, HAS_BIAS)


def folded_gemm(
    x: Tensor, weight: NarrowMatrix, bias: Tensor | None, tile: FoldedTile, tickets: Tensor, out: Tensor | None = None
) -> Tensor:
    """x [M, K] bfloat16 @ weight [N, K].T + bias [N] -> [M, N]. `tickets`: int32, all 0, one for each tile of 64 columns."""
    (rows, width), columns = x.shape, weight.shape[0]
    assert weight.scales is not None
    out = x.new_empty(rows, columns) if out is None else out
    steps, tiles_m = width // RUN // tile.splits, -(-rows // tile.block_m)
    tiles, tile_n = tiles_m * -(-columns // tile.block_n), 16 * tile.num_warps
    x_box, w_box = [tile.block_m, 64], [tile_n, 64]
    size = tiles * tile.splits * tile.block_n * tile.block_m if tile.splits > 1 else 0
    x_layout, w_layout = (gl.NVMMASharedLayout.get_default_for(*of) for of in ((x_box, gl.bfloat16), (w_box, gl.uint8)))
    _folded_gemm[(tile.splits * tiles,)](
        x_tiles=TensorDescriptor.from_tensor(x, x_box, x_layout), zeros_ptr=weight.zeros, scales_ptr=weight.scales,
        w_tiles=TensorDescriptor.from_tensor(weight.data, w_box, w_layout), bias_ptr=bias, out_ptr=out,
        partials_ptr=x.new_empty(size, dtype=torch.float32) if size else None, tickets_ptr=tickets if size else None,
        M=rows, N=columns, tiles_m=tiles_m, ZEROS=weight.zeros is not None, STEPS=steps,
        STEPS_BLOCK=groups_held(steps), BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, SPLITS=tile.splits,
        STAGES=min(tile.stages, steps), WARPS=tile.num_warps, HAS_BIAS=bias is not None, num_warps=tile.num_warps, **pdl(x),
    )  # fmt: skip
    return out
