"""Where the device's memory goes, in bytes, term by term, decided before the KV cache is allocated.

The KV cache gets what is left of the budget (on a GPU less what other processes hold) after weights, workspaces, activations,
logits, state, graphs and reserve. The plan is arithmetic over the largest legal step, so that no legal request can run the
device out of memory later. A draft model computes before the target does, so of what both need for a moment the larger counts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from headrace.cache.kv_cache import KVCache
from headrace.cache.state_pool import StatePool
from headrace.config import EngineConfig
from headrace.errors import CapacityError
from headrace.machine import available_memory
from headrace.model.config import ModelConfig
from headrace.model.row_elements import row_elements
from headrace.sampling.logprobs import PROMPT_CHUNK_BYTES, SAMPLED_CHUNK_BYTES
from headrace.scheduler.config import Limits
from headrace.worker.batch_state import BatchState

logger = logging.getLogger(__name__)
GIB = 1 << 30
MAX_GRAPHS = 256  # captured decode steps that are kept; a draft model has half as many of its own
MAX_PROMPT_GRAPHS = 128  # captured steps with prompts, of up to `captured_tokens`
LEAST_TOKENS, MOST_TOKENS = 1024, 4096
LAUNCHES_WORTH = 3 * 10**11  # operations that an H200 does while a layer is launched kernel by kernel, half a millisecond
# of the driver, for a kernel in a graph; measured on an H200: 120 graphs of 28 layers took 0.7 MiB each, of 36 layers less
KERNEL_BYTES = 4096  # (`--log-level debug` shows what each capture took)
LAYER_KERNELS, EXPERTS_KERNELS, DELTA_KERNELS = 10, 8, 5  # of one layer of a captured step, at most; more where it has either
SUM_KERNELS = 4  # of more than two ranks, beside one for each: padded, exchanged, rounded, gathered
SNAPSHOT_SHARE = 4  # the part of what is left for the prefix cache that snapshots of states may take: one in so many
DRAFT_GRAPH_ROWS = 64  # requests that a captured step of a draft model serves at most


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of each term; `num_blocks` is what the KV term buys."""

    budget: int
    weights: int  # of the model and of a draft model
    workspaces: int  # of attention and of the small-batch path, tables of positions, and where ranks' cards meet
    activations: int  # of the largest step: max_num_batched_tokens rows
    logits: int  # of max_num_seqs rows and the drafts, with the float32 copies that processing makes
    state: int  # slot tables and penalty counts
    recurrent: int  # what layers without keys and values remember of each slot's sequence, and snapshots of that
    graphs: int  # captured steps: what they compute stays allocated, and the driver holds their kernels
    reserve: int  # CUDA context, fragmentation
    kv: int
    num_blocks: int
    num_snapshots: int = 0  # of the recurrent term

    def log(self) -> None:
        parts = ", ".join(f"{t} {getattr(self, t) / GIB:.2f}" for t in (*TERMS, "kv"))
        logger.info("memory plan (GiB): budget %.2f = %s; %d KV blocks", self.budget / GIB, parts, self.num_blocks)


TERMS = ("weights", "workspaces", "activations", "logits", "state", "recurrent", "graphs", "reserve")


def captured_tokens(model: ModelConfig, most: int = MOST_TOKENS) -> int:
    """Of a step with prompts, which has at most `most`: a power of two up to which launches take as long as the device."""
    experts = model.experts
    inner = model.intermediate_size if experts is None else experts.chosen * experts.inner + experts.shared_inner
    layer = model.hidden_size * (2 * model.q_size + 2 * model.kv_size + 3 * inner)
    balance = LAUNCHES_WORTH // (2 * layer)
    return min(most, max(LEAST_TOKENS, min(MOST_TOKENS, 1 << max(0, balance.bit_length() - 1))))


