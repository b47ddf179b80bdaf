"""Attention of long prompts on Hopper, with roles for warps: one loads keys and values, two groups of four share what it loads.

What attention_prefill computes, for a cache in bfloat16 whose blocks are whole tiles. There each program reads all keys and
values for 64 rows, and the reading, from the L2 cache, is what it waits for; here it is for 128. Each group multiplies a tile's
values while it weighs the next one's scores, and the groups take turns at the tensor cores by themselves (Shah et al. 2024,
FlashAttention-3). Written in Gluon, for Triton itself has no such roles on this card: neither the interpreter nor another card
runs it.
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
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from headrace.kernels.attention_prefill import is_bounded
from headrace.kernels.gluon_launch import grid_dependency
from headrace.kernels.launch import pdl

ROWS = 64  # of a group: of so many tensor cores' products are made
TILE = 64  # keys of a step, a block of the cache
LOG2_E = 1.4426950408889634


@gluon.jit
def _load(
    k_desc, v_desc, k_ring, v_ring, k_full, k_free, v_full, v_free, table, head, first, count,
    DIM: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The one warp's part: tiles `first` .. `first + count` of a sequence into the rings."""
    for i in range(count):
        stage = i % STAGES
        odd = i // STAGES & 1
        row = gl.load(table + first + i) * TILE
        mbarrier.wait(k_free.index(stage), odd ^ 1)
        mbarrier.expect(k_full.index(stage), TILE * DIM * 2)
        tma.async_copy_global_to_shared(k_desc, [row, head * DIM], k_full.index(stage), k_ring.index(stage))
        mbarrier.wait(v_free.index(stage), odd ^ 1)
        mbarrier.expect(v_full.index(stage), TILE * DIM * 2)
        tma.async_copy_global_to_shared(v_desc, [row, head * DIM], v_full.index(stage), v_ring.index(stage))


@gluon.jit
def _weigh(
    s, m, total, key, position, masked, factor, cap, window,
    WINDOW: gl.constexpr, CAPPED: gl.constexpr, values: gl.constexpr,
):  # fmt: skip
    """Scores of a tile -> (weights as the left operand of a product, the new maximum and sum, what older sums shrink by).

    Capped ones need no maximum (see attention_prefill.is_bounded), and no sums shrink."""
    if CAPPED:
        s = cap * gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [s * factor], gl.float32, True, 1)
    if masked:
        seen = key[None, :] <= position[:, None]
        if WINDOW:
            seen = seen & (key[None, :] > position[:, None] - window)
        s = gl.where(seen, s, -float("inf"))
    if CAPPED:
        p = gl.exp2(s).to(gl.bfloat16)
        total = total + gl.sum(p.to(gl.float32), 1)
        shrink = m
    else:
        top = gl.maximum(m, gl.max(s, 1) * factor)
        base = top
        if WINDOW:  # a row may see nothing of the tiles so far
            base = gl.where(top == -float("inf"), 0.0, top)
        e = gl.exp2(s * factor - base[:, None])
        shrink = gl.exp2(m - base)
        total = total * shrink + gl.sum(e, 1)
        p = e.to(gl.bfloat16)
        m = top
    return gl.convert_layout(p, values), m, total, shrink


