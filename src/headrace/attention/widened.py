"""Our own kernels over an FP8 cache: what many new rows see is made wide once a layer, not once for each tile of queries."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.attention.triton_backend import Run, TritonAttention
from headrace.cache.kv_cache import KVCache
from headrace.kernels.attention_prefill import varlen_attention
from headrace.kernels.widen_kv import BLOCK, Widened, widen
from headrace.model.batch import ForwardBatch
from headrace.model.config import ModelConfig

# What is made wide at a time: keys and values of this many tokens in two bytes a number. Sequences that are longer are read in
# FP8 throughout.
TOKENS = 32768
# A sequence's new rows times the heads of a group, on average, from which on it pays: widening a key moves 6 bytes a number,
# and saves each row of a query tile its part of the conversions.
WORTH = 1024


class WidenedAttention(TritonAttention):
    """The room is allocated by the first prompt that is worth it."""

    def __init__(self, model: ModelConfig, device: torch.device):
        super().__init__(model, device)
        self.room: Widened | None = None

    def workspace_bytes(self, max_num_seqs: int) -> int:
        m = self.model
        return super().workspace_bytes(max_num_seqs) + TOKENS * m.num_kv_heads * (2 * 2 * m.head_dim + 4)

    def launch(
        self, run: Run, q: Tensor, out: Tensor, layer: int, kv: KVCache, batch: ForwardBatch, *, scale: float, window: int,
        softcap: float, sinks: Tensor | None,
    ) -> None:  # fmt: skip
        total, blocks = TOKENS * 2 // (q.element_size() * BLOCK), -(-run.context // BLOCK)
        together = total // max(1, blocks)  # sequences
        few = run.num_rows * self.group < WORTH * run.num_seqs
        if run.kind == "split" or run.least or few or not together or kv.scales[layer][0] is None:
            super().launch(run, q, out, layer, kv, batch, scale=scale, window=window, softcap=softcap, sinks=sinks)
            return
        if self.room is None:
            self.room = Widened.empty(total, self.model.num_kv_heads, self.model.head_dim, q.dtype, q.device)
        rows = batch.seq_slots, batch.query_start, batch.seq_lens
        end = run.first_seq + run.num_seqs
        for first in range(run.first_seq, end, together):
            seqs = min(together, end - first)
            widen(
                kv.k[layer], kv.v[layer], kv.scales[layer], self.room, batch.block_tables, *rows,
                first_seq=first, num_seqs=seqs, blocks=blocks, window=window,
            )  # fmt: skip
            varlen_attention(
                q, self.room.k, self.room.v, out, None, *rows, first_seq=first, num_seqs=seqs,
                num_rows=min(run.num_rows, seqs * run.tokens), max_tokens=run.tokens, scale=scale, window=window,
                softcap=softcap, scales=(self.room.k_scales, None), blocks=blocks, sinks=sinks,
            )  # fmt: skip
