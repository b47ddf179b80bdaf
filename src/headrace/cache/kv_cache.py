"""The paged KV cache: one pair of tensors per layer and what a block costs in bytes."""

from __future__ import annotations

import contextlib
import math
import mmap
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

_HUGE_PAGE = 2 << 20


class CacheShape(Protocol):
    """What a model's cache follows from; a ModelConfig has it."""

    @property
    def num_layers(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...


SCALE_BYTES = 4  # of the scale that the numbers of one head at one position share in int8


class KVCache:
    """Keys and values of `num_blocks` blocks of `block_size` tokens: per layer [num_blocks, block_size, kv_heads, head_dim].

    In int8, which only the native CPU step has, head_dim is SCALE_BYTES longer; how it lays out a block is its own affair.
    """

    def __init__(self, shape: CacheShape, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device):
        self.num_blocks, self.block_size = num_blocks, block_size
        size = (num_blocks, block_size, shape.num_kv_heads, shape.head_dim + _scale_bytes(dtype))
        self.k = [zeros(size, dtype, device) for _ in range(shape.num_layers)]
        self.v = [zeros(size, dtype, device) for _ in range(shape.num_layers)]

    def write(self, layer: int, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
        """Store k, v [T, kv_heads, head_dim] at slot_mapping [T] (no padding rows: the torch path never pads)."""
        self.k[layer].flatten(0, 1).index_copy_(0, slot_mapping, k)
        self.v[layer].flatten(0, 1).index_copy_(0, slot_mapping, v)

    @staticmethod
    def bytes_per_block(shape: CacheShape, block_size: int, dtype: torch.dtype) -> int:
        head = shape.head_dim * dtype.itemsize + _scale_bytes(dtype)
        return 2 * shape.num_layers * block_size * shape.num_kv_heads * head


def _scale_bytes(dtype: torch.dtype) -> int:
    return SCALE_BYTES if dtype == torch.int8 else 0


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A zeroed tensor (an uninitialised NaN would survive a masked-out product as 0 * NaN).

    On the CPU its pages are not touched before they are used, so a large cache costs a laptop nothing at start; they are
    huge ones where the system has them, and begin at a cache line.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    pages = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    raw = np.frombuffer(pages, dtype=np.uint8)
    first = -raw.ctypes.data % _HUGE_PAGE
    return torch.from_numpy(raw[first : first + size]).view(dtype).view(shape)
