"""A weight matrix as it is held: floats, or narrow numbers with scales. What they stand for is said here, for all formats.

The narrow kinds know nothing of file formats, which are repacked once, when they are read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

Kind = Literal["float", "fp8", "int8", "int4", "fp4"]
TOGETHER = 128  # columns whose 4-bit numbers are packed together, and that no cut divides
BLOCK = 128  # rows and columns of a block of FP8 with one scale
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the codes 0 to 7; 8 to 15 are the same below zero
# Half floats that hold every value take half the bytes: the first that does is taken.
_SCALE_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(slots=True)
class Weight:
    """A matrix [N, K] = [out, in]: of kind "float" `data` itself, else w = (data - zeros) * scales in float32.

    data: fp8: float8_e4m3fn [N, K]. int8: int8 [N, K]. int4: uint8 [N, K / 2], two unsigned numbers a byte; K is a multiple of
    128, and of each run b of 128 columns byte b * 64 + j holds column b * 128 + j in its low half and b * 128 + 64 + j in its
    high one, so that a kernel multiplies two halves and interleaves nothing. fp4: the same with codes of e2m1
    (sign << 3 | code).
    scales, zeros: [ceil(N / scale_rows), G] float16, bfloat16 or float32, of G groups of `group` columns, the last of which may
    be cut short; `group` 0: of the whole row, G = 1. Without zeros they are 0, of int4 8. Zeros of int4 that are all whole
    numbers from 0 to 127 may be uint8.
    """

    data: Tensor
    scales: Tensor | None = None
    zeros: Tensor | None = None
    kind: Kind = "float"
    group: int = 0
    scale_rows: int = 1  # or 128: FP8 in blocks

    @classmethod
    def nothing(cls) -> Weight:
        """Where a layer has no such matrix."""
        return cls(torch.empty(0, 0))

    @classmethod
    def of(cls, matrix: Tensor | Weight) -> Weight:
        return matrix if isinstance(matrix, Weight) else cls(matrix)

    @property
    def tensors(self) -> list[Tensor]:
        return [t for t in (self.data, self.scales, self.zeros) if t is not None]

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        rows, columns = self.data.shape
        return rows, columns * 2 if self.kind in ("int4", "fp4") else columns


def dequantized(weight: Weight, dtype: torch.dtype) -> Tensor:
    """The matrix [N, K]: what the kind's formula gives in float32, rounded once to `dtype`. ValueError: an unknown kind."""
    if weight.kind == "float":
        return weight.data.to(dtype)
    if weight.kind not in get_args(Kind) or weight.scales is None:
        raise ValueError(f"no weights are of kind {weight.kind!r}, or these lack their scales")
    values = _values(weight)
    if weight.zeros is not None:
        values -= _spread(weight.zeros, weight)
    elif weight.kind == "int4":
        values -= 8
    return values.mul_(_spread(weight.scales, weight)).to(dtype)


def _values(weight: Weight) -> Tensor:
    if weight.kind == "int4":
        return unpack_int4(weight.data).float()
    if weight.kind == "fp4":
        return e2m1_values(unpack_int4(weight.data))
    return weight.data.float()


def _spread(scales: Tensor, weight: Weight) -> Tensor:
    """One for each element, or for each row, in float32."""
    rows, columns = weight.shape
    scales = scales.float()
    if weight.scale_rows > 1:
        scales = scales.repeat_interleave(weight.scale_rows, 0)[:rows]
    return scales.repeat_interleave(weight.group, 1)[:, :columns] if weight.group else scales


def pack_int4(values: Tensor) -> Tensor:
    """Integers 0 to 15 [N, K], K a multiple of 128 -> uint8 [N, K / 2], in the order that Weight names."""
    low, high = values.to(torch.uint8).unflatten(1, (-1, 2, TOGETHER // 2)).unbind(2)
    return (low | (high << 4)).flatten(1)


def unpack_int4(data: Tensor) -> Tensor:
    """uint8 [N, K / 2] -> uint8 [N, K], the inverse of `pack_int4`."""
    halves = data.unflatten(1, (-1, 1, TOGETHER // 2))
    return torch.cat([halves & 15, halves >> 4], 2).flatten(1)


def e2m1_values(codes: Tensor) -> Tensor:
    """Codes 0 to 15 -> what they stand for, float32."""
    table = torch.tensor([*E2M1, *(-value for value in E2M1)], device=codes.device)
    return table[codes.int()]


def smallest_exact(scales: Tensor, dtypes: tuple[torch.dtype, ...] = _SCALE_DTYPES) -> Tensor:
    """float32 -> the same numbers in the first of `dtypes` that holds them all, else as they are."""
    return next((half for dtype in dtypes if torch.equal((half := scales.to(dtype)).float(), scales)), scales)


def smallest(weight: Weight) -> Weight:
    """The same with scales and zeros in as few bytes as hold them."""
    dtypes = _SCALE_DTYPES[::-1] if weight.kind == "fp4" else _SCALE_DTYPES  # of MXFP4 powers of two, which become operands
    scales, zeros = (None if t is None else smallest_exact(t, dtypes) for t in (weight.scales, weight.zeros))
    if weight.kind == "int4" and zeros is not None:
        whole = zeros.clamp(0, 127).to(torch.uint8)
        zeros = whole if torch.equal(whole.float(), zeros.float()) else zeros
    return replace(weight, scales=scales, zeros=zeros)
