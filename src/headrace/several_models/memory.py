"""How much memory models may take together, and how much of it each gets: from their checkpoints' headers, without torch.

A model's share is known before it is loaded; its core divides it by its own memory plan (worker/memory_plan.py) among weights,
KV cache and what a step computes with, and refuses to start if it is too small. So what is loaded never takes more than the sum
of the shares, and the sum never exceeds the budget.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from headrace.config import EngineConfig
from headrace.errors import CapacityError
from headrace.machine import available_memory, cuda_driver, num_cards

GIB = 1 << 30
HOST_SHARE = 0.9  # of the free memory: other programs want some, too


def budget_of(config: EngineConfig, wanted: int | None) -> tuple[int, bool]:
    """Bytes that models may take together, and whether they are a card's. `wanted`: what the operator has said."""
    on_card = config.device != "cpu" and num_cards() > 0
    if wanted is not None:
        return wanted, on_card
    if on_card:
        return int(card_bytes() * config.gpu_memory_utilization), True
    return int(available_memory() * HOST_SHARE), False


def card_bytes() -> int:
    """Of the first card that CUDA sees. No context is made."""
    cuda, device, size = cuda_driver(), ctypes.c_int(0), ctypes.c_size_t(0)
    there = cuda is not None and not cuda.cuInit(0) and not cuda.cuDeviceGet(ctypes.byref(device), 0)
    if cuda is None or not there or cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device):
        raise CapacityError("the driver does not say how much memory the card has: give --model-memory-bytes")
    return size.value


def shares(budget: int, weights: Sequence[int], asked: Sequence[int | None]) -> list[int]:
    """Bytes of each model: what was asked for, else its weights and an even part of what the weights of all leave; where that
    is less than a GiB, as when not all fit at once, at least an eighth of what its own weights leave."""
    even = (budget - sum(weights)) // len(weights)

    def room(weight: int) -> int:
        return even if even >= GIB else max(even, (budget - weight) // 8)

    return [
        min(budget, weight + room(weight)) if wanted is None else wanted for weight, wanted in zip(weights, asked, strict=True)
    ]


def most_at_once(budget: int, sizes: Sequence[int], pinned: Sequence[bool]) -> int:
    """How many models may be in memory at the same time."""
    left, count = budget - sum(size for size, stays in zip(sizes, pinned, strict=True) if stays), sum(pinned)
    for size in sorted(size for size, stays in zip(sizes, pinned, strict=True) if not stays):
        left -= size
        count += left >= 0
    return max(1, count)


def check_room(budget: int, names: Sequence[str], weights: Sequence[int], sizes: Sequence[int], pinned: Sequence[bool]) -> None:
    """Raises CapacityError for what can never be loaded."""
    stay = sum(size for size, stays in zip(sizes, pinned, strict=True) if stays)
    if stay > budget:
        raise CapacityError(f"the pinned models take {stay / GIB:.2f} GiB together, of a budget of {budget / GIB:.2f} GiB")
    for name, weight, size, stays in zip(names, weights, sizes, pinned, strict=True):
        room = budget if stays else budget - stay
        if size > room or weight >= size:
            beside = " beside the pinned models" if stay and not stays else ""
            raise CapacityError(
                f"the model {name} can never be loaded{beside}: its weights (with kv_cache_bytes) take {weight / GIB:.2f} GiB, "
                f"its share is {size / GIB:.2f}, and the room {room / GIB:.2f} of {budget / GIB:.2f} GiB (model-memory-bytes)"
            )
