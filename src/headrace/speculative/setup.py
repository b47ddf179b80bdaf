"""From options to the parts of speculation: who guesses, how much, and what it costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headrace.attention.select import choose_cache_dtype, select_attention
from headrace.cache.kv_cache import KVCache
from headrace.config import EngineConfig
from headrace.model.batch import ForwardBatch
from headrace.model.checkpoint import Checkpoint
from headrace.model.config import ModelConfig
from headrace.model.decoder import Decoder
from headrace.model.forward import Forward
from headrace.model.loader import load_embedding
from headrace.scheduler.config import Limits
from headrace.speculative.checkpoint import draft_checkpoint
from headrace.speculative.draft_model import DraftModel
from headrace.speculative.eagle import EagleHead, EagleParts, load_eagle
from headrace.speculative.ngram import NGramProposer
from headrace.speculative.speculator import Speculator
from headrace.structured_output.manager import StructuredOutput
from headrace.worker.batch_state import BatchState
from headrace.worker.drafter import Drafter
from headrace.worker.memory_plan import DRAFT_GRAPH_ROWS, MAX_GRAPHS

if TYPE_CHECKING:
    from headrace.worker.cuda_graphs import DecodeGraphs

# of one more row in a step of few rows, relative to the step: a GPU waits for the weights, a CPU computes as well (measured)
VERIFY_COST = {"cuda": 0.03, "cpu": 0.15}


@dataclass(slots=True)
class Draft:
    """A draft model or an EAGLE-3 head that has been loaded; its cache comes when the memory plan is made."""

    model: ModelConfig
    forward: Forward
    num_bytes: int  # of the weights
    vocab_size: int  # ids that both models have
    eagle: EagleParts | None = None

    def block_bytes(self, block_size: int) -> int:
        cache = KVCache.bytes_per_block(self.model, block_size, self.forward.cache_dtype)
        return cache if self.eagle is None else cache + EagleHead.bytes_per_block(self.model, block_size, self.forward.dtype)

    def drafter(
        self, config: EngineConfig, limits: Limits, target: Forward, target_bytes: int, state: BatchState
    ) -> DraftModel:
        kv = KVCache(self.model, limits.num_blocks, limits.block_size, self.forward.cache_dtype, state.device)
        cost = self.num_bytes / target_bytes  # what decoding costs is reading the weights
        if self.eagle is not None:
            assert isinstance(self.forward, Decoder) and isinstance(target, Decoder)
            rows = limits.max_num_batched_tokens
            return EagleHead(self.forward, self.eagle, target, kv, state, cost, self.vocab_size, rows)
        if target.tokenless is not None:
            self.forward.tokenless = target.tokenless.cut(self.model.vocab_size)
        graphs = None
        if state.device.type == "cuda" and not config.enforce_eager:
            from headrace.worker.cuda_graphs import DecodeGraphs

            rows = min(limits.max_num_seqs, DRAFT_GRAPH_ROWS)
            graphs = DecodeGraphs(self._decode, kv, state, rows, limits.max_model_len, max_graphs=MAX_GRAPHS // 2)
        return DraftModel(self.forward, kv, state, cost, self.vocab_size, limits.max_num_batched_tokens, graphs)

    def _decode(self, batch: ForwardBatch, kv: KVCache) -> Tensor:
        return self.forward.decode(batch, kv)[:, : self.vocab_size].contiguous()  # the target has no row for others


def load_draft(
    config: EngineConfig, limits: Limits, target: ModelConfig, dtype: torch.dtype, device: torch.device,
    load_forward: Callable[..., tuple[Forward, int, str, int]], embedding_of: Checkpoint | None = None,
) -> Draft | None:  # fmt: skip
    """The draft model or head, if the method has one; a head computes in `dtype`, the target's. `embedding_of`: the target's
    checkpoint, from which a head without an embedding gets one where its target has only a part of it.

    Raises CheckpointError, or ParameterError for another vocabulary.
    """
    if config.speculative_model is None:
        return None
    checkpoint, model = draft_checkpoint(config, target)
    if config.speculative_method == "eagle3":
        layer, parts = load_eagle(checkpoint, model, target, dtype, device)
        if embedding_of is not None and not parts.own_embedding:
            layer.embedding, parts = load_embedding(embedding_of, target, dtype, device), parts._replace(own_embedding=True)
        cache_dtype = choose_cache_dtype(config.kv_cache_dtype, dtype, device)
        attention, _ = select_attention(config.attention_backend, model, device, cache_dtype)
        decoder = Decoder(model, layer, attention, max_model_len=limits.max_model_len)
        decoder.cache_dtype = cache_dtype
        return Draft(model, decoder, layer.num_bytes + parts.num_bytes, len(layer.lm_head.data), parts)
    forward, num_bytes, *_ = load_forward(config, checkpoint, model, limits, device, draft=True)
    return Draft(model, forward, num_bytes, min(model.vocab_size, target.vocab_size))


def make_speculator(
    config: EngineConfig, limits: Limits, structured: StructuredOutput | None, drafter: Drafter | None,
    device: torch.device, graphs: DecodeGraphs | None = None,
) -> Speculator | None:  # fmt: skip
    """The core's part, if anybody drafts: who was asked to guess, and grammars."""
    if not limits.max_draft_rows:
        return None
    proposer, cost = None, VERIFY_COST.get(device.type, 0.1)
    if drafter is not None:
        cost += drafter.cost
    elif config.speculative_method is not None:
        proposer = NGramProposer(config.prompt_lookup_min, config.prompt_lookup_max)
    num_tokens = config.num_speculative_tokens if config.speculative_method is not None else 0
    overlap = device.type == "cuda" and config.async_scheduling  # on a CPU a launched step is done
    speculator = Speculator(num_tokens, limits.max_draft_rows, cost, proposer, structured, overlap)
    if graphs is not None:
        speculator.padded = graphs.size_for
    return speculator
