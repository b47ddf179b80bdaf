"""Attention of one new token a sequence, in few turns: as attention.py, in Gluon, for Hopper.

That kernel passes keys and values through registers and shared memory and weighs one tile after the other, with some sixty
barriers behind the wait. Here tiles come by the copy engine (TMA), as many as there is place for before the wait, and those of
a chunk are multiplied, weighed and summed together: scores with keys as the left operand, so that eight query heads fill the
tensor cores' smallest product, one maximum of all tiles, then all values.
"""

# mypy: disable-error-code="assignment, misc, var-annotated"
# (kernels grow tuples of tiles in loops that the compiler unrolls)

from __future__ import annotations

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

from headrace.fast_decode.attention_reference import HeadShape
from headrace.fast_decode.ring_gemm import await_parts, say_done
from headrace.fast_decode.ring_tile import KEYS, RingAttention
from headrace.kernels.activation import soft_cap
from headrace.kernels.cluster import (
    await_begun,
    await_joined,
    barriers,
    begin_joining,
    blocked,
    joined_one,
    lane_like,
    operand,
    place_of,
    plain,
    rank_in_cluster,
    send_four,
    send_one,
    sums_of,
    tiles_of,
)
from headrace.kernels.gluon_launch import grid_dependency
from headrace.kernels.launch import pdl
from headrace.kernels.rounded import put
from headrace.kernels.split import SplitSpace

TILE, HEADS_AT_ONCE = KEYS, 8  # keys of a step; query heads of a key-value head at most
LEAST = 2  # tiles of a program, where a sequence has so many: another part takes longer than another tile


@gluon.jit
def full_barriers(RING: gl.constexpr, CTAS: gl.constexpr = 1):
    """Of each place of the rings of keys and of values, that it is filled."""
    k_full = gl.allocate_shared_memory(gl.int64, [RING, 1], barriers(CTAS))
    v_full = gl.allocate_shared_memory(gl.int64, [RING, 1], barriers(CTAS))
    for i in gl.static_range(RING):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    return k_full, v_full


@gluon.jit
def share_of(lens_ptr, b, num_splits, window, TILE: gl.constexpr, HAS_WINDOW: gl.constexpr):
    """(position of a sequence's new token, -1 in a padded row; the oldest token that it sees; the tile with that; how many
    tiles there are from it on; how many of them a program has)."""
    # past the L1 cache: what is read before the wait may have changed since this SM read it last
    pos = gl.load(lens_ptr + b, cache_modifier=".cg") - 1
    oldest = 0
    if HAS_WINDOW:
        oldest = gl.maximum(pos - window + 1, 0)
    begin = oldest // TILE
    tiles = pos // TILE - begin + 1
    return pos, oldest, begin, tiles, (tiles + num_splits - 1) // num_splits


@gluon.jit
def ask_tile(tiles, ring, full, table, first, i, count, head, DIM: gl.constexpr, TILE: gl.constexpr, RING: gl.constexpr):
    """Tile i of the program's part into its place, if there is one."""
    there = i < count
    block = gl.load(table + first + gl.minimum(i, count - 1))
    mbarrier.expect(full.index(i % RING), TILE * DIM * 2, pred=there)
    tma.async_copy_global_to_shared(tiles, [block * TILE, head * DIM], full.index(i % RING), ring.index(i % RING), pred=there)


