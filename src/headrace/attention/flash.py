"""Prefill by kernels of others: FlashAttention-3 where it is installed, cuDNN through torch where it is asked for.

Measured on an H100, prompts of 4096, head_dim 128 (TFLOP/s, 16 heads / 32 heads / 32 heads and 4 prompts): FlashAttention-3
656 / 690 / 700, of varying lengths 600 / 634 / 650, cuDNN 457 / 537 / 600, our own varlen kernel 409 / 457 / 500. Decode,
windows and whatever else these kernels do not take stay with our own.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from headrace.attention.triton_backend import Run, TritonAttention, join
from headrace.cache.kv_cache import KVCache
from headrace.kernels.gather_kv import gather_kv
from headrace.model.attention import KeyValues
from headrace.model.batch import ForwardBatch
from headrace.model.config import ModelConfig

logger = logging.getLogger(__name__)

# cuDNN builds a plan for each shape, in tens of milliseconds or many more, and each call costs the host as much as several
# launches: it gets the part of a prompt that is a multiple of this many tokens, and at most so many calls a layer.
CUDNN_MULTIPLE = 1024
CUDNN_CALLS = 4
# FlashAttention-3 takes steps with at least this many prefill rows ...
FA3_ROWS = 128
# ... and gathers at most this many tokens of context a step, into a buffer of its own.
FA3_GATHER = 32768
FA3_ARGUMENTS = {
    "out", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "is_causal", "num_splits",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Dense:
    """Adjacent fresh prompts of equal length: `rows` rows of each, from `first_row` on, see only one another."""

    first_row: int
    num_seqs: int
    rows: int


def split_dense(runs: list[Run], batch: ForwardBatch) -> tuple[list[Dense], list[Run]]:
    """Take the fresh prompts' first multiples of CUDNN_MULTIPLE rows out of the varlen runs: (dense parts, what is left).

    A prompt without context is causal over its own rows, and so is each of its beginnings: the rest of its rows is a chunk
    behind a context, which the varlen kernel reads from the cache.
    """
    dense: list[Dense] = []
    left: list[Run] = []
    for run in runs:
        if run.kind != "varlen":
            left.append(run)
            continue
        row = run.first_row
        for seq in range(run.first_seq, run.first_seq + run.num_seqs):
            rows, context = batch.query_lens[seq], batch.context_lens[seq]
            taken = rows // CUDNN_MULTIPLE * CUDNN_MULTIPLE if rows == context else 0
            last = dense[-1] if dense else None
            joins = last and taken == rows == last.rows and row == last.first_row + last.num_seqs * last.rows
            if taken and last and joins:
                dense[-1] = replace(last, num_seqs=last.num_seqs + 1)
            elif taken and len(dense) < CUDNN_CALLS:
                dense.append(Dense(row, 1, taken))
            else:
                taken = 0
            if taken < rows:
                part = Run("varlen", seq, 1, row, rows, rows, context, taken)
                before = left[-1] if left else None
                adjacent = before and before.kind == "varlen" and before.first_seq + before.num_seqs == seq
                if before and adjacent and before.skip == 0 == taken:
                    left[-1] = join(before, part)
                else:
                    left.append(part)
            row += rows
    return dense, left


class CudnnAttention(TritonAttention):
    """Long fresh prompts by cuDNN, equal ones in one call; everything else by our own kernels."""

    def __init__(self, model: ModelConfig, device: torch.device):
        super().__init__(model, device)
        self.dense: list[Dense] = []
        self.others: list[Run] = []
        self.broken = False  # cuDNN refused what it should take

    def begin(self, batch: ForwardBatch, kv: KVCache) -> None:
        super().begin(batch, kv)
        self.dense, self.others = [], []
        if not self.broken and not batch.context_bound and kv.k[0].dtype in (torch.bfloat16, torch.float16):
            self.dense, self.others = split_dense(self.runs, batch)
        self.keeps_own = bool(self.dense)

    def attend(
        self, q: Tensor, layer: int, kv: KVCache, batch: ForwardBatch, *, scale: float, window: int, softcap: float,
        own: KeyValues | None = None, sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        if not self.dense or self.broken or window or softcap or own is None or sinks is not None:
            return super().attend(q, layer, kv, batch, scale=scale, window=window, softcap=softcap, sinks=sinks)
        try:
            parts = [self._cudnn(part, q, *own, scale) for part in self.dense]
        except RuntimeError as error:  # no plan for this shape on this card, or too old a cuDNN
            logger.warning("cuDNN attention failed, our own kernels take over: %s", error)
            self.broken = True
            return super().attend(q, layer, kv, batch, scale=scale, window=window, softcap=softcap, sinks=sinks)
        if not self.others and len(parts) == 1:  # the whole batch: no copy
            return parts[0]
        out = torch.empty((q.shape[0], q.shape[1] * q.shape[2]), dtype=q.dtype, device=q.device)
        for part, done in zip(self.dense, parts, strict=True):
            out[part.first_row : part.first_row + part.num_seqs * part.rows] = done
        for run in self.others:
            self.launch(run, q, out, layer, kv, batch, scale=scale, window=window, softcap=softcap, sinks=None)
        return out

    def _cudnn(self, part: Dense, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        rows = slice(part.first_row, part.first_row + part.num_seqs * part.rows)
        q, k, v = (x[rows].unflatten(0, (part.num_seqs, part.rows)).transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return out.transpose(1, 2).reshape(part.num_seqs * part.rows, -1)


class FlashAttention3(TritonAttention):
    """Prefill by FlashAttention-3: all prompts in one call, contexts gathered from the blocks first.

    `forward` is its operator itself: that writes where it is told to, and costs the host less than the functions around it.
    """

    def __init__(self, model: ModelConfig, device: torch.device, forward: Callable[..., object]):
        super().__init__(model, device)
        self.forward = forward
        self.part: Run | None = None  # all sequences behind the decodes, where FlashAttention-3 takes them
        self.fresh = False
        self.keys = 0  # of all these sequences
        self.key_start: Tensor | None = None
        self.lengths: dict[str, object] = {}  # as the operator takes them; none: all sequences are alike
        self.gathered: tuple[Tensor, Tensor] | None = None

    def workspace_bytes(self, max_num_seqs: int) -> int:
        return super().workspace_bytes(max_num_seqs) + 2 * FA3_GATHER * self.model.kv_size * 2

    def begin(self, batch: ForwardBatch, kv: KVCache) -> None:
        super().begin(batch, kv)
        first, seqs = batch.num_decodes, batch.num_seqs
        query_lens, context_lens = batch.query_lens[first:], batch.context_lens[first:]
        self.fresh = query_lens == context_lens
        rows, self.keys = sum(query_lens), sum(context_lens)
        self.keeps_own, self.part = False, None
        too_much = not self.fresh and self.keys > FA3_GATHER
        if rows < FA3_ROWS or too_much or kv.k[0].dtype != torch.bfloat16:  # the wheel of FlashAttention-3 has bfloat16 only
            return
        self.part = part = Run("varlen", first, seqs - first, first, rows, max(query_lens), max(context_lens))
        query_start = batch.query_start[first:] - first if first else batch.query_start  # decodes have a row each
        if self.fresh:
            self.key_start, self.keeps_own = query_start, True
        else:
            self.key_start = F.pad(batch.seq_lens[first:].cumsum(0, dtype=torch.int32), (1, 0))
            if self.gathered is None:
                shape = (FA3_GATHER, *kv.k[kv.first].shape[2:])
                self.gathered = (kv.k[0].new_empty(shape), kv.v[0].new_empty(shape))
        self.lengths = {}
        if not batch.exact or rows != part.num_seqs * part.tokens or self.keys != part.num_seqs * part.context:
            self.lengths = {
                "cu_seqlens_q": query_start, "cu_seqlens_k": self.key_start,
                "max_seqlen_q": part.tokens, "max_seqlen_k": part.context,
            }  # fmt: skip

    def attend(
        self, q: Tensor, layer: int, kv: KVCache, batch: ForwardBatch, *, scale: float, window: int, softcap: float,
        own: KeyValues | None = None, sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        part = self.part
        if part is None or window or softcap or sinks is not None or (self.fresh and own is None):
            return super().attend(q, layer, kv, batch, scale=scale, window=window, softcap=softcap, sinks=sinks)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if self.fresh:
            assert own is not None
            k, v = own
        else:
            k, v = self._gather(part, layer, kv, batch)
        mine = [q, k, v, out]
        if part.first_row:
            rows = slice(part.first_row, None)
            mine = [q[rows], k[rows] if self.fresh else k, v[rows] if self.fresh else v, out[rows]]
        if not self.lengths:  # a tenth faster
            mine = [x.view(part.num_seqs, -1, *x.shape[1:]) for x in mine]
        self.forward(*mine[:3], out=mine[3], softmax_scale=scale, is_causal=True, num_splits=1, **self.lengths)
        flat = out.view(q.shape[0], -1)
        if part.first_row:  # the decodes
            self.launch(self.runs[0], q, flat, layer, kv, batch, scale=scale, window=window, softcap=softcap, sinks=None)
        return flat

    def _gather(self, part: Run, layer: int, kv: KVCache, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        assert self.gathered is not None and self.key_start is not None
        k, v = (x[: self.keys] for x in self.gathered)
        gather_kv(
            kv.k[layer], kv.v[layer], k, v, batch.block_tables, batch.seq_slots, self.key_start,
            first_seq=part.first_seq, num_seqs=part.num_seqs, max_context=part.context,
        )  # fmt: skip
        return k, v


def find_flash_attention_3() -> tuple[Callable[..., object] | None, str]:
    """Its forward operator and where it comes from, or None and why not."""
    problem = "not installed"
    for module, namespace in (("flash_attn_interface", "flash_attn_3"), ("fa3_fwd_interface", "fa3_fwd")):
        try:
            importlib.import_module(module)
            operator = getattr(torch.ops, namespace).fwd.default
            if {argument.name for argument in operator._schema.arguments} >= FA3_ARGUMENTS:
                return operator, module
            problem = f"{module} has another interface"
        except ImportError as error:
            if not isinstance(error, ModuleNotFoundError) or error.name != module:
                problem = f"{module} does not load: {error}"
        except (OSError, RuntimeError, AttributeError) as error:  # built for another torch, another CUDA
            problem = f"{module} does not load: {error}"
    return None, problem
