"""Attention of one new token a sequence from keys and values in FP8, in few turns: as attention_ring.py, for Hopper.

Tiles come by the copy engine as they lie in the cache, two numbers side by side as one of 16 bits, and are widened to float16
on the way into the tensor cores' left operand, even dimensions and odd ones by themselves (see kernels/fp8_cache.py). A value's
scale joins its weight in the exponent, so that no weight is above 1 (see kernels/attention_decode.py).
"""

# mypy: disable-error-code="assignment, index, misc, var-annotated"
# (kernels grow tuples of tiles in loops that the compiler unrolls)

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from headrace.cache.fp8 import Scales
from headrace.fast_decode.attention_reference import HeadShape
from headrace.fast_decode.attention_ring import (
    HEADS_AT_ONCE,
    TILE,
    ask_tile,
    full_barriers,
    leave,
    new_numbers,
    places_of_sizes,
    rotated,
    rotation,
    share_of,
    sum_slabs,
)
from headrace.fast_decode.ring_tile import RingAttention
from headrace.kernels.activation import soft_cap
from headrace.kernels.fp8_cache import fp8_factors, largest, nearest_fp8
from headrace.kernels.gluon_launch import grid_dependency
from headrace.kernels.launch import pdl
from headrace.kernels.rounded import put
from headrace.kernels.split import SplitSpace

REGISTERS = 128  # of a thread: four programs on a multiprocessor


@gluon.jit
def _widened(x):
    """(even, odd) numbers of x int16, in which two of FP8 lie side by side, as float16."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 t; .reg .b16 a, b; prmt.b32 t, $2, 0, 0x3120; mov.b32 {a, b}, t;"
        " cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }",
        "=&r,=r,r", [x], dtype=(gl.float16, gl.float16), is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def _tile_scales(scales, table, first, i, count, head, pos, r, KV_HEADS: gl.constexpr, TILE: gl.constexpr):
    """Of tile i of the program's part; 1 where no cached token lies."""
    block = gl.load(table + first + gl.minimum(i, count - 1))
    there = (i < count) & ((first + i) * TILE + r < pos)
    return gl.load(scales + (block * KV_HEADS + head) * TILE + r, mask=there, other=1.0, cache_modifier=".cg")


