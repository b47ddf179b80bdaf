"""Paged attention of sequences with few new rows (decode, verification): the context is split over programs and merged.

    grid = (kv heads, parts, sequences); a program takes one part of one sequence's context for all query heads that share a
    kv head (GQA packed into the rows of one matrix product)
    grid = (kv heads, parts of all) of many sequences: the longest parts come first

The grid has as many parts as the longest context that may come; programs past a sequence's end leave at once. So one CUDA
graph serves every mix of lengths, and a long context is spread over many programs whatever the batch. A sequence of one
part is written at once; several are merged by the program that comes last, in their order (see split.py).
Split over the context: Dao et al., Flash-Decoding (2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.cache.fp8 import Scales
from headrace.kernels.activation import soft_cap
from headrace.kernels.fp8_cache import fp8_kind, half_pairs, halves_of, log2_and_inverse
from headrace.kernels.launch import (
    capability,
    gdc_launch_dependents,
    gdc_wait,
    jit,
    next_power_of_2,
    num_multiprocessors,
    pdl,
    tl,
)
from headrace.kernels.split import MERGE_ELEMENTS, SplitSpace, choose_chunk, count_part, merge_attention

# So many sequences and more have their parts in order, the longest first: then those that end last are short, and what is
# past the ends takes no places among others. There are programs for half as many parts again as sequences, and some more;
# where there are more parts, a program takes several.
ORDERED_FROM, MORE_PARTS = 48, 64
OWN = 16  # sequences of a program that finds their places in the order
MAX_ROWS = 64  # tokens of a sequence times query heads of a kv head


@jit
def _parts_of(length, chunk, TILE: tl.constexpr):
    """Size and number of equal parts of half to one and a half chunks: what is just past a chunk's end is not worth a merge."""
    wanted = tl.maximum((length + chunk // 2) // chunk, 1)
    size = tl.maximum(tl.cdiv(tl.cdiv(length, wanted), TILE), 1) * TILE
    return size, tl.cdiv(length, size)


@jit(do_not_specialize=["first_seq", "num_seqs"])
def _order_parts(lens_ptr, order_ptr, first_seq, num_seqs, chunk, TILE: tl.constexpr, OWN: tl.constexpr, BLOCK: tl.constexpr,
                 PDL: tl.constexpr):  # fmt: skip
    seq = tl.program_id(0) * OWN + tl.arange(0, OWN)
    n = tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
    size, parts = _parts_of(tl.load(lens_ptr + first_seq + seq, mask=seq < num_seqs, other=0), chunk, TILE)
    parts = tl.maximum(parts, 1)  # of a sequence without tokens one that writes zeros
    place = tl.full([OWN], 1, tl.int32)
    count = 0
    for s0 in range(0, num_seqs, BLOCK):
        other = s0 + n
        others_size, others = _parts_of(tl.load(lens_ptr + first_seq + other, mask=other < num_seqs, other=0), chunk, TILE)
        others = tl.where(other < num_seqs, tl.maximum(others, 1), 0)
        earlier = (others_size[None, :] == size[:, None]) & (other[None, :] < seq[:, None])
        before = (others_size[None, :] > size[:, None]) | earlier
        place += tl.sum(tl.where(before, others[None, :], 0), 1)
        count += tl.sum(others, 0)
    for part in range(0, tl.max(tl.where(seq < num_seqs, parts, 0), 0)):
        tl.store(order_ptr + place + part, seq | part << 16, mask=(seq < num_seqs) & (part < parts))
    if tl.program_id(0) == 0:
        tl.store(order_ptr, count)
    if PDL:
        gdc_launch_dependents()


@jit
def _attend_part(
    head, part, local_seq, max_parts,
    q_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, sinks_ptr, out_ptr, partials_ptr, lse_ptr, tickets_ptr,
    tables_ptr, slots_ptr, query_start_ptr, lens_ptr, first_seq, scale, softcap, window, chunk,
    q_stride, out_stride, block_stride, token_stride, head_stride, table_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, MERGE_ROWS: tl.constexpr,
    MERGE_CHUNKS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, FP8: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
    ORDERED: tl.constexpr,
):  # fmt: skip
    """One part of one sequence's context for the query heads of a kv head."""
    seq = first_seq + local_seq
    length = tl.load(lens_ptr + seq)
    if TOKENS == 1:
        row0 = seq
        num_tokens = 1
    else:
        row0 = tl.load(query_start_ptr + seq)
        num_tokens = tl.load(query_start_ptr + seq + 1) - row0
    lo = 0
    if WINDOW:  # nothing before the first token's window is touched
        lo = tl.maximum(length - num_tokens + 1 - window, 0) // TILE * TILE
    size, num_parts = _parts_of(length - lo, chunk, TILE)
    start = lo + part * size
    if PDL and not ORDERED:
        gdc_wait()
    # of more rows than the launch is for: another kernel's
    if ((start < length) | (part == 0)) & (num_tokens <= TOKENS):
        table = tables_ptr + tl.load(slots_ptr + seq).to(tl.int64) * table_stride
        stop = tl.minimum(length, start + size)
        r = tl.arange(0, ROWS)
        d = tl.arange(0, DIM)
        c = tl.arange(0, COLUMNS)  # of the cache: in FP8 two numbers each
        n = tl.arange(0, TILE)
        token = r // GROUP
        real = (r < TOKENS * GROUP) & (token < num_tokens)
        q_head = head * GROUP + r % GROUP
        row = (row0 + token).to(tl.int64)
        q = tl.load(
            q_ptr + (row * q_stride + q_head * HEAD_DIM)[:, None] + d[None, :],
            mask=real[:, None] & (d < HEAD_DIM)[None, :], other=0.0,
        )  # fmt: skip
        position = length - num_tokens + tl.minimum(token, num_tokens - 1)  # no padding row without a key
        # positive: the maximum may be taken before it; not of FP8, where factors are a query's and join a value's
        factor = 1.0 if SOFTCAP or FP8 else scale * 1.4426950408889634
        m = tl.full([ROWS], -float("inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        if SINKS:  # a score without a value, which the first part has seen before all others
            m = tl.where(part == 0, tl.load(sinks_ptr + q_head) * 1.4426950408889634, m)
            total = tl.where(part == 0, 1.0, total)
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        if FP8:
            q, of_q = halves_of(q)
            of_q = of_q[:, None] * (scale if SOFTCAP else scale * 1.4426950408889634)
            q, q_odd = tl.split(tl.reshape(q, [ROWS, COLUMNS, 2]))
            odd = acc
        for n0 in range(start, stop, TILE):
            key = n0 + n
            inside = key < stop
            if BLOCK % TILE == 0:
                block = tl.load(table + n0 // BLOCK).to(tl.int64)
                offset = block * block_stride + (n0 % BLOCK + n) * token_stride + head * head_stride
            else:
                block = tl.load(table + key // BLOCK, mask=inside, other=0).to(tl.int64)
                offset = block * block_stride + (key % BLOCK) * token_stride + head * head_stride
            mask = inside[:, None] & (c < HEAD_DIM // (DIM // COLUMNS))[None, :]
            k = tl.load(k_ptr + offset[:, None] + c[None, :], mask=mask, other=0)
            v = tl.load(v_ptr + offset[:, None] + c[None, :], mask=mask, other=0)
            if FP8:
                k, k_odd = half_pairs(tl.trans(k), q.dtype, FP8)
                s = tl.dot(q_odd, k_odd, tl.dot(q, k, input_precision=PRECISION), input_precision=PRECISION)
                place = (block * KV_HEADS + head) * BLOCK + key % BLOCK
                s = s * tl.load(k_scales_ptr + place, mask=inside, other=0.0)[None, :] * of_q
                if SOFTCAP:
                    s = soft_cap(s, softcap) * 1.4426950408889634
                # a value's scale joins its weight in the exponent: so weights are at most 1, as float16 may hold them
                of_v, without = log2_and_inverse(tl.load(v_scales_ptr + place, mask=inside, other=1.0), FP8)
                s += of_v[None, :]
            else:
                s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
                if SOFTCAP:
                    s = soft_cap(s * scale, softcap) * 1.4426950408889634
            if TOKENS == 1:
                seen = inside[None, :]
            else:
                seen = key[None, :] <= position[:, None]
            if WINDOW:
                seen = seen & (key[None, :] > position[:, None] - window)
            s = tl.where(seen, s, -float("inf"))
            m_new = tl.maximum(m, tl.max(s, 1) * factor)
            base = m_new
            if TOKENS > 1:  # a row may see nothing of this tile
                base = tl.where(m_new == -float("inf"), 0.0, m_new)
            p = tl.exp2(s * factor - base[:, None])
            shrink = tl.exp2(m - base)
            if FP8:
                total = total * shrink + tl.sum(p * without[None, :], 1)
                p = p.to(q.dtype)
                v, v_odd = half_pairs(v, q.dtype, FP8)
                odd = tl.dot(p, v_odd, odd * shrink[:, None], input_precision=PRECISION)
            else:
                total = total * shrink + tl.sum(p, 1)
            acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
            m = m_new
        if FP8:
            acc = tl.reshape(tl.join(acc, odd), [ROWS, DIM])
        o = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        if num_parts <= 1:  # also length 0: zeros
            tl.store(
                out_ptr + (row * out_stride + q_head * HEAD_DIM)[:, None] + d[None, :], o.to(out_ptr.dtype.element_ty),
                mask=real[:, None] & (d < HEAD_DIM)[None, :],
            )  # fmt: skip
        else:
            base = (local_seq.to(tl.int64) * KV_HEADS + head) * max_parts
            place = (base + part) * (TOKENS * GROUP) + r
            tl.store(partials_ptr + place[:, None] * HEAD_DIM + d[None, :], o, mask=real[:, None] & (d < HEAD_DIM)[None, :])
            lse = tl.where(total == 0.0, -float("inf"), m + tl.log2(tl.where(total == 0.0, 1.0, total)))
            tl.store(lse_ptr + place, lse, mask=real)
            ticket = tickets_ptr + local_seq * KV_HEADS + head
            if count_part(ticket) == num_parts - 1:
                tl.store(ticket, 0)  # as the next launch wants to find it
                out = out_ptr + row0.to(tl.int64) * out_stride + head * (GROUP * HEAD_DIM)
                merge_attention(
                    out, partials_ptr, lse_ptr, base, num_parts, num_tokens, out_stride, GROUP, HEAD_DIM, DIM, TOKENS,
                    MERGE_ROWS, MERGE_CHUNKS,
                )  # fmt: skip


@jit(do_not_specialize=["first_seq", "window", "max_parts"])
def _split_attention(
    order_ptr, max_parts,
    q_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, sinks_ptr, out_ptr, partials_ptr, lse_ptr, tickets_ptr,
    tables_ptr, slots_ptr, query_start_ptr, lens_ptr, first_seq, scale, softcap, window, chunk,
    q_stride, out_stride, block_stride, token_stride, head_stride, table_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, MERGE_ROWS: tl.constexpr,
    MERGE_CHUNKS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, FP8: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
    ORDERED: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    if ORDERED:
        if PDL:
            gdc_wait()
        for at in tl.range(tl.program_id(1), tl.load(order_ptr), tl.num_programs(1), disable_licm=True):
            entry = tl.load(order_ptr + 1 + at)
            _attend_part(
                head, entry >> 16, entry & 0xFFFF, max_parts,
                q_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, sinks_ptr, out_ptr, partials_ptr, lse_ptr,
                tickets_ptr, tables_ptr, slots_ptr, query_start_ptr, lens_ptr, first_seq, scale, softcap, window,
                chunk, q_stride, out_stride, block_stride, token_stride, head_stride, table_stride, KV_HEADS, GROUP,
                HEAD_DIM, DIM, COLUMNS, BLOCK, TOKENS, ROWS, TILE, MERGE_ROWS, MERGE_CHUNKS, WINDOW, SOFTCAP, SINKS,
                FP8, PRECISION, PDL, ORDERED,
            )  # fmt: skip
    else:
        _attend_part(
            head, tl.program_id(1), tl.program_id(2), max_parts,
            q_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, sinks_ptr, out_ptr, partials_ptr, lse_ptr,
            tickets_ptr, tables_ptr, slots_ptr, query_start_ptr, lens_ptr, first_seq, scale, softcap, window,
            chunk, q_stride, out_stride, block_stride, token_stride, head_stride, table_stride, KV_HEADS, GROUP,
            HEAD_DIM, DIM, COLUMNS, BLOCK, TOKENS, ROWS, TILE, MERGE_ROWS, MERGE_CHUNKS, WINDOW, SOFTCAP, SINKS,
            FP8, PRECISION, PDL, ORDERED,
        )  # fmt: skip
    if PDL:
        gdc_launch_dependents()


@dataclass(frozen=True, slots=True)
class SplitTile:
    """Keys per step of the inner loop, warps and software pipeline stages of the split kernel."""

    keys: int = 64
    num_warps: int = 4
    num_stages: int = 3


def default_tile(dim: int, itemsize: int, rows: int, hopper: bool, narrow: bool = False) -> SplitTile:
    """16 KiB of keys at a time (64 in bf16 at head_dim 128): 3.0 TB/s of an H100's 3.0 as measured. `narrow`: in FP8.

    Of few rows two warps: 256 sequences of 384 tokens in 57 us for 62 (heads of 64), 102 for 104 (of 128) on an H200; of 1,024
    in FP8 in 145 us for 160 (of 128).
    """
    keys = max(16, min(64, 16384 // (dim * itemsize)))
    few = 2 if hopper and itemsize == 2 and rows * dim <= 2048 else 4
    return SplitTile(keys, few if rows * dim <= 4096 else 8, (5 if narrow else 3) if hopper else 2)


def max_tokens(group: int) -> int:
    """New rows of one sequence that the split kernel takes, `group` query heads to a kv head."""
    return max(1, MAX_ROWS // group)


def split_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, block_tables: Tensor, seq_slots: Tensor, query_start: Tensor,
    seq_lens: Tensor, space: SplitSpace, *, first_seq: int, num_seqs: int, tokens: int, max_context: int, scale: float,
    window: int = 0, softcap: float = 0.0, scales: Scales = (None, None), sinks: Tensor | None = None,
    chunk: int | None = None, tile: SplitTile | None = None, ordered: bool = False,
) -> None:  # fmt: skip
    """Attention of those of the sequences first_seq .. first_seq + num_seqs that have at most `tokens` rows, into `out`.

    q [T, num_heads, head_dim] (rows may be strided); k_cache, v_cache [num_blocks, block_size, kv_heads, head_dim], alike in
    strides, in FP8 with their `scales`; out [T, num_heads * head_dim]; block_tables [slots, blocks] int32, indexed by seq_slots
    [S] int32; query_start [S + 1] int32; seq_lens [S] int32. A sequence's rows are its last positions and see all before and
    themselves, the last `window` of them if window > 0. With tokens == 1 sequence s has row s, and no other. seq_lens 0: its
    rows become 0, nothing is read. sinks [num_heads] float32: as of AttentionBackend.attend. max_context bounds seq_lens; it
    and the host ints are fixed in a CUDA graph. Only `space` is written too. `ordered`: the last launch in it without a
    window was of the same sequences, lengths and sizes.
    """
    num_heads, head_dim = q.shape[-2:]
    kv_heads, group = k_cache.shape[2], num_heads // k_cache.shape[2]
    real_rows = tokens * group
    kind = fp8_kind(q, scales[0])
    rows, dim = max(16, next_power_of_2(real_rows)), max(32 if kind else 16, next_power_of_2(head_dim))
    if kind:
        k_cache, v_cache = k_cache.view(torch.int16), v_cache.view(torch.int16)
    if tile is None:
        tile = default_tile(dim, q.element_size(), rows, capability(q.device) >= (9, 0), kind > 0)
    context = min(max_context, window + tokens + tile.keys - 2) if window else max_context  # from the first touched tile on
    slots = space.lse.numel() // num_heads
    if chunk is None:
        chunk = choose_chunk(num_seqs, tokens, kv_heads, context, num_multiprocessors(q.device), slots)
    parts = max(1, -(-context // chunk))
    if chunk % tile.keys or (parts > 1 and num_seqs * tokens * parts > slots):
        raise ValueError(f"chunk {chunk} does not suit {num_seqs} sequences of {context} tokens")
    merge_rows = next_power_of_2(real_rows)
    in_order = space.order is not None and not window and ORDERED_FROM <= num_seqs <= 1 << 16  # an entry has 16 bits for it
    grid: tuple[int, ...] = (kv_heads, parts, num_seqs)
    if in_order:
        grid = (kv_heads, min(num_seqs * parts, num_seqs + max(MORE_PARTS, num_seqs // 2)))
        if not ordered:
            _order_parts[(-(-num_seqs // OWN),)](
                seq_lens, space.order, first_seq, num_seqs, chunk, TILE=tile.keys, OWN=OWN, BLOCK=128, **pdl(q)
            )
    _split_attention[grid](
        space.order if in_order else None, parts,
        q, k_cache, v_cache, *scales, sinks, out, space.partials, space.lse, space.tickets,
        block_tables, seq_slots, query_start, seq_lens, first_seq, scale, softcap, window, chunk,
        q.stride(0), out.stride(0), k_cache.stride(0), k_cache.stride(1), k_cache.stride(2), block_tables.stride(0),
        KV_HEADS=kv_heads, GROUP=group, HEAD_DIM=head_dim, DIM=dim, COLUMNS=dim // 2 if kind else dim,
        BLOCK=k_cache.shape[1], TOKENS=tokens, ROWS=rows, TILE=tile.keys, MERGE_ROWS=merge_rows,
        MERGE_CHUNKS=max(1, MERGE_ELEMENTS // (merge_rows * dim)),
        WINDOW=window > 0, SOFTCAP=softcap > 0, SINKS=sinks is not None, FP8=kind, ORDERED=in_order,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=tile.num_warps, num_stages=tile.num_stages, **pdl(q),
    )  # fmt: skip