@gluon.jit
def _attend(
    group, q_ptr, out_ptr, q_both, k_ring, v_ring, k_full, k_free, v_full, v_free, row0, token0, num_tokens, position0, length,
    head, first, count, even, full, factor, cap, window, q_stride, out_stride,
    GROUP: gl.constexpr, DIM: gl.constexpr, ROWS: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr,
    WINDOW: gl.constexpr, CAPPED: gl.constexpr,
):  # fmt: skip
    """A group's part: its rows over all tiles. Tiles from `even` to `full` are seen whole by all rows of the program."""
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    values: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    apart: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    parts: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    token0 += group * (ROWS // GROUP)
    position0 += group * (ROWS // GROUP)
    q = q_both.index(group)
    r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, apart))
    d = gl.arange(0, DIM, layout=gl.SliceLayout(0, apart))
    token = token0 + r // GROUP
    at = (row0 + token).to(gl.int64) * q_stride + (head * GROUP + r % GROUP) * DIM
    q.store(gl.load(q_ptr + at[:, None] + d[None, :], mask=(token < num_tokens)[:, None], other=0.0))
    fence_async_shared()
    gl.thread_barrier()
    position = position0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, scores)) // GROUP
    key = first * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(0, scores))
    zeros = gl.full([ROWS, TILE], 0.0, gl.float32, scores)
    acc = gl.full([ROWS, DIM], 0.0, gl.float32, sums)
    m = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, scores))
    total = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, scores))
    mbarrier.wait(k_full.index(0), 0)
    s = warpgroup_mma(q, k_ring.index(0).permute((1, 0)), zeros, use_acc=False)
    gl.thread_barrier()  # all warps of the group have read it
    mbarrier.arrive(k_free.index(0), count=1)
    masked = (first < even) | (first >= full)
    p, m, total, shrink = _weigh(s, m, total, key, position, masked, factor, cap, window, WINDOW, CAPPED, values)
    for i in range(1, count):
        stage = i % STAGES
        before = (i - 1) % STAGES
        mbarrier.wait(k_full.index(stage), i // STAGES & 1)
        next_s = warpgroup_mma(q, k_ring.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(before), (i - 1) // STAGES & 1)
        next_acc = warpgroup_mma(p, v_ring.index(before), acc, is_async=True)
        s = warpgroup_mma_wait(1, deps=[next_s])
        gl.thread_barrier()
        mbarrier.arrive(k_free.index(stage), count=1)
        masked = (first + i < even) | (first + i >= full)
        new_p, m, total, shrink = _weigh(
            s, m, total, key + i * TILE, position, masked, factor, cap, window, WINDOW, CAPPED, values
        )  # fmt: skip
        acc, p = warpgroup_mma_wait(0, deps=[next_acc, p])
        gl.thread_barrier()
        mbarrier.arrive(v_free.index(before), count=1)
        if not CAPPED:
            acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, sums))[:, None]
        p = new_p
    last = (count - 1) % STAGES
    mbarrier.wait(v_full.index(last), (count - 1) // STAGES & 1)
    tail = length - (first + count - 1) * TILE
    if tail < TILE:  # what lies behind the sequence's end may be anything, and 0 * NaN is NaN; both groups write the same
        row = gl.arange(0, TILE, layout=gl.SliceLayout(1, parts))
        for c in gl.static_range(DIM // 64):
            part = v_ring.index(last).slice(c * 64, 64, 1)
            part.store(gl.where((row < tail)[:, None], part.load(parts), 0.0))
        fence_async_shared()
        gl.thread_barrier()
    acc = warpgroup_mma(p, v_ring.index(last), acc)
    acc = acc / gl.convert_layout(gl.where(total == 0.0, 1.0, total), gl.SliceLayout(1, sums))[:, None]
    r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, sums))
    d = gl.arange(0, DIM, layout=gl.SliceLayout(0, sums))
    token = token0 + r // GROUP
    at = (row0 + token).to(gl.int64) * out_stride + (head * GROUP + r % GROUP) * DIM
    gl.store(out_ptr + at[:, None] + d[None, :], acc.to(gl.bfloat16), mask=(token < num_tokens)[:, None])


@gluon.jit
def _clear(
    out_ptr, row0, token0, num_tokens, head, out_stride, GROUP: gl.constexpr, DIM: gl.constexpr, ROWS: gl.constexpr
):  # fmt: skip
    apart: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    zeros = gl.full([ROWS, DIM], 0.0, gl.bfloat16, apart)
    d = gl.arange(0, DIM, layout=gl.SliceLayout(0, apart))
    for group in gl.static_range(2):
        r = group * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, apart))
        token = token0 + r // GROUP
        at = (row0 + token).to(gl.int64) * out_stride + (head * GROUP + r % GROUP) * DIM
        gl.store(out_ptr + at[:, None] + d[None, :], zeros, mask=(token < num_tokens)[:, None])


