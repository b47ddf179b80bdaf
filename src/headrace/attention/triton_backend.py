"""Attention on a GPU by our own kernels: any head size to 512, windows, soft caps, blocks read in place. Always there."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from headrace.cache.kv_cache import KVCache
from headrace.kernels.attention_decode import max_tokens, split_attention
from headrace.kernels.attention_prefill import varlen_attention
from headrace.kernels.launch import capability, takes_gluon
from headrace.kernels.split import SplitSpace, num_slots, split_space
from headrace.model.attention import AttentionBackend, KeyValues
from headrace.model.batch import ForwardBatch
from headrace.model.config import ModelConfig

# Sequences with few new rows are split over their context from this length on: below it the varlen kernel, which takes all
# sequences in one launch, has enough to do.
SPLIT_CONTEXT = 1024
# More changes between kinds of sequences than this and all go through the varlen kernel: launches cost too.
MAX_RUNS = 8
# Of a captured step with prompts nobody knows how many rows a sequence has: those of up to so many are split.
FEW_TOKENS = 2
# Rows of a launch from which on the kernel with roles for warps is faster: as fast at 1,024 on an H200, and at 4,096 a sixth
# faster with heads of 128, a third and more with heads of 256.
ROLES_ROWS = 2048
# Captured steps of so many sequences behind contexts of up to so many tokens have one launch of attention where heads are small
# and not in FP8: with 64 decodes beside a prompt of 512 tokens 38 us for 44 (contexts of 190), 67 for 81 (of 600),
# 149 for 151 (of 1,900). Two are as fast or faster with fewer or more sequences,
# and with heads of 256 behind contexts of 600 tokens and more.
ONE_LAUNCH, ONE_LAUNCH_CONTEXT, ONE_LAUNCH_DIM = range(33, 97), 2048, 128


@dataclass(frozen=True, slots=True)
class Run:
    """Adjacent sequences that one launch takes, with host bounds on their sizes."""

    kind: Literal["split", "varlen"]
    first_seq: int
    num_seqs: int
    first_row: int
    num_rows: int
    tokens: int  # rows of one sequence, at most; of a split run a power of two
    context: int  # tokens of one sequence, at most
    skip: int = 0  # first rows of each sequence that something else computes
    least: int = 0  # rows of a sequence below which something else computes it


def plan_runs(batch: ForwardBatch, group: int) -> list[Run]:
    """The launches for a batch: decodes together, then runs of what has few rows behind a long context, and of the rest."""
    runs: list[Run] = []
    if batch.num_decodes:
        runs.append(Run("split", 0, batch.num_decodes, 0, batch.num_decodes, 1, max(batch.context_lens[: batch.num_decodes])))
    row = batch.num_decodes
    most = 1 << (max_tokens(group).bit_length() - 1)  # may be 1: then only decodes are split
    rest: list[Run] = []
    for seq in range(batch.num_decodes, batch.num_seqs):
        rows, context = batch.query_lens[seq], batch.context_lens[seq]
        if rows <= most and most > 1 and context >= SPLIT_CONTEXT:
            # 1 is for decodes only, whose row numbers are their sequence numbers
            run = Run("split", seq, 1, row, rows, max(2, 1 << (rows - 1).bit_length()), context)
        else:
            run = Run("varlen", seq, 1, row, rows, rows, context)
        row += rows
        if rest and rest[-1].kind == run.kind and (run.kind == "varlen" or rest[-1].tokens == run.tokens):
            rest[-1] = join(rest[-1], run)
        else:
            rest.append(run)
    if len(rest) > MAX_RUNS:
        rest = [replace(functools.reduce(join, rest), kind="varlen")]
    return runs + rest


def runs_of_any(batch: ForwardBatch, small: bool) -> list[Run]:
    """The launches for a batch of which only bounds are known: all sequences go to both kernels, and each takes its own, or to
    one that takes them all. `small`: of heads and numbers for which that may be faster."""
    seqs, rows, context = batch.num_seqs, batch.num_rows, batch.context_bound
    if not batch.num_decodes or (small and seqs in ONE_LAUNCH and context <= ONE_LAUNCH_CONTEXT):
        return [Run("varlen", 0, seqs, 0, rows, rows, context, least=1)]
    few = Run("split", 0, seqs, 0, rows, FEW_TOKENS, context)
    return [few, Run("varlen", 0, seqs, 0, rows, rows, context, least=FEW_TOKENS + 1)]


def join(a: Run, b: Run) -> Run:
    """Two adjacent runs of one kind as one."""
    return replace(
        a, num_seqs=a.num_seqs + b.num_seqs, num_rows=a.num_rows + b.num_rows, tokens=max(a.tokens, b.tokens),
        context=max(a.context, b.context),
    )  # fmt: skip


class TritonAttention(AttentionBackend):
    """Few rows over a long context: the split kernel (decode, verification); many rows: the varlen kernel (prefill).

    The split kernel's workspace is allocated at the first batch, for as many sequences as the block tables have rows, and
    stays: CUDA graphs hold its address.
    """

    def __init__(self, model: ModelConfig, device: torch.device):
        self.model, self.device = model, device
        kv_heads = [of.heads for of in model.kv_shapes if of.heads]
        self.kv_heads = max(kv_heads)
        # of the layer with the fewest key-value heads; where heads are large, rows take the registers of two
        self.group = model.num_heads // min(kv_heads) * (1 + (model.head_dim > 256))
        self.roles: Any = None  # the kernel with roles for warps, where there is one
        self.workspace: SplitSpace | None = None
        self.runs: list[Run] = []
        self.ordered: tuple[Run, torch.Size] | None = None  # whose parts the workspace has in order, of a cache of such a shape

    def workspace_bytes(self, max_num_seqs: int) -> int:
        """Device memory that this backend keeps, for the memory plan."""
        m = self.model
        seqs = max_num_seqs + 1
        return 4 * (num_slots(seqs) * (m.num_heads * (m.head_dim + 1) + 1) + seqs * self.kv_heads + 1)

    def begin(self, batch: ForwardBatch, kv: KVCache) -> None:
        m = self.model
        if self.workspace is None:
            self.roles = find_roles(self.device)
            seqs = max(batch.block_tables.shape[0], batch.num_seqs)
            self.workspace = split_space(seqs, m.num_heads, self.kv_heads, m.head_dim, self.device)
        self.ordered = None
        small = m.head_dim <= ONE_LAUNCH_DIM and kv.k[0].element_size() > 1
        self.runs = runs_of_any(batch, small) if batch.context_bound else plan_runs(batch, self.group)

    def attend(
        self, q: Tensor, layer: int, kv: KVCache, batch: ForwardBatch, *, scale: float, window: int, softcap: float,
        own: KeyValues | None = None, sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        out = torch.empty((q.shape[0], q.shape[1] * q.shape[2]), dtype=q.dtype, device=q.device)
        for run in self.runs:
            self.launch(run, q, out, layer, kv, batch, scale=scale, window=window, softcap=softcap, sinks=sinks)
        return out

    def launch(
        self, run: Run, q: Tensor, out: Tensor, layer: int, kv: KVCache, batch: ForwardBatch, *, scale: float, window: int,
        softcap: float, sinks: Tensor | None,
    ) -> None:  # fmt: skip
        """One run into its rows of `out`."""
        args = (q, kv.k[layer], kv.v[layer], out, batch.block_tables, batch.seq_slots, batch.query_start, batch.seq_lens)
        if run.kind == "split":
            assert self.workspace is not None
            what = run, kv.k[layer].shape
            ordered = self.ordered == what
            if not window:
                self.ordered = what
            split_attention(
                *args, self.workspace, first_seq=run.first_seq, num_seqs=run.num_seqs, tokens=run.tokens,
                max_context=run.context, scale=scale, window=window, softcap=softcap, scales=kv.scales[layer], sinks=sinks,
                ordered=ordered,
            )  # fmt: skip
        elif self.takes_roles(run, q, kv.k[layer], softcap, sinks):
            self.roles.roles_attention(
                *args, first_seq=run.first_seq, num_seqs=run.num_seqs, num_rows=run.num_rows, least=run.least, scale=scale,
                window=window, softcap=softcap,
            )  # fmt: skip
        else:
            varlen_attention(
                *args, first_seq=run.first_seq, num_seqs=run.num_seqs, num_rows=run.num_rows, max_tokens=run.tokens,
                skip=run.skip, least=run.least, scale=scale, window=window, softcap=softcap, scales=kv.scales[layer],
                sinks=sinks,
            )  # fmt: skip

    def takes_roles(self, run: Run, q: Tensor, k_cache: Tensor, softcap: float, sinks: Tensor | None) -> bool:
        if self.roles is None or run.num_rows < ROLES_ROWS or run.skip:
            return False
        return self.roles.takes(q, k_cache, softcap, sinks)


def find_roles(device: torch.device) -> Any:
    """The kernel with roles for warps, where the card has them and this Triton knows how to write it."""
    if capability(device) != (9, 0):
        return None
    try:
        from headrace.kernels import attention_roles
    except (ImportError, AttributeError):
        return None
    return attention_roles if takes_gluon() else None
