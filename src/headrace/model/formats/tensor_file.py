"""Where a tensor lies in a file and how its elements are encoded: what safetensors and GGUF files have in common.

No torch here: the process that serves HTTP reads headers and tokenizers only, and starts seconds sooner without it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Encoding:
    """`block_size` elements are stored in `block_bytes` bytes; `blocks.py` decodes them, by name."""

    name: str
    block_size: int
    block_bytes: int


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


def num_elements(shape: tuple[int, ...]) -> int:
    return math.prod(shape)