@gluon.jit(do_not_specialize=["first_seq", "num_seqs", "least", "window"])
def _roles_attention(
    q_ptr, k_desc, v_desc, out_ptr, tables_ptr, slots_ptr, query_start_ptr, lens_ptr, first_seq, num_seqs, least, factor, cap,
    window, q_stride, out_stride, table_stride,
    GROUP: gl.constexpr, DIM: gl.constexpr, ROWS: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr,
    WINDOW: gl.constexpr, CAPPED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    TOKENS: gl.constexpr = 2 * ROWS // GROUP
    tile = gl.num_programs(0) - 1 - gl.program_id(0)  # late rows see most: they start first
    head = gl.program_id(1)
    # as attention_prefill.find_sequence
    lane = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    start = gl.load(query_start_ptr + first_seq)
    found = 0
    for s0 in range(0, num_seqs, 128):
        s = s0 + lane
        before = gl.load(query_start_ptr + first_seq + s, mask=s < num_seqs, other=0) - start
        found += gl.sum(((before // TOKENS + s <= tile) & (s < num_seqs)).to(gl.int32), 0)
    seq = first_seq + found - 1
    row0 = gl.load(query_start_ptr + seq)
    token0 = (tile - ((row0 - start) // TOKENS + found - 1)) * TOKENS
    num_tokens = gl.load(query_start_ptr + seq + 1) - row0
    length = gl.load(lens_ptr + seq)
    if PDL:
        grid_dependency("wait")
    if (token0 >= num_tokens) | (num_tokens < least):
        return
    if length <= 0:  # a padded sequence
        _clear(out_ptr, row0, token0, num_tokens, head, out_stride, GROUP, DIM, ROWS)
        return
    table = tables_ptr + gl.load(slots_ptr + seq).to(gl.int64) * table_stride
    position0 = length - num_tokens + token0
    stop = gl.minimum(length, position0 + TOKENS)
    full = (position0 + 1) // TILE
    first = 0
    even = 0
    if WINDOW:
        first = gl.maximum(position0 + 1 - window, 0) // TILE
        even = gl.maximum(position0 + TOKENS - window + TILE - 1, 0) // TILE
    count = (stop + TILE - 1) // TILE - first
    q_both = gl.allocate_shared_memory(gl.bfloat16, [2, ROWS, DIM], gl.NVMMASharedLayout(128, 16, 2))
    k_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, DIM], k_desc.layout)
    v_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, DIM], v_desc.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_free.index(i), count=2)  # by each group
        mbarrier.init(v_free.index(i), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_attend, (0, q_ptr, out_ptr, q_both, k_ring, v_ring, k_full, k_free, v_full, v_free, row0, token0, num_tokens,
                       position0, length, head, first, count, even, full, factor, cap, window, q_stride, out_stride,
                       GROUP, DIM, ROWS, TILE, STAGES, WINDOW, CAPPED)),
            (_attend, (1, q_ptr, out_ptr, q_both, k_ring, v_ring, k_full, k_free, v_full, v_free, row0, token0, num_tokens,
                       position0, length, head, first, count, even, full, factor, cap, window, q_stride, out_stride,
                       GROUP, DIM, ROWS, TILE, STAGES, WINDOW, CAPPED)),
            (_load, (k_desc, v_desc, k_ring, v_ring, k_full, k_free, v_full, v_free, table, head, first, count,
                     DIM, TILE, STAGES)),
        ],
        [4, 1], [240, 24],  # warps and registers of a thread; the first group has as many as the second
    )  # fmt: skip
    if PDL:
        grid_dependency("launch_dependents")


def takes(q: Tensor, k_cache: Tensor, softcap: float, sinks: Tensor | None) -> bool:
    """Whether the kernel is for these, on a card that has it: see `roles_attention`. Heads of 64 are slower by it."""
    group, dim = q.shape[1] // k_cache.shape[2], q.shape[2]
    numbers = q.dtype == k_cache.dtype == torch.bfloat16 and dim in (128, 256) and k_cache.is_contiguous()
    small = not softcap or is_bounded(q, softcap, sinks, 0)
    return numbers and k_cache.shape[1] == TILE and ROWS % group == 0 and small and sinks is None


def roles_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, block_tables: Tensor, seq_slots: Tensor, query_start: Tensor,
    seq_lens: Tensor, *, first_seq: int, num_seqs: int, num_rows: int, scale: float, window: int = 0, softcap: float = 0.0,
    least: int = 0,
) -> None:  # fmt: skip
    """As `attention_prefill.varlen_attention`, for a cache in bfloat16, contiguous and in blocks of TILE tokens, heads of 64,
    128 or 256 dimensions, groups of a power of two, a `softcap` that is_bounded, and no sinks."""
    (num_heads, dim), kv_heads = q.shape[-2:], k_cache.shape[2]
    layout = gl.NVMMASharedLayout.get_default_for([TILE, dim], gl.bfloat16)
    k_desc, v_desc = (TensorDescriptor.from_tensor(x.view(-1, kv_heads * dim), [TILE, dim], layout) for x in (k_cache, v_cache))
    group = num_heads // kv_heads
    factor, cap = (scale / softcap, softcap * LOG2_E) if softcap else (scale * LOG2_E, 0.0)
    programs = num_rows // (2 * ROWS // group) + num_seqs
    _roles_attention[(programs, kv_heads)](
        q, k_desc, v_desc, out, block_tables, seq_slots, query_start, seq_lens, first_seq, num_seqs, least,
        factor, cap, window, q.stride(0), out.stride(0), block_tables.stride(0),
        GROUP=group, DIM=dim, ROWS=ROWS, TILE=TILE, STAGES=2 if dim > 128 else 4, WINDOW=window > 0, CAPPED=softcap > 0,
        num_warps=4, **pdl(q),
    )  # fmt: skip