@gluon.jit
def _clear_tail(tile, tail, parts: gl.constexpr, DIM: gl.constexpr, TILE: gl.constexpr, CTAS: gl.constexpr):
    """What lies behind the first `tail` tokens may be anything, and 0 * NaN is NaN."""
    token = gl.arange(0, TILE, layout=gl.SliceLayout(1, parts))
    if CTAS > 1:  # of which buffers have no slices
        tile.store(gl.where((token < tail)[:, None], tile.load(parts), 0.0))
    else:
        for c in gl.static_range(DIM // 64):
            part = tile.slice(c * 64, 64, 1)
            part.store(gl.where((token < tail)[:, None], part.load(parts), 0.0))


@gluon.jit
def places_of_sizes(sizes_ptr, sizes_stride, b, heads, out_ptr):
    """Where those of a row's heads lie, where they are FP8."""
    OUT: gl.constexpr = out_ptr.dtype.element_ty
    places = heads
    if gl.float8e4nv == OUT:
        places = sizes_ptr + heads * sizes_stride + b
    return places


@gluon.jit
def sum_slabs(pointers, slab_stride, mask, SLABS: gl.constexpr):
    x = gl.load(pointers, mask=mask, other=0.0)
    for j in gl.static_range(1, SLABS):
        x += gl.load(pointers + j * slab_stride, mask=mask, other=0.0)
    return x


@gluon.jit
def new_numbers(
    qkv_ptr, b, head, rg, rd, partner, g_ok, slab_stride,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, SLABS: gl.constexpr,
):  # fmt: skip
    """A head's queries [ROWS, DIM] and its key [DIM] of a row, each with the partners of its numbers; where its value lies."""
    row = qkv_ptr + b * ((HEADS + 2 * KV_HEADS) * DIM)
    q_row = row + (head * (HEADS // KV_HEADS) + rg)[:, None] * DIM
    k_row = row + (HEADS + head) * DIM
    v_row = k_row + KV_HEADS * DIM
    q = sum_slabs(q_row + rd[None, :], slab_stride, g_ok, SLABS)
    q_turned = sum_slabs(q_row + partner[None, :], slab_stride, g_ok, SLABS)
    k_new = sum_slabs(k_row + rd, slab_stride, rd >= 0, SLABS)
    k_turned = sum_slabs(k_row + partner, slab_stride, rd >= 0, SLABS)
    return q, q_turned, k_new, k_turned, v_row


@gluon.jit
def rotation(q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, pos, rd, partner, norm_offset, DIM: gl.constexpr, QK_NORM: gl.constexpr):
    """What a query's numbers and their partners are multiplied by, then a key's; with the weights of their norms."""
    HALF: gl.constexpr = DIM // 2
    cos = gl.load(cos_ptr + pos * HALF + rd % HALF)
    sin = gl.load(sin_ptr + pos * HALF + rd % HALF)
    sin = gl.where(rd < HALF, -sin, sin)
    q_cos, q_sin, k_cos, k_sin = cos, sin, cos, sin
    if QK_NORM:
        q_cos = (gl.load(q_norm_ptr + rd).to(gl.float32) + norm_offset) * cos
        q_sin = (gl.load(q_norm_ptr + partner).to(gl.float32) + norm_offset) * sin
        k_cos = (gl.load(k_norm_ptr + rd).to(gl.float32) + norm_offset) * cos
        k_sin = (gl.load(k_norm_ptr + partner).to(gl.float32) + norm_offset) * sin
    return q_cos, q_sin, k_cos, k_sin


@gluon.jit
def rotated(q, q_turned, k, k_turned, q_cos, q_sin, k_cos, k_sin, eps, DIM: gl.constexpr, QK_NORM: gl.constexpr):
    """Queries [ROWS, DIM] and the key [DIM], normed and rotated; `turned`: the partners of their numbers."""
    if QK_NORM:
        q = gl.rsqrt(gl.sum(q * q, 1) / DIM + eps)[:, None] * (q * q_cos[None, :] + q_turned * q_sin[None, :])
        k = gl.rsqrt(gl.sum(k * k, 0) / DIM + eps) * (k * k_cos + k_turned * k_sin)
    else:
        q = q * q_cos[None, :] + q_turned * q_sin[None, :]
        k = k * k_cos + k_turned * k_sin
    return q, k


@gluon.jit
def leave(
    o, lse, out, sizes_ptr, partials_ptr, lse_ptr, tickets_ptr, sizes_stride, second, b, head, split, num_splits, used,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, ROWS: gl.constexpr, MERGE: gl.constexpr, PAIR: gl.constexpr,
):  # fmt: skip
    """o [DIM, ROWS] of a part of a sequence, and the logarithms of its weights' sums, to where `out` points, if it is the only
    one of `used`; else the last of them, which has the new token, waits for the others and adds theirs to its own."""
    GROUP: gl.constexpr = HEADS // KV_HEADS
    flat: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, 4], [0, 1])
    o = gl.convert_layout(o, flat)
    d = gl.arange(0, DIM, layout=gl.SliceLayout(1, flat))
    g = gl.arange(0, ROWS, layout=gl.SliceLayout(0, flat))
    ok = (d >= 0)[:, None] & (g < GROUP)[None, :]
    at = g[None, :] * DIM + d[:, None]
    sizes = places_of_sizes(sizes_ptr, sizes_stride, b, head * GROUP + g, out)
    if used == 1:
        put(out + at, o, ok, sizes, g < GROUP, second, 0, PAIR)
    else:
        base = (b * KV_HEADS + head) * num_splits
        slab = partials_ptr + base.to(gl.int64) * (GROUP * DIM) + at
        top = gl.convert_layout(lse, gl.SliceLayout(0, flat))
        lses = lse_ptr + base * GROUP + g
        ticket = tickets_ptr + b * KV_HEADS + head
        if split < used - 1:
            gl.store(slab + split * (GROUP * DIM), o, mask=ok)
            gl.store(lses + split * GROUP, top, mask=g < GROUP)
            say_done(ticket)
        else:
            await_parts(ticket, used - 1)
            weight_sum = gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(0, flat))
            for s0 in range(0, used - 1, MERGE):
                xs = ()
                ws = ()
                new = top
                for j in gl.static_range(MERGE):
                    there = s0 + j < used - 1
                    w = gl.load(lses + (s0 + j) * GROUP, mask=(g < GROUP) & there, other=-float("inf"), cache_modifier=".cg")
                    ws = ws + (w,)
                    x = gl.load(slab + (s0 + j) * (GROUP * DIM), mask=ok & there, other=0.0, cache_modifier=".cg")
                    xs = xs + (x,)
                    new = gl.maximum(new, w)
                shrink = gl.exp2(top - new)
                weight_sum = weight_sum * shrink
                o = o * shrink[None, :]
                for j in gl.static_range(MERGE):
                    w = gl.exp2(ws[j] - new)
                    weight_sum += w
                    o += xs[j] * w[None, :]
                top = new
            put(out + at, o / weight_sum[None, :], ok, sizes, g < GROUP, second, 0, PAIR)
            gl.thread_barrier()  # all threads have looked
            gl.store(ticket, 0)


