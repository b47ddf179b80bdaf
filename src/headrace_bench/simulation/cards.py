"""Cards: what their makers' data sheets say, and how much of it steps of this engine reached where it was measured.

Rates are those of the data sheets times what a large copy and a large matrix product reach of them (`headrace bench all`
measures both in each run). Of the limit that follows, a step gets a share: `percent_of_limit` of the results in
benchmarks/results, by the rows of a step, for a small and a larger model. Measured are an H100 and an H200; an H100's are
carried over to the other cards: an assumption, until somebody measures there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from headrace.cache.kv_cache import KVCache
from headrace.config import EngineConfig
from headrace.errors import CapacityError, ParameterError
from headrace.model.config import ModelConfig
from headrace.worker.memory_plan import captured_tokens
from headrace_bench.roofline import Limits, Machine
from headrace_bench.simulation.cost import Roofline

Shares = tuple[tuple[int, float], ...]  # (rows, share of the limit)


@dataclass(frozen=True, slots=True)
class Measured:
    """Of the data sheet's rates, and of the limit that these give; the last rows are those of a full prefill step."""

    bandwidth: float
    flops: float
    shares: Mapping[float, Shares]  # by the bytes of weights that a step reads
    prompt_shares: Shares = ()  # of a larger model's steps with prompts; none: as of others with so many rows
    cache_share: float | None = None  # with which the decodes' keys and values are read, where that is told from the rest


# benchmarks/results/h100-qwen3-0.6b.json and h100-qwen3-8b.json, whose "bandwidth" and "flops" are the rates
H100 = Measured(2.963e12 / 3.35e12, 778.4e12 / 989e12, MappingProxyType({
    1.19e9: ((1, 0.641), (8, 0.588), (32, 0.655), (64, 0.713), (128, 0.762), (256, 0.828), (16384, 0.722)),
    15.14e9: ((1, 0.995), (8, 0.902), (32, 0.892), (64, 0.869), (256, 0.779), (16384, 0.834)),
}))  # fmt: skip

# simulate-h200-qwen3-8b.json, "shares" ("decodes_later" before "decodes"): of a larger model's steps, what attention reads told
# from the rest; rates as in h200-two-cards.json. The small model's, up to 64 rows, are the captured steps of
# docs/benchmarks.md, the others an H100's
H200 = Measured(4.136e12 / 4.8e12, 779.8e12 / 989e12, MappingProxyType({
    1.19e9: (
        (1, 0.56), (2, 0.517), (4, 0.529), (8, 0.607), (16, 0.618), (32, 0.668), (64, 0.702), (128, 0.762), (256, 0.828),
        (16384, 0.722),
    ),
    15.14e9: (
        (1, 0.98), (2, 0.90), (4, 0.936), (8, 0.944), (16, 0.91), (24, 0.884), (32, 0.893), (40, 0.795), (48, 0.813),
        (64, 0.806), (96, 0.721), (128, 0.709), (192, 0.625), (256, 0.715), (16384, 0.829),
    ),
}), ((128, 0.62), (448, 0.62), (640, 0.73), (1024, 0.77), (16384, 0.829)), 0.9)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Card:
    """Bytes, bytes per second, operations per second (16 bits, dense)."""

    memory: float
    bandwidth: float
    flops: float
    link: float  # to the other cards of its host, in one direction
    measured: Measured = H100


CARDS = MappingProxyType({  # NVIDIA's data sheets; B200: those of the DGX B200, by eight
    "a100": Card(80e9, 2.039e12, 312e12, 300e9),
    "l40s": Card(48e9, 0.864e12, 362e12, 32e9),  # PCIe 4.0
    "h100": Card(80e9, 3.35e12, 989e12, 450e9),
    "h200": Card(141e9, 4.8e12, 989e12, 450e9, H200),
    "b200": Card(180e9, 8.0e12, 2250e12, 900e9),
})  # fmt: skip

HOST = 75e-6  # seconds of the host for a step: `host_ms_per_step` of the same runs
PROMPT_HOST, LAYER_HOST = 0.85e-3, 0.44e-3  # of one with prompts that is captured, of each layer of one that is not (an H200)

# Seconds of an all-reduce by bytes, 2, 4 and 8 H100 of one host: https://github.com/sgl-project/sglang/pull/2904, the one-shot
# kernel; what is larger goes at LINK_REACHED of the link's rate in a ring
REDUCE_TIMES = MappingProxyType({
    2: ((512, 3.7e-6), (4096, 3.9e-6), (32768, 4.5e-6), (262144, 7.9e-6), (524288, 12.5e-6), (1048576, 19.9e-6)),
    4: ((512, 4.8e-6), (32768, 4.8e-6), (262144, 13.9e-6), (524288, 20.2e-6), (1048576, 31.1e-6)),
    8: ((512, 5.9e-6), (32768, 7.8e-6), (262144, 16.7e-6), (524288, 22.1e-6), (1048576, 33.8e-6)),
})  # fmt: skip
LINK_REACHED = 0.8


def card_named(name: str) -> Card:
    try:
        return CARDS[name.lower()]
    except KeyError:
        allowed = f"one of {', '.join(CARDS)}; what a CPU or another card does is said by a recorded trace (--trace)"
        raise ParameterError("--card", name, allowed) from None


