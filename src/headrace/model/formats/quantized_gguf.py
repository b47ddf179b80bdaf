"""The blocks of a GGUF file as they are: integers with scales and, where they have them, zero points, of 16 or 32 columns.

The layouts are those of ggml's block structs (see blocks.py, which decodes them to floats).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.model.formats.blocks import (
    fifth_bits,
    half,
    k_scales,
    mxfp4_codes,
    powers_of_two,
    q5_k_numbers,
    q6_k_numbers,
    q6_k_scales,
)
from headrace.model.formats.quantized_matrix import MatrixSource, Part, Rows
from headrace.model.formats.tensor_file import TensorEntry
from headrace.model.narrow import of_e2m1, of_filled_e2m1, of_integers
from headrace.model.weight import Weight

_IQ4_NL_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


class _Blocks(NamedTuple):
    """Of n blocks: numbers [n, block size], scales and zero points [n, groups in a block] in float32."""

    numbers: Tensor
    scales: Tensor
    zeros: Tensor | None = None


def _q4_0(blocks: Tensor) -> _Blocks:
    return _Blocks(_nibbles(blocks[:, 2:]), half(blocks[:, :2]))


def _q4_1(blocks: Tensor) -> _Blocks:
    scales = half(blocks[:, :4])
    return _with_minima(_nibbles(blocks[:, 4:]), scales[:, :1], -scales[:, 1:])


def _q5_0(blocks: Tensor) -> _Blocks:
    return _Blocks((_nibbles(blocks[:, 6:]) | fifth_bits(blocks[:, 2:6])).view(torch.int8) - 16, half(blocks[:, :2]))


def _q5_1(blocks: Tensor) -> _Blocks:
    scales = half(blocks[:, :4])
    return _with_minima(_nibbles(blocks[:, 8:]) | fifth_bits(blocks[:, 4:8]), scales[:, :1], -scales[:, 1:])


def _iq4_nl(blocks: Tensor) -> _Blocks:
    values = torch.tensor(_IQ4_NL_VALUES, dtype=torch.int8, device=blocks.device)
    return _Blocks(values[_nibbles(blocks[:, 2:]).int()], half(blocks[:, :2]))


def _q8_0(blocks: Tensor) -> _Blocks:
    return _Blocks(blocks[:, 2:].contiguous().view(torch.int8), half(blocks[:, :2]))


def _q4_k(blocks: Tensor) -> _Blocks:
    return _with_minima(_nibbles(blocks[:, 16:].unflatten(-1, (4, 32))).flatten(1), *k_scales(blocks))


def _q5_k(blocks: Tensor) -> _Blocks:
    return _with_minima(q5_k_numbers(blocks).flatten(1), *k_scales(blocks))


def _q6_k(blocks: Tensor) -> _Blocks:
    return _Blocks((q6_k_numbers(blocks).view(torch.int8) - 32).flatten(1), q6_k_scales(blocks))


def _nibbles(packed: Tensor) -> Tensor:
    """[n, ..., b] -> [n, ..., 2b]: all low ones, then all high ones."""
    return torch.cat([packed & 15, packed >> 4], -1)


def _with_minima(numbers: Tensor, scales: Tensor, minima: Tensor) -> _Blocks:
    """w = number * scale - minimum. Without a scale the minimum is one, and all numbers are one below their zero."""
    none = scales == 0
    zeros = torch.where(none, 1.0, minima / torch.where(none, 1.0, scales))
    grouped = numbers.unflatten(1, (scales.shape[1], -1)).masked_fill(none.unsqueeze(-1), 0)
    return _Blocks(grouped.flatten(1), torch.where(none, minima, scales), zeros)


_DECODERS: Mapping[str, tuple[Callable[[Tensor], _Blocks], int]] = MappingProxyType({  # and the bits that hold the numbers
    "Q4_0": (_q4_0, 4), "Q4_1": (_q4_1, 4), "Q5_0": (_q5_0, 8), "Q5_1": (_q5_1, 8), "Q8_0": (_q8_0, 8),
    "Q4_K": (_q4_k, 4), "Q5_K": (_q5_k, 8), "Q6_K": (_q6_k, 8), "IQ4_NL": (_iq4_nl, 8),
})  # fmt: skip


def gguf_source(entry: TensorEntry) -> MatrixSource | None:
    """Of a matrix whose blocks can stay as narrow as they are."""
    if entry.encoding.name not in (*_DECODERS, "MXFP4") or len(entry.shape) != 2:
        return None
    return MatrixSource(entry.name, entry.shape, {"data": Part(entry)}, _read)


def _read(parts: Mapping[str, Rows], count: int) -> Weight:
    entry, raw, _ = parts["data"]
    if entry.encoding.name == "MXFP4":
        return _read_mxfp4(entry, raw.view(-1, 17), count)
    decode, bits = _DECODERS[entry.encoding.name]
    found = decode(raw.view(-1, entry.encoding.block_bytes))
    group = entry.encoding.block_size // found.scales.shape[1]
    numbers, scales, zeros = (None if t is None else _usual_order(t.reshape(count, -1), entry.head_dim) for t in found)
    assert numbers is not None and scales is not None
    if bits == 4:
        return of_integers(numbers, scales, zeros, group)
    return Weight(numbers.view(torch.int8), scales, zeros, "int8", group)


def _read_mxfp4(entry: TensorEntry, blocks: Tensor, count: int) -> Weight:
    codes, scales = (
        _usual_order(t.reshape(count, -1), entry.head_dim) for t in (mxfp4_codes(blocks), powers_of_two(blocks[:, :1]))
    )
    return (of_filled_e2m1 if ".experts." in entry.name else of_e2m1)(codes, scales, 32)


def _usual_order(rows: Tensor, head_dim: int) -> Tensor:
    """The halves of every head apart, which llama's files interleave."""
    return rows.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2) if head_dim else rows
