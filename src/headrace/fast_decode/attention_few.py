"""Attention of a few rows where what counts is how soon it is done: few instructions, few barriers.

As `attention.py`, from the raw QKV product to the context vector. At one row and a short context the bytes are nothing, and
that kernel takes as long as its two thousand instructions, one after the other. Here a program has one query head and one
split, on the CUDA cores. Lanes that share a token's numbers add up its score among themselves; each such group of lanes has
tokens of its own and a softmax of its own over them, so that nothing is exchanged between warps before the end. Keys and
values are read once for each query head of their group, all but once from the L2 cache: not for long contexts.
"""

from __future__ import annotations

from torch import Tensor

from headrace.cache.fp8 import Scales
from headrace.fast_decode.attention_reference import HeadShape
from headrace.kernels.activation import soft_cap
from headrace.kernels.fp8_cache import fp8_factors, largest, nearest_fp8
from headrace.kernels.launch import gdc_launch_dependents, gdc_wait, jit, next_power_of_2, pdl, tl
from headrace.kernels.split import SplitSpace, count_part


@jit
def token_offsets(table, n0, rn, hi, stride_block, stride_token, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Element offsets of tokens n0 + rn (below n0 + BLOCK_N) of a sequence in a cache tensor, 64-bit."""
    if BLOCK_SIZE % BLOCK_N == 0:  # the whole tile lies in one block
        block = tl.load(table + n0 // BLOCK_SIZE).to(tl.int64)
        return block * stride_block + (n0 % BLOCK_SIZE + rn) * stride_token
    token = n0 + rn
    block = tl.load(table + token // BLOCK_SIZE, mask=token < hi, other=0).to(tl.int64)
    return block * stride_block + (token % BLOCK_SIZE) * stride_token


@jit
def _together(d, NUMBER: tl.constexpr):
    """Says that so many neighbours among the indices d [LANES, ...] are neighbours in memory."""
    return tl.max_contiguous(tl.multiple_of(d, [1, NUMBER]), [1, NUMBER])


@jit
def _partner(d, HALF: tl.constexpr, NUMBER: tl.constexpr):
    """The dimension that one is rotated with; those past the rotated ones are their own."""
    return _together(tl.where(d < 2 * HALF, tl.where(d < HALF, d + HALF, d - HALF), d), NUMBER)


@jit
def _angle(d, HALF: tl.constexpr):
    return _together(tl.where(d < HALF, d, tl.where(d < 2 * HALF, d - HALF, 0)), 4)


@jit
def _four(ptr, d, OF: tl.constexpr, HALF: tl.constexpr, LANES: tl.constexpr, QUARTERS: tl.constexpr):
    """Float32 numbers of dimensions d, of their partners or of their angles, four of a thread: [LANES, QUARTERS, 4]."""
    if OF == "partner":
        d = _partner(d, HALF, 4)
    elif OF == "angle":
        d = _angle(d, HALF)
    return tl.reshape(tl.load(ptr + d), (LANES, QUARTERS, 4))


@jit
def _floats(ptr, first, OF: tl.constexpr, HALF: tl.constexpr, LANES: tl.constexpr, DIM: tl.constexpr, PARTS: tl.constexpr):
    """Float32 numbers [LANES, DIM]: of each thread those that belong to its 4 * PARTS cached ones, by PARTS loads."""
    QUARTERS: tl.constexpr = DIM // PARTS // 4
    x = _four(ptr, first, OF, HALF, LANES, QUARTERS)
    if PARTS == 2:
        x = tl.permute(tl.join(x, _four(ptr, first + 4, OF, HALF, LANES, QUARTERS)), (0, 1, 3, 2))
    return tl.reshape(x, (LANES, DIM))


@jit
def _product(
    ptr, first, slab_stride, OF: tl.constexpr, HALF: tl.constexpr, SLABS: tl.constexpr, LANES: tl.constexpr,
    DIM: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The same of a product, summed over its slabs."""
    x = _floats(ptr, first, OF, HALF, LANES, DIM, PARTS)
    for j in tl.static_range(1, SLABS):
        x += _floats(ptr + j * slab_stride, first, OF, HALF, LANES, DIM, PARTS)
    return x


@jit
def _as_kept(x):
    """x [LANES, DIM] float32 as an FP8 cache keeps it, its scales [LANES], and what is read of it."""
    factor, scale = fp8_factors(largest(x))
    x = nearest_fp8(x * factor[:, None])
    return x.to(tl.float8e4nv), scale, x * scale[:, None]


@jit
def _scales(
    k_scales_ptr, v_scales_ptr, table, n0, rn, hi, kv_head, ok,
    KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Of keys and values in FP8."""
    at = token_offsets(table, n0, rn, hi, KV_HEADS * BLOCK_SIZE, 1, BLOCK_SIZE, BLOCK_N) + kv_head * BLOCK_SIZE
    return tl.load(k_scales_ptr + at, mask=ok, other=0.0), tl.load(v_scales_ptr + at, mask=ok, other=0.0)


@jit(do_not_specialize=["num_splits", "window"])
def _few_attention_kernel(
    qkv_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, tables_ptr, slots_ptr, lens_ptr, mapping_ptr, q_norm_ptr,
    k_norm_ptr, cos_ptr, sin_ptr, sinks_ptr, out_ptr, partials_ptr, lse_ptr, tickets_ptr,
    slab_stride, table_stride, stride_block, stride_token, stride_head, num_splits, window, scale, softcap, eps, norm_offset,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, SLABS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, PARTS: tl.constexpr, MIN_TILES: tl.constexpr,
    MERGE_SPLITS: tl.constexpr, QK_NORM: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr, FP8: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL and AT_ONCE:
        gdc_launch_dependents()
    GROUP: tl.constexpr = HEADS // KV_HEADS
    BLOCK_N: tl.constexpr = ROWS * LANES
    LOG2E: tl.constexpr = 1.4426950408889634
    MODEL: tl.constexpr = out_ptr.dtype.element_ty if FP8 else k_ptr.dtype.element_ty
    head = tl.program_id(0)
    split = tl.program_id(1)
    b = tl.program_id(2)
    kv_head = head // GROUP
    # past the L1 cache: what is read before the wait may have changed since this SM read it last
    pos = tl.load(lens_ptr + b, cache_modifier=".cg") - 1  # of the new token; -1 in a padded row
    table = tables_ptr + tl.load(slots_ptr + b, cache_modifier=".cg").to(tl.int64) * table_stride
    lane = tl.arange(0, LANES)
    one = tl.max_contiguous(tl.multiple_of(tl.arange(0, DIM), 4 * PARTS), 4 * PARTS)  # no more in a thread
    rd = lane[:, None] * 0 + one[None, :]
    r = tl.arange(0, DIM // PARTS)
    r = r // 4 * (4 * PARTS) + r % 4
    first = _together(lane[:, None] * 0 + r[None, :], 4)
    oldest = 0  # token that is seen
    if HAS_WINDOW:
        oldest = tl.maximum(pos - window + 1, 0)
    begin = oldest // BLOCK_N * BLOCK_N
    tiles = (pos - begin) // BLOCK_N + 1
    share = tl.maximum((tiles + num_splits - 1) // num_splits, MIN_TILES) * BLOCK_N
    lo = begin + split * share
    out = out_ptr + (b * HEADS + head) * DIM + one
    if lo > pos:  # nothing to read
        if PDL:
            gdc_wait()
        if (pos < 0) & (split == 0):
            tl.store(out, tl.zeros([DIM], out_ptr.dtype.element_ty))
        return
    owner = pos < lo + share
    hi = tl.minimum(pos, lo + share)  # of the cached tokens; the new one comes from the product
    rn = tl.arange(0, ROWS)[None, :] * LANES + lane[:, None]
    k_base = k_ptr + kv_head * stride_head
    v_base = v_ptr + kv_head * stride_head
    offsets = token_offsets(table, lo, rn, hi, stride_block, stride_token, BLOCK_SIZE, BLOCK_N)
    ok = (lo + rn < hi) & (lo + rn >= oldest)
    k = tl.load(k_base + offsets[:, :, None] + one[None, None, :], mask=ok[:, :, None], other=0.0)
    v = tl.load(v_base + offsets[:, :, None] + one[None, None, :], mask=ok[:, :, None], other=0.0)
    k_scale, v_scale = 1.0, 1.0
    if FP8:
        k_scale, v_scale = _scales(k_scales_ptr, v_scales_ptr, table, lo, rn, hi, kv_head, ok, KV_HEADS, BLOCK_SIZE, BLOCK_N)
    cos_ptr += pos * HALF
    sin_ptr += pos * HALF
    turned = rd < 2 * HALF
    cos = tl.where(turned, _floats(cos_ptr, first, "angle", HALF, LANES, DIM, PARTS), 1.0)
    sin = tl.where(turned, _floats(sin_ptr, first, "angle", HALF, LANES, DIM, PARTS), 0.0)
    sin = tl.where(rd < HALF, -sin, sin)
    q_cos, q_sin, k_cos, k_sin = cos, sin, cos, sin
    if QK_NORM:
        q_cos = (tl.load(q_norm_ptr + rd).to(tl.float32) + norm_offset) * cos
        q_sin = (tl.load(q_norm_ptr + _partner(rd, HALF, 4 * PARTS)).to(tl.float32) + norm_offset) * sin
        k_cos = (tl.load(k_norm_ptr + rd).to(tl.float32) + norm_offset) * cos
        k_sin = (tl.load(k_norm_ptr + _partner(rd, HALF, 4 * PARTS)).to(tl.float32) + norm_offset) * sin
    if PDL:
        gdc_wait()
        if not AT_ONCE:
            gdc_launch_dependents()
    row = qkv_ptr + b * ((HEADS + 2 * KV_HEADS) * DIM)
    q_row = row + head * DIM
    k_row = row + (HEADS + kv_head) * DIM
    q = _product(q_row, first, slab_stride, "own", HALF, SLABS, LANES, DIM, PARTS)
    q_partner = _product(q_row, first, slab_stride, "partner", HALF, SLABS, LANES, DIM, PARTS)
    m = tl.full([LANES], -float("inf"), tl.float32)
    l = tl.zeros([LANES], tl.float32)
    acc = tl.zeros([LANES, DIM], tl.float32)
    q_factor = tl.full([LANES], 1.0, tl.float32)
    if QK_NORM:
        q_factor = tl.rsqrt(tl.sum(q * q, 1) / DIM + eps)
    q = (q_factor[:, None] * (q * q_cos + q_partner * q_sin)).to(MODEL).to(tl.float32)
    if owner:
        k_new = _product(k_row, first, slab_stride, "own", HALF, SLABS, LANES, DIM, PARTS)
        k_partner = _product(k_row, first, slab_stride, "partner", HALF, SLABS, LANES, DIM, PARTS)
        v_new = _product(k_row + KV_HEADS * DIM, first, slab_stride, "own", HALF, SLABS, LANES, DIM, PARTS).to(MODEL)
        k_factor = tl.full([LANES], 1.0, tl.float32)
        if QK_NORM:
            k_factor = tl.rsqrt(tl.sum(k_new * k_new, 1) / DIM + eps)
        k_new = (k_factor[:, None] * (k_new * k_cos + k_partner * k_sin)).to(MODEL)
        place = tl.load(mapping_ptr + b)
        k_own, v_own = k_new.to(tl.float32), v_new.to(tl.float32)
        if FP8:  # the next step will read them as they are kept
            k_new, k_own_scale, k_own = _as_kept(k_own)
            v_new, v_own_scale, v_own = _as_kept(v_own)
        if (place >= 0) & (head % GROUP == 0):
            mine = lane == 0
            if FP8:
                at = (place // BLOCK_SIZE * KV_HEADS + kv_head) * BLOCK_SIZE + place % BLOCK_SIZE + lane
                tl.store(k_scales_ptr + at, k_own_scale, mask=mine)
                tl.store(v_scales_ptr + at, v_own_scale, mask=mine)
            place = place // BLOCK_SIZE * stride_block + place % BLOCK_SIZE * stride_token
            tl.store(k_base + place + rd, k_new, mask=mine[:, None])
            tl.store(v_base + place + rd, v_new, mask=mine[:, None])
        s = tl.sum(q * k_own, 1) * scale
        if HAS_SOFTCAP:
            s = soft_cap(s, softcap)
        mine = lane == 0  # of the groups of lanes one has the new token
        m = tl.where(mine, s * LOG2E, m)
        l = tl.where(mine, 1.0, l)
        acc = tl.where(mine[:, None], v_own, acc)
    if SINKS:  # a score without a value, which one group of one split counts
        sink = tl.load(sinks_ptr + head) * LOG2E
        mine = (lane == 1) & (split == 0)
        m = tl.where(mine, sink, m)
        l = tl.where(mine, 1.0, l)
    for n0 in range(lo, hi, BLOCK_N):
        s = tl.sum(k.to(tl.float32) * q[:, None, :], 2) * scale * k_scale
        if HAS_SOFTCAP:
            s = soft_cap(s, softcap)
        s = tl.where(ok, s * LOG2E, -float("inf"))
        top = tl.maximum(m, tl.max(s, 1))
        safe = tl.where(top == -float("inf"), 0.0, top)  # a group without a token so far
        p = tl.exp2(s - safe[:, None])
        shrink = tl.exp2(m - safe)
        l = l * shrink + tl.sum(p, 1)
        p *= v_scale
        acc = acc * shrink[:, None] + tl.sum(p[:, :, None] * v.to(tl.float32), 1)
        m = top
        if n0 + BLOCK_N < hi:
            offsets = token_offsets(table, n0 + BLOCK_N, rn, hi, stride_block, stride_token, BLOCK_SIZE, BLOCK_N)
            ok = n0 + BLOCK_N + rn < hi
            k = tl.load(k_base + offsets[:, :, None] + one[None, None, :], mask=ok[:, :, None], other=0.0)
            v = tl.load(v_base + offsets[:, :, None] + one[None, None, :], mask=ok[:, :, None], other=0.0)
            if FP8:
                at = n0 + BLOCK_N
                k_scale, v_scale = _scales(
                    k_scales_ptr, v_scales_ptr, table, at, rn, hi, kv_head, ok, KV_HEADS, BLOCK_SIZE, BLOCK_N
                )  # fmt: skip
    top = tl.max(m, 0)
    weight = tl.exp2(m - top)
    total = tl.sum(l * weight, 0)
    result = tl.sum(acc * weight[:, None], 0) / total
    used = (tiles * BLOCK_N + share - 1) // share
    if used == 1:
        tl.store(out, result.to(out_ptr.dtype.element_ty))
    else:
        base = (b * HEADS + head) * num_splits
        tl.store(partials_ptr + (base + split).to(tl.int64) * DIM + one, result)
        tl.store(lse_ptr + base + split, top + tl.log2(total))
        ticket = tickets_ptr + b * HEADS + head
        if count_part(ticket) == used - 1:
            tl.store(ticket, 0)
            _merge(out, partials_ptr, lse_ptr, base, used, DIM, MERGE_SPLITS)


@jit
def _merge(out, partials_ptr, lse_ptr, base, used, DIM: tl.constexpr, SPLITS: tl.constexpr):
    """All splits of a head at once, from the L2 cache, where the other programs' sums are."""
    part = tl.arange(0, SPLITS)
    d = tl.arange(0, DIM)
    lse = tl.load(lse_ptr + base + part, mask=part < used, other=-float("inf"), cache_modifier=".cg")
    place = (base + part).to(tl.int64)[:, None] * DIM + d[None, :]
    parts = tl.load(partials_ptr + place, mask=(part < used)[:, None], other=0.0, cache_modifier=".cg")
    weight = tl.exp2(lse - tl.max(lse, 0))
    result = tl.sum(parts * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out, result.to(out.dtype.element_ty))


def takes_few(heads: HeadShape, rotated: int, num_splits: int) -> bool:
    """Whether heads, and halves of what is rotated, are of a size that lanes share evenly, and have no gates; and splits are so
    few that they can be merged at once."""
    return not heads.gated and heads.head_dim in (32, 64, 128, 256) and rotated % 16 == 0 and num_splits <= 32


def few_attention(
    qkv: Tensor, out: Tensor, k: Tensor, v: Tensor, scales: Scales, *, block_tables: Tensor, seq_slots: Tensor,
    seq_lens: Tensor, slot_mapping: Tensor, cos: Tensor, sin: Tensor, q_norm: Tensor | None, k_norm: Tensor | None,
    heads: HeadShape, window: int, num_splits: int, block_n: int, num_warps: int, min_tiles: int,
    space: SplitSpace, sinks: Tensor | None, at_once: bool = False,
) -> None:  # fmt: skip
    """As `attention.decode_attention`; `block_n` tokens at a time."""
    slabs, rows, _ = qkv.shape
    together = min(8, 16 // k.itemsize)  # numbers that a thread loads at once
    lanes = num_warps * 32 * together // heads.head_dim  # groups of lanes
    _few_attention_kernel[heads.num_heads, num_splits, rows](
        qkv, k, v, *scales, block_tables, seq_slots, seq_lens, slot_mapping, q_norm, k_norm, cos, sin, sinks, out,
        space.partials, space.lse, space.tickets,
        qkv.stride(0), block_tables.stride(0), k.stride(0), k.stride(1), k.stride(2), num_splits, window, heads.scale,
        heads.softcap, heads.norm_eps, heads.norm_offset,
        HEADS=heads.num_heads, KV_HEADS=heads.num_kv_heads, DIM=heads.head_dim, HALF=cos.shape[1], SLABS=slabs,
        BLOCK_SIZE=k.shape[1], ROWS=block_n // lanes, LANES=lanes, PARTS=together // 4, MIN_TILES=min_tiles,
        MERGE_SPLITS=next_power_of_2(num_splits), QK_NORM=q_norm is not None, HAS_WINDOW=window > 0,
        HAS_SOFTCAP=heads.softcap > 0, SINKS=sinks is not None, FP8=scales[0] is not None, AT_ONCE=at_once,
        num_warps=num_warps, num_stages=1, **pdl(qkv),
    )  # fmt: skip