def roofline(card: Card, model: ModelConfig, dtype: torch.dtype, ranks: int) -> Roofline:
    """The cost of a step on so many cards, in numbers of `dtype`. Raises ParameterError if they cannot share the model."""
    check_ranks(model, ranks)
    measured = card.measured
    machine = Machine("", card.bandwidth * measured.bandwidth, card.flops * measured.flops)
    limits = Limits(model, dtype, machine)
    experts = dtype.itemsize * limits.parameters.experts / ranks
    weights = limits.weight_bytes(0) / ranks
    nearest = min(measured.shares, key=lambda size: abs(math.log(size / (weights + limits.parameters.share * experts))))
    larger = nearest == max(measured.shares)
    return Roofline(
        weight_bytes=weights,
        expert_bytes=experts,
        chosen=limits.parameters.share,
        kv_bytes=kv_bytes(model, dtype, ranks),
        row_flops=2 * limits.parameters.of_row / ranks,
        head_flops=2 * model.vocab_size * model.hidden_size / ranks,
        pair_flops=4 * sum(limits.score_columns.values()) / ranks,
        bandwidth=machine.bandwidth,
        flops=machine.flops,
        shares=measured.shares[nearest],
        prompt_shares=measured.prompt_shares if larger else (),
        cache_share=measured.cache_share if larger else None,
        host=HOST,
        prompt_hosts=((captured_tokens(model), PROMPT_HOST), (math.inf, LAYER_HOST * model.num_layers)),
        reduces=2 * model.num_layers if ranks > 1 else 0,
        reduce_bytes=model.hidden_size * dtype.itemsize,
        reduce_times=REDUCE_TIMES[min(n for n in REDUCE_TIMES if n >= min(ranks, 8))] if ranks > 1 else (),
        link=card.link * LINK_REACHED * ranks / (2 * (ranks - 1)) if ranks > 1 else math.inf,
    )


def check_ranks(model: ModelConfig, ranks: int) -> None:
    heads, kv_heads = model.num_heads, model.num_kv_heads
    experts = model.experts.count if model.experts is not None else 0
    fits = [n for n in range(1, heads + 1) if not (heads % n or experts % n or (kv_heads % n and n % kv_heads))]
    if ranks not in fits:
        of_experts = f" and {experts} experts" if experts else ""
        allowed = f"one of {', '.join(map(str, fits))}: {heads} heads, {kv_heads} key-value heads{of_experts} must divide"
        raise ParameterError("--tensor-parallel-size", ranks, allowed)


def kv_bytes(model: ModelConfig, dtype: torch.dtype, ranks: int) -> float:
    """Of one token on one rank: where there are more ranks than key-value heads, some have the same."""
    return KVCache.bytes_per_block(model, 1, dtype) / min(ranks, model.num_kv_heads)


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """The options by which the memory for keys and values is planned."""

    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    utilization: float


def seats(card: Card, config: EngineConfig, model: ModelConfig, dtype: torch.dtype, ranks: int, tied: bool) -> int:
    """Requests that run at the same time where nobody says, as the engine decides it."""
    from headrace.engine.build import resolve
    from headrace.model.shard import Shard
    from headrace.worker.seats import card_seats

    return card_seats(
        config, resolve(config, model, torch.device("cuda")), Shard(0, ranks).config(model), dtype, dtype,
        memory=int(card.memory), weight_bytes=int(weight_bytes(model, dtype, ranks, tied)), ranks=ranks,
    )  # fmt: skip


def weight_bytes(model: ModelConfig, dtype: torch.dtype, ranks: int, tied: bool) -> float:
    """Of one rank."""
    limits = Limits(model, dtype, Machine("", 1.0, 1.0))
    parameters = limits.parameters
    return dtype.itemsize * (limits.head * (1 if tied else 2) + parameters.plain + parameters.experts) / ranks


def num_blocks(card: Card, model: ModelConfig, dtype: torch.dtype, ranks: int, tied: bool, sizes: BlockSizes) -> int:
    """KV blocks that fit beside the weights, with what the engine's memory plan takes for its largest step.

    Raises CapacityError if none do.
    """
    from headrace.model.row_elements import row_elements
    from headrace.worker.memory_plan import GIB, MAX_GRAPHS, graph_bytes, logits_bytes

    item, weights = dtype.itemsize, weight_bytes(model, dtype, ranks, tied)
    largest = item * row_elements(model) * sizes.max_num_batched_tokens / ranks
    largest += logits_bytes(sizes.max_num_seqs, sizes.max_num_batched_tokens, model.vocab_size, item) / ranks
    largest += graph_bytes(model, sizes.max_num_seqs, item, MAX_GRAPHS) / ranks
    room = card.memory * sizes.utilization - weights - largest - GIB / 2
    blocks = int(room // (kv_bytes(model, dtype, ranks) * sizes.block_size))
    if blocks < 1:
        raise CapacityError(
            f"{weights / 1e9:.1f} GB of weights and {largest / 1e9:.1f} GB of its largest step leave no room for a KV cache in "
            f"{card.memory * sizes.utilization / 1e9:.1f} GB: take a card with more memory, or more of them "
            f"(--tensor-parallel-size)"
        )
    return min(blocks, sizes.max_num_seqs * -(-sizes.max_model_len // sizes.block_size))
