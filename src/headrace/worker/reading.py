"""The limit of a step of decodes: what it reads of weights and cache, over the rate at which the machine reads.

A lower bound, for whoever wants to see how near a step comes to it. Left out are layers with a window, states of delta nets,
drafts, and all that is computed. Mixtures of experts have none: what their steps read is chosen by the rows.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from headrace.cache.kv_cache import KVCache
from headrace.cache.layer_shape import LayerShape
from headrace.machine import available_memory
from headrace.model.config import ModelConfig

CPU_BYTES = 2**27  # that a CPU reads to be measured: more than its caches hold
CPU_ROUNDS = 3


@dataclass(slots=True)
class Reading:
    """`weights`: bytes that a step reads, however few its rows; `token`: bytes of keys and values for each token of context;
    `threads` of a CPU, 0 for a card; `rate`: bytes a second, 0 where it has not been measured."""

    weights: int
    token: int
    threads: int
    rate: float = 0.0

    def measure(self) -> None:
        """Of a CPU, once; takes some 50 ms, in which nothing else should run, and memory that must be there twice over."""
        if self.rate or not self.threads or available_memory() < 2 * CPU_BYTES:
            return
        numbers = np.ones(CPU_BYTES // 8, np.int64)
        with ThreadPoolExecutor(self.threads) as pool:
            for _ in range(CPU_ROUNDS):
                began = time.perf_counter()
                list(pool.map(np.max, np.array_split(numbers, self.threads)))
                self.rate = max(self.rate, CPU_BYTES / (time.perf_counter() - began))


@dataclass(frozen=True, slots=True)
class Layers:
    """Some of a model's, as the cache is told of them."""

    kv_shapes: tuple[LayerShape, ...]


def reading_of(
    model: ModelConfig, weights: int, cache_dtype: torch.dtype, device: torch.device, threads: int
) -> Reading | None:
    """Of a rank's part of a model; `threads` that run its steps on a CPU, 0 where torch does, of which it is not known."""
    if model.experts is not None or (device.type == "cpu" and not threads):
        return None
    see_all = tuple(of for layer, of in enumerate(model.kv_shapes) if not model.window(layer))
    token = KVCache.bytes_per_block(Layers(see_all), 1, cache_dtype)
    if device.type == "cpu":
        return Reading(weights, token, threads)
    card = torch.cuda.get_device_properties(device)
    # kHz, twice a clock, as the data sheets count
    rate = 2e3 * card.memory_clock_rate * card.memory_bus_width / 8
    return Reading(weights, token, 0, rate) if rate else None
