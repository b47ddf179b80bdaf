"""The paged KV cache: one pair of tensors per layer and what a block costs in bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.cache import fp8
from headrace.cache.layer_shape import CacheShape
from headrace.cache.memory import zeros
from headrace.cache.state_pool import NoStates, States

SCALE_BYTES = 4  # of the scale that the numbers of one head at one position share in int8 and FP8


class KVCache:
    """Keys and values of `num_blocks` blocks of `block_size` tokens: per layer [num_blocks, block_size, kv_heads, head_dim].

    In int8, which only the native CPU step has, head_dim is SCALE_BYTES longer; how it lays out a block is its own affair.
    In FP8 `scales` has those of keys and values: per layer [num_blocks, kv_heads, block_size] each.
    """

    def __init__(self, shape: CacheShape, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device):
        self.num_blocks, self.block_size = num_blocks, block_size
        extra, place = SCALE_BYTES if dtype == torch.int8 else 0, (dtype, device)
        self.k = [zeros((num_blocks, block_size, heads, k + extra), *place) for heads, k, _ in shape.kv_shapes]
        self.v = [zeros((num_blocks, block_size, heads, v + extra), *place) for heads, _, v in shape.kv_shapes]
        self.first = next(layer for layer, of in enumerate(shape.kv_shapes) if of.heads)  # that keeps anything
        self.states: States = NoStates()  # of layers that keep no keys and values
        self.scales: list[fp8.Scales] = [(None, None)] * len(self.k)
        if dtype == fp8.DTYPE:
            one = [((num_blocks, of.heads, block_size), torch.float32, device) for of in shape.kv_shapes]
            self.scales = [(zeros(*size), zeros(*size)) for size in one]

    def write(self, layer: int, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
        """Store k, v [T, kv_heads, head_dim] at slot_mapping [T] (no padding rows: the torch path never pads)."""
        for x, data, scales in zip((k, v), (self.k[layer], self.v[layer]), self.scales[layer], strict=True):
            if scales is None:
                data.flatten(0, 1).index_copy_(0, slot_mapping, x)
            else:
                fp8.write(data, scales, x, slot_mapping)

    @staticmethod
    def bytes_per_block(shape: CacheShape, block_size: int, dtype: torch.dtype) -> int:
        scale = SCALE_BYTES if dtype.itemsize == 1 else 0
        return block_size * sum(n * ((k + v) * dtype.itemsize + 2 * scale) for n, k, v in shape.kv_shapes)
