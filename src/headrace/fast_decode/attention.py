"""Attention of one new token a sequence, from the raw QKV product to the context vector, in one kernel.

A program owns (sequence, KV head, split of the context). It sums the partial QKV products, applies qk-norm and rotary
embedding, attends over its part of the paged cache with all query heads of the group at once, and the split that holds the new
token also writes its key and value to the cache. Splits are merged by the program that finishes last, in their order (see
kernels/split.py; Flash-Decoding, Dao et al. 2023). The first tile of keys and values is loaded before the wait for the previous
kernel: it is older than this step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headrace.cache.kv_cache import KVCache
from headrace.fast_decode.attention_few import few_attention, takes_few, token_offsets
from headrace.fast_decode.attention_reference import HeadShape, decode_attention_reference
from headrace.fast_decode.epilogues import runs_triton
from headrace.fast_decode.ring_tile import RingAttention
from headrace.kernels.activation import soft_cap
from headrace.kernels.fp8_cache import fp8_factors, fp8_kind, largest, pairs
from headrace.kernels.launch import gdc_launch_dependents, gdc_wait, jit, next_power_of_2, pdl, tl, touch
from headrace.kernels.rounded import keep, put
from headrace.kernels.split import MERGE_ELEMENTS, SplitSpace, count_part, merge_attention


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """block_n tokens a step; a split has at least `min_tiles` of them, so a short sequence is split less or not at all.

    `early`: the next kernel may start (and load its weights) while this one reads the cache; else when it is about to end.
    `heads_first`: programs that run side by side read the KV heads of one sequence, which lie together in memory, rather than
    one head of many sequences. `touch`: tiles after the first that are asked into the L2 cache before the wait. `few`: up to so
    many tokens a program for each query head reads a context (attention_few.py); `at_once`: the next kernel may then start
    before this one has waited for the product. Its programs wait behind all of this one's, which have started: in nobody's way.
    """

    block_n: int = 64
    num_warps: int = 4
    num_stages: int = 3
    min_tiles: int = 1
    early: bool = False
    heads_first: bool = False
    touch: int = 0
    few: int = 0
    at_once: bool = False


@jit
def _sum_slabs(pointers, slab_stride, mask, SLABS: tl.constexpr):
    x = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    for j in tl.static_range(1, SLABS):
        x += tl.load(pointers + j * slab_stride, mask=mask, other=0.0).to(tl.float32)
    return x


@jit
def _attend(
    q, q_odd, k, v, k_scale, v_scale, m, l, acc, odd, ok, scale, softcap, HAS_SOFTCAP: tl.constexpr, FP8: tl.constexpr
):  # fmt: skip
    """One tile of the online softmax, in powers of two. In FP8 odd dimensions go by themselves (see kernels/fp8_cache.py)."""
    if FP8:
        k, k_odd = pairs(tl.trans(k), q.dtype, FP8)
        s = tl.dot(q_odd, k_odd, tl.dot(q, k, input_precision="ieee"), input_precision="ieee")
        s = s * k_scale[None, :] * scale
    else:
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if HAS_SOFTCAP:
        s = soft_cap(s, softcap)
    s = tl.where(ok[None, :], s * 1.4426950408889634, -float("inf"))
    top = tl.maximum(m, tl.max(s, 1))
    p = tl.exp2(s - top[:, None])
    shrink = tl.exp2(m - top)
    l = l * shrink + tl.sum(p, 1)
    if FP8:
        p = (p * v_scale[None, :]).to(q.dtype)
        v, v_odd = pairs(v, q.dtype, FP8)
        odd = tl.dot(p, v_odd, odd * shrink[:, None], input_precision="ieee")
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return top, l, acc, odd


@jit
def _quantized(x):
    """x [DIM] float32 as the cache keeps it, and its scale."""
    factor, scale = fp8_factors(largest(x))
    return (x * factor).to(tl.float8e4nv), scale


@jit(do_not_specialize=["num_splits", "window", "sizes_stride", "second"])
def _decode_attention_kernel(
    qkv_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, tables_ptr, slots_ptr, lens_ptr, mapping_ptr,
    q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, sinks_ptr,
    out_ptr, out_sizes_ptr, partials_ptr, lse_ptr, tickets_ptr,
    sizes_stride, second, slab_stride, table_stride, stride_block, stride_token, stride_head, num_splits, window,
    scale, softcap, eps, norm_offset,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, HALF: tl.constexpr,
    GROUP_BLOCK: tl.constexpr, MERGE_GROUP: tl.constexpr, MERGE_SPLITS: tl.constexpr, SLABS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, MIN_TILES: tl.constexpr, QK_NORM: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, SINKS: tl.constexpr, GATED: tl.constexpr, EARLY: tl.constexpr,
    HEADS_FIRST: tl.constexpr, TOUCH: tl.constexpr, FP8: tl.constexpr, PAIR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    GROUP: tl.constexpr = HEADS // KV_HEADS
    LINE: tl.constexpr = 1024 // k_ptr.dtype.element_ty.primitive_bitwidth  # elements of a cache line
    PACK: tl.constexpr = 2 if FP8 else 1  # numbers in a column of the cache
    COLUMNS: tl.constexpr = DIM_BLOCK // PACK
    OUT: tl.constexpr = out_ptr.dtype.element_ty
    MODEL: tl.constexpr = (tl.bfloat16 if tl.float8e4nv == OUT else OUT) if FP8 else k_ptr.dtype.element_ty
    if HEADS_FIRST:
        head = tl.program_id(0)
        split = tl.program_id(1)
        b = tl.program_id(2)
    else:
        b = tl.program_id(0)
        head = tl.program_id(1)
        split = tl.program_id(2)
    rg = tl.arange(0, GROUP_BLOCK)
    rd = tl.arange(0, DIM_BLOCK)
    rn = tl.arange(0, BLOCK_N)
    rc = tl.arange(0, COLUMNS)
    d_ok = rd < DIM
    c_ok = rc < DIM // PACK
    g_ok = rg < GROUP
    # past the L1 cache: what is read before the wait may have changed since this SM read it last
    pos = tl.load(lens_ptr + b, cache_modifier=".cg") - 1  # of the new token; -1 in a padded row
    first = 0  # oldest token that is seen
    if HAS_WINDOW:
        first = tl.maximum(pos - window + 1, 0)
    begin = first // BLOCK_N * BLOCK_N
    tiles = (pos - begin) // BLOCK_N + 1
    share = tl.maximum((tiles + num_splits - 1) // num_splits, MIN_TILES) * BLOCK_N
    lo = begin + split * share
    out = out_ptr + (b * HEADS + head * GROUP) * DIM
    out_place = rg[:, None] * DIM + rd[None, :]
    out_ok = g_ok[:, None] & d_ok[None, :]
    out_sizes = rg
    if tl.float8e4nv == OUT:  # of a head of a row
        out_sizes = out_sizes_ptr + (head * GROUP + rg) * sizes_stride + b
    if lo > pos:  # nothing to read
        if PDL:
            gdc_wait()
        if (pos < 0) & (split == 0):
            put(out + out_place, tl.zeros([GROUP_BLOCK, DIM_BLOCK], tl.float32), out_ok, out_sizes, g_ok, second, 1, PAIR)
        return
    owner = pos < lo + share
    hi = tl.minimum(pos, lo + share)  # of the cached tokens; the new one comes from the product
    table = tables_ptr + tl.load(slots_ptr + b, cache_modifier=".cg").to(tl.int64) * table_stride
    # rotary embedding as x * cos + partner * sin, the partner half a rotation away; the rest of the head is left alone
    turned = rd < 2 * HALF
    partner = tl.where(turned, tl.where(rd < HALF, rd + HALF, rd - HALF), rd)
    angle = pos * HALF + tl.where(rd < HALF, rd, rd - HALF)
    cos = tl.load(cos_ptr + angle, mask=turned, other=1.0)
    sin = tl.load(sin_ptr + angle, mask=turned, other=0.0)
    sin = tl.where(rd < HALF, -sin, sin)
    if QK_NORM:
        q_cos = (tl.load(q_norm_ptr + rd, mask=d_ok, other=0.0).to(tl.float32) + norm_offset) * cos
        q_sin = (tl.load(q_norm_ptr + partner, mask=d_ok, other=0.0).to(tl.float32) + norm_offset) * sin
        k_cos = (tl.load(k_norm_ptr + rd, mask=d_ok, other=0.0).to(tl.float32) + norm_offset) * cos
        k_sin = (tl.load(k_norm_ptr + partner, mask=d_ok, other=0.0).to(tl.float32) + norm_offset) * sin
    offsets = token_offsets(table, lo, rn, hi, stride_block, stride_token, BLOCK_SIZE, BLOCK_N)
    ok = (lo + rn < hi) & (lo + rn >= first)
    k_base = k_ptr + head * stride_head + rc[None, :]
    v_base = v_ptr + head * stride_head + rc[None, :]
    k = tl.load(k_base + offsets[:, None], mask=ok[:, None] & c_ok[None, :], other=0)
    v = tl.load(v_base + offsets[:, None], mask=ok[:, None] & c_ok[None, :], other=0)
    k_scale, v_scale = scale, scale  # without meaning
    if FP8:  # [blocks, kv heads, tokens of a block]
        places = token_offsets(table, lo, rn, hi, KV_HEADS * BLOCK_SIZE, 1, BLOCK_SIZE, BLOCK_N) + head * BLOCK_SIZE
        k_scale = tl.load(k_scales_ptr + places, mask=ok, other=0.0)
        v_scale = tl.load(v_scales_ptr + places, mask=ok, other=0.0)
    if PDL:
        for i in tl.static_range(TOUCH):
            n0 = lo + (i + 1) * BLOCK_N
            if n0 < hi:
                lines = token_offsets(table, n0, rn, hi, stride_block, stride_token, BLOCK_SIZE, BLOCK_N)[:, None]
                lines += (head * stride_head + tl.arange(0, (COLUMNS + LINE - 1) // LINE) * LINE)[None, :]
                touch(k_ptr + lines)
                touch(v_ptr + lines)
        gdc_wait()
        if EARLY:
            gdc_launch_dependents()
    row = qkv_ptr + b * ((HEADS * (2 if GATED else 1) + 2 * KV_HEADS) * DIM)
    q_row = row + (head * GROUP + rg)[:, None] * DIM
    k_row = row + (HEADS + head) * DIM
    q = _sum_slabs(q_row + rd[None, :], slab_stride, out_ok, SLABS)
    q_partner = _sum_slabs(q_row + partner[None, :], slab_stride, out_ok, SLABS)
    k_new = _sum_slabs(k_row + rd, slab_stride, d_ok, SLABS)
    k_partner = _sum_slabs(k_row + partner, slab_stride, d_ok, SLABS)
    v_new = _sum_slabs(k_row + KV_HEADS * DIM + rd, slab_stride, d_ok, SLABS).to(MODEL)
    if QK_NORM:
        q_factor = tl.rsqrt(tl.sum(q * q, 1) / DIM + eps)[:, None]
        q = q_factor * (q * q_cos[None, :] + q_partner * q_sin[None, :])
        k_factor = tl.rsqrt(tl.sum(k_new * k_new, 0) / DIM + eps)
        k_new = k_factor * (k_new * k_cos + k_partner * k_sin)
    else:
        q = q * cos[None, :] + q_partner * sin[None, :]
        k_new = k_new * cos + k_partner * sin
    q = q.to(MODEL)
    k_new = k_new.to(MODEL)
    m = tl.full([GROUP_BLOCK], -float("inf"), tl.float32)
    l = tl.zeros([GROUP_BLOCK], tl.float32)
    acc = tl.zeros([GROUP_BLOCK, COLUMNS], tl.float32)
    q_even, q_odd, odd = q, q, acc
    if FP8:
        q_even, q_odd = tl.split(tl.reshape(q, [GROUP_BLOCK, COLUMNS, 2]))
    if owner:
        place = tl.load(mapping_ptr + b)
        k_kept, v_kept = k_new, v_new
        k_own, v_own = k_new.to(tl.float32), v_new.to(tl.float32)
        if FP8:  # the next step will read them as they are kept
            k_kept, k_own_scale = _quantized(k_own)
            v_kept, v_own_scale = _quantized(v_own)
            k_own, v_own = k_kept.to(tl.float32) * k_own_scale, v_kept.to(tl.float32) * v_own_scale
            if place >= 0:
                at = (place // BLOCK_SIZE * KV_HEADS + head) * BLOCK_SIZE + place % BLOCK_SIZE
                tl.store(k_scales_ptr + at, k_own_scale)
                tl.store(v_scales_ptr + at, v_own_scale)
        if place >= 0:
            place = (place // BLOCK_SIZE * stride_block + place % BLOCK_SIZE * stride_token + head * stride_head) * PACK
            tl.store(k_ptr.to(tl.pointer_type(k_kept.dtype)) + place + rd, k_kept, mask=d_ok)
            tl.store(v_ptr.to(tl.pointer_type(v_kept.dtype)) + place + rd, v_kept, mask=d_ok)
        m = tl.sum(q.to(tl.float32) * k_own[None, :], 1) * scale
        if HAS_SOFTCAP:
            m = soft_cap(m, softcap)
        m = m * 1.4426950408889634
        l = l + 1.0
        if FP8:
            v_even, v_odd = tl.split(tl.reshape(v_own, [COLUMNS, 2]))
            acc = acc + v_even[None, :]
            odd = odd + v_odd[None, :]
        else:
            acc = acc + v_own[None, :]
    if lo < hi:
        m, l, acc, odd = _attend(
            q_even, q_odd, k, v, k_scale, v_scale, m, l, acc, odd, ok, scale, softcap, HAS_SOFTCAP, FP8
        )  # fmt: skip
    for n0 in range(lo + BLOCK_N, hi, BLOCK_N):
        offsets = token_offsets(table, n0, rn, hi, stride_block, stride_token, BLOCK_SIZE, BLOCK_N)
        ok = n0 + rn < hi
        k = tl.load(k_base + offsets[:, None], mask=ok[:, None] & c_ok[None, :], other=0)
        v = tl.load(v_base + offsets[:, None], mask=ok[:, None] & c_ok[None, :], other=0)
        if FP8:
            places = token_offsets(table, n0, rn, hi, KV_HEADS * BLOCK_SIZE, 1, BLOCK_SIZE, BLOCK_N) + head * BLOCK_SIZE
            k_scale = tl.load(k_scales_ptr + places, mask=ok, other=0.0)
            v_scale = tl.load(v_scales_ptr + places, mask=ok, other=0.0)
        m, l, acc, odd = _attend(
            q_even, q_odd, k, v, k_scale, v_scale, m, l, acc, odd, ok, scale, softcap, HAS_SOFTCAP, FP8
        )  # fmt: skip
    if PDL and not EARLY:
        gdc_launch_dependents()
    used = (tiles * BLOCK_N + share - 1) // share
    if FP8:
        acc = tl.reshape(tl.join(acc, odd), [GROUP_BLOCK, DIM_BLOCK])
    if SINKS:  # a score without a value, which one split counts
        sink = tl.load(sinks_ptr + head * GROUP + rg, mask=g_ok, other=0.0) * 1.4426950408889634
        sink = tl.where(split == 0, sink, -float("inf"))
        top = tl.maximum(m, sink)
        shrink = tl.exp2(m - top)
        l = l * shrink + tl.exp2(sink - top)
        acc = acc * shrink[:, None]
        m = top
    result = acc / l[:, None]
    if GATED:  # each split its part: what they add up to is gated too
        gate = _sum_slabs(q_row + (HEADS + 2 * KV_HEADS) * DIM + rd[None, :], slab_stride, out_ok, SLABS)
        result *= tl.sigmoid(gate)
    if used == 1:
        put(out + out_place, result, out_ok, out_sizes, g_ok, second, 1, PAIR)
    else:
        base = (b * KV_HEADS + head) * num_splits
        part = ((base + split) * GROUP + rg).to(tl.int64)
        tl.store(partials_ptr + part[:, None] * DIM + rd[None, :], result, mask=out_ok)
        tl.store(lse_ptr + part, m + tl.log2(l), mask=g_ok)
        ticket = tickets_ptr + b * KV_HEADS + head
        if count_part(ticket) == used - 1:
            tl.store(ticket, 0)
            merge_attention(
                out, partials_ptr, lse_ptr, base, used, 1, 0, GROUP, DIM, DIM_BLOCK, 1, MERGE_GROUP, MERGE_SPLITS,
                out_sizes_ptr, sizes_stride, head * GROUP * sizes_stride + b, second, PAIR,
            )  # fmt: skip


def decode_attention(
    qkv: Tensor, out: Tensor, kv: KVCache, layer: int, *, block_tables: Tensor, seq_slots: Tensor, seq_lens: Tensor,
    slot_mapping: Tensor, cos: Tensor, sin: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, heads: HeadShape,
    window: int, num_splits: int, tile: AttentionTile | RingAttention, space: SplitSpace, sinks: Tensor | None = None,
    sizes: Tensor | None = None,
) -> None:  # fmt: skip
    """qkv [slabs, B, (heads + 2 kv heads) * head_dim, and that of gates] (summed over the slabs) -> out [B, heads * head_dim].

    Row b is the newest token of a sequence: seq_lens[b] tokens long with it, block table block_tables[seq_slots[b]], its own
    place slot_mapping[b] (-1: not written); a row with seq_lens 0 is padding and gets zeros. cos, sin [P, rotated / 2]
    float32; q_norm, k_norm [head_dim] or None. window counts tokens with the query's own (0: all). sinks [heads] float32: as of
    AttentionBackend.attend. `out` may be FP8, also pairs, with `sizes` [heads, >= B], its chunks a head each
    (kernels/rounded.py).
    num_splits programs share a sequence's context.
    """
    slabs, rows, _ = qkv.shape
    told: dict[str, Any] = {  # each of the kernels, and the reference
        "block_tables": block_tables, "seq_slots": seq_slots, "seq_lens": seq_lens, "slot_mapping": slot_mapping, "cos": cos,
        "sin": sin, "q_norm": q_norm, "k_norm": k_norm, "heads": heads, "window": window,
    }  # fmt: skip
    if not runs_triton(qkv):
        keep(out, decode_attention_reference(qkv.sum(0), kv, layer, **told, sinks=sinks), sizes)
        return
    k, v, kind = kv.k[layer], kv.v[layer], fp8_kind(out, kv.scales[layer][0])
    if isinstance(tile, RingAttention):
        from headrace.fast_decode.attention_ring import ring_attention  # which needs Gluon
        from headrace.fast_decode.attention_ring_fp8 import ring_attention_fp8

        attend = partial(ring_attention_fp8, scales=kv.scales[layer]) if kind else ring_attention
        attend(qkv, out, k, v, **told, num_splits=num_splits, tile=tile, space=space, sizes=sizes)
        return
    if tile.few and takes_few(heads, 2 * cos.shape[1], num_splits):
        few_attention(
            qkv, out, k, v, kv.scales[layer], **told, num_splits=num_splits, block_n=tile.block_n, num_warps=tile.num_warps,
            min_tiles=tile.min_tiles, space=space, sinks=sinks, at_once=tile.at_once,
        )  # fmt: skip
        return
    if kind:
        k, v = k.view(torch.int16), v.view(torch.int16)
    group = heads.num_heads // heads.num_kv_heads
    dim_block = max(32 if kind else 16, next_power_of_2(heads.head_dim))
    merge_group = next_power_of_2(group)
    merge_splits = max(1, min(next_power_of_2(num_splits), MERGE_ELEMENTS // (merge_group * dim_block)))
    grid = (heads.num_kv_heads, num_splits, rows) if tile.heads_first else (rows, heads.num_kv_heads, num_splits)
    _decode_attention_kernel[grid](
        qkv, k, v, *kv.scales[layer], block_tables, seq_slots, seq_lens, slot_mapping, q_norm, k_norm, cos, sin,
        sinks, out, sizes, space.partials, space.lse, space.tickets,
        0 if sizes is None else sizes.stride(0), out.stride(0), qkv.stride(0), block_tables.stride(0), k.stride(0), k.stride(1),
        k.stride(2), num_splits, window,
        heads.scale, heads.softcap, heads.norm_eps, heads.norm_offset,
        HEADS=heads.num_heads, KV_HEADS=heads.num_kv_heads, DIM=heads.head_dim, DIM_BLOCK=dim_block, HALF=cos.shape[1],
        GROUP_BLOCK=max(16, next_power_of_2(group)), MERGE_GROUP=merge_group, MERGE_SPLITS=merge_splits, SLABS=slabs,
        BLOCK_SIZE=k.shape[1], BLOCK_N=tile.block_n, MIN_TILES=tile.min_tiles, QK_NORM=q_norm is not None,
        HAS_WINDOW=window > 0, HAS_SOFTCAP=heads.softcap > 0, SINKS=sinks is not None, GATED=heads.gated,
        EARLY=tile.early, HEADS_FIRST=tile.heads_first, TOUCH=tile.touch, FP8=kind, PAIR=out.dim() == 3,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **pdl(qkv),
    )  # fmt: skip
