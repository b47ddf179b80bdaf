"""From the fused QKV projection to rotated queries and keys and values in the cache, in one pass over the rows."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.cache.kv_cache import KVCache
from headrace.kernels.launch import gdc_launch_dependents, gdc_wait, jit, next_power_of_2, on_gpu, pdl, tl
from headrace.kernels.norm import rms_norm_reference, rms_norm_triton


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
    eps: float, norm_offset: float,
) -> Tensor:  # fmt: skip
    """See `qkv_rope_write`."""
    if positions is not None:
        cos, sin = rotation_rows(cos, sin, positions)
    rows, num_qk = qkv.shape[0], num_heads + num_kv_heads
    heads = qkv.view(rows, num_qk + num_kv_heads, head_dim)
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
    kv.write(layer, qk[:, num_heads:], heads[:, num_qk:], slot_mapping)
    return qk[:, :num_heads]


@jit
def _qkv_rope_write(
    q_ptr, k_ptr, v_ptr, positions_ptr, cos_ptr, sin_ptr, slots_ptr, q_norm_ptr, k_norm_ptr,
    q_out_ptr, k_out_ptr, k_cache_ptr, v_cache_ptr, eps, offset, q_stride, k_stride, v_stride, token_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr, PACK: tl.constexpr, NORM: tl.constexpr, KEEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program takes PACK heads of one row, all queries, all keys or all values.

    A head is three parts: two halves that are rotated into each other, and a rest that is not.
    """
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    Q_GROUPS: tl.constexpr = (HEADS + PACK - 1) // PACK
    KV_GROUPS: tl.constexpr = (KV_HEADS + PACK - 1) // PACK
    REST: tl.constexpr = HEAD_DIM - 2 * HALF
    position = tl.load(positions_ptr + row).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    i = tl.arange(0, HALF_PAD)
    j = tl.arange(0, REST_PAD)
    cos = tl.load(cos_ptr + position * HALF + i, mask=i < HALF, other=0.0)[None, :]
    sin = tl.load(sin_ptr + position * HALF + i, mask=i < HALF, other=0.0)[None, :]
    is_q = group < Q_GROUPS
    is_k = (group >= Q_GROUPS) & (group < Q_GROUPS + KV_GROUPS)
    if is_q:
        head = group * PACK + tl.arange(0, PACK)
        valid = head < HEADS
        src = q_ptr + row * q_stride
        norm_ptr = q_norm_ptr
    else:
        head = (group - Q_GROUPS) % KV_GROUPS * PACK + tl.arange(0, PACK)
        valid = head < KV_HEADS
        src = v_ptr + row * v_stride
        if is_k:
            src = k_ptr + row * k_stride
        norm_ptr = k_norm_ptr
    if NORM:  # weights of this layer: cold, so they are fetched before the wait
        low_weight = tl.load(norm_ptr + i, mask=i < HALF, other=0.0).to(tl.float32) + offset
        high_weight = tl.load(norm_ptr + HALF + i, mask=i < HALF, other=0.0).to(tl.float32) + offset
        tail_weight = tl.load(norm_ptr + 2 * HALF + j, mask=j < REST, other=0.0).to(tl.float32) + offset
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    at = (head * HEAD_DIM)[:, None]
    half = valid[:, None] & (i < HALF)[None, :]
    rest = valid[:, None] & (j < REST)[None, :]
    low = tl.load(src + at + i[None, :], mask=half, other=0.0)
    high = tl.load(src + at + HALF + i[None, :], mask=half, other=0.0)
    if REST > 0:
        tail = tl.load(src + at + 2 * HALF + j[None, :], mask=rest, other=0.0)
    if is_q | is_k:
        a = low.to(tl.float32)
        b = high.to(tl.float32)
        if NORM:
            square = tl.sum(a * a, 1) + tl.sum(b * b, 1)
            if REST > 0:
                c = tail.to(tl.float32)
                square += tl.sum(c * c, 1)
            rstd = tl.rsqrt(square / HEAD_DIM + eps)[:, None]
            a = a * rstd * low_weight[None, :]
            b = b * rstd * high_weight[None, :]
            if REST > 0:
                tail = (c * rstd * tail_weight[None, :]).to(tail.dtype)
        low = (a * cos - b * sin).to(low.dtype)
        high = (b * cos + a * sin).to(high.dtype)
    if is_q:
        dst = q_out_ptr + row * (HEADS * HEAD_DIM) + at
        tl.store(dst + i[None, :], low, mask=half)
        tl.store(dst + HALF + i[None, :], high, mask=half)
        if REST > 0:
            tl.store(dst + 2 * HALF + j[None, :], tail, mask=rest)
    else:
        if slot >= 0:
            cache = v_cache_ptr + slot * token_stride
            if is_k:
                cache = k_cache_ptr + slot * token_stride
            tl.store(cache + at + i[None, :], low.to(k_cache_ptr.dtype.element_ty), mask=half)
            tl.store(cache + at + HALF + i[None, :], high.to(k_cache_ptr.dtype.element_ty), mask=half)
            if REST > 0:
                tl.store(cache + at + 2 * HALF + j[None, :], tail.to(k_cache_ptr.dtype.element_ty), mask=rest)
        if KEEP:  # noqa: SIM102  (known when compiled, unlike is_k)
            if is_k:
                dst = k_out_ptr + row * (KV_HEADS * HEAD_DIM) + at
                tl.store(dst + i[None, :], low, mask=half)
                tl.store(dst + HALF + i[None, :], high, mask=half)
                if REST > 0:
                    tl.store(dst + 2 * HALF + j[None, :], tail, mask=rest)


