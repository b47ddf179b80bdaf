"""What the fused step's attention computes, in torch: for the CPU, and what the kernel is held to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.cache import fp8
from headrace.cache.kv_cache import KVCache
from headrace.kernels.qkv import rotate_reference


@dataclass(frozen=True, slots=True)
class HeadShape:
    """What attention must know of a model's heads; how many dimensions turn (halves paired) the tables' width says."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float = 0.0
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    gated: bool = False  # behind q, k and v, a row has for each number of the output what that is multiplied by the sigmoid of

    @property
    def gates(self) -> list[int]:
        """Heads behind those of the values."""
        return [self.num_heads] if self.gated else []


def decode_attention_reference(
    qkv: Tensor, kv: KVCache, layer: int, *, block_tables: Tensor, seq_slots: Tensor, seq_lens: Tensor,
    slot_mapping: Tensor, cos: Tensor, sin: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, heads: HeadShape,
    window: int, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """What attention.decode_attention computes, one sequence at a time in float32; qkv as there, without slabs."""
    out = torch.zeros(qkv.shape[0], heads.num_heads, heads.head_dim, device=qkv.device)
    group = heads.num_heads // heads.num_kv_heads
    for b, length in enumerate(seq_lens.tolist()):
        if length == 0:
            continue
        x = qkv[b].float().view(1, -1, heads.head_dim)
        q, k, v, *gate = x.split([heads.num_heads, heads.num_kv_heads, heads.num_kv_heads, *heads.gates], 1)
        if q_norm is not None and k_norm is not None:
            q, k = (
                y * torch.rsqrt(y.square().mean(-1, keepdim=True) + heads.norm_eps) * (w.float() + heads.norm_offset)
                for y, w in ((q, q_norm), (k, k_norm))
            )
        turn = cos[length - 1 : length], sin[length - 1 : length]
        q, k = rotate_reference(q, *turn), rotate_reference(k, *turn)
        if kv.scales[layer][0] is None:
            k, v = k.to(kv.k[layer].dtype), v.to(kv.v[layer].dtype)
        if slot_mapping[b] >= 0:
            kv.write(layer, k, v, slot_mapping[b : b + 1])
        first = max(0, length - window) if window else 0
        position = torch.arange(first, length - 1, device=qkv.device)
        blocks = block_tables[int(seq_slots[b])].long()[position // kv.block_size]
        slots = blocks * kv.block_size + position % kv.block_size
        keys = _with_new(kv.k[layer], kv.scales[layer][0], slots, k)
        values = _with_new(kv.v[layer], kv.scales[layer][1], slots, v)
        scores = torch.einsum("kgd,tkd->kgt", q[0].view(-1, group, heads.head_dim), keys) * heads.scale
        if heads.softcap:
            scores = heads.softcap * torch.tanh(scores / heads.softcap)
        weights = scores.softmax(-1)
        if sinks is not None:  # the share of what has a value
            weights = weights * torch.sigmoid(scores.logsumexp(-1) - sinks.view(-1, group)).unsqueeze(-1)
        out[b] = torch.einsum("kgt,tkd->kgd", weights, values).flatten(0, 1)
        if gate:
            out[b] *= torch.sigmoid(gate[0][0])
    return out.flatten(1)


def _with_new(data: Tensor, scales: Tensor | None, slots: Tensor, new: Tensor) -> Tensor:
    """What the cache has at `slots` and, behind it, what it makes of `new`: [tokens, kv heads, head_dim] float32."""
    if scales is None:
        return torch.cat((data.flatten(0, 1)[slots], new)).float()
    out = torch.empty((len(slots), *new.shape[1:]), device=new.device)
    return torch.cat((fp8.read(data, scales, slots, out), fp8.dequantize(*fp8.quantize(new))))
