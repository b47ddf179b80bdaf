"""The first kernel of a fused decode step: embedding rows become the residual and what the first product needs of it."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.fast_decode.epilogues import runs_triton, sumsq_block
from headrace.kernels.launch import gdc_launch_dependents, jit, next_power_of_2, pdl, tl
from headrace.kernels.rounded import keep, put


@jit(do_not_specialize=["tiles", "first_id"])
def _embed_residual_kernel(
    ids_ptr, table_ptr, norm_ptr, residual_ptr, normed_ptr, sumsq_ptr, sizes_ptr, vocab, first_id, scale,
    norm_offset, tiles, sizes_stride, second,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, TILES_BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    PAIR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0)
    r = tl.arange(0, BLOCK)
    ok = r < WIDTH
    norm = tl.load(norm_ptr + r, mask=ok, other=0.0).to(tl.float32) + norm_offset
    token = tl.load(ids_ptr + row).to(tl.int64) - first_id
    known = (token >= 0) & (token < vocab)  # a padded row may hold anything
    x = tl.load(table_ptr + token * WIDTH + r, mask=ok & known, other=0.0)
    x = (x.to(tl.float32) * scale).to(table_ptr.dtype.element_ty).to(tl.float32)
    tl.store(residual_ptr + row * WIDTH + r, x, mask=ok)
    y = x * norm
    if CHUNK > 0:
        CHUNKS: tl.constexpr = BLOCK // CHUNK
        place, c = tl.reshape(r, (CHUNKS, CHUNK)), tl.arange(0, CHUNKS)
        sizes = sizes_ptr + c * sizes_stride + row
        chunks = tl.reshape(y, (CHUNKS, CHUNK))
        put(normed_ptr + row * WIDTH + place, chunks, place < WIDTH, sizes, c * CHUNK < WIDTH, second, 1, PAIR)
    else:
        tl.store(normed_ptr + row * WIDTH + r, y.to(normed_ptr.dtype.element_ty), mask=ok)
    t = tl.arange(0, TILES_BLOCK)
    tl.store(sumsq_ptr + row * tiles + t, tl.where(t == 0, tl.sum(x * x, 0), 0.0), mask=t < tiles)


def embed_residual(
    token_ids: Tensor, table: Tensor, residual: Tensor, normed: Tensor, sumsq: Tensor, next_norm: Tensor, *,
    scale: float = 1.0, norm_offset: float = 0.0, first_id: int = 0, sizes: Tensor | None = None,
) -> None:  # fmt: skip
    """residual [B, H] float32 = scale * table [V, H][token_ids [B] int32], rounded to the table's dtype.

    Also normed [B, H] = residual * (next_norm + norm_offset) and sumsq [B, tiles] float32, the sum of residual^2 in column 0:
    see products.residual; normed may be FP8, also pairs, with `sizes` [chunks, >= B] (kernels/rounded.py). The table's rows are
    of the ids from `first_id` on; an id that it has not (of a padded row, or of another rank) gives zeros. Launched as an
    ordinary kernel: everything before it in the stream has ended when it starts, so all later kernels of the step may read
    lengths, tables and the older cache before they wait.
    """
    if not runs_triton(residual):
        place = token_ids - first_id
        known = (place >= 0) & (place < table.shape[0])
        found = table[torch.where(known, place, 0).long()] * known[:, None]
        residual.copy_((found.float() * scale).to(table.dtype))
        keep(normed, residual * (next_norm.float() + norm_offset), sizes)
        sumsq.zero_()[:, 0] = residual.square().sum(1)
        return
    rows, width = residual.shape
    chunk = 0 if sizes is None else width // sizes.shape[0]
    _embed_residual_kernel[(rows,)](
        token_ids, table, next_norm, residual, normed, sumsq, sizes, table.shape[0], first_id, scale, norm_offset,
        sumsq.shape[1], 0 if sizes is None else sizes.stride(0), normed.stride(0), WIDTH=width, BLOCK=next_power_of_2(width),
        TILES_BLOCK=sumsq_block(sumsq, 256), CHUNK=chunk, PAIR=normed.dim() == 3, PDL=pdl(residual)["PDL"], num_warps=4,
    )  # fmt: skip
