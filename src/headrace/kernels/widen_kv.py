"""Keys and values of whole sequences out of an FP8 cache, in the model's dtype: for prompts, whose tiles of queries would each
convert them again.

Keys are widened as they are kept, which is exact, and attention multiplies the scores by their scales as it does where it
reads the cache itself. Values are multiplied by their scales here and rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.cache.fp8 import Scales
from headrace.kernels.fp8_cache import fp8_kind, pairs
from headrace.kernels.launch import gdc_launch_dependents, gdc_wait, jit, next_power_of_2, pdl, tl

BLOCK = 64  # tokens; a tile of queries reads whole blocks by the tensor memory accelerator, whatever the cache's are


@dataclass(slots=True)
class Widened:
    """Room for some blocks: k, v [blocks, BLOCK, kv_heads, head_dim]; k_scales of [kv_heads, tokens], as many as are used."""

    k: Tensor
    v: Tensor
    k_scales: Tensor

    @classmethod
    def empty(cls, blocks: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> Widened:
        k, v = (torch.empty((blocks, BLOCK, kv_heads, head_dim), dtype=dtype, device=device) for _ in range(2))
        return cls(k, v, torch.empty(blocks * BLOCK * kv_heads, dtype=torch.float32, device=device))


@jit(do_not_specialize=["first_seq", "blocks", "window"])
def _widen_kv(
    k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, k_out_ptr, v_out_ptr, scales_out_ptr, tables_ptr, slots_ptr, query_start_ptr,
    lens_ptr, first_seq, blocks, window, block_stride, token_stride, head_stride, table_stride,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
    WINDOW: tl.constexpr, FP8: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    local_seq, head = tl.program_id(1), tl.program_id(2)
    seq = first_seq + local_seq
    length = tl.load(lens_ptr + seq)
    token0 = tl.program_id(0) * TOKENS
    first = 0
    if WINDOW:  # the oldest token that the first new row sees
        first = length - (tl.load(query_start_ptr + seq + 1) - tl.load(query_start_ptr + seq)) + 1 - window
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if (token0 < length) & (token0 + TOKENS > first):
        token = token0 + tl.arange(0, TOKENS)
        c = tl.arange(0, COLUMNS)
        inside = token < length
        mask = inside[:, None] & (c < HEAD_DIM // 2)[None, :]
        table = tables_ptr + tl.load(slots_ptr + seq).to(tl.int64) * table_stride
        block = tl.load(table + token // BLOCK, mask=inside, other=0).to(tl.int64)
        source = (block * block_stride + (token % BLOCK) * token_stride + head * head_stride)[:, None] + c[None, :]
        place = (block * KV_HEADS + head) * BLOCK + token % BLOCK
        k = tl.load(k_ptr + source, mask=mask, other=0)
        v = tl.load(v_ptr + source, mask=mask, other=0)
        k_scale = tl.load(k_scales_ptr + place, mask=inside, other=0.0)
        v_scale = tl.load(v_scales_ptr + place, mask=inside, other=0.0)
        made = k_out_ptr.dtype.element_ty
        k_even, k_odd = pairs(k, made, FP8)
        v_even, v_odd = pairs(v, made, FP8)
        v_even = (v_even.to(tl.float32) * v_scale[:, None]).to(made)
        v_odd = (v_odd.to(tl.float32) * v_scale[:, None]).to(made)
        new = local_seq * blocks * TOKENS + token
        d = tl.arange(0, 2 * COLUMNS)
        target = ((new.to(tl.int64) * KV_HEADS + head) * HEAD_DIM)[:, None] + d[None, :]
        wide = inside[:, None] & (d < HEAD_DIM)[None, :]
        tl.store(k_out_ptr + target, tl.reshape(tl.join(k_even, k_odd), [TOKENS, 2 * COLUMNS]), mask=wide)
        tl.store(v_out_ptr + target, tl.reshape(tl.join(v_even, v_odd), [TOKENS, 2 * COLUMNS]), mask=wide)
        tl.store(scales_out_ptr + head * (tl.num_programs(1) * blocks * TOKENS) + new, k_scale, mask=inside)


def widen(
    k_cache: Tensor, v_cache: Tensor, scales: Scales, out: Widened, block_tables: Tensor, seq_slots: Tensor,
    query_start: Tensor, seq_lens: Tensor, *, first_seq: int, num_seqs: int, blocks: int, window: int,
) -> None:  # fmt: skip
    """What the new rows of sequences first_seq .. first_seq + num_seqs see of the cache, to `out`: `blocks` blocks a sequence,
    which no sequence has more of. Tensors as in `attention_prefill.varlen_attention`."""
    kv_heads, head_dim = k_cache.shape[2:]
    k, v = k_cache.view(torch.int16), v_cache.view(torch.int16)
    _widen_kv[(blocks, num_seqs, kv_heads)](
        k, v, *scales, out.k, out.v, out.k_scales, block_tables, seq_slots, query_start, seq_lens,
        first_seq, blocks, window, k.stride(0), k.stride(1), k.stride(2), block_tables.stride(0),
        KV_HEADS=kv_heads, HEAD_DIM=head_dim, COLUMNS=next_power_of_2(head_dim) // 2, BLOCK=k.shape[1], TOKENS=BLOCK,
        WINDOW=window > 0, FP8=fp8_kind(out.k, scales[0]), num_warps=4, **pdl(k),
    )  # fmt: skip
