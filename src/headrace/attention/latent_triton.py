"""Attention over latents on a GPU by our own kernel: contexts of few rows are split, many rows go tile by tile.

The first rows of long fresh prompts may be left to whoever makes keys and values of heads (model/latent.py): of these a product
takes a third to a half of what one with latents does, and nothing but the prompt's own rows is to be read. Measured on an H200,
a prompt of 4096 and the 20 heads of GLM-4.7-Flash: 0.46 ms a layer by cuDNN, keys and values made included; 2.0 ms by our own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from headrace.attention.flash import Dense, split_dense
from headrace.attention.triton_backend import Run, plan_runs
from headrace.cache.kv_cache import KVCache
from headrace.kernels.latent_attention import PartSpace, latent_attention, num_slots
from headrace.kernels.launch import capability
from headrace.model.attention import AttentionBackend, KeyValues
from headrace.model.batch import ForwardBatch
from headrace.model.config import ModelConfig

SPLIT_TOKENS = 8  # rows of a sequence that are few
AS_IF = 64 // SPLIT_TOKENS  # heads of a group for which `plan_runs` would draw that line


class TritonLatentAttention(AttentionBackend):
    """q [T, heads, row] -> [T, heads * rank]. Where parts of contexts meet is allocated at the first batch, and stays: CUDA
    graphs hold its address."""

    def __init__(self, model: ModelConfig, device: torch.device, expands: bool = False):
        assert model.latent is not None
        self.heads, self.rank, self.device, self.expands = model.num_heads, model.latent.rank, device, expands
        self.space: PartSpace | None = None
        self.runs: list[Run] = []
        self.dense: list[Dense] = []  # rows of the batch that `attend` leaves out

    def workspace_bytes(self, max_num_seqs: int) -> int:
        """Device memory that this backend keeps, for the memory plan."""
        return 4 * num_slots(max_num_seqs + 1) * self.heads * (self.rank + 1)

    def begin(self, batch: ForwardBatch, kv: KVCache) -> None:
        if self.space is None:
            self.space = PartSpace.of(max(batch.block_tables.shape[0], batch.num_seqs), self.heads, self.rank, self.device)
        self.runs, self.dense = plan_runs(batch, AS_IF), []
        if self.expands and kv.k[0].dtype in (torch.bfloat16, torch.float16):
            self.dense, self.runs = split_dense(self.runs, batch)
            self.keeps_own = bool(self.dense)

    def attend(
        self, q: Tensor, layer: int, kv: KVCache, batch: ForwardBatch, *, scale: float, window: int, softcap: float,
        own: KeyValues | None = None, sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """See AttentionBackend.attend."""
        out = torch.empty((q.shape[0], self.heads * self.rank), dtype=q.dtype, device=q.device)
        for run in self.runs:
            latent_attention(
                q, kv.k[layer], out, batch.block_tables, batch.seq_slots, batch.query_start, batch.seq_lens,
                self.space if run.kind == "split" else None, rank=self.rank, first_seq=run.first_seq, num_seqs=run.num_seqs,
                num_rows=run.num_rows, max_tokens=run.tokens, max_context=run.context, scale=scale, skip=run.skip,
            )  # fmt: skip
        return out

    def attend_dense(self, part: Dense, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """See model.latent.Expanding."""
        q, k, v = (x.unflatten(0, (part.num_seqs, part.rows)).transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        return out.transpose(1, 2).flatten(0, 1)


def expands(model: ModelConfig, device: torch.device) -> bool:
    """Whether cuDNN takes heads of this model's sizes here, and does so on the cards that it was measured on."""
    latent = model.latent
    if latent is None or capability(device)[0] != 9 or not torch.backends.cudnn.is_available():
        return False
    if latent.query % 8 or latent.value % 8:
        return False
    q = torch.zeros((1024, model.num_heads, latent.query), dtype=torch.bfloat16, device=device)
    try:
        value = q.new_zeros((*q.shape[:2], latent.value))
        TritonLatentAttention(model, device).attend_dense(Dense(0, 1, 1024), q, q, value, 1.0)
    except RuntimeError:
        return False
    return True