def summed_rows(model: ModelConfig, limits: Limits) -> int:
    """That captured steps have at most, and whose parts of several ranks are added up within them."""
    return max(limits.max_decode_rows, -(-captured_tokens(model, limits.max_num_batched_tokens) // 512) * 512)


def graph_bytes(model: ModelConfig, rows: int, item: int, count: int, sampled: int | None = None, ranks: int = 1) -> int:
    """Of `count` captured steps of up to `rows` rows, `sampled` (None: all) of which have logits: they share one buffer of
    these, and memory for what they compute.

    That is counted twice: what a size has left there may be too small for the next one. A layer has two sums,
    of more than two `ranks` several kernels each; where all cards see what they add up a sum is one kernel, as if ranks were 1
    (CardGroup).
    """
    more = EXPERTS_KERNELS * (model.experts is not None) + DELTA_KERNELS * (model.delta is not None)
    more += 2 * (ranks + SUM_KERNELS) * (ranks > 2)
    kernels = (LAYER_KERNELS + more) * (model.num_layers + 1)
    return count * kernels * KERNEL_BYTES + (2 * rows * row_elements(model) + (sampled or rows) * model.vocab_size) * item


def logits_bytes(rows: int, prompt_rows: int, vocab: int, item: int, ranks: int = 1) -> int:
    """Of sampling `rows` rows, or of the logprobs of so many rows of prompts, whichever is more.

    Penalties hold six float32 copies of the logits at their widest; the logprobs of all ids fewer, and what sorts a chunk of
    them. Those of prompts have logits, their copy and its logprobs, the widest intermediate twice. What other ranks have is
    gathered, and then put in order.
    """
    gathered = 0 if ranks == 1 else 2
    sampled = rows * vocab * (item * (1 + gathered) + 6 * 4) + 8 * min(SAMPLED_CHUNK_BYTES, 4 * rows * vocab)
    return max(sampled, (4 + gathered) * min(PROMPT_CHUNK_BYTES, 4 * prompt_rows * vocab))


def never(rows: int) -> bool:
    return False


def terms_of_limits(
    config: EngineConfig, limits: Limits, model: ModelConfig, dtype: torch.dtype, on_card: bool,
    draft: ModelConfig | None = None, ranks: int = 1, pushes: Callable[[int], bool] = never,
) -> dict[str, int]:  # fmt: skip
    """Those that follow from what bounds a step; the recurrent one without snapshots. Arguments as of plan_memory."""
    rows, block_size, item = limits.max_num_seqs, limits.block_size, dtype.itemsize
    vocab = max(model.vocab_size, draft.vocab_size if draft else 0)
    state_bytes = 0 if model.delta is None else StatePool.bytes_per_row(model.delta, dtype, limits.max_drafts)
    terms = {
        "logits": logits_bytes(rows + limits.max_draft_rows, limits.max_num_batched_tokens, vocab, item, ranks),
        "state": BatchState.bytes(rows, limits.max_model_len, block_size) + 4 * (rows + 1) * model.vocab_size,
        "recurrent": (rows + 1) * state_bytes,  # one of padded rows
        "graphs": 0,
        "reserve": GIB // 2 if on_card else 0,
    }
    if on_card and not config.enforce_eager:
        most = captured_tokens(model, limits.max_num_batched_tokens)
        apart = [1 if pushes(count) else ranks for count in (limits.max_decode_rows, most)]
        terms["graphs"] = graph_bytes(model, limits.max_decode_rows, item, MAX_GRAPHS, ranks=apart[0])
        # of several ranks others' parts of a sum, and others' logits, which are put in order
        sampled = rows if ranks == 1 else 3 * rows
        terms["graphs"] += graph_bytes(model, most, item, MAX_PROMPT_GRAPHS, sampled, apart[1])
        terms["graphs"] += 0 if ranks == 1 else 2 * most * 3 * model.hidden_size * item
        if draft is not None:
            terms["graphs"] += graph_bytes(draft, min(rows, DRAFT_GRAPH_ROWS), item, MAX_GRAPHS // 2)
    return terms


class CardBudget(NamedTuple):
    """Bytes of a card that may be used, with what others have taken."""

    budget: int
    used_by_others: int


def budget_of_card(config: EngineConfig, device: torch.device, peer_bytes: int) -> CardBudget:
    free, total = torch.cuda.mem_get_info(device)
    budget = int(total * config.gpu_memory_utilization)
    used_by_others = max(0, total - free - torch.cuda.memory_reserved(device) - peer_bytes)
    if config.memory_bytes is not None:  # the rest is for other models
        budget = min(budget, used_by_others + config.memory_bytes)
    return CardBudget(budget, used_by_others)


def plan_memory(
    config: EngineConfig,
    limits: Limits,
    model: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    weight_bytes: int,
    workspace_bytes: int,
    activation_bytes: int,
    cache_dtype: torch.dtype | None = None,
    loaded: bool = True,
    draft: ModelConfig | None = None,
    draft_block_bytes: int = 0,
    ranks: int = 1,
    pushes: Callable[[int], bool] = never,
    peer_bytes: int = 0,
) -> MemoryPlan:
    """Divide the device's memory, where the weights are already unless `loaded` says no. `limits.num_blocks` is what could be
    used, or was asked for; `dtype` is that of the logits, and of keys and values without a `cache_dtype`.

    `draft`: a draft model or head, whose weights and workspaces are in those terms. `ranks`: `model` and weights are the part
    of one of so many, each of which has a card to itself, or its share of the machine's memory; `pushes` says whether a sum of
    so many rows meets in memory that all cards see, of which this card has taken `peer_bytes` by the driver. Raises
    CapacityError with the numbers and the options to change.
    """
    terms = {"weights": weight_bytes, "workspaces": workspace_bytes + peer_bytes, "activations": activation_bytes}
    terms |= terms_of_limits(config, limits, model, dtype, device.type == "cuda", draft, ranks, pushes)
    state_bytes = 0 if model.delta is None else StatePool.bytes_per_row(model.delta, dtype, limits.max_drafts)
    if device.type == "cuda":
        budget, used_by_others = budget_of_card(config, device, peer_bytes)
        kv = budget - used_by_others - sum(terms.values())
    else:
        free = available_memory() // ranks - (0 if loaded else weight_bytes)
        if config.memory_bytes is not None:  # the rest is for other cores of this machine
            free = min(free, config.memory_bytes // ranks - weight_bytes)
        budget, used_by_others = free + weight_bytes, 0  # the weights are no longer in what is free
        if not loaded and free < 0:
            raise CapacityError(
                f"the weights take {weight_bytes / GIB:.2f} GiB, and {budget / GIB:.2f} GiB of memory are free: free some, or "
                f"take a model of fewer or narrower weights"
            )
        # a laptop also runs other things; the pages are only taken when they are used
        kv = min(budget - sum(terms.values()), free // 4, 16 * GIB)
    num_snapshots = min(limits.num_snapshots, max(0, kv) // SNAPSHOT_SHARE // state_bytes) if state_bytes else 0
    terms["recurrent"] += num_snapshots * state_bytes
    kv = kv - num_snapshots * state_bytes if config.kv_cache_bytes is None else config.kv_cache_bytes
    block_bytes = KVCache.bytes_per_block(model, limits.block_size, cache_dtype or dtype) + draft_block_bytes
    num_blocks = limits.num_blocks if config.num_kv_blocks is not None else min(kv // block_bytes, limits.num_blocks)
    if num_blocks < 1:
        taken = ", ".join(f"{name} {size / GIB:.2f}" for name, size in terms.items())
        share = "raise gpu_memory_utilization or lower" if device.type == "cuda" else "free some memory, or lower"
        raise CapacityError(
            f"no memory is left for the KV cache: {budget / GIB:.2f} GiB may be used, of which {used_by_others / GIB:.2f} are "
            f"taken by others, {taken}; {share} max_num_batched_tokens or max_num_seqs"
        )
    return MemoryPlan(budget, **terms, kv=num_blocks * block_bytes, num_blocks=num_blocks, num_snapshots=num_snapshots)