@gluon.jit
def join_in_cluster(
    o, lse, out, joined, split, used, BASE: gl.constexpr,
    GROUP: gl.constexpr, DIM: gl.constexpr, ROWS: gl.constexpr, CTAS: gl.constexpr,
):  # fmt: skip
    """As `leave`, over distributed shared memory: parts, behind them the logarithms of their weights' sums, and a barrier."""
    SIZE: gl.constexpr = GROUP * DIM
    BEHIND: gl.constexpr = BASE + 4 * CTAS * SIZE
    BARRIER: gl.constexpr = BEHIND + 4 * CTAS * GROUP
    flat: gl.constexpr = blocked([4, 1], [16, 2], [1, 4], [0, 1], CTAS)
    sent_of: gl.constexpr = blocked([CTAS, SIZE // 128], [1, 32], [1, 4], [1, 0], CTAS)
    o = gl.convert_layout(o, flat)
    top = gl.convert_layout(lse, gl.SliceLayout(0, flat))
    d = gl.arange(0, DIM, layout=gl.SliceLayout(1, flat))
    g = gl.arange(0, ROWS, layout=gl.SliceLayout(0, flat))
    at = BASE + 4 * (split * SIZE + g[None, :] * DIM + d[:, None])
    await_begun(4, CTAS)
    send_four(o, at, BARRIER, (d >= 0)[:, None] & (g < GROUP)[None, :])
    send_one(top, BEHIND + 4 * (split * GROUP + g), BARRIER, (g < GROUP) & (lane_like(g) % 16 == 0))
    if split == used - 1:
        await_joined(BARRIER, used * (4 * SIZE + 4 * GROUP), 4, CTAS)
        part = gl.arange(0, CTAS, layout=gl.SliceLayout(1, sent_of))
        c = gl.arange(0, SIZE, layout=gl.SliceLayout(0, sent_of))
        there = (part < used)[:, None] & (c >= 0)[None, :]
        w = gl.where(there, joined_one(BEHIND + 4 * (part[:, None] * GROUP + c[None, :] // DIM)), -float("inf"))
        w = gl.exp2(w - gl.max(w, 0)[None, :])
        x = gl.where(there, joined.index(0).load(sent_of), 0.0)
        gl.store(out + c, (gl.sum(x * w, 0) / gl.sum(w, 0)).to(gl.bfloat16))


@gluon.jit(do_not_specialize=["num_splits", "window", "sizes_stride", "second"])
def _ring_attention_kernel(
    qkv_ptr, k_tiles, v_tiles, k_ptr, v_ptr, tables_ptr, slots_ptr, lens_ptr, mapping_ptr, q_norm_ptr, k_norm_ptr, cos_ptr,
    sin_ptr, out_ptr, sizes_ptr, partials_ptr, lse_ptr, tickets_ptr,
    sizes_stride, second, slab_stride, table_stride, num_splits, window, scale, softcap, eps, norm_offset,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, TILE: gl.constexpr, ROWS: gl.constexpr,
    SLABS: gl.constexpr, CHUNK: gl.constexpr, RING: gl.constexpr, LEAST: gl.constexpr, MERGE: gl.constexpr,
    QK_NORM: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_SOFTCAP: gl.constexpr, PAIR: gl.constexpr, CTAS: gl.constexpr,
    BASE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    GROUP: gl.constexpr = HEADS // KV_HEADS
    HALF: gl.constexpr = DIM // 2
    LOG2E: gl.constexpr = 1.4426950408889634
    prep: gl.constexpr = blocked([1, DIM // 32], [1, 32], [4, 1], [1, 0], CTAS)
    sums: gl.constexpr = sums_of(ROWS, 4, CTAS)
    parts: gl.constexpr = blocked([1, 8], [4, 8], [4, 1], [1, 0], CTAS)
    kept: gl.constexpr = operand(CTAS)
    head = gl.program_id(0)
    split = gl.program_id(1)
    b = gl.program_id(2)
    if CTAS > 1:
        joined = gl.allocate_shared_memory(gl.float32, [2, CTAS, GROUP * DIM], plain(CTAS))
        begin_joining(BASE + 4 * CTAS * (GROUP * DIM + GROUP), 4, CTAS)
    k_ring = gl.allocate_shared_memory(gl.bfloat16, [RING, TILE, DIM], k_tiles.layout)
    v_ring = gl.allocate_shared_memory(gl.bfloat16, [RING, TILE, DIM], v_tiles.layout)
    q_kept = gl.allocate_shared_memory(gl.bfloat16, [ROWS, DIM], kept)
    p_kept = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, ROWS, TILE], kept)
    k_full, v_full = full_barriers(RING, CTAS)
    pos, oldest, begin, tiles, share = share_of(lens_ptr, b, num_splits, window, TILE, HAS_WINDOW)
    share = gl.maximum(share, LEAST)
    if CTAS > 1:
        split = (tiles + share - 1) // share - 1 - rank_in_cluster()  # the first has the new token, and adds up
    first = begin + split * share
    rg = gl.arange(0, ROWS, layout=gl.SliceLayout(1, prep))
    rd = gl.arange(0, DIM, layout=gl.SliceLayout(0, prep))
    g_ok = (rg < GROUP)[:, None] & (rd >= 0)[None, :]
    out = out_ptr + (b * HEADS + head * GROUP) * DIM
    idle = split < 0 if CTAS > 1 else first * TILE > pos
    if (pos >= 0) & idle:  # nothing to read: its place is another's at once
        return
    if pos < 0:
        if PDL:
            grid_dependency("wait", 4, CTAS)
            grid_dependency("launch_dependents", 4, CTAS)
        if split == 0:
            of_rows = places_of_sizes(sizes_ptr, sizes_stride, b, head * GROUP + rg, out_ptr)
            zeros = gl.full([ROWS, DIM], 0.0, gl.float32, prep)
            put(out + rg[:, None] * DIM + rd[None, :], zeros, g_ok, of_rows, rg < GROUP, second, 1, PAIR)
        return
    count = gl.minimum(share, begin + tiles - first)
    owner = first + count == begin + tiles
    table = tables_ptr + gl.load(slots_ptr + b, cache_modifier=".cg").to(gl.int64) * table_stride
    for i in gl.static_range(RING):
        ask_tile(k_tiles, k_ring, k_full, table, first, i, count, head, DIM, TILE, RING)
    for i in gl.static_range(RING):
        ask_tile(v_tiles, v_ring, v_full, table, first, i, count, head, DIM, TILE, RING)
    partner = (rd + HALF) % DIM
    factors = rotation(q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, pos, rd, partner, norm_offset, DIM, QK_NORM)
    q_cos, q_sin, k_cos, k_sin = factors
    if PDL:
        grid_dependency("wait", 4, CTAS)
        grid_dependency("launch_dependents", 4, CTAS)
    q, q_turned, k_new, k_turned, v_row = new_numbers(
        qkv_ptr, b, head, rg, rd, partner, g_ok, slab_stride, HEADS, KV_HEADS, DIM, SLABS
    )
    v_new = sum_slabs(v_row + rd, slab_stride, rd >= 0, SLABS).to(gl.bfloat16)
    dims = gl.arange(0, DIM, layout=gl.SliceLayout(1, sums))
    v_own = sum_slabs(v_row + dims, slab_stride, dims >= 0, SLABS).to(gl.bfloat16).to(gl.float32)
    tail = pos - (first + count - 1) * TILE  # cached tokens of the last tile, of the program that has the new one
    last = (count - 1) % RING
    if owner & (count <= RING):
        mbarrier.wait(v_full.index(last), 0)
        _clear_tail(v_ring.index(last), tail, parts, DIM, TILE, CTAS)
    q, k_new = rotated(q, q_turned, k_new, k_turned, q_cos, q_sin, k_cos, k_sin, eps, DIM, QK_NORM)
    q = q.to(gl.bfloat16)
    k_new = k_new.to(gl.bfloat16)
    q_kept.store(q)
    fence_async_shared()
    gl.thread_barrier()
    m = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(0, sums))
    l = gl.full([TILE, ROWS], 0.0, gl.float32, sums)  # of each thread's tokens
    acc = gl.full([DIM, ROWS], 0.0, gl.float32, sums)
    r = gl.arange(0, TILE, layout=gl.SliceLayout(1, sums))
    if owner:
        place = gl.load(mapping_ptr + b)
        if place >= 0:
            gl.store(k_ptr + (place * KV_HEADS + head) * DIM + rd, k_new)
            gl.store(v_ptr + (place * KV_HEADS + head) * DIM + rd, v_new)
        own = gl.sum(q.to(gl.float32) * k_new.to(gl.float32)[None, :], 1) * scale
        if HAS_SOFTCAP:
            own = soft_cap(own, softcap)
        m = gl.convert_layout(own * LOG2E, gl.SliceLayout(0, sums))
        l += gl.where(r == 0, 1.0, 0.0)[:, None]
        acc += v_own[:, None]
    zeros = gl.full([TILE, ROWS], 0.0, gl.float32, sums)
    end = gl.minimum(pos, (first + count) * TILE)
    for c0 in range(0, count, CHUNK):
        made = ()  # all asked for at once, waited for once
        for j in gl.static_range(CHUNK):
            n = gl.minimum(c0 + j, count - 1)  # past the last tile that one again, with weights of 0
            mbarrier.wait(k_full.index(n % RING), n // RING & 1)
            product = warpgroup_mma(k_ring.index(n % RING), q_kept.permute((1, 0)), zeros, use_acc=False, is_async=True)
            made = made + (product,)
        made = warpgroup_mma_wait(0, deps=made)
        if CHUNK == 1:
            made = (made,)
        scores = ()
        for j in gl.static_range(CHUNK):
            s = made[j] * scale
            if HAS_SOFTCAP:
                s = soft_cap(s, softcap)
            at = (first + c0 + j) * TILE + r
            seen = at < end
            if HAS_WINDOW:
                seen = seen & (at >= oldest)
            scores = scores + (gl.where(seen[:, None], s * LOG2E, -float("inf")),)
        most = scores[0]
        for j in gl.static_range(1, CHUNK):
            most = gl.maximum(most, scores[j])
        top = gl.maximum(m, gl.max(most, 0))
        safest = gl.where(top == -float("inf"), 0.0, top)
        shrink = gl.exp2(m - safest)
        l = l * shrink[None, :]
        acc = acc * shrink[None, :]
        for j in gl.static_range(CHUNK):
            p = gl.exp2(scores[j] - safest[None, :])
            l += p
            p_kept.index(j).store(gl.permute(p, (1, 0)).to(gl.bfloat16))
        m = top
        if count > RING:
            for j in gl.static_range(CHUNK):  # all warps have read the keys: the maximum was of all
                if c0 + j + RING < count:
                    ask_tile(k_tiles, k_ring, k_full, table, first, c0 + j + RING, count, head, DIM, TILE, RING)
        if owner & (c0 + CHUNK >= count) & (count > RING):
            mbarrier.wait(v_full.index(last), (count - 1) // RING & 1)
            _clear_tail(v_ring.index(last), tail, parts, DIM, TILE, CTAS)
        fence_async_shared()
        gl.thread_barrier()
        for j in gl.static_range(CHUNK):
            n = gl.minimum(c0 + j, count - 1)
            mbarrier.wait(v_full.index(n % RING), n // RING & 1)
            of_weights = p_kept.index(j).permute((1, 0))
            acc = warpgroup_mma(v_ring.index(n % RING).permute((1, 0)), of_weights, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        if count > RING:
            gl.thread_barrier()
            for j in gl.static_range(CHUNK):
                if c0 + j + RING < count:
                    ask_tile(v_tiles, v_ring, v_full, table, first, c0 + j + RING, count, head, DIM, TILE, RING)
    total = gl.sum(l, 0)
    o = acc / total[None, :]
    used = (tiles + share - 1) // share
    if CTAS > 1:
        join_in_cluster(o, m + gl.log2(total), out, joined, split, used, BASE, GROUP, DIM, ROWS, CTAS)
    else:
        leave(
            o, m + gl.log2(total), out, sizes_ptr, partials_ptr, lse_ptr, tickets_ptr, sizes_stride, second, b, head, split,
            num_splits, used, HEADS, KV_HEADS, DIM, ROWS, MERGE, PAIR,
        )


def ring_attention(
    qkv: Tensor, out: Tensor, k: Tensor, v: Tensor, *, block_tables: Tensor, seq_slots: Tensor, seq_lens: Tensor,
    slot_mapping: Tensor, cos: Tensor, sin: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, heads: HeadShape, window: int,
    num_splits: int, tile: RingAttention, space: SplitSpace, sizes: Tensor | None = None,
) -> None:  # fmt: skip
    """As `attention.decode_attention`."""
    slabs, rows, _ = qkv.shape
    kv_heads, dim = heads.num_kv_heads, heads.head_dim
    group = heads.num_heads // kv_heads
    size = group * dim  # of a part; places for those of a cluster are no smaller than what else is in shared memory by then
    clusters = tile.few and sizes is None and group & (group - 1) == 0 and size >= 128 and num_splits * group >= 4
    ctas, ring = num_splits if clusters else 1, 2 * tile.ring * TILE * dim
    q, p = 2 * HEADS_AT_ONCE * dim, 2 * HEADS_AT_ONCE * TILE * tile.chunk
    base = place_of("joined", {"joined": 8 * ctas * size, "k": ring, "v": ring, "q": q, "p": p}) if ctas > 1 else 0
    k_tiles, v_tiles = (tiles_of(x.view(-1, kv_heads * dim), [TILE, dim], ctas) for x in (k, v))
    _ring_attention_kernel[kv_heads, num_splits // ctas, rows](
        qkv, k_tiles, v_tiles, k, v, block_tables, seq_slots, seq_lens, slot_mapping, q_norm, k_norm, cos, sin, out,
        sizes, space.partials, space.lse, space.tickets, 0 if sizes is None else sizes.stride(0), out.stride(0), qkv.stride(0),
        block_tables.stride(0), num_splits, window, heads.scale, heads.softcap, heads.norm_eps, heads.norm_offset,
        HEADS=heads.num_heads, KV_HEADS=kv_heads, DIM=dim, TILE=TILE, ROWS=HEADS_AT_ONCE, SLABS=slabs, CHUNK=tile.chunk,
        RING=tile.ring, LEAST=tile.chunk if ctas > 1 else LEAST, MERGE=4, QK_NORM=q_norm is not None, HAS_WINDOW=window > 0,
        HAS_SOFTCAP=heads.softcap > 0, PAIR=out.dim() == 3, CTAS=ctas, BASE=base, num_ctas=ctas, num_warps=4, **pdl(qkv),
    )  # fmt: skip