@gluon.jit(do_not_specialize=["num_splits", "window", "sizes_stride", "second"])
def _ring_attention_fp8_kernel(
    qkv_ptr, k_tiles, v_tiles, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, tables_ptr, slots_ptr, lens_ptr, mapping_ptr,
    q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, out_ptr, sizes_ptr, partials_ptr, lse_ptr, tickets_ptr,
    sizes_stride, second, slab_stride, table_stride, num_splits, window, scale, softcap, eps, norm_offset,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, TILE: gl.constexpr, ROWS: gl.constexpr,
    SLABS: gl.constexpr, CHUNK: gl.constexpr, RING: gl.constexpr, MERGE: gl.constexpr, QK_NORM: gl.constexpr,
    HAS_WINDOW: gl.constexpr, HAS_SOFTCAP: gl.constexpr, PAIR: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    GROUP: gl.constexpr = HEADS // KV_HEADS
    HALF: gl.constexpr = DIM // 2  # of the turned dimensions; and numbers of 16 bits in a head of the cache
    LOG2E: gl.constexpr = 1.4426950408889634
    prep: gl.constexpr = gl.BlockedLayout([1, DIM // 32], [1, 32], [4, 1], [1, 0])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    kept: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    head = gl.program_id(0)
    split = gl.program_id(1)
    b = gl.program_id(2)
    k_ring = gl.allocate_shared_memory(gl.int16, [RING, TILE, HALF], k_tiles.layout)
    v_ring = gl.allocate_shared_memory(gl.int16, [RING, TILE, HALF], v_tiles.layout)
    q_kept = gl.allocate_shared_memory(gl.float16, [2, ROWS, HALF], kept)
    p_kept = gl.allocate_shared_memory(gl.float16, [CHUNK, ROWS, TILE], kept)
    k_full, v_full = full_barriers(RING)
    pos, oldest, begin, tiles, share = share_of(lens_ptr, b, num_splits, window, TILE, HAS_WINDOW)
    first = begin + split * share
    rg = gl.arange(0, ROWS, layout=gl.SliceLayout(1, prep))
    rd = gl.arange(0, DIM, layout=gl.SliceLayout(0, prep))
    g_ok = (rg < GROUP)[:, None] & (rd >= 0)[None, :]
    out = out_ptr + (b * HEADS + head * GROUP) * DIM
    if (pos < 0) | (first * TILE > pos):  # nothing to read
        if PDL:
            grid_dependency("wait")
            grid_dependency("launch_dependents")
        if (pos < 0) & (split == 0):
            of_rows = places_of_sizes(sizes_ptr, sizes_stride, b, head * GROUP + rg, out_ptr)
            # sines of position 0: zeros that the assembler does not know (ptxas 12.8 loses half of a word of others in FP8)
            zeros = gl.full([ROWS, DIM], 0.0, gl.float32, prep) + gl.load(sin_ptr + rd % HALF)[None, :]
            put(out + rg[:, None] * DIM + rd[None, :], zeros, g_ok, of_rows, rg < GROUP, second, 1, PAIR)
        return
    count = gl.minimum(share, begin + tiles - first)
    owner = first + count == begin + tiles
    table = tables_ptr + gl.load(slots_ptr + b, cache_modifier=".cg").to(gl.int64) * table_stride
    for i in gl.static_range(RING):
        ask_tile(k_tiles, k_ring, k_full, table, first, i, count, head, HALF, TILE, RING)
    for i in gl.static_range(RING):
        ask_tile(v_tiles, v_ring, v_full, table, first, i, count, head, HALF, TILE, RING)
    r = gl.arange(0, TILE, layout=gl.SliceLayout(1, sums))
    k_scales = ()
    v_scales = ()
    for j in gl.static_range(CHUNK):
        k_scales = k_scales + (_tile_scales(k_scales_ptr, table, first, j, count, head, pos, r, KV_HEADS, TILE),)
        v_scales = v_scales + (_tile_scales(v_scales_ptr, table, first, j, count, head, pos, r, KV_HEADS, TILE),)
    partner = (rd + HALF) % DIM
    factors = rotation(q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, pos, rd, partner, norm_offset, DIM, QK_NORM)
    q_cos, q_sin, k_cos, k_sin = factors
    if PDL:
        grid_dependency("wait")
        grid_dependency("launch_dependents")
    q, q_turned, k_new, k_turned, v_row = new_numbers(
        qkv_ptr, b, head, rg, rd, partner, g_ok, slab_stride, HEADS, KV_HEADS, DIM, SLABS
    )
    v_new = sum_slabs(v_row + rd, slab_stride, rd >= 0, SLABS).to(gl.bfloat16).to(gl.float32)
    pair = gl.arange(0, HALF, layout=gl.SliceLayout(1, sums))
    v_even = sum_slabs(v_row + 2 * pair, slab_stride, pair >= 0, SLABS).to(gl.bfloat16).to(gl.float32)
    v_odd = sum_slabs(v_row + 2 * pair + 1, slab_stride, pair >= 0, SLABS).to(gl.bfloat16).to(gl.float32)
    q, k_new = rotated(q, q_turned, k_new, k_turned, q_cos, q_sin, k_cos, k_sin, eps, DIM, QK_NORM)
    q = q.to(gl.bfloat16).to(gl.float32)
    k_new = k_new.to(gl.bfloat16).to(gl.float32)
    # as float16, which has more bits, with the largest of a head at 128 to 256
    exponent = gl.maximum(gl.max(q.to(gl.int32, bitcast=True) & 0x7FFFFFFF, 1) >> 23, 8)
    factor = ((261 - exponent) << 23).to(gl.float32, bitcast=True)
    back = gl.where(exponent == 255, float("nan"), ((exponent - 7) << 23).to(gl.float32, bitcast=True)) * scale
    back = gl.convert_layout(back, gl.SliceLayout(0, sums))
    q_even, q_odd = gl.split(gl.reshape((q * factor[:, None]).to(gl.float16), [ROWS, HALF, 2]))
    q_kept.index(0).store(q_even)
    q_kept.index(1).store(q_odd)
    fence_async_shared()
    gl.thread_barrier()
    m = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(0, sums))
    l = gl.full([TILE, ROWS], 0.0, gl.float32, sums)  # of each thread's tokens
    acc = gl.full([HALF, ROWS], 0.0, gl.float32, sums)
    odd = gl.full([HALF, ROWS], 0.0, gl.float32, sums)
    if owner:  # the next step will read them as they are kept
        k_factor, k_scale = fp8_factors(largest(k_new))
        v_factor, v_scale = fp8_factors(largest(v_new))
        k_code = nearest_fp8(k_new * k_factor)
        place = gl.load(mapping_ptr + b)
        if place >= 0:
            at = (place // TILE * KV_HEADS + head) * TILE + place % TILE
            gl.store(k_scales_ptr + at, k_scale)
            gl.store(v_scales_ptr + at, v_scale)
            gl.store(k_ptr + (place * KV_HEADS + head) * DIM + rd, k_code.to(gl.float8e4nv))
            gl.store(v_ptr + (place * KV_HEADS + head) * DIM + rd, nearest_fp8(v_new * v_factor).to(gl.float8e4nv))
        own = gl.sum(q * k_code[None, :], 1) * (k_scale * scale)
        if HAS_SOFTCAP:
            own = soft_cap(own, softcap)
        m = gl.convert_layout(own * LOG2E, gl.SliceLayout(0, sums)) + gl.log2(v_scale)
        l += gl.where(r == 0, 1.0 / v_scale, 0.0)[:, None]
        acc += nearest_fp8(v_even * v_factor)[:, None]
        odd += nearest_fp8(v_odd * v_factor)[:, None]
    zeros = gl.full([TILE, ROWS], 0.0, gl.float32, sums)
    token = gl.arange(0, TILE, layout=gl.SliceLayout(0, left))
    for c0 in range(0, count, CHUNK):
        scores = ()
        k_next = ()
        v_next = ()
        for j in gl.static_range(CHUNK):
            later = c0 + CHUNK + j
            k_next = k_next + (_tile_scales(k_scales_ptr, table, first, later, count, head, pos, r, KV_HEADS, TILE),)
            v_next = v_next + (_tile_scales(v_scales_ptr, table, first, later, count, head, pos, r, KV_HEADS, TILE),)
        for j in gl.static_range(CHUNK):
            n = c0 + j
            s = gl.full([TILE, ROWS], -float("inf"), gl.float32, sums)
            if n < count:
                mbarrier.wait(k_full.index(n % RING), n // RING & 1)
                k_even, k_odd = _widened(k_ring.index(n % RING).load(left))
                s = warpgroup_mma(k_even, q_kept.index(0).permute((1, 0)), zeros, use_acc=False, is_async=True)
                s = warpgroup_mma(k_odd, q_kept.index(1).permute((1, 0)), s, is_async=True)
                s, k_even, k_odd = warpgroup_mma_wait(0, deps=[s, k_even, k_odd])
                s = s * k_scales[j][:, None] * back[None, :]
                if HAS_SOFTCAP:
                    s = soft_cap(s, softcap)
                at = (first + n) * TILE + r
                seen = at < pos
                if HAS_WINDOW:
                    seen = seen & (at >= oldest)
                s = gl.where(seen[:, None], s * LOG2E + gl.log2(v_scales[j])[:, None], -float("inf"))
            scores = scores + (s,)
        most = scores[0]
        for j in gl.static_range(1, CHUNK):
            most = gl.maximum(most, scores[j])
        top = gl.maximum(m, gl.max(most, 0))
        safest = gl.where(top == -float("inf"), 0.0, top)
        shrink = gl.exp2(m - safest)
        l = l * shrink[None, :]
        acc = acc * shrink[None, :]
        odd = odd * shrink[None, :]
        for j in gl.static_range(CHUNK):
            p = gl.exp2(scores[j] - safest[None, :])
            l += p * (1.0 / v_scales[j])[:, None]
            p_kept.index(j).store(gl.permute(p, (1, 0)).to(gl.float16))
        m = top
        if count > RING:
            for j in gl.static_range(CHUNK):  # all warps have read the keys: the maximum was of all
                if c0 + j + RING < count:
                    ask_tile(k_tiles, k_ring, k_full, table, first, c0 + j + RING, count, head, HALF, TILE, RING)
        fence_async_shared()
        gl.thread_barrier()
        for j in gl.static_range(CHUNK):
            n = c0 + j
            if n < count:
                mbarrier.wait(v_full.index(n % RING), n // RING & 1)
                v = v_ring.index(n % RING).permute((1, 0)).load(left)
                if (first + n + 1) * TILE > pos:  # behind the cached tokens may be anything, and 0 * NaN is NaN
                    v = gl.where(((first + n) * TILE + token < pos)[None, :], v, 0)
                v_evens, v_odds = _widened(v)
                acc = warpgroup_mma(v_evens, p_kept.index(j).permute((1, 0)), acc, is_async=True)
                odd = warpgroup_mma(v_odds, p_kept.index(j).permute((1, 0)), odd, is_async=True)
                acc, odd, v_evens, v_odds = warpgroup_mma_wait(0, deps=[acc, odd, v_evens, v_odds])
        gl.thread_barrier()  # before the next chunk's weights, and tiles, come
        if count > RING:
            for j in gl.static_range(CHUNK):
                if c0 + j + RING < count:
                    ask_tile(v_tiles, v_ring, v_full, table, first, c0 + j + RING, count, head, HALF, TILE, RING)
        k_scales = k_next
        v_scales = v_next
    total = gl.sum(l, 0)
    both = gl.join(acc / total[None, :], odd / total[None, :])
    o = gl.reshape(gl.permute(both, (0, 2, 1)), [DIM, ROWS])
    used = (tiles + share - 1) // share
    leave(
        o, m + gl.log2(total), out, sizes_ptr, partials_ptr, lse_ptr, tickets_ptr, sizes_stride, second, b, head, split,
        num_splits, used, HEADS, KV_HEADS, DIM, ROWS, MERGE, PAIR,
    )


def ring_attention_fp8(
    qkv: Tensor, out: Tensor, k: Tensor, v: Tensor, *, scales: Scales, block_tables: Tensor, seq_slots: Tensor,
    seq_lens: Tensor, slot_mapping: Tensor, cos: Tensor, sin: Tensor, q_norm: Tensor | None, k_norm: Tensor | None,
    heads: HeadShape, window: int, num_splits: int, tile: RingAttention, space: SplitSpace, sizes: Tensor | None = None,
) -> None:  # fmt: skip
    """As `attention.decode_attention`, of a cache in FP8."""
    slabs, rows, _ = qkv.shape
    kv_heads, dim = heads.num_kv_heads, heads.head_dim
    box = [TILE, dim // 2]
    layout = gl.NVMMASharedLayout.get_default_for(box, gl.int16)
    k_tiles, v_tiles = (
        TensorDescriptor.from_tensor(x.view(torch.int16).view(-1, kv_heads * dim // 2), box, layout) for x in (k, v)
    )
    _ring_attention_fp8_kernel[kv_heads, num_splits, rows](
        qkv, k_tiles, v_tiles, k, v, *scales, block_tables, seq_slots, seq_lens, slot_mapping, q_norm, k_norm, cos, sin, out,
        sizes, space.partials, space.lse, space.tickets, 0 if sizes is None else sizes.stride(0), out.stride(0), qkv.stride(0),
        block_tables.stride(0), num_splits, window, heads.scale, heads.softcap, heads.norm_eps, heads.norm_offset,
        HEADS=heads.num_heads, KV_HEADS=kv_heads, DIM=dim, TILE=TILE, ROWS=HEADS_AT_ONCE, SLABS=slabs, CHUNK=tile.chunk,
        RING=tile.ring, MERGE=4, QK_NORM=q_norm is not None, HAS_WINDOW=window > 0, HAS_SOFTCAP=heads.softcap > 0,
        PAIR=out.dim() == 3, num_warps=4, maxnreg=REGISTERS, **pdl(qkv),
    )  # fmt: skip
