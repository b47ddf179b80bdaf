"""Keys and values of whole sequences, copied out of the cache's blocks into one piece: for kernels that read no blocks."""

from __future__ import annotations

from torch import Tensor

from headrace.kernels.launch import gdc_launch_dependents, gdc_wait, jit, next_power_of_2, pdl, tl


@jit(do_not_specialize=["first_seq"])
def _gather_kv(
    k_ptr, v_ptr, k_out_ptr, v_out_ptr, tables_ptr, slots_ptr, starts_ptr, first_seq, block_stride, token_stride,
    table_stride, BLOCK: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, PAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    local_seq = tl.program_id(1)
    start = tl.load(starts_ptr + local_seq)
    length = tl.load(starts_ptr + local_seq + 1) - start
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if tl.program_id(0) * TOKENS < length:
        table = tables_ptr + tl.load(slots_ptr + first_seq + local_seq).to(tl.int64) * table_stride
        column = tl.arange(0, PAD)
        inside = token < length
        mask = inside[:, None] & (column < WIDTH)[None, :]
        block = tl.load(table + token // BLOCK, mask=inside, other=0).to(tl.int64)
        source = (block * block_stride + (token % BLOCK) * token_stride)[:, None] + column[None, :]
        target = (start + token).to(tl.int64)[:, None] * WIDTH + column[None, :]
        k = tl.load(k_ptr + source, mask=mask, other=0.0)
        v = tl.load(v_ptr + source, mask=mask, other=0.0)
        tl.store(k_out_ptr + target, k, mask=mask)
        tl.store(v_out_ptr + target, v, mask=mask)


def gather_kv(
    k_cache: Tensor, v_cache: Tensor, k_out: Tensor, v_out: Tensor, block_tables: Tensor, seq_slots: Tensor, starts: Tensor,
    *, first_seq: int, num_seqs: int, max_context: int,
) -> None:  # fmt: skip
    """Copy the tokens of sequences first_seq .. first_seq + num_seqs to rows starts[i] .. starts[i + 1] of k_out, v_out.

    k_cache, v_cache [num_blocks, block_size, kv_heads, head_dim]; k_out, v_out [rows, kv_heads, head_dim]; starts
    [num_seqs + 1] int32; max_context bounds the tokens of one sequence.
    """
    width = k_cache.shape[2] * k_cache.shape[3]
    pad = next_power_of_2(width)
    tokens = max(1, 8192 // pad)
    _gather_kv[(-(-max_context // tokens), num_seqs)](
        k_cache, v_cache, k_out, v_out, block_tables, seq_slots, starts, first_seq, k_cache.stride(0), k_cache.stride(1),
        block_tables.stride(0), BLOCK=k_cache.shape[1], TOKENS=tokens, WIDTH=width, PAD=pad, num_warps=8, **pdl(k_cache),
    )  # fmt: skip
