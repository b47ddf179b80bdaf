"""From the fused QKV projection to rotated queries and keys and values in the cache, in one pass over the rows."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.cache.kv_cache import KVCache
from headrace.kernels.fp8_cache import store_head
from headrace.kernels.launch import Launcher, gdc_launch_dependents, gdc_wait, jit, next_power_of_2, on_gpu, tl
from headrace.kernels.norm import rms_norm_reference, rms_norm_triton


class Rotated(NamedTuple):
    """What `qkv_rope_write` gives: queries [T, num_heads, head_dim] and, where they were to be kept, the rows' own keys and
    values [T, num_kv_heads, head_dim] each: prompts that have no context before them need not gather them from the blocks."""

    q: Tensor
    own: tuple[Tensor, Tensor] | None = None


def rotation_rows(cos: Tensor, sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Tables [P, rot / 2] -> the rows' factors (cos, cos) and (-sin, sin), both [T, 1, rot] float32."""
    return _both_halves(cos.index_select(0, positions), sin.index_select(0, positions))


def rotate_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first rot dimensions of x [T, heads, head_dim], i paired with i + rot / 2; cos, sin [T, rot / 2]."""
    return _rotate(x, *_both_halves(cos, sin))


def _both_halves(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """With the factors from `_both_halves`; in float32, rounded once to x's dtype."""
    rot = cos.shape[-1]
    part = x if rot == x.shape[-1] else x[..., :rot]
    turned = torch.addcmul(part * cos, part.roll(rot // 2, -1), sin).to(x.dtype)
    return turned if rot == x.shape[-1] else torch.cat((turned, x[..., rot:]), -1)


def qkv_rope_write_reference(
    qkv: Tensor, positions: Tensor | None, cos: Tensor, sin: Tensor, kv: KVCache, layer: int, slot_mapping: Tensor, *,
    num_heads: int, num_kv_heads: int, head_dim: int, q_norm: Tensor | None, k_norm: Tensor | None,
    eps: float, norm_offset: float, normed_values: bool = False,
) -> Rotated:  # fmt: skip
    """See `qkv_rope_write`."""
    qkv = qkv if qkv.dim() == 2 else qkv.float().sum(0).to(qkv.dtype)
    if positions is not None:
        cos, sin = rotation_rows(cos, sin, positions)
    rows, num_qk = qkv.shape[0], num_heads + num_kv_heads
    heads = qkv.view(rows, -1, head_dim)
    values = heads[:, heads.shape[1] - num_kv_heads :]
    if normed_values:
        values = rms_norm_reference(values, torch.ones(head_dim, device=qkv.device), eps)
    if q_norm is None or k_norm is None:
        qk = heads[:, :num_qk]
    elif q_norm.numel() == head_dim:  # one norm per head
        q = rms_norm_reference(heads[:, :num_heads], q_norm, eps, norm_offset)
        k = rms_norm_reference(heads[:, num_heads:num_qk], k_norm, eps, norm_offset)
        qk = torch.cat((q, k), 1)
    else:  # one norm over the whole projection
        q = rms_norm_reference(qkv[:, : num_heads * head_dim], q_norm, eps, norm_offset)
        k = rms_norm_reference(qkv[:, num_heads * head_dim : num_qk * head_dim], k_norm, eps, norm_offset)
        qk = torch.cat((q, k), 1).view(rows, num_qk, head_dim)
    qk = _rotate(qk, cos, sin)
    if not num_kv_heads:
        return Rotated(qk)
    kv.write(layer, qk[:, num_heads:], values, slot_mapping)
    return Rotated(qk[:, :num_heads])


@jit
def _sum(a, b):
    return (a.to(tl.float32) + b.to(tl.float32)).to(a.dtype)


@jit(do_not_specialize=["half_stride"])
def _qkv_rope_write(
    q_ptr, k_ptr, v_ptr, positions_ptr, cos_ptr, sin_ptr, slots_ptr, q_norm_ptr, k_norm_ptr,
    k_cache_ptr, v_cache_ptr, k_scales_ptr, v_scales_ptr, eps, offset, q_stride, k_stride, v_stride, token_stride,
    half_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr, PACK: tl.constexpr, NORM: tl.constexpr, V_NORM: tl.constexpr, KEEP: tl.constexpr,
    BLOCK: tl.constexpr, FP8: tl.constexpr, HALVES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program takes PACK heads of one row, all queries, all keys or all values; a row's programs are neighbours.

    A head is three parts: two halves that are rotated into each other, and a rest that is not.
    """
    Q_GROUPS: tl.constexpr = (HEADS + PACK - 1) // PACK
    KV_GROUPS: tl.constexpr = (KV_HEADS + PACK - 1) // PACK
    ANY: tl.constexpr = max(KV_GROUPS, 1)
    REST: tl.constexpr = HEAD_DIM - 2 * HALF
    row = (tl.program_id(0) // (Q_GROUPS + 2 * KV_GROUPS)).to(tl.int64)
    group = tl.program_id(0) % (Q_GROUPS + 2 * KV_GROUPS)
    position = tl.load(positions_ptr + row).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    is_q = group < Q_GROUPS
    is_v = group >= Q_GROUPS + KV_GROUPS
    # only scalars come out of these branches: tensors would go through shared memory, from one layout into another
    first, heads, src, norm_ptr = group * PACK, HEADS, q_ptr + row * q_stride, q_norm_ptr
    cache, scales = k_cache_ptr + slot * token_stride, k_scales_ptr
    if not is_q:
        first, heads, src, norm_ptr = (group - Q_GROUPS) % ANY * PACK, KV_HEADS, k_ptr + row * k_stride, k_norm_ptr
    if is_v:
        src = v_ptr + row * v_stride
        cache, scales = v_cache_ptr + slot * token_stride, v_scales_ptr
    head = first + tl.arange(0, PACK)[:, None]
    # whole tiles, though all heads share them: each thread gets its own elements in one piece
    i = tl.broadcast_to(tl.arange(0, HALF_PAD)[None, :], (PACK, HALF_PAD))
    j = tl.broadcast_to(tl.arange(0, REST_PAD)[None, :], (PACK, REST_PAD))
    if NORM:  # weights of this layer: cold, so they are fetched before the wait
        low_weight = tl.load(norm_ptr + i, mask=i < HALF, other=0.0)
        high_weight = tl.load(norm_ptr + HALF + i, mask=i < HALF, other=0.0)
        if REST > 0:
            tail_weight = tl.load(norm_ptr + 2 * HALF + j, mask=j < REST, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    low_at = head * HEAD_DIM + i
    tail_at = head * HEAD_DIM + 2 * HALF + j
    half = (head < heads) & (i < HALF)
    rest = (head < heads) & (j < REST)
    low = tl.load(src + low_at, mask=half, other=0.0)
    high = tl.load(src + HALF + low_at, mask=half, other=0.0)
    tail = low
    if REST > 0:
        tail = tl.load(src + tail_at, mask=rest, other=0.0)
    if HALVES:  # of a sum, rounded as by a product
        more = src + half_stride // 16 * 16  # so that the compiler knows that they lie as the first ones do
        low = _sum(low, tl.load(more + low_at, mask=half, other=0.0))
        high = _sum(high, tl.load(more + HALF + low_at, mask=half, other=0.0))
        if REST > 0:
            tail = _sum(tail, tl.load(more + tail_at, mask=rest, other=0.0))
        if is_v & KEEP:
            tl.store(src + low_at, low, mask=half)
            tl.store(src + HALF + low_at, high, mask=half)
            if REST > 0:
                tl.store(src + tail_at, tail, mask=rest)
    there = head < heads
    scale_at = (slot // BLOCK * KV_HEADS + head) * BLOCK + slot % BLOCK
    if is_v:
        if V_NORM:
            a = low.to(tl.float32)
            b = high.to(tl.float32)
            square = tl.sum(a * a + b * b, 1, keep_dims=True)
            if REST > 0:
                c = tail.to(tl.float32)
                square += tl.sum(c * c, 1, keep_dims=True)
            rstd = tl.rsqrt(square / HEAD_DIM + eps)
            low = (a * rstd).to(src.dtype.element_ty)
            high = (b * rstd).to(src.dtype.element_ty)
            if REST > 0:
                tail = (c * rstd).to(src.dtype.element_ty)
        if slot >= 0:
            store_head(
                cache, scales, low, high, tail, low_at, tail_at, half, rest, scale_at, there, HALF, REST, FP8
            )  # fmt: skip
    else:
        # after the rows, whose way is longer: these have to wait for the position
        cos = tl.load(cos_ptr + position * HALF + i, mask=i < HALF, other=0.0)
        sin = tl.load(sin_ptr + position * HALF + i, mask=i < HALF, other=0.0)
        a = low.to(tl.float32)
        b = high.to(tl.float32)
        if NORM:
            square = tl.sum(a * a + b * b, 1, keep_dims=True)
            if REST > 0:
                c = tail.to(tl.float32)
                square += tl.sum(c * c, 1, keep_dims=True)
            rstd = tl.rsqrt(square / HEAD_DIM + eps)
            a = a * rstd * (low_weight.to(tl.float32) + offset)
            b = b * rstd * (high_weight.to(tl.float32) + offset)
            if REST > 0:
                tail = (c * rstd * (tail_weight.to(tl.float32) + offset)).to(src.dtype.element_ty)
        low = (a * cos - b * sin).to(src.dtype.element_ty)
        high = (b * cos + a * sin).to(src.dtype.element_ty)
        if is_q | KEEP:
            tl.store(src + low_at, low, mask=half)
            tl.store(src + HALF + low_at, high, mask=half)
            if REST > 0:
                tl.store(src + tail_at, tail, mask=rest)
        if (not is_q) & (slot >= 0):
            store_head(
                cache, scales, low, high, tail, low_at, tail_at, half, rest, scale_at, there, HALF, REST, FP8
            )  # fmt: skip


_launcher = Launcher(_qkv_rope_write)


@dataclass(frozen=True, slots=True)
class QkvTile:
    """Heads and warps of a program."""

    heads: int
    num_warps: int


@functools.cache
def default_tile(num_heads: int, head_dim: int) -> QkvTile:
    """1024 elements a program, 16 a thread: two loads of 16 bytes in bfloat16."""
    dim = next_power_of_2(head_dim)
    heads = max(1, min(next_power_of_2(num_heads), 1024 // dim))
    return QkvTile(heads, max(1, heads * dim // 512))


def qkv_rope_write_triton(
    qkv: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, kv: KVCache, layer: int, slot_mapping: Tensor, *,
    num_heads: int, num_kv_heads: int, head_dim: int, q_norm: Tensor | None, k_norm: Tensor | None,
    eps: float, norm_offset: float, normed_values: bool = False, keep: bool = False, tile: QkvTile | None = None,
) -> Rotated:  # fmt: skip
    """See `qkv_rope_write`."""
    assert not (keep and normed_values), "kept values are those of the projection"
    if qkv.dim() == 3 and ((q_norm is not None and q_norm.numel() != head_dim) or qkv.stride(0) % 16):
        qkv = qkv.sum(0)
    halves = qkv.dim() == 3
    half_stride, qkv = (qkv.stride(0), qkv[0]) if halves else (0, qkv)
    rows, q_size, kv_size = qkv.shape[0], num_heads * head_dim, num_kv_heads * head_dim
    q, k, v = qkv[:, :q_size], qkv[:, q_size : q_size + kv_size], qkv[:, qkv.shape[1] - kv_size :]
    weights = None if q_norm is None or k_norm is None else (q_norm, k_norm)
    if weights is not None and weights[0].numel() != head_dim:  # over the whole projection
        q, k = (rms_norm_triton(x, weight, eps, norm_offset) for x, weight in zip((q, k), weights, strict=True))
        weights = None
    own = (k.view(rows, num_kv_heads, head_dim), v.view(rows, num_kv_heads, head_dim)) if keep else None
    rotated = Rotated(q.view(rows, num_heads, head_dim), own)
    if not rows:
        return rotated
    half = cos.shape[1]
    tile = tile or default_tile(num_heads, head_dim)
    groups = -(-num_heads // tile.heads) + 2 * -(-num_kv_heads // tile.heads)
    k_cache, v_cache = kv.k[layer], kv.v[layer]
    k_scales, v_scales = kv.scales[layer]
    scales = (cos, cos) if k_scales is None or v_scales is None else (k_scales, v_scales)
    _launcher(
        rows * groups,
        (q, k, v, positions, cos, sin, slot_mapping, *(weights or (cos, cos)), k_cache, v_cache, *scales),
        (eps, norm_offset, q.stride(0), k.stride(0), v.stride(0), k_cache.stride(1)), (half_stride,),
        num_warps=tile.num_warps, HEADS=num_heads, KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, HALF=half,
        HALF_PAD=next_power_of_2(half), REST_PAD=next_power_of_2(max(1, head_dim - 2 * half)), PACK=tile.heads,
        NORM=weights is not None, V_NORM=normed_values, KEEP=keep, BLOCK=k_cache.shape[1], FP8=k_scales is not None,
        HALVES=halves,
    )  # fmt: skip
    return rotated


def qkv_rope_write(
    qkv: Tensor, positions: Tensor | None, cos: Tensor, sin: Tensor, kv: KVCache, layer: int, slot_mapping: Tensor, *,
    num_heads: int, num_kv_heads: int, head_dim: int, q_norm: Tensor | None, k_norm: Tensor | None,
    eps: float, norm_offset: float, normed_values: bool = False, keep: bool = False,
) -> Rotated:  # fmt: skip
    """Split, norm, rotate; write keys and values to the cache.

    qkv [T, (num_heads + 2 num_kv_heads) * head_dim], or [2, T, the same], whose sum it is; positions [T] int32 index the rows
    of cos, sin [P, rot/2] float32. Without key-value heads queries are all there is, and nothing is written. `normed_values`:
    each head of the values is normed, too, without a weight; where qkv has none, [T, (num_heads + num_kv_heads) * head_dim],
    they are made of the keys as these come.
    On the CPU positions may be None: cos and sin are then what `rotation_rows` made of them, once for all layers.
    q_norm, k_norm: RMSNorm weights, [head_dim] (per head) or [num_heads * head_dim], [num_kv_heads * head_dim] (whole
    projection), or None. Only the first rot dimensions of a head are rotated (halves paired). slot_mapping [T] int64:
    block_id * block_size + offset, -1 writes nothing (the torch path never gets -1). `keep` (GPU only): the rows' keys
    and values are returned too. On a GPU queries (and kept keys) take the place of their projection: `qkv` is used up.
    """
    if on_gpu(qkv):
        assert positions is not None
        return qkv_rope_write_triton(
            qkv, positions, cos, sin, kv, layer, slot_mapping, num_heads=num_heads, num_kv_heads=num_kv_heads,
            head_dim=head_dim, q_norm=q_norm, k_norm=k_norm, eps=eps, norm_offset=norm_offset,
            normed_values=normed_values, keep=keep,
        )  # fmt: skip
    return qkv_rope_write_reference(
        qkv, positions, cos, sin, kv, layer, slot_mapping, num_heads=num_heads, num_kv_heads=num_kv_heads,
        head_dim=head_dim, q_norm=q_norm, k_norm=k_norm, eps=eps, norm_offset=norm_offset, normed_values=normed_values,
    )  # fmt: skip
