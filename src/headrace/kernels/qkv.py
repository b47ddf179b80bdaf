"""From the fused QKV projection to rotated queries and keys and values in the cache, in one pass over the rows."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.cache.kv_cache import KVCache
from headrace.kernels.norm import rms_norm_reference


def rotate_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first 2 * cos.shape[-1] dimensions of x [T, heads, head_dim], i paired with i + cos.shape[-1].

    cos, sin [T, rot / 2] float32. Computed in float32, rounded once to x's dtype.
    """
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    low, high = x[..., :half], x[..., half : 2 * half]
    if x.dtype != torch.float32:
        low, high = low.float(), high.float()
    parts = [torch.addcmul(low * cos, high, sin, value=-1), torch.addcmul(high * cos, low, sin)]
    if 2 * half < x.shape[-1]:
        parts.append(x[..., 2 * half :].to(cos.dtype))
    return torch.cat(parts, -1).to(x.dtype)


def qkv_rope_write_reference(
    qkv: Tensor, positions: Tensor | None, cos: Tensor, sin: Tensor, kv: KVCache, layer: int, slot_mapping: Tensor, *,
    num_heads: int, num_kv_heads: int, head_dim: int, q_norm: Tensor | None, k_norm: Tensor | None,
    eps: float, norm_offset: float,
) -> Tensor:  # fmt: skip
    """See `qkv_rope_write`."""
    if positions is not None:
        cos, sin = cos.index_select(0, positions), sin.index_select(0, positions)
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
    qk = rotate_reference(qk, cos, sin)
    kv.write(layer, qk[:, num_heads:], heads[:, num_qk:], slot_mapping)
    return qk[:, :num_heads]


def qkv_rope_write(
    qkv: Tensor, positions: Tensor | None, cos: Tensor, sin: Tensor, kv: KVCache, layer: int, slot_mapping: Tensor, *,
    num_heads: int, num_kv_heads: int, head_dim: int, q_norm: Tensor | None, k_norm: Tensor | None,
    eps: float, norm_offset: float,
) -> Tensor:  # fmt: skip
    """Split, norm, rotate; write keys and values to the cache; return the queries [T, num_heads, head_dim].

    qkv [T, (num_heads + 2 num_kv_heads) * head_dim]; positions [T] int32 index the rows of cos, sin [P, rot/2] float32.
    On the CPU positions may be None: cos and sin then hold the T rows themselves, gathered once for all layers.
    q_norm, k_norm: RMSNorm weights, [head_dim] (per head) or [num_heads * head_dim], [num_kv_heads * head_dim] (whole
    projection), or None. Only the first rot dimensions of a head are rotated (halves paired). slot_mapping [T] int64:
    block_id * block_size + offset, -1 writes nothing (the torch path never gets -1).
    """
    return qkv_rope_write_reference(
        qkv, positions, cos, sin, kv, layer, slot_mapping, num_heads=num_heads, num_kv_heads=num_kv_heads,
        head_dim=head_dim, q_norm=q_norm, k_norm=k_norm, eps=eps, norm_offset=norm_offset,
    )  # fmt: skip
