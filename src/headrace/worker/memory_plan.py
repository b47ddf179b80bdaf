"""Where the device's memory goes, in bytes, term by term, decided before the KV cache is allocated.

The KV cache gets what is left of the budget (on a GPU less what other processes hold) after weights, workspaces, activations,
logits, state and reserve. The plan is arithmetic over the largest legal step, so that no legal request can run the device out
of memory later.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import torch

from headrace.cache.kv_cache import KVCache
from headrace.config import EngineConfig
from headrace.errors import CapacityError
from headrace.model.config import ModelConfig
from headrace.worker.batch_state import BatchState

logger = logging.getLogger(__name__)
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of each term; `num_blocks` is what the KV term buys."""

    budget: int
    weights: int
    workspaces: int  # of attention and of the small-batch path
    activations: int  # of the largest step: max_num_batched_tokens rows
    logits: int  # of max_num_seqs rows and the drafts, with the float32 copies that processing makes
    state: int  # slot tables and penalty counts
    reserve: int  # CUDA context, graphs, fragmentation
    kv: int
    num_blocks: int

    def log(self) -> None:
        terms = ("weights", "workspaces", "activations", "logits", "state", "reserve", "kv")
        parts = ", ".join(f"{t} {getattr(self, t) / GIB:.2f}" for t in terms)
        logger.info("memory plan (GiB): budget %.2f = %s; %d KV blocks", self.budget / GIB, parts, self.num_blocks)


def plan_memory(
    config: EngineConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    weight_bytes: int,
    workspace_bytes: int,
    extra_block_bytes: int,
) -> MemoryPlan:
    """Divide the device's memory; `config` is resolved. Raises CapacityError with the numbers and the options to change."""
    assert config.max_model_len and config.block_size and config.max_num_batched_tokens
    max_num_seqs, block_size, item = config.max_num_seqs, config.block_size, dtype.itemsize
    # the widest moment of a layer: residual, normed input, qkv, attention output, gate_up and its product
    row = 2 * model.hidden_size + 2 * model.q_size + 2 * model.kv_size + 3 * model.intermediate_size
    activations = config.max_num_batched_tokens * row * item
    # penalties hold six float32 copies of them at their widest, the logprobs of all ids fewer
    logits = (max_num_seqs + config.max_draft_rows) * model.vocab_size * (item + 6 * 4)
    if device.type == "cuda" and not config.enforce_eager:  # captured steps keep what they compute, and a copy for the sampler
        logits += 2 * max_num_seqs * model.vocab_size * item
    state = BatchState.bytes(max_num_seqs, config.max_model_len, block_size) + 4 * (max_num_seqs + 1) * model.vocab_size
    block_bytes = KVCache.bytes_per_block(model, block_size, dtype) + extra_block_bytes  # of a draft model's cache
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        budget, reserve = int(total * config.gpu_memory_utilization), GIB
        used_by_others = max(0, total - free - torch.cuda.memory_reserved(device))
    else:
        total = available_memory()
        # a laptop also runs other things: the cache takes a quarter of what is free, and its pages only when they are used
        budget, reserve, used_by_others = total, 0, 0
    rest = budget - used_by_others - weight_bytes - workspace_bytes - activations - logits - state - reserve
    kv = rest if device.type == "cuda" else min(rest, total // 4, 16 * GIB)
    if config.kv_cache_bytes is not None:
        kv = config.kv_cache_bytes
    # more than every slot at full length can hold would never be used
    most = max_num_seqs * -(-config.max_model_len // block_size)
    num_blocks = config.num_kv_blocks if config.num_kv_blocks is not None else min(kv // block_bytes, most)
    if num_blocks < 1:
        terms = {"weights": weight_bytes, "workspaces": workspace_bytes, "activations": activations, "logits": logits}
        taken = ", ".join(f"{name} {size / GIB:.2f}" for name, size in (terms | {"state": state, "reserve": reserve}).items())
        raise CapacityError(
            f"no memory is left for the KV cache: {budget / GIB:.2f} GiB may be used, of which {used_by_others / GIB:.2f} are "
            f"taken by others, {taken}; raise gpu_memory_utilization or lower max_num_batched_tokens or max_num_seqs"
        )
    return MemoryPlan(
        budget=budget,
        weights=weight_bytes,
        workspaces=workspace_bytes,
        activations=activations,
        logits=logits,
        state=state,
        reserve=reserve,
        kv=num_blocks * block_bytes,
        num_blocks=num_blocks,
    )


def available_memory() -> int:
    """Bytes of host memory that can be taken without swapping, by the cgroup's limit too where there is one."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/proc/meminfo") as f:
            available = next(int(line.split()[1]) * 1024 for line in f if line.startswith("MemAvailable"))
        with open("/sys/fs/cgroup/memory.max") as f:
            limit = f.read().strip()
        if limit != "max":
            with open("/sys/fs/cgroup/memory.current") as f:
                available = min(available, max(0, int(limit) - int(f.read())))
    except (OSError, StopIteration, ValueError):
        pass  # not Linux, or no such file: the physical size stands
    return available
