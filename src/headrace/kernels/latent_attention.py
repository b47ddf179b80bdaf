"""Paged attention over latents: many query heads, one row a token, whose first columns are also its value.

    split:   grid = (head groups, parts, sequences): a program takes one part of a sequence's context (decode, verification)
    varlen:  grid = (tiles, head groups): a program takes some rows of one sequence and all that they see (prefill)

Rows of a program's products are tokens times heads. A row of the cache is read as two parts, latent and key, so that neither
needs a width that is no power of two. Every sequence is cut into as many parts as the grid has, or fewer of at least MIN_PART
tokens: whatever the lengths, each fills the card alike, and one CUDA graph serves them all. Parts are merged in their order by
a second kernel with a program for some columns of each head: the last program to arrive would be alone with megabytes of them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels.attention_prefill import find_sequence
from headrace.kernels.launch import (
    TensorDescriptor,
    capability,
    gdc_launch_dependents,
    gdc_wait,
    is_roomy,
    jit,
    next_power_of_2,
    num_multiprocessors,
    pdl,
    tl,
)

MIN_PART = 64  # tokens
MAX_PARTS = 128  # of a sequence
MAX_ROWS = 64  # of a program
COLUMNS = 128  # of one head that a program merges


@jit
def _part_size(length, parts, MIN_PART: tl.constexpr, TILE: tl.constexpr):
    """Tokens of each part of a sequence."""
    return tl.cdiv(tl.maximum(tl.cdiv(length, parts), MIN_PART), TILE) * TILE


@jit
def _attend_rows(
    acc, total, m, q, q_rope, cache_ptr, latents, ropes, table, start, stop, position, scale, block_stride, token_stride,
    RANK: tl.constexpr, RANK_PAD: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, MASK: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Online softmax over the tokens start .. stop: weighted sum of latents, sum of weights, largest score (base 2). MASK where
    some row may not see some token."""
    c = tl.arange(0, RANK_PAD)
    e = tl.arange(0, ROPE_PAD)
    n = tl.arange(0, TILE)
    factor = scale * 1.4426950408889634
    for n0 in range(start, stop, TILE):
        key = n0 + n
        inside = key < stop
        if TMA and not MASK:
            place = tl.load(table + n0 // BLOCK) * BLOCK + n0 % BLOCK
            latent = latents.load([place, 0])
            rope = ropes.load([place, RANK])
        else:
            if BLOCK % TILE == 0:
                block = tl.load(table + n0 // BLOCK).to(tl.int64)
                offset = block * block_stride + (n0 % BLOCK + n) * token_stride
            else:
                block = tl.load(table + key // BLOCK, mask=inside, other=0).to(tl.int64)
                offset = block * block_stride + (key % BLOCK) * token_stride
            at = offset[:, None] + c[None, :]
            rope_at = RANK + offset[:, None] + e[None, :]
            if MASK:
                latent = tl.load(cache_ptr + at, mask=inside[:, None] & (c < RANK)[None, :], other=0.0)
                rope = tl.load(cache_ptr + rope_at, mask=inside[:, None] & (e < ROPE)[None, :], other=0.0)
            elif (RANK == RANK_PAD) & (ROPE == ROPE_PAD):
                latent = tl.load(cache_ptr + at)
                rope = tl.load(cache_ptr + rope_at)
            else:
                latent = tl.load(cache_ptr + at, mask=(c < RANK)[None, :], other=0.0)
                rope = tl.load(cache_ptr + rope_at, mask=(e < ROPE)[None, :], other=0.0)
        s = tl.dot(latent, q, input_precision=PRECISION)
        s = tl.dot(rope, q_rope, s, input_precision=PRECISION) * factor
        if MASK:
            s = tl.where(inside[:, None] & (key[:, None] <= position[None, :]), s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, 0))
        base = m_new
        if MASK:  # a row may see nothing so far
            base = tl.where(m_new == -float("inf"), 0.0, m_new)
        p = tl.exp2(s - base[None, :])
        shrink = tl.exp2(m - base)
        total = total * shrink + tl.sum(p, 0)
        acc = tl.dot(tl.trans(latent), p.to(latent.dtype), acc * shrink[None, :], input_precision=PRECISION)
        m = m_new
    return acc, total, m


@jit(do_not_specialize=["first_seq", "num_seqs", "skip"])
def _latent_attention(
    q_ptr, cache_ptr, latents, ropes, out_ptr, partials_ptr, lse_ptr, tables_ptr, slots_ptr, query_start_ptr, lens_ptr,
    first_seq, num_seqs, skip, scale, block_stride, token_stride, table_stride,
    HEADS: tl.constexpr, RANK: tl.constexpr, RANK_PAD: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr,
    BLOCK: tl.constexpr, TOKENS: tl.constexpr, PACK: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    TAIL: tl.constexpr, MIN_PART: tl.constexpr, SPLIT: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    part = 0
    parts = 1
    local_seq = 0
    token0 = 0
    if SPLIT:
        group = tl.program_id(0)
        part = tl.program_id(1)
        parts = tl.num_programs(1)
        local_seq = tl.program_id(2)
        seq = first_seq + local_seq
    else:
        group = tl.program_id(1)
        tile = tl.num_programs(0) - 1 - tl.program_id(0)  # late rows see most: they start first
        seq, local = find_sequence(query_start_ptr, tile, first_seq, num_seqs, skip, TOKENS)
        token0 = skip + local * TOKENS
    length = tl.load(lens_ptr + seq)
    if SPLIT and TOKENS == 1:
        row0 = seq
        num_tokens = 1
    else:
        row0 = tl.load(query_start_ptr + seq)
        num_tokens = tl.load(query_start_ptr + seq + 1) - row0
    start = 0
    stop = length
    if SPLIT:
        size = _part_size(length, parts, MIN_PART, TILE)
        start = part * size
        stop = tl.minimum(length, start + size)
    else:
        stop = tl.maximum(tl.minimum(length, length - num_tokens + token0 + TOKENS), 0)
    if PDL:
        gdc_wait()
    if (token0 < num_tokens) & ((start < length) | (part == 0)):
        table = tables_ptr + tl.load(slots_ptr + seq).to(tl.int64) * table_stride
        r = tl.arange(0, ROWS)
        c = tl.arange(0, RANK_PAD)
        e = tl.arange(0, ROPE_PAD)
        token = token0 + r // PACK
        head = group * PACK + r % PACK
        real = (r < TOKENS * PACK) & (token < num_tokens) & (head < HEADS)
        row = (row0 + token).to(tl.int64) * HEADS + head
        source = q_ptr + row * (RANK + ROPE)
        q = tl.load(source[None, :] + c[:, None], mask=real[None, :] & (c < RANK)[:, None], other=0.0)
        q_rope = tl.load(source[None, :] + RANK + e[:, None], mask=real[None, :] & (e < ROPE)[:, None], other=0.0)
        position = length - num_tokens + tl.minimum(token, num_tokens - 1)
        m = tl.full([ROWS], -float("inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([RANK_PAD, ROWS], tl.float32)
        full = start
        if TMA or TAIL < TILE:  # else one loop does for all: half the code
            # up to here all rows see every token of whole tiles
            full = tl.maximum(tl.minimum(stop, length - num_tokens + token0 + 1) // TILE * TILE, start)
            acc, total, m = _attend_rows(
                acc, total, m, q, q_rope, cache_ptr, latents, ropes, table, start, full, position, scale, block_stride,
                token_stride, RANK, RANK_PAD, ROPE, ROPE_PAD, BLOCK, TILE, False, TMA, PRECISION,
            )  # fmt: skip
        acc, total, m = _attend_rows(
            acc, total, m, q, q_rope, cache_ptr, latents, ropes, table, full, stop, position, scale, block_stride,
            token_stride, RANK, RANK_PAD, ROPE, ROPE_PAD, BLOCK, TAIL, True, TMA, PRECISION,
        )  # fmt: skip
        safe = tl.where(total == 0.0, 1.0, total)
        acc = acc / safe[None, :]
        mask = real[None, :] & (c < RANK)[:, None]
        covered = stop - start if SPLIT else length
        if covered >= length:  # also length 0: zeros
            tl.store(out_ptr + row[None, :] * RANK + c[:, None], acc.to(out_ptr.dtype.element_ty), mask=mask)
        else:
            place = ((local_seq * parts + part) * TOKENS + token).to(tl.int64) * HEADS + head
            tl.store(partials_ptr + place[None, :] * RANK + c[:, None], acc, mask=mask)
            tl.store(lse_ptr + place, tl.where(total == 0.0, -float("inf"), m + tl.log2(safe)), mask=real)
    if PDL:
        gdc_launch_dependents()


@jit(do_not_specialize=["first_seq", "parts"])
def _merge_parts(
    out_ptr, partials_ptr, lse_ptr, query_start_ptr, lens_ptr, first_seq, parts,
    HEADS: tl.constexpr, RANK: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, TOGETHER: tl.constexpr,
    TILE: tl.constexpr, MIN_PART: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program weighs some columns of one head's parts by their exponential sums, TOGETHER parts at a time."""
    head = tl.program_id(0) % HEADS
    token = tl.program_id(0) // HEADS
    local_seq = tl.program_id(2)
    seq = first_seq + local_seq
    length = tl.load(lens_ptr + seq)
    row0 = seq
    num_tokens = 1
    if TOKENS > 1:
        row0 = tl.load(query_start_ptr + seq)
        num_tokens = tl.load(query_start_ptr + seq + 1) - row0
    num_parts = tl.cdiv(length, _part_size(length, parts, MIN_PART, TILE))
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if (num_parts > 1) & (token < num_tokens):
        c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        i = tl.arange(0, TOGETHER)
        m = -float("inf")
        total = 0.0
        acc = tl.zeros([COLUMNS], tl.float32)
        for i0 in range(0, num_parts, TOGETHER):
            there = i0 + i < num_parts
            place = ((local_seq * parts + i0 + i) * TOKENS + token).to(tl.int64) * HEADS + head
            lse = tl.load(lse_ptr + place, mask=there, other=-float("inf"))
            o = tl.load(
                partials_ptr + place[:, None] * RANK + c[None, :], mask=there[:, None] & (c < RANK)[None, :], other=0.0
            )  # fmt: skip
            m_new = tl.maximum(m, tl.max(lse, 0))
            weight = tl.exp2(lse - m_new)  # each sequence's first part is seen by all of its rows
            shrink = tl.exp2(m - m_new)
            total = total * shrink + tl.sum(weight, 0)
            acc = acc * shrink + tl.sum(o * weight[:, None], 0)
            m = m_new
        row = (row0 + token).to(tl.int64) * HEADS + head
        tl.store(out_ptr + row * RANK + c, (acc / total).to(out_ptr.dtype.element_ty), mask=c < RANK)


@dataclass(frozen=True, slots=True)
class LatentTile:
    """Rows of a program at most, tokens per step of the inner loop, warps and stages of the software pipeline; tokens per step
    where some row does not see all of them; whether whole tiles are read through the tensor memory accelerator."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    tail: int
    tma: bool


def default_tile(itemsize: int, rows: int, copies: bool, hopper: bool, roomy: bool) -> LatentTile:
    """For `rows` rows that there are of a sequence, or may be of a program; `copies`: the cache suits the tensor memory
    accelerator. `roomy`: a program may have more than 99 KB of shared memory.

    Measured on an H200, 20 heads, 32 contexts of 8192: 130 us by 4 warps that read through it, 157 us by 8; by pointers 138
    and 162 us. Prompts: 2.0 ms, by pointers 2.2 ms, in tiles of 32 rows 3.9 ms.
    """
    if itemsize == 4:
        return LatentTile(16, 16, 4, 1, 16, False)
    if not hopper:
        return LatentTile(32, 32, 8, 2, 16, False) if roomy else LatentTile(32, 16, 4, 2, 16, False)
    if rows <= 32:
        return LatentTile(64, 64, 4, 2, 16, copies)
    # by pointers, whose places are loaded too, a tile more is in flight: of 64 tokens there was no room for it
    return LatentTile(64, 64, 8, 2, 64, True) if copies else LatentTile(64, 32, 8, 2, 32, False)


@dataclass(slots=True)
class PartSpace:
    """Where parts of contexts meet, allocated once: `slots` (sequence row, part) pairs of all heads."""

    partials: Tensor
    lse: Tensor
    slots: int

    @classmethod
    def of(cls, max_num_seqs: int, heads: int, rank: int, device: torch.device) -> PartSpace:
        slots = num_slots(max_num_seqs)
        partials = torch.empty(slots * heads * rank, dtype=torch.float32, device=device)
        return cls(partials, torch.empty(slots * heads, dtype=torch.float32, device=device), slots)


def num_slots(max_num_seqs: int) -> int:
    """Of a PartSpace: enough to fill any card twice, and for four parts of each sequence."""
    return max(512, 4 * max_num_seqs)


@functools.lru_cache(4096)
def choose_parts(num_seqs: int, tokens: int, groups: int, context: int, multiprocessors: int, slots: int) -> int:
    """Into how many parts a sequence is cut at most: the fewest that keep nine tenths of two rounds of the card busy, or as
    many as come nearest to that."""
    most = max(1, min(MAX_PARTS, -(-context // MIN_PART), slots // (num_seqs * tokens)))

    def busy(parts: int) -> float:
        rounds = num_seqs * groups * parts / multiprocessors
        return rounds / -(-rounds // 1)

    wanted = [parts for parts in range(1, most + 1) if num_seqs * groups * parts <= 2 * multiprocessors] or [1]
    best = max(busy(parts) for parts in wanted)
    return next(parts for parts in wanted if busy(parts) >= min(0.9, best))


def latent_attention(
    q: Tensor, cache: Tensor, out: Tensor, block_tables: Tensor, seq_slots: Tensor, query_start: Tensor, seq_lens: Tensor,
    space: PartSpace | None, *, rank: int, first_seq: int, num_seqs: int, num_rows: int, max_tokens: int, max_context: int,
    scale: float, skip: int = 0, parts: int | None = None, tile: LatentTile | None = None,
) -> None:  # fmt: skip
    """Attention of the sequences first_seq .. first_seq + num_seqs into `out`.

    q [T, heads, row] and out [T, heads * rank], contiguous; cache [num_blocks, block_size, 1, row]; block_tables [slots,
    blocks] int32, indexed by seq_slots [S] int32; query_start [S + 1] int32; seq_lens [S] int32. A sequence's rows are its last
    positions and see all before and themselves. seq_lens 0: its rows become 0, nothing is read. num_rows bounds the rows of
    these sequences together, max_tokens of one of them, max_context seq_lens; all are fixed in a CUDA graph. With a `space`,
    which is written too, contexts are split; then with max_tokens == 1 sequence s has row s. Without one each sequence's first
    `skip` rows, fewer than any has, are left to somebody else.
    """
    heads, row = q.shape[1:]
    if tile is None:
        hopper, roomy = capability(q.device)[0] == 9, is_roomy(q.device)
        copies = cache.shape[1] % 64 == 0 and all(size & (size - 1) == 0 for size in (rank, row - rank))
        rows = max_tokens * heads if space is not None else MAX_ROWS  # else a program has all that it can, be they few or not
        tile = default_tile(q.element_size(), rows, copies, hopper, roomy)
    together = max(1, tile.rows // (1 if space is None else max_tokens))
    pack = -(-heads // -(-heads // together))  # as many heads in each group, at most so many
    tokens, groups = tile.rows // pack if space is None else max_tokens, -(-heads // pack)
    grid: tuple[int, ...] = ((num_rows - num_seqs * skip) // tokens + num_seqs, groups)
    partials, lse = out, out
    if space is not None:
        partials, lse = space.partials, space.lse
        if parts is None:
            parts = choose_parts(num_seqs, tokens, groups, max_context, num_multiprocessors(q.device), space.slots)
        if parts > 1 and num_seqs * tokens * parts > space.slots:
            raise ValueError(f"{parts} parts of {num_seqs} sequences do not fit {space.slots} slots")
        grid = (groups, parts, num_seqs)
    latents, ropes = cache, cache
    if tile.tma:
        flat = cache.view(-1, row)
        latents, ropes = (TensorDescriptor.from_tensor(flat, [tile.keys, columns]) for columns in (rank, row - rank))
    _latent_attention[grid](
        q, cache, latents, ropes, out, partials, lse, block_tables, seq_slots, query_start, seq_lens, first_seq, num_seqs,
        skip, scale, cache.stride(0), cache.stride(1), block_tables.stride(0),
        HEADS=heads, RANK=rank, RANK_PAD=max(16, next_power_of_2(rank)), ROPE=row - rank,
        ROPE_PAD=max(16, next_power_of_2(row - rank)), BLOCK=cache.shape[1], TOKENS=tokens, PACK=pack,
        ROWS=max(16, next_power_of_2(tokens * pack)), TILE=tile.keys, TAIL=tile.tail, MIN_PART=MIN_PART,
        SPLIT=space is not None, TMA=tile.tma, PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=tile.num_warps, num_stages=tile.num_stages, **pdl(q),
    )  # fmt: skip
    if parts is not None and parts > 1:
        columns = min(COLUMNS, next_power_of_2(rank))
        _merge_parts[(heads * tokens, -(-rank // columns), num_seqs)](
            out, partials, lse, query_start, seq_lens, first_seq, parts, HEADS=heads, RANK=rank, TOKENS=tokens, COLUMNS=columns,
            TOGETHER=32, TILE=tile.keys, MIN_PART=MIN_PART, num_warps=4, **pdl(q),
        )  # fmt: skip
