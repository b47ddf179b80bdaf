"""Paged attention of sequences with many new rows: prompts, chunks of prompts behind a context, and mixtures of both.

One launch serves any number of sequences. A program takes some rows of one sequence for all query heads that share a kv
head: `TOKENS` tokens times `GROUP` heads are the rows of its matrix products (Dao 2023, FlashAttention-2, with GQA packed).
Keys and values are read from the cache's blocks in place: through the tensor memory accelerator where the card has one and
a block holds whole tiles, by pointers otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.cache.fp8 import Scales
from headrace.kernels.activation import soft_cap
from headrace.kernels.fp8_cache import fp8_kind, pairs
from headrace.kernels.launch import (
    TensorDescriptor,
    capability,
    gdc_launch_dependents,
    gdc_wait,
    is_roomy,
    jit,
    next_power_of_2,
    pdl,
    tl,
)


@jit
def _attend_tiles(
    acc, odd, total, m, q, q_odd, k_src, v_src, k_scales, v_scales, table, lo, hi, stop, position, n, c, head,
    scale, softcap, window, block_stride, token_stride, head_stride,
    USED: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, MASK: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, FP8: tl.constexpr, WIDE: tl.constexpr, TMA: tl.constexpr,
    BOUNDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The online softmax over keys lo .. hi (multiples of TILE); MASK where some row may not see some key below `stop`."""
    factor = 1.0 if SOFTCAP else scale * 1.4426950408889634  # positive: the maximum may be taken before it
    for n0 in range(lo, hi, TILE):
        key = n0 + n
        if WIDE:
            if TMA:
                k_scale = tl.reshape(k_scales.load([head, table * BLOCK + n0]), [TILE])
            else:
                k_scale = tl.load(k_scales + n0 + n)
        if TMA:
            block = table + n0 // BLOCK if WIDE else tl.load(table + n0 // BLOCK)
            row = block * BLOCK + n0 % BLOCK
            k = tl.reshape(k_src.load([row, head, 0]), [TILE, COLUMNS])
        else:
            if WIDE:
                offset = table * block_stride + (n0 + n) * token_stride + head * head_stride
            elif BLOCK % TILE == 0:
                block = tl.load(table + n0 // BLOCK).to(tl.int64)
                offset = block * block_stride + (n0 % BLOCK + n) * token_stride + head * head_stride
            else:
                block = tl.load(table + key // BLOCK, mask=key < stop, other=0).to(tl.int64)
                offset = block * block_stride + (key % BLOCK) * token_stride + head * head_stride
            at = offset[:, None] + c[None, :]
            if MASK:
                k = tl.load(k_src + at, mask=(key < stop)[:, None] & (c < USED)[None, :], other=0)
            elif COLUMNS == USED:
                k = tl.load(k_src + at)
            else:
                k = tl.load(k_src + at, mask=(c < USED)[None, :], other=0)
        if FP8:
            k, k_odd = pairs(k, q.dtype, FP8)
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            s = tl.dot(q_odd, tl.trans(k_odd), s, input_precision=PRECISION)
            place = (block.to(tl.int64) * tl.num_programs(1) + head) * BLOCK + key % BLOCK
            if MASK:
                v_scale = tl.load(v_scales + place, mask=key < stop, other=0.0)
                s = s * tl.load(k_scales + place, mask=key < stop, other=0.0)[None, :]
            else:
                v_scale = tl.load(v_scales + place)
                s = s * tl.load(k_scales + place)[None, :]
        else:
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            if WIDE:
                s = s * k_scale[None, :]
        if BOUNDED:  # soft_cap in powers of two: cap (1 - 2 / (1 + exp(2 x / cap)))
            top = softcap * 1.4426950408889634
            s = top - 2.0 * top / (tl.exp2(s * (scale * 2.8853900817779268 / softcap)) + 1.0)
        elif SOFTCAP:
            s = soft_cap(s * scale, softcap) * 1.4426950408889634
        if MASK:
            seen = key[None, :] <= position[:, None]
            if WINDOW:
                seen = seen & (key[None, :] > position[:, None] - window)
            s = tl.where(seen, s, -float("inf"))
        if BOUNDED:  # by the rounded weights, or a single key would not get its value back
            p = tl.exp2(s).to(q.dtype).to(tl.float32)
            total = total + tl.sum(p, 1)
        else:
            m_new = tl.maximum(m, tl.max(s, 1) * factor)
            base = m_new
            if WINDOW:  # a row may see nothing of the tiles so far
                base = tl.where(m_new == -float("inf"), 0.0, m_new)
            p = tl.exp2(s * factor - base[:, None])
            shrink = tl.exp2(m - base)
            total = total * shrink + tl.sum(p, 1)
            acc = acc * shrink[:, None]
            m = m_new
        if TMA:
            v = tl.reshape(v_src.load([row, head, 0]), [TILE, COLUMNS])
            if MASK:  # what lies behind the sequence's end may be anything, and 0 * NaN is NaN
                v = tl.where((key < stop)[:, None], v, 0)
        elif MASK:
            v = tl.load(v_src + at, mask=(key < stop)[:, None] & (c < USED)[None, :], other=0)
        elif COLUMNS == USED:
            v = tl.load(v_src + at)
        else:
            v = tl.load(v_src + at, mask=(c < USED)[None, :], other=0)
        if FP8:
            p = (p * v_scale[None, :]).to(q.dtype)
            v, v_odd = pairs(v, q.dtype, FP8)
            odd = tl.dot(p, v_odd, odd * shrink[:, None], input_precision=PRECISION)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, odd, total, m


@jit
def _load_tile(src, table, n0, head, BLOCK: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.load(table + n0 // BLOCK) * BLOCK + n0 % BLOCK
    return tl.reshape(src.load([row, head, 0]), [TILE, COLUMNS])


@jit
def _weigh(s, m, factor):
    """Scores -> (their exponentials, the new maximum, what older exponentials are multiplied by), in powers of two."""
    top = tl.maximum(m, tl.max(s, 1) * factor)
    return tl.exp2(s * factor - top[:, None]), top, tl.exp2(m - top)


@jit
def _attend_whole_tiles(
    acc, total, m, q, k_src, v_src, table, lo, hi, head, scale,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`_attend_tiles` by TMA where all rows see all keys. A tile's values are multiplied while the next one's scores are
    weighed: on Hopper the compiler lets a product run on whose operand in registers was made in the same turn of the loop, so
    exponentials are carried as float32 and rounded in the next turn. (Carried as rounded they would be overwritten while they
    are read, which a test of the compiled kernels looks for.)"""
    factor = scale * 1.4426950408889634
    if lo < hi:
        k = _load_tile(k_src, table, lo, head, BLOCK, TILE, COLUMNS)
        e, m, shrink = _weigh(tl.dot(q, tl.trans(k), input_precision=PRECISION), m, factor)
        for n0 in range(lo + TILE, hi, TILE):
            k = _load_tile(k_src, table, n0, head, BLOCK, TILE, COLUMNS)
            v = _load_tile(v_src, table, n0 - TILE, head, BLOCK, TILE, COLUMNS)
            p = e.to(q.dtype)
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            total = total * shrink + tl.sum(e, 1)
            acc = tl.dot(p, v, acc * shrink[:, None], input_precision=PRECISION)
            e, m, shrink = _weigh(s, m, factor)
        total = total * shrink + tl.sum(e, 1)
        v = _load_tile(v_src, table, hi - TILE, head, BLOCK, TILE, COLUMNS)
        acc = tl.dot(e.to(q.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return acc, total, m


@jit
def find_sequence(query_start_ptr, tile, first_seq, num_seqs, skip, TOKENS: tl.constexpr):
    """The sequence that a tile belongs to, and the tile's number within it.

    With p rows before sequence s in the launch, its tiles begin at p // TOKENS + (s - first_seq): enough for each sequence to
    round up, and monotone, so that counting the beginnings finds it.
    """
    lane = tl.arange(0, 128)
    row0 = tl.load(query_start_ptr + first_seq)
    found = 0
    for s0 in range(0, num_seqs, 128):
        s = s0 + lane
        before = tl.load(query_start_ptr + first_seq + s, mask=s < num_seqs, other=0) - row0 - s * skip
        found += tl.sum(((before // TOKENS + s <= tile) & (s < num_seqs)).to(tl.int32), 0)
    s = found - 1
    before = tl.load(query_start_ptr + first_seq + s) - row0 - s * skip
    return first_seq + s, tile - (before // TOKENS + s)


@jit(do_not_specialize=["first_seq", "num_seqs", "skip", "least", "window", "blocks"])
def _varlen_attention(
    q_ptr, k_src, v_src, k_scales, v_scales, sinks_ptr, out_ptr, tables_ptr, slots_ptr, query_start_ptr, lens_ptr,
    first_seq, num_seqs, skip, least, blocks, scale, softcap, window,
    q_stride, out_stride, block_stride, token_stride, head_stride, table_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr, FP8: tl.constexpr, WIDE: tl.constexpr, TMA: tl.constexpr,
    BOUNDED: tl.constexpr, AHEAD: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # late rows see most: they start first
    head = tl.program_id(1)
    seq, local = find_sequence(query_start_ptr, tile, first_seq, num_seqs, skip, TOKENS)
    row0 = tl.load(query_start_ptr + seq)
    num_tokens = tl.load(query_start_ptr + seq + 1) - row0
    length = tl.load(lens_ptr + seq)
    token0 = skip + local * TOKENS
    if PDL:
        gdc_wait()
    if (token0 < num_tokens) & (num_tokens >= least):
        if WIDE:
            table = (seq - first_seq) * blocks  # the first of this sequence's
            if not TMA:
                k_scales += (head * num_seqs * blocks + table) * BLOCK
        else:
            table = tables_ptr + tl.load(slots_ptr + seq).to(tl.int64) * table_stride
        r = tl.arange(0, ROWS)
        d = tl.arange(0, DIM)
        c = tl.arange(0, COLUMNS)  # of the cache: in FP8 two numbers each
        USED: tl.constexpr = HEAD_DIM * COLUMNS // DIM
        n = tl.arange(0, TILE)
        token = token0 + r // GROUP
        real = (r < TOKENS * GROUP) & (token < num_tokens)
        mask = real[:, None] & (d < HEAD_DIM)[None, :]
        row = (row0 + token).to(tl.int64)
        q_head = head * GROUP + r % GROUP
        q = tl.load(q_ptr + (row * q_stride + q_head * HEAD_DIM)[:, None] + d[None, :], mask=mask, other=0.0)
        m = tl.full([ROWS], -float("inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        if SINKS:  # a score without a value, seen before all others
            m = tl.load(sinks_ptr + q_head) * 1.4426950408889634
            total += 1.0
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        q_odd, odd = q, total
        if FP8:
            q, q_odd = tl.split(tl.reshape(q, [ROWS, COLUMNS, 2]))
            odd = acc
        position0 = length - num_tokens + token0
        position = position0 + r // GROUP
        stop = tl.maximum(tl.minimum(length, position0 + TOKENS), 0)  # 0 for a padded sequence: it reads nothing
        # keys lo..even: seen by some rows' windows; even..full: by all rows; full..stop: by rows that are late enough
        full = tl.minimum(tl.maximum(position0 + 1, 0), stop) // TILE * TILE
        lo = 0
        if WINDOW:
            lo = tl.minimum(tl.maximum(position0 + 1 - window, 0) // TILE * TILE, full)
            even = tl.maximum(position0 + TOKENS - window + TILE - 1, 0) // TILE * TILE
            even = tl.maximum(tl.minimum(even, full), lo)
            acc, odd, total, m = _attend_tiles(
                acc, odd, total, m, q, q_odd, k_src, v_src, k_scales, v_scales, table, lo, even, stop, position, n, c, head,
                scale, softcap, window, block_stride, token_stride, head_stride,
                USED, COLUMNS, BLOCK, TILE, True, WINDOW, SOFTCAP, FP8, WIDE, TMA, BOUNDED, PRECISION,
            )  # fmt: skip
            lo = even
        if AHEAD:
            acc, total, m = _attend_whole_tiles(
                acc, total, m, q, k_src, v_src, table, lo, full, head, scale, COLUMNS, BLOCK, TILE, PRECISION
            )
        else:
            acc, odd, total, m = _attend_tiles(
                acc, odd, total, m, q, q_odd, k_src, v_src, k_scales, v_scales, table, lo, full, stop, position, n, c, head,
                scale, softcap, window, block_stride, token_stride, head_stride,
                USED, COLUMNS, BLOCK, TILE, False, WINDOW, SOFTCAP, FP8, WIDE, TMA, BOUNDED, PRECISION,
            )  # fmt: skip
        acc, odd, total, m = _attend_tiles(
            acc, odd, total, m, q, q_odd, k_src, v_src, k_scales, v_scales, table, full, stop, stop, position, n, c, head,
            scale, softcap, window, block_stride, token_stride, head_stride,
            USED, COLUMNS, BLOCK, TILE, True, WINDOW, SOFTCAP, FP8, WIDE, TMA, BOUNDED, PRECISION,
        )  # fmt: skip
        if FP8:
            acc = tl.reshape(tl.join(acc, odd), [ROWS, DIM])
        o = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        at = out_ptr + (row * out_stride + q_head * HEAD_DIM)[:, None] + d[None, :]
        tl.store(at, o.to(out_ptr.dtype.element_ty), mask=mask)
    if PDL:
        gdc_launch_dependents()


@dataclass(frozen=True, slots=True)
class VarlenTile:
    """Rows (tokens times heads of a group) of a program, keys per step, warps, pipeline stages; by TMA or pointers."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    tma: bool


def default_tile(dim: int, itemsize: int, block_size: int, hopper: bool, roomy: bool = True, fp8: bool = False) -> VarlenTile:
    """For queries of `itemsize` bytes a number; `hopper`: the card and the cache's rows suit the tensor memory accelerator.
    `roomy`: a program may have more than 99 KB of shared memory, as on the data centre's cards with that. `fp8`: the cache is,
    or was and has been made wide for a card that is not roomy.

    Measured best at head_dim 128 on an H100: 64 x 64 with 4 warps by TMA, 128 x 64 with 8 by pointers, 3 stages; at 256 on an
    H200: 64 x 64 by TMA with 2 stages, 204 us where 128 x 32 took 322.
    """
    keys = max(16, min(64, 16384 // (dim * itemsize)))
    tma = hopper and block_size % keys == 0 and dim <= 256  # a box of it has at most 256 columns
    if itemsize == 4:
        return VarlenTile(16, keys, 4, 2, tma)
    if tma and dim == 256 and roomy and not fp8 and block_size % 64 == 0:
        return VarlenTile(64, 64, 4, 2, True)
    if tma and dim <= 128:
        return VarlenTile(64, keys, 4, 3 if roomy or not fp8 else 2, tma)
    if dim > 256:
        return VarlenTile(64 if roomy else 32, keys, 8, 2, tma)
    return VarlenTile(128 if roomy or dim <= 128 else 64, keys, 8, 3 if hopper else 2, tma)


def is_bounded(q: Tensor, softcap: float, sinks: Tensor | None, fp8: int) -> bool:
    """Whether scores are known to be so small that their exponentials need no maximum: neither they nor their sums overflow."""
    return 0.0 < softcap <= 60.0 and sinks is None and not fp8 and q.dtype != torch.float16


def varlen_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, block_tables: Tensor | None, seq_slots: Tensor,
    query_start: Tensor, seq_lens: Tensor, *, first_seq: int, num_seqs: int, num_rows: int, max_tokens: int, scale: float,
    window: int = 0, softcap: float = 0.0, scales: Scales | tuple[Tensor, None] = (None, None),
    sinks: Tensor | None = None, skip: int = 0, least: int = 0, blocks: int = 0, tile: VarlenTile | None = None,
) -> None:  # fmt: skip
    """Attention of the sequences first_seq .. first_seq + num_seqs without each one's first `skip` rows, into `out`.

    Tensors as in `attention_decode.split_attention`. num_rows bounds the rows of these sequences together, max_tokens of one
    of them. `skip` rows (fewer than any of these sequences has) are left to another kernel and stay untouched in `out`; so are
    sequences of fewer than `least` rows. Both bounds and the host ints are fixed in a CUDA graph; sequences may have no rows.
    With `blocks` there are no tables: the cache is what kernels/widen_kv.py made, `blocks` blocks a sequence.
    """
    num_heads, head_dim = q.shape[-2:]
    block_size, kv_heads, group = k_cache.shape[1], k_cache.shape[2], num_heads // k_cache.shape[2]
    kind = 0 if blocks else fp8_kind(q, scales[0])
    dim = max(32 if kind else 16, next_power_of_2(head_dim))
    columns, numbers = (dim // 2, torch.int16) if kind else (dim, k_cache.dtype)
    k_cache, v_cache = k_cache.view(numbers), v_cache.view(numbers)
    if tile is None:
        copies = capability(q.device) >= (9, 0) and k_cache.shape[3] * k_cache.element_size() % 16 == 0
        roomy = is_roomy(q.device)
        tile = default_tile(dim, q.element_size(), block_size, copies, roomy, kind > 0 or (blocks > 0 and not roomy))
    rows = max(16, next_power_of_2(group), min(tile.rows, next_power_of_2((max_tokens - skip) * group)))
    k_src, v_src, k_scales = k_cache, v_cache, scales[0]
    if tile.tma and blocks and k_scales is not None:  # all threads would load a vector of so few numbers each
        used = k_scales[: kv_heads * num_seqs * blocks * block_size].view(kv_heads, -1)
        k_scales = TensorDescriptor.from_tensor(used, [1, tile.keys])
    if tile.tma:
        k_src, v_src = (
            TensorDescriptor.from_tensor(x.view(-1, *x.shape[2:]), [tile.keys, 1, columns]) for x in (k_cache, v_cache)
        )
    # where products run on beside other instructions (and in the interpreter); larger heads have no registers left for it
    ahead = tile.tma and not kind and not blocks and not softcap and dim <= 128 and capability(q.device)[0] in (0, 9)
    tokens = rows // group
    programs = (num_rows - num_seqs * skip) // tokens + num_seqs
    _varlen_attention[(programs, kv_heads)](
        q, k_src, v_src, k_scales, scales[1], sinks, out, block_tables, seq_slots, query_start, seq_lens, first_seq, num_seqs,
        skip, least, blocks, scale, softcap, window, q.stride(0), out.stride(0),
        k_cache.stride(0), k_cache.stride(1), k_cache.stride(2), 1 if block_tables is None else block_tables.stride(0),
        GROUP=group, HEAD_DIM=head_dim, DIM=dim, COLUMNS=columns, BLOCK=block_size, TOKENS=tokens, ROWS=rows, TILE=tile.keys,
        WINDOW=window > 0, SOFTCAP=softcap > 0, SINKS=sinks is not None, FP8=kind, WIDE=blocks > 0, TMA=tile.tma,
        BOUNDED=is_bounded(q, softcap, sinks, kind), AHEAD=ahead,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=tile.num_warps if rows >= 64 else 4, num_stages=tile.num_stages, **pdl(q),
    )  # fmt: skip
