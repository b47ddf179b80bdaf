"""Token masks, a bit for each id, onto rows of logits: one pass that touches only what is banned."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.launch import jit, on_gpu, tl

BLOCK = 4096


def add_mask(logits: Tensor, bits: Tensor, rows: Tensor) -> None:
    """logits [R, V] of `rows` [Q] int64 (none twice) += 0 where the bit is set, else -inf, in place.

    bits [Q, ceil(V / 32)] int32: bit v % 32 of word v / 32 is that of id v. NaN stays NaN.
    """
    (add_mask_triton if on_gpu(logits) else add_mask_reference)(logits, bits, rows)


def add_mask_reference(logits: Tensor, bits: Tensor, rows: Tensor) -> None:
    """See `add_mask`. Byte b of the mask is row b of a table of 0 and -inf, eight at a time: branches over a mask of bools cost
    three times as much on a CPU."""
    byte = torch.arange(256, device=logits.device)
    table = torch.where((byte[:, None] >> byte[:8] & 1).bool(), 0.0, -torch.inf)
    added = torch.nn.functional.embedding(bits.view(torch.uint8).int(), table).flatten(1)[:, : logits.shape[1]]
    logits.index_add_(0, rows, added.to(logits.dtype))


def add_mask_triton(logits: Tensor, bits: Tensor, rows: Tensor) -> None:
    """See `add_mask`."""
    vocab = logits.shape[1]
    _add_mask[(-(-vocab // BLOCK), len(bits))](
        logits, bits, rows, vocab, logits.stride(0), bits.stride(0), BLOCK=BLOCK, num_warps=8
    )


@jit
def _add_mask(logits, bits, rows, V, logits_stride, bits_stride, BLOCK: tl.constexpr):
    index = tl.program_id(1)
    row = tl.load(rows + index).to(tl.int64)
    ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(bits + index.to(tl.int64) * bits_stride + ids // 32, ids < V, -1)
    banned = ((words >> (ids % 32)) & 1) == 0
    place = logits + row * logits_stride + ids
    tl.store(place, (tl.load(place, banned, 0.0).to(tl.float32) + float("-inf")).to(logits.dtype.element_ty), banned)
