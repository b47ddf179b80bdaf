"""Whether there is room for the places of adapters, before they are made."""

from __future__ import annotations

import torch

from headrace.config import EngineConfig
from headrace.errors import CapacityError
from headrace.lora.targets import num_bytes
from headrace.machine import available_memory
from headrace.model.config import ModelConfig

GIB = 1 << 30


def check_room(config: EngineConfig, model: ModelConfig, ranks: int, dtype: torch.dtype, device: torch.device) -> None:
    """Of the whole `model`, of which this is one of so many ranks, with its weights loaded. Raises CapacityError with the
    numbers and the options to change."""
    slots, rank = config.max_loras, config.max_lora_rank
    needed = num_bytes(model, slots, rank, dtype.itemsize, config.lora_experts) // ranks
    free = available_memory() // ranks if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    if needed > free:
        experts = ", of experts too (lora_experts)," if config.lora_experts else ""
        raise CapacityError(
            f"places for max_loras = {slots} adapters of max_lora_rank = {rank}{experts} take {needed / GIB:.2f} GiB, and "
            f"{free / GIB:.2f} GiB of memory are free: fewer places, or smaller ones"
        )
