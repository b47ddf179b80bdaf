"""Heads whose rotary pairs are neighbours in a file (GLM-4, ERNIE 4.5): their rows are put apart when they are read.

So every kernel rotates dimension i with i + dim / 2, and scores stay what they were: queries and keys are permuted alike.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TypeVar

from headrace.model.config import ModelConfig
from headrace.model.formats.quantized_matrix import MatrixSource, Read, Rows
from headrace.model.formats.tensor_file import TensorEntry, head_order
from headrace.model.narrow import permuted_heads
from headrace.model.weight import Weight

_ROTATED = re.compile(r"model\.layers\.\d+\.self_attn\.[qk]_proj\.(weight|bias)")
Source = TypeVar("Source", TensorEntry, TensorEntry | MatrixSource)


def order_of(name: str, config: ModelConfig) -> list[int] | None:
    """In which order the rows of each head of the tensor `name` are read; None: as they are."""
    if not config.rope_interleaved or not _ROTATED.fullmatch(name):
        return None
    return head_order(config.head_dim, config.rope.dim)


def in_halves(entry: Source, name: str, config: ModelConfig) -> Source:
    """The tensor `name`; if it is of queries or keys, it will be read in the order that kernels know."""
    if (order := order_of(name, config)) is None:
        return entry
    if isinstance(entry, TensorEntry):
        return replace(entry, head_dim=config.head_dim, rotary=config.rope.dim)
    return replace(entry, heads=config.head_dim, read=partial(_read, entry.read, order))


def _read(read: Read, order: list[int], parts: Mapping[str, Rows], count: int) -> Weight:
    return permuted_heads(read(parts, count), order)
