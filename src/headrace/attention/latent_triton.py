"""Attention over latents on a GPU by our own kernel: contexts of few rows are split, many rows go tile by tile."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.attention.triton_backend import Run, plan_runs
from headrace.cache.kv_cache import KVCache
from headrace.kernels.latent_attention import PartSpace, latent_attention, num_slots
from headrace.model.attention import AttentionBackend, KeyValues
from headrace.model.batch import ForwardBatch
from headrace.model.config import ModelConfig

SPLIT_TOKENS = 8  # rows of a sequence that are few
AS_IF = 64 // SPLIT_TOKENS  # heads of a group for which `plan_runs` would draw that line


class TritonLatentAttention(AttentionBackend):
    """q [T, heads, row] -> [T, heads * rank]. Where parts of contexts meet is allocated at the first batch, and stays: CUDA
    graphs hold its address."""

    def __init__(self, model: ModelConfig, device: torch.device):
        assert model.latent is not None
        self.heads, self.rank, self.device = model.num_heads, model.latent.rank, device
        self.space: PartSpace | None = None
        self.runs: list[Run] = []

    def workspace_bytes(self, max_num_seqs: int) -> int:
        """Device memory that this backend keeps, for the memory plan."""
        return 4 * num_slots(max_num_seqs + 1) * self.heads * (self.rank + 1)

    def begin(self, batch: ForwardBatch, kv: KVCache) -> None:
        if self.space is None:
            self.space = PartSpace.of(max(batch.block_tables.shape[0], batch.num_seqs), self.heads, self.rank, self.device)
        self.runs = plan_runs(batch, AS_IF)

    def attend(
        self, q: Tensor, layer: int, kv: KVCache, batch: ForwardBatch, *, scale: float, window: int, softcap: float,
        own: KeyValues | None = None, sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        out = torch.empty((q.shape[0], self.heads * self.rank), dtype=q.dtype, device=q.device)
        for run in self.runs:
            latent_attention(
                q, kv.k[layer], out, batch.block_tables, batch.seq_slots, batch.query_start, batch.seq_lens,
                self.space if run.kind == "split" else None, rank=self.rank, first_seq=run.first_seq, num_seqs=run.num_seqs,
                num_rows=run.num_rows, max_tokens=run.tokens, max_context=run.context, scale=scale,
            )  # fmt: skip
        return out
