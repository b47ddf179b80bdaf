"""Token embedding: a gather of rows, with the scale that some families put on them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.launch import gdc_launch_dependents, gdc_wait, jit, next_power_of_2, on_gpu, pdl, tl


def embed_reference(token_ids: Tensor, table: Tensor, scale: float = 1.0) -> Tensor:
    """See `embed`."""
    rows = F.embedding(token_ids, table)
    return rows if scale == 1.0 else rows.mul_(scale)


@jit
def _embed(
    ids_ptr, table_ptr, out_ptr, vocab, scale, table_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.load(ids_ptr + row).to(tl.int64)
    known = (token >= 0) & (token < vocab)  # a padded row may hold anything: it gets zeros, and reads nothing
    x = tl.load(table_ptr + token * table_stride + column, mask=mask & known, other=0.0).to(tl.float32) * scale
    tl.store(out_ptr + row * WIDTH + column, x.to(out_ptr.dtype.element_ty), mask=mask)


def embed_triton(token_ids: Tensor, table: Tensor, scale: float = 1.0) -> Tensor:
    """See `embed`; a row whose id is not in the table is zero."""
    rows, (vocab, width) = token_ids.shape[0], table.shape
    out = torch.empty((rows, width), dtype=table.dtype, device=table.device)
    if rows:
        block = next_power_of_2(width)
        _embed[(rows,)](
            token_ids, table, out, vocab, scale, table.stride(0),
            WIDTH=width, BLOCK=block, num_warps=min(8, max(1, block // 512)), **pdl(table),
        )  # fmt: skip
    return out


def embed(token_ids: Tensor, table: Tensor, scale: float = 1.0) -> Tensor:
    """table[token_ids] * scale: token_ids [T] int32, table [V, H] -> [T, H] in table's dtype (product rounded once)."""
    return (embed_triton if on_gpu(table) else embed_reference)(token_ids, table, scale)
