"""How many requests run at the same time where nobody says: as many as the memory plan has room for beside a useful cache.

What a seat takes whether anybody sits there or not (rows of logits with their copies, slot tables, penalty counts, a state
where layers keep one) is taken from the KV cache. So there are no more of them than leave each so many tokens of cache that
requests of usual lengths find room when all seats are taken. Powers of two, found from the card's whole memory, whoever else
uses it: the same number after a restart, on all ranks, and where kernels are compiled ahead without the card.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from headrace.cache.kv_cache import KVCache
from headrace.config import EngineConfig
from headrace.model.config import ModelConfig
from headrace.model.row_elements import row_elements
from headrace.scheduler.config import Limits
from headrace.worker.memory_plan import terms_of_limits

CPU_SEATS = 256
SEATS = (1024, 512, 256, 128, 64)  # the last one whatever there is: the plan says what is too much
STATE_SEATS = 256  # at most, where each has a state of tens of megabytes
SEAT_TOKENS = 512  # of the KV cache, for each


def card_seats(
    config: EngineConfig, limits: Limits, model: ModelConfig, dtype: torch.dtype, cache_dtype: torch.dtype, *,
    memory: int, weight_bytes: int, ranks: int = 1,
) -> int:  # fmt: skip
    """For a card of `memory` bytes; `model` and `weight_bytes` are the part of one of `ranks`. `limits` are of any number."""
    budget = int(memory * config.gpu_memory_utilization)
    if config.memory_bytes is not None:
        budget = min(budget, config.memory_bytes)
    activations = limits.max_num_batched_tokens * row_elements(model) * dtype.itemsize
    block_bytes = KVCache.bytes_per_block(model, limits.block_size, cache_dtype)
    blocks = -(-min(SEAT_TOKENS, limits.max_model_len) // limits.block_size)  # of a seat
    for seats in SEATS[:-1]:
        if model.delta is not None and seats > STATE_SEATS:
            continue
        tried = replace(limits, max_num_seqs=seats)
        kv = budget - weight_bytes - activations - sum(terms_of_limits(config, tried, model, dtype, True, ranks=ranks).values())
        if config.kv_cache_bytes is not None:
            kv = min(kv, config.kv_cache_bytes)
        if kv >= seats * blocks * block_bytes:
            return seats
    return SEATS[-1]
