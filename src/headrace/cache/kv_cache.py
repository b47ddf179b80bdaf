"""The paged KV cache: one pair of tensors per layer and what a block costs in bytes."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from headrace.model.config import ModelConfig


class KVCache:
    """Keys and values of `num_blocks` blocks of `block_size` tokens: per layer [num_blocks, block_size, kv_heads, head_dim]."""

    def __init__(self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device):
        self.num_blocks, self.block_size = num_blocks, block_size
        shape = (num_blocks, block_size, config.num_kv_heads, config.head_dim)
        self.k = [zeros(shape, dtype, device) for _ in range(config.num_layers)]
        self.v = [zeros(shape, dtype, device) for _ in range(config.num_layers)]

    def write(self, layer: int, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
        """Store k, v [T, kv_heads, head_dim] at slot_mapping [T] (no padding rows: the torch path never pads)."""
        self.k[layer].flatten(0, 1).index_copy_(0, slot_mapping, k)
        self.v[layer].flatten(0, 1).index_copy_(0, slot_mapping, v)

    @staticmethod
    def bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
        return 2 * config.num_layers * block_size * config.kv_size * dtype.itemsize


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A zeroed tensor (an uninitialised NaN would survive a masked-out product as 0 * NaN).

    On the CPU its pages are not touched before they are used, so a large cache costs a laptop nothing at start.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros(int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)
