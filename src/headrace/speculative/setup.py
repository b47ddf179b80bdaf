"""From options to the parts of speculation: who guesses, how much, and what it costs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headrace.attention.select import select_attention
from headrace.cache.kv_cache import KVCache
from headrace.config import EngineConfig
from headrace.errors import ParameterError
from headrace.model.batch import ForwardBatch
from headrace.model.checkpoint import resolve_checkpoint
from headrace.model.config import ModelConfig
from headrace.model.decoder import Decoder, DecoderWeights
from headrace.model.families import model_config_from_hf
from headrace.model.loader import load_model
from headrace.speculative.draft_model import DraftModel
from headrace.speculative.ngram import NGramProposer
from headrace.speculative.proposer import Drafter
from headrace.speculative.speculator import Speculator
from headrace.structured_output.manager import StructuredOutput
from headrace.worker.batch_state import BatchState

VERIFY_COST = 0.1  # of one more row in a step of few rows, relative to the step
GRAPH_ROWS = 64  # requests that a captured draft step serves at most
PADDING = 1024  # ids by which vocabularies of one tokenizer may differ: models pad them to round numbers


@dataclass(slots=True)
class Draft:
    """A draft model that has been loaded; its cache comes when the memory plan is made."""

    model: ModelConfig
    weights: DecoderWeights
    decoder: Decoder
    vocab_size: int  # ids that both models have


def load_draft(config: EngineConfig, target: ModelConfig, dtype: torch.dtype, device: torch.device) -> Draft | None:
    """The draft model, if the method has one. Raises CheckpointError, or ParameterError for another vocabulary."""
    if config.speculative_model is None:
        return None
    checkpoint = resolve_checkpoint(replace(config, model=config.speculative_model, revision=None, tokenizer=None))
    model = model_config_from_hf(checkpoint.config)
    if abs(model.vocab_size - target.vocab_size) > PADDING:
        allowed = f"a model with the vocabulary of the target ({target.vocab_size} tokens, not {model.vocab_size})"
        raise ParameterError("speculative_model", config.speculative_model, allowed)
    weights = load_model(checkpoint, model, dtype, device, progress=False)
    attention, _ = select_attention(config.attention_backend, model, device)
    decoder = Decoder(model, weights, attention, max_model_len=config.max_model_len)
    return Draft(model, weights, decoder, min(model.vocab_size, target.vocab_size))


def draft_model(config: EngineConfig, draft: Draft, target_bytes: int, num_blocks: int, state: BatchState) -> DraftModel:
    """The drafter; `config` is resolved."""
    assert config.block_size and config.max_num_batched_tokens
    weight = draft.weights.embedding
    kv = KVCache(draft.model, num_blocks, config.block_size, weight.dtype, weight.device)
    cost = draft.weights.num_bytes / target_bytes  # what decoding costs is reading the weights
    graphs = None
    if state.device.type == "cuda" and not config.enforce_eager:
        from headrace.worker.cuda_graphs import DecodeGraphs

        def forward(batch: ForwardBatch, cache: KVCache) -> Tensor:
            logits = draft.decoder.logits(draft.decoder.forward(batch, cache))
            return logits[:, : draft.vocab_size].contiguous()  # the target has no row for others

        assert config.max_model_len
        graphs = DecodeGraphs(forward, kv, state, min(config.max_num_seqs, GRAPH_ROWS), config.max_model_len)
    return DraftModel(draft.decoder, kv, state, cost, draft.vocab_size, config.max_num_batched_tokens, graphs)


def make_speculator(
    config: EngineConfig, structured: StructuredOutput | None, drafter: Drafter | None
) -> Speculator | None:
    """The core's part, if speculation is wished; `config` is resolved."""
    if config.speculative_method is None:
        return None
    assert config.speculative_max_rows
    proposer, cost = None, VERIFY_COST
    if drafter is not None:
        cost += drafter.cost
    else:
        proposer = NGramProposer(config.prompt_lookup_min, config.prompt_lookup_max)
    return Speculator(config.num_speculative_tokens, config.speculative_max_rows, cost, proposer, structured)
