"""Where a tensor lies in a file and how its elements are encoded: what safetensors and GGUF files have in common."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Encoding:
    """How `block_size` elements are stored in `block_bytes` bytes.

    `decode(raw)` takes uint8 bytes [n * block_bytes] on any device and returns n * block_size elements there, in the type
    that the file holds them in (plain types) or in float32 (quantized types).
    """

    name: str
    block_size: int
    block_bytes: int
    decode: Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file. Its position and size were checked against the file's size by whoever made the entry.

    `head_dim` > 0 says that within each head of that many rows the two rotary halves are interleaved (llama GGUFs) and
    must be separated again; `shift` is added to every element in float32 (-1 for the norms of Gemma GGUFs).
    """

    name: str
    shape: tuple[int, ...]
    encoding: Encoding
    file: Path
    offset: int  # bytes from the file's start
    num_bytes: int
    head_dim: int = 0
    shift: float = 0.0

    @property
    def num_rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        return self.num_bytes // self.num_rows if self.num_rows else 0

    def decode_rows(self, raw: Tensor, num_rows: int) -> Tensor:
        """`num_rows` rows from their bytes `raw` (uint8, any device): [num_rows, *shape[1:]]; whole heads if head_dim."""
        out = self.encoding.decode(raw).view(num_rows, *self.shape[1:])
        if self.head_dim:
            pairs = out.view(num_rows // self.head_dim, self.head_dim // 2, 2, *self.shape[1:])
            out = pairs.transpose(1, 2).reshape(num_rows, *self.shape[1:])
        return out.float() + self.shift if self.shift else out


def plain_encoding(name: str, dtype: torch.dtype) -> Encoding:
    """The encoding of elements that are stored as they are, little-endian."""
    return Encoding(name, 1, dtype.itemsize, lambda raw: raw.view(dtype))


def num_elements(shape: tuple[int, ...]) -> int:
    return math.prod(shape)
