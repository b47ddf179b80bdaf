"""The paged KV cache: one pair of tensors per layer and what a block costs in bytes."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from headrace.cache import fp8
from headrace.cache.memory import zeros


class CacheShape(Protocol):
    """What a model's cache follows from; a ModelConfig has it."""

    @property
    def num_layers(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...


SCALE_BYTES = 4  # of the scale that the numbers of one head at one position share in int8 and FP8


class KVCache:
    """Keys and values of `num_blocks` blocks of `block_size` tokens: per layer [num_blocks, block_size, kv_heads, head_dim].

    In int8, which only the native CPU step has, head_dim is SCALE_BYTES longer; how it lays out a block is its own affair.
    In FP8 `scales` has those of keys and values: per layer [num_blocks, kv_heads, block_size] each.
    """

    def __init__(self, shape: CacheShape, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device):
        self.num_blocks, self.block_size = num_blocks, block_size
        size = (num_blocks, block_size, shape.num_kv_heads, shape.head_dim + (SCALE_BYTES if dtype == torch.int8 else 0))
        self.k = [zeros(size, dtype, device) for _ in range(shape.num_layers)]
        self.v = [zeros(size, dtype, device) for _ in range(shape.num_layers)]
        self.scales: list[fp8.Scales] = [(None, None)] * shape.num_layers
        if dtype == fp8.DTYPE:
            pair = (num_blocks, shape.num_kv_heads, block_size), torch.float32, device
            self.scales = [(zeros(*pair), zeros(*pair)) for _ in range(shape.num_layers)]

    def write(self, layer: int, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
        """Store k, v [T, kv_heads, head_dim] at slot_mapping [T] (no padding rows: the torch path never pads)."""
        for x, data, scales in zip((k, v), (self.k[layer], self.v[layer]), self.scales[layer], strict=True):
            if scales is None:
                data.flatten(0, 1).index_copy_(0, slot_mapping, x)
            else:
                fp8.write(data, scales, x, slot_mapping)

    @staticmethod
    def bytes_per_block(shape: CacheShape, block_size: int, dtype: torch.dtype) -> int:
        head = shape.head_dim * dtype.itemsize + (SCALE_BYTES if dtype.itemsize == 1 else 0)
        return 2 * shape.num_layers * block_size * shape.num_kv_heads * head
