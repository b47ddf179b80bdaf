"""What programs share that sum one thing together: a place for their parts, and the merge by the one that comes last.

Each program leaves its part and counts itself (an integer ticket); the last one to arrive adds up all parts in their order. So
no second kernel is needed, and the result does not depend on who was last: replays are bit-identical.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.launch import jit, next_power_of_2, tl
from headrace.kernels.rounded import put

MIN_CHUNK, MAX_CHUNK = 64, 1024  # tokens of a context that one program of attention reads
MERGE_ELEMENTS = 4096  # of partial outputs that a merging program holds at once; more costs the main loop registers


class SplitSpace:
    """Where parts meet, allocated once, so that CUDA graphs find it at the same place; one serves kernels that run in order.

    `lse` (base 2) is for attention, whose parts are weighed by their exponential sums. The tickets are 0 between launches.
    """

    def __init__(self, elements: int, tickets: int, device: torch.device, lse: int = 0, order: int = 0):
        self.partials = torch.empty(elements, dtype=torch.float32, device=device)
        self.lse = torch.empty(lse, dtype=torch.float32, device=device)
        self.tickets = torch.zeros(tickets, dtype=torch.int32, device=device)
        self.order = torch.zeros(order, dtype=torch.int32, device=device) if order else None

    @property
    def tensors(self) -> list[Tensor]:
        return [self.partials, self.lse, self.tickets]


def num_slots(max_num_seqs: int) -> int:
    """(sequence row, chunk) pairs for which there is place: a launch picks its chunk size so that sequences * tokens * chunks
    fit."""
    return max(4096, 4 * max_num_seqs)


def split_space(max_num_seqs: int, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device) -> SplitSpace:
    """For attention_decode.split_attention of up to that many sequences."""
    slots = num_slots(max_num_seqs)
    sums = slots * num_heads
    return SplitSpace(sums * head_dim, max_num_seqs * num_kv_heads, device, lse=sums, order=slots + 1)


def choose_chunk(num_seqs: int, tokens: int, kv_heads: int, context: int, multiprocessors: int, slots: int) -> int:
    """Context tokens per program, a power of two.

    Small enough to fill the card twice with contexts of up to 2k (measured best: 64 at batch 1, 256 at 8, 1024 from 32 on),
    large enough that no merge gets more than 128 parts and that all partial sums fit the slots of the space.
    """
    fill = num_seqs * kv_heads * min(context, 2048) // (2 * multiprocessors)
    chunk = max(MIN_CHUNK, min(MAX_CHUNK, next_power_of_2(max(fill, 1))), next_power_of_2(-(-context // 128)))
    most = max(1, slots // (num_seqs * tokens))
    return max(chunk, next_power_of_2(-(-context // most)))


@jit
def count_part(ticket_ptr):
    """How many parts were there before this one, which has just been stored."""
    tl.debug_barrier()  # all threads' stores before the one thread's release
    return tl.atomic_add(ticket_ptr, 1, sem="acq_rel")


@jit
def merge_attention(
    out_ptr, partials_ptr, lse_ptr, base, parts, num_tokens, out_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    CHUNKS: tl.constexpr, sizes_ptr=None, sizes_stride=0, sizes_at=0, second=0,
    PAIR: tl.constexpr = False,
):  # fmt: skip
    """Weigh `parts` partial outputs of one sequence's tokens and kv head by their exponential sums, CHUNKS at a time.

    A part has TOKENS * GROUP rows (ROWS: the power of two that holds them); the first one is number `base`. Row r is of query
    head r % GROUP of the kv head, whose first one's output for the first token lies at out_ptr.
    """
    r = tl.arange(0, ROWS)
    c = tl.arange(0, CHUNKS)
    d = tl.arange(0, DIM)
    token = r // GROUP
    real = (r < TOKENS * GROUP) & (token < num_tokens)
    m = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    for c0 in range(0, parts, CHUNKS):
        place = (base + c0 + c)[:, None] * (TOKENS * GROUP) + r[None, :]
        mask = (c0 + c < parts)[:, None] & real[None, :]
        # .cg: from L2, where the other programs' sums are
        lse = tl.load(lse_ptr + place, mask=mask, other=-float("inf"), cache_modifier=".cg")
        o = tl.load(
            partials_ptr + place[:, :, None] * HEAD_DIM + d[None, None, :],
            mask=mask[:, :, None] & (d < HEAD_DIM)[None, None, :], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        m_new = tl.maximum(m, tl.max(lse, 0))
        top = tl.where(m_new == -float("inf"), 0.0, m_new)
        weight = tl.exp2(lse - top[None, :])
        shrink = tl.exp2(m - top)
        total = total * shrink + tl.sum(weight, 0)
        acc = acc * shrink[:, None] + tl.sum(o * weight[:, :, None], 0)
        m = m_new
    o = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    at = token.to(tl.int64) * out_stride + r % GROUP * HEAD_DIM
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    sizes = r
    if tl.float8e4nv == DTYPE:
        sizes = sizes_ptr + sizes_at + r * sizes_stride
    put(out_ptr + at[:, None] + d[None, :], o, real[:, None] & (d < HEAD_DIM)[None, :], sizes, real, second, 1, PAIR)
