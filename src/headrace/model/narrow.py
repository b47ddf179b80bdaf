"""Cuts, stacks and packs narrow weights, and makes them of floats: what happens to a Weight between a file and its product."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from headrace.model.weight import BLOCK, TOGETHER, Weight, dequantized, e2m1_values, pack_int4, smallest, unpack_int4

_GROUPS = (128, 64, 32, 16)  # columns of one scale, as kernels take them
_FP8_MAX, _INT8_MAX, _INT4_MAX = 448, 127, 15


def of_integers(values: Tensor, scales: Tensor, zeros: Tensor | None, group: int) -> Weight:
    """Of unsigned 4-bit integers [N, K]: packed, or bytes where K is no multiple of what is packed together. Without `zeros`
    they are 8."""
    if values.shape[1] % TOGETHER == 0:
        return Weight(pack_int4(values), scales, zeros, "int4", group)
    values = values.to(torch.int8)
    return Weight(values if zeros is not None else values - 8, scales, zeros, "int8", group)


def of_e2m1(codes: Tensor, scales: Tensor, group: int) -> Weight:
    """Of codes [N, K] of e2m1; in bytes they are twice as large, of half the scale, and so integers."""
    if codes.shape[1] % TOGETHER == 0:
        return Weight(pack_int4(codes), scales, None, "fp4", group)
    return Weight((e2m1_values(codes) * 2).to(torch.int8), scales / 2, None, "int8", group)


def of_filled_e2m1(codes: Tensor, scales: Tensor, group: int) -> Weight:
    """As `of_e2m1`, packed for any number of columns: behind them come as many of zeros as are missing to a whole run. So
    experts are held, whose kernels take rows of x to be longer by zeros, too."""
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % TOGETHER))
    scales = torch.nn.functional.pad(scales, (0, codes.shape[1] // group - scales.shape[1]))
    return of_e2m1(codes, scales, group)


def quantized(rows: Tensor, kind: str) -> Weight:
    """Rows of floats [N, K] as fp8 or int8 with a scale for each, or as int4 in groups of 128 with a zero point, too."""
    rows = rows.float()
    if kind == "int4":
        return _int4_of(rows)
    largest = rows.abs().amax(1, keepdim=True)
    if kind == "fp8":
        scales = largest / _FP8_MAX
        return Weight((rows / _no_zero(scales)).clamp_(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn), scales, None, "fp8")
    scales = largest / _INT8_MAX
    return Weight((rows / _no_zero(scales)).round_().to(torch.int8), scales, None, "int8")


def _int4_of(rows: Tensor) -> Weight:
    """Zero is always a number that the group holds exactly. Scales are rounded up to 16 bits before the numbers are: so they
    are kept in these, and no number lies beyond the last step."""
    count, columns = rows.shape
    groups = torch.nn.functional.pad(rows, (0, -columns % TOGETHER)).view(count, -1, TOGETHER)
    low, high = groups.amin(2).clamp_(max=0), groups.amax(2).clamp_(min=0)
    wanted = (high - low) / _INT4_MAX
    scales = wanted.half()
    above = (scales.view(torch.int16) + 1).view(torch.float16)  # the next float, as scales are not negative
    scales = torch.where(scales < wanted, above, scales).float()
    scales = torch.where(scales.isinf(), wanted, scales)
    zeros = (-low / _no_zero(scales)).round_()
    values = (groups / _no_zero(scales).unsqueeze(2)).round_().add_(zeros.unsqueeze(2)).clamp_(0, _INT4_MAX)
    return of_integers(values.view(count, -1)[:, :columns].to(torch.uint8), scales, zeros, TOGETHER)


def _no_zero(scales: Tensor) -> Tensor:
    return torch.where(scales == 0, 1.0, scales)


def rows_of(weight: Weight, rows: range) -> Weight:
    """Some of its rows. A cut through blocks of FP8 gives every row a scale of its own."""
    if len(rows) == weight.shape[0]:
        return weight
    if weight.scale_rows > 1 and rows.start % weight.scale_rows:
        weight = _scales_by_row(weight)
    part, first, stop = slice(rows.start, rows.stop), rows.start // weight.scale_rows, -(-rows.stop // weight.scale_rows)
    scales, zeros = (None if t is None else t[first:stop] for t in (weight.scales, weight.zeros))
    return replace(weight, data=weight.data[part], scales=scales, zeros=zeros)


def permuted_heads(weight: Weight, order: list[int]) -> Weight:
    """Of whole heads, the rows of each in another order: the `order[i]`th comes ith."""
    if weight.scale_rows % len(order):
        weight = _scales_by_row(weight)

    def permuted(rows: Tensor | None) -> Tensor | None:
        return None if rows is None else rows.unflatten(0, (-1, len(order)))[:, order].flatten(0, 1)

    data = permuted(weight.data.view(torch.uint8) if weight.kind == "fp8" else weight.data)
    assert data is not None
    of_rows = weight.scale_rows == 1
    scales, zeros = (permuted(t) if of_rows else t for t in (weight.scales, weight.zeros))
    return replace(weight, data=data.view(weight.data.dtype), scales=scales, zeros=zeros)


def columns_of(weight: Weight, columns: range) -> Weight:
    """Some of its columns. A cut through a group makes all groups smaller, one through what is packed together bytes of it."""
    if len(columns) == weight.shape[1]:
        return weight
    if weight.shape[1] != weight.data.shape[1]:
        if columns.start % TOGETHER or len(columns) % TOGETHER:
            return columns_of(in_bytes(weight), columns)
        data = weight.data[:, columns.start // 2 : columns.stop // 2]
    else:
        data = weight.data[:, columns.start : columns.stop]
    if not weight.group:
        return replace(weight, data=data)
    weight = _regrouped(weight, math.gcd(weight.group, columns.start))
    first, stop = columns.start // weight.group, -(-columns.stop // weight.group)
    scales, zeros = (None if t is None else t[:, first:stop] for t in (weight.scales, weight.zeros))
    return fitted(replace(weight, data=data, scales=scales, zeros=zeros))


def fitted(weight: Weight) -> Weight:
    """The same with groups as kernels take them; floats where there are none such."""
    if weight.kind == "float":
        return weight
    packed = weight.kind in ("int4", "fp4")
    if not weight.group:
        weight = _regrouped(weight, TOGETHER) if packed else weight
    elif weight.group not in _GROUPS:
        group = next((group for group in _GROUPS if weight.group % group == 0), 0)
        if not group:
            return Weight(dequantized(weight, torch.float32))
        weight = _regrouped(weight, group)
    if weight.scale_rows > 1 and (weight.kind, weight.scale_rows, weight.group) != ("fp8", BLOCK, BLOCK):
        weight = _scales_by_row(weight)
    return weight


def stacked(parts: Sequence[Weight], dtype: torch.dtype) -> Weight:
    """One above the other: as the narrowest kind that holds all of them exactly, floats in `dtype` if there is none."""
    kinds = {part.kind for part in parts}
    if "float" in kinds or ("fp8" in kinds and len(kinds) > 1):
        return Weight(torch.cat([dequantized(part, dtype) for part in parts]))
    if len(kinds) > 1:
        parts = [in_bytes(part) for part in parts]
    if len({part.group for part in parts}) > 1:
        finest = min(part.group for part in parts if part.group)
        parts = [_regrouped(part, finest) for part in parts]
    if any(part.scale_rows > 1 for part in parts) and not (
        len({part.scale_rows for part in parts}) == 1 and all(part.shape[0] % part.scale_rows == 0 for part in parts[:-1])
    ):
        parts = [_scales_by_row(part) for part in parts]
    if any(part.zeros is not None for part in parts):
        parts = [_with_zeros(part) for part in parts]
    scales, zeros = _joined([part.scales for part in parts]), _joined([part.zeros for part in parts])
    first = parts[0].data
    data = torch.cat([part.data.view(torch.uint8) for part in parts]).view(first.dtype)
    return replace(parts[0], data=data, scales=scales, zeros=zeros)


def compact(weight: Weight, num_rows: int) -> Weight:
    """In tensors of its own, as small as they may be, with zeros below it up to `num_rows`."""
    if weight.kind == "float":
        return Weight(_padded(weight.data, num_rows))
    if weight.shape[0] < num_rows:
        weight = _scales_by_row(weight)
    data = _padded(weight.data.view(torch.uint8), num_rows).view(weight.data.dtype)
    rows = -(-num_rows // weight.scale_rows)
    scales, zeros = (None if t is None else _padded(t.float(), rows) for t in (weight.scales, weight.zeros))
    return smallest(replace(weight, data=data, scales=scales, zeros=zeros))


def _padded(tensor: Tensor, num_rows: int) -> Tensor:
    if len(tensor) < num_rows:
        tensor = torch.cat([tensor, tensor.new_zeros((num_rows - len(tensor), *tensor.shape[1:]))])
    return tensor.contiguous()


def _joined(tensors: Sequence[Tensor | None]) -> Tensor | None:
    present = [tensor.float() for tensor in tensors if tensor is not None]
    return torch.cat(present) if present else None


def in_bytes(weight: Weight) -> Weight:
    """A weight of packed 4-bit numbers as int8."""
    if weight.kind == "int4":
        values = unpack_int4(weight.data).to(torch.int8)
        return replace(weight, kind="int8", data=values if weight.zeros is not None else values - 8)
    if weight.kind == "fp4":
        assert weight.scales is not None
        values = (e2m1_values(unpack_int4(weight.data)) * 2).to(torch.int8)
        return replace(weight, kind="int8", data=values, scales=weight.scales.float() / 2)
    return weight


def _regrouped(weight: Weight, group: int) -> Weight:
    """With a scale for each `group` columns, of which the groups that it has are multiples."""
    if weight.group == group:
        return weight
    columns = weight.shape[1]
    count, each = -(-columns // group), weight.group // group if weight.group else -(-columns // group)
    scales, zeros = (
        None if t is None else t.repeat_interleave(each, 1)[:, :count] for t in (weight.scales, weight.zeros)
    )  # fmt: skip
    return replace(weight, scales=scales, zeros=zeros, group=group)


def _scales_by_row(weight: Weight) -> Weight:
    if weight.scale_rows == 1:
        return weight
    scales, zeros = (
        None if t is None else t.repeat_interleave(weight.scale_rows, 0)[: weight.shape[0]]
        for t in (weight.scales, weight.zeros)
    )  # fmt: skip
    return replace(weight, scales=scales, zeros=zeros, scale_rows=1)


def _with_zeros(weight: Weight) -> Weight:
    assert weight.scales is not None
    if weight.zeros is not None:
        return weight
    return replace(weight, zeros=torch.full_like(weight.scales, 8.0 if weight.kind == "int4" else 0.0))
