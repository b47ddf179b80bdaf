"""Where a tensor lies in a file and how its elements are encoded: what safetensors and GGUF files have in common.

No torch here: the process that serves HTTP reads headers and tokenizers only, and starts seconds sooner without it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

FLOATS = ("F32", "F16", "BF16")  # encodings in which matrices are not quantized
INTEGERS = ("I8", "U8", "I32", "I64", "BOOL")


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
    must be separated again, in its first `rotary` rows (0: all); `shift` is added to every element in float32 (-1 for the
    norms of Gemma GGUFs). `stride` > 0: these are some columns of a wider tensor, whose rows are so many bytes apart; what is
    read of a row begins `skip` elements before them. `transposed`: a matrix of floats whose columns lie one behind the other.
    """

    name: str
    shape: tuple[int, ...]
    encoding: Encoding
    file: Path
    offset: int  # bytes from the file's start
    num_bytes: int
    head_dim: int = 0
    shift: float = 0.0
    stride: int = 0
    skip: int = 0
    rotary: int = 0
    transposed: bool = False

    @property
    def together(self) -> int:
        """Rows of which none can be read without the others."""
        return self.num_rows if self.transposed else self.head_dim or 1

    @property
    def num_rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        return self.num_bytes // self.num_rows if self.num_rows else 0

    def columns(self, wanted: range) -> TensorEntry:
        """The same with these columns alone: of each row, the blocks are read that hold them."""
        size, num_bytes = self.encoding.block_size, self.encoding.block_bytes
        first, stop = wanted.start // size, -(-wanted.stop // size)
        return replace(
            self,
            shape=(self.num_rows, len(wanted)),
            offset=self.offset + first * num_bytes,
            num_bytes=self.num_rows * (stop - first) * num_bytes,
            stride=self.row_bytes,
            skip=wanted.start - first * size,
        )


def head_order(head_dim: int, rotary: int = 0) -> list[int]:
    """Which of a head's rows come first, where the halves of its first `rotary` (0: all) are interleaved and are put apart."""
    rotary = rotary or head_dim
    return [*range(0, rotary, 2), *range(1, rotary, 2), *range(rotary, head_dim)]


def overlap(entries: Iterable[TensorEntry]) -> str:
    """Of which two tensors of one file some bytes are the same, in words; nothing where each has its own."""
    ordered = sorted(entries, key=lambda e: (e.offset, e.num_bytes))
    pairs = (p for p in itertools.pairwise(ordered) if p[0].offset + p[0].num_bytes > p[1].offset)
    return next((f"the tensors {first.name!r} and {second.name!r} overlap" for first, second in pairs), "")


def num_elements(shape: tuple[int, ...]) -> int:
    return math.prod(shape)
