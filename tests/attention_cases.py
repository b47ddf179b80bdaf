"""Random paged batches and the attention they must give, shared by the kernel tests on the CPU and on a card."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from headrace.model.batch import ForwardBatch


@dataclass
class PagedCase:
    """Sequences with `query_lens` new rows at the end of `context_lens` tokens; tables are indexed by shuffled slots."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_tables: Tensor
    seq_slots: Tensor
    query_start: Tensor
    seq_lens: Tensor
    query_lens: list[int]
    context_lens: list[int]

    def tensors(self) -> tuple[Tensor, ...]:
        return self.block_tables, self.seq_slots, self.query_start, self.seq_lens


def paged_case(
    query_lens: list[int], context_lens: list[int], heads: int, kv_heads: int, head_dim: int, block: int, *,
    dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0, spare_blocks: int = 3, poison: bool = True,
) -> PagedCase:  # fmt: skip
    """A batch whose blocks lie scattered in the cache. With `poison`, everything outside of the sequences is NaN."""
    gen = torch.Generator(device=device).manual_seed(seed)
    total, width = sum(-(-c // block) for c in context_lens), max(1, -(-max(context_lens) // block)) + 1
    num_blocks = total + spare_blocks
    shape = (num_blocks, block, kv_heads, head_dim)
    k, v = (torch.randn(shape, generator=gen, device=device, dtype=torch.float32).to(dtype) for _ in range(2))
    order = torch.randperm(num_blocks, generator=gen, device=device).to(torch.int32)
    slots = torch.randperm(len(context_lens) + 2, generator=gen, device=device)[: len(context_lens)].to(torch.int32)
    tables = torch.full((len(context_lens) + 2, width), num_blocks - 1, dtype=torch.int32, device=device)
    used = torch.zeros(num_blocks, block, dtype=torch.bool, device=device)
    first = 0
    for s, c in enumerate(context_lens):
        n = -(-c // block)
        tables[slots[s], :n] = order[first : first + n]
        used[order[first : first + n].long()] = True
        if c % block:
            used[int(order[first + n - 1]), c % block :] = False
        first += n
    if poison:
        k[~used], v[~used] = float("nan"), float("nan")
    rows = sum(query_lens)
    # the rows of q are strided, as they are inside a fused projection
    q = torch.randn((rows, heads + 2 * kv_heads, head_dim), generator=gen, device=device, dtype=torch.float32).to(dtype)
    start = torch.tensor([0, *torch.tensor(query_lens).cumsum(0).tolist()], dtype=torch.int32, device=device)
    lens = torch.tensor(context_lens, dtype=torch.int32, device=device)
    return PagedCase(q[:, :heads], k, v, tables, slots, start, lens, query_lens, context_lens)


def attention_reference(case: PagedCase, scale: float, window: int = 0, softcap: float = 0.0) -> Tensor:
    """Dense attention in float32 (float64 on the CPU), sequence by sequence -> [T, heads * head_dim]; padded rows are 0."""
    wide = torch.float64 if case.q.device.type == "cpu" else torch.float32
    heads, head_dim = case.q.shape[1:]
    block, kv_heads = case.k_cache.shape[1:3]
    out = torch.zeros(case.q.shape[0], heads, head_dim, dtype=wide, device=case.q.device)
    row = 0
    for s, (n, c) in enumerate(zip(case.query_lens, case.context_lens, strict=True)):
        if c:
            blocks = case.block_tables[int(case.seq_slots[s]), : -(-c // block)].long()
            k = case.k_cache[blocks].flatten(0, 1)[:c].to(wide).repeat_interleave(heads // kv_heads, 1)
            v = case.v_cache[blocks].flatten(0, 1)[:c].to(wide).repeat_interleave(heads // kv_heads, 1)
            for r0 in range(0, n, 256):  # bounded memory
                r1 = min(n, r0 + 256)
                scores = torch.einsum("qhd,khd->hqk", case.q[row + r0 : row + r1].to(wide), k) * scale
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                position = torch.arange(c - n + r0, c - n + r1, device=out.device)[:, None]
                key = torch.arange(c, device=out.device)[None]
                seen = (key <= position) & ((key > position - window) if window else True)
                scores = scores.masked_fill(~seen, float("-inf"))
                out[row + r0 : row + r1] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
        row += n
    return out.flatten(1)


def batch_of(case: PagedCase) -> ForwardBatch:
    rows, decodes = sum(case.query_lens), 0
    while decodes < len(case.query_lens) and case.query_lens[decodes] == 1:
        decodes += 1
    nothing = torch.zeros(rows, dtype=torch.int32, device=case.q.device)
    return ForwardBatch(
        nothing, nothing, nothing.long(), *case.tensors(), num_decodes=decodes,
        query_lens=case.query_lens, context_lens=case.context_lens,
    )  # fmt: skip


def cache_of(case: PagedCase) -> SimpleNamespace:
    """Like KVCache after the rows were written: `rows` are their keys and values, as the projection's kernel leaves them."""
    rows, block = [], case.k_cache.shape[1]
    for s, (n, c) in enumerate(zip(case.query_lens, case.context_lens, strict=True)):
        token = torch.arange(c - n, c, device=case.q.device)
        slots = case.block_tables[int(case.seq_slots[s])][token // block].long() * block + token % block
        rows.append(slots)
    index = torch.cat(rows)
    kept = (case.k_cache.flatten(0, 1)[index], case.v_cache.flatten(0, 1)[index])
    return SimpleNamespace(k=[case.k_cache], v=[case.v_cache], rows=kept)