def qkv_rope_write_triton(
    qkv: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, kv: KVCache, layer: int, slot_mapping: Tensor, *,
    num_heads: int, num_kv_heads: int, head_dim: int, q_norm: Tensor | None, k_norm: Tensor | None,
    eps: float, norm_offset: float,
) -> Tensor:  # fmt: skip
    """See `qkv_rope_write`."""
    rows, device, dtype = qkv.shape[0], qkv.device, qkv.dtype
    q, k, v = qkv.split((num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim), 1)
    norm = q_norm is not None and k_norm is not None
    if q_norm is not None and k_norm is not None and q_norm.numel() != head_dim:  # over the whole projection
        q = rms_norm_triton(q, q_norm, eps, norm_offset)
        k = rms_norm_triton(k, k_norm, eps, norm_offset)
        norm = False
    q_out = torch.empty((rows, num_heads, head_dim), dtype=dtype, device=device)
    k_out = torch.empty((rows, num_kv_heads, head_dim), dtype=dtype, device=device) if kv.keep_rows else q_out
    kv.rows = (k_out, v.unflatten(1, (num_kv_heads, head_dim))) if kv.keep_rows else None
    if not rows:
        return q_out
    half = cos.shape[1]
    half_pad, rest_pad = next_power_of_2(half), next_power_of_2(max(1, head_dim - 2 * half))
    pack = max(1, min(next_power_of_2(num_heads), 1024 // next_power_of_2(head_dim)))
    groups = -(-num_heads // pack) + 2 * -(-num_kv_heads // pack)
    _qkv_rope_write[(rows, groups)](
        q, k, v, positions, cos, sin, slot_mapping, q_norm if norm else cos, k_norm if norm else cos,
        q_out, k_out, kv.k[layer], kv.v[layer], eps, norm_offset, q.stride(0), k.stride(0), v.stride(0),
        kv.k[layer].stride(1), HEADS=num_heads, KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, HALF=half, HALF_PAD=half_pad,
        REST_PAD=rest_pad, PACK=pack, NORM=norm, KEEP=kv.keep_rows,
        num_warps=max(1, pack * half_pad // 256), **pdl(qkv),
    )  # fmt: skip
    return q_out


def qkv_rope_write(
    qkv: Tensor, positions: Tensor | None, cos: Tensor, sin: Tensor, kv: KVCache, layer: int, slot_mapping: Tensor, *,
    num_heads: int, num_kv_heads: int, head_dim: int, q_norm: Tensor | None, k_norm: Tensor | None,
    eps: float, norm_offset: float,
) -> Tensor:  # fmt: skip
    """Split, norm, rotate; write keys and values to the cache; return the queries [T, num_heads, head_dim].

    qkv [T, (num_heads + 2 num_kv_heads) * head_dim]; positions [T] int32 index the rows of cos, sin [P, rot/2] float32.
    On the CPU positions may be None: cos and sin are then what `rotation_rows` made of them, once for all layers.
    q_norm, k_norm: RMSNorm weights, [head_dim] (per head) or [num_heads * head_dim], [num_kv_heads * head_dim] (whole
    projection), or None. Only the first rot dimensions of a head are rotated (halves paired). slot_mapping [T] int64:
    block_id * block_size + offset, -1 writes nothing (the torch path never gets -1). With kv.keep_rows (GPU only) the rows'
    keys and values are left in kv.rows too, until the next layer's.
    """
    if on_gpu(qkv):
        assert positions is not None
        return qkv_rope_write_triton(
            qkv, positions, cos, sin, kv, layer, slot_mapping, num_heads=num_heads, num_kv_heads=num_kv_heads,
            head_dim=head_dim, q_norm=q_norm, k_norm=k_norm, eps=eps, norm_offset=norm_offset,
        )  # fmt: skip
    return qkv_rope_write_reference(
        qkv, positions, cos, sin, kv, layer, slot_mapping, num_heads=num_heads, num_kv_heads=num_kv_heads,
        head_dim=head_dim, q_norm=q_norm, k_norm=k_norm, eps=eps, norm_offset=norm_offset,
    )  # fmt: skip
