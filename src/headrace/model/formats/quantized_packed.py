"""compressed-tensors' pack-quantized: integers of 4 or 8 bits, packed along the columns; zero points along the rows."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from headrace.model.formats.quantized_matrix import Allowed, Read, Role, Rows, by_row, scale_role, unpacked
from headrace.model.formats.scheme import Scheme
from headrace.model.formats.tensor_file import FLOATS
from headrace.model.narrow import of_integers
from headrace.model.weight import Weight


def roles(scheme: Scheme, shape: tuple[int, int]) -> dict[str, Role]:
    rows, columns = shape
    each = 32 // scheme.bits
    scales = scale_role(scheme.tile, shape, "weight_scale", encodings=FLOATS)
    bytes_of = tuple(allowed._replace(encodings=("I8",)) for allowed in scales.allowed)  # as older versions wrote them
    groups = -(-columns // (scheme.tile or (1, 0))[1]) if scheme.tile and scheme.tile[1] else 1
    packed = Allowed(("I32",), (-(-rows // each), groups), each)
    return {
        "data": Role(("weight_packed",), (Allowed(("I32",), (rows, -(-columns // each))),)),
        "scale": scales,
        "zero": Role(("weight_zero_point",), (packed, *bytes_of), optional=not scheme.zeros),
        "order": Role(("weight_g_idx",), (Allowed(("I32",), (columns,), 0),), optional=True),
    }


def reader(scheme: Scheme, shape: tuple[int, int]) -> Read:
    """w = (data - zero) * scale of signed integers, which are packed as unsigned ones."""
    group, columns, middle = (scheme.tile or (1, 0))[1], shape[1], 1 << (scheme.bits - 1)

    def read(parts: Mapping[str, Rows], count: int) -> Weight:
        values = unpacked(parts["data"].decoded(), scheme.bits)[:, :columns]
        scales, zeros = by_row(parts["scale"].decoded(), count), None
        if (stored := parts.get("zero")) is not None:
            zeros = stored.decoded()
            if zeros.dtype == torch.int32:
                zeros = unpacked(zeros.t(), scheme.bits).t()[:count].float() - middle
            zeros = by_row(zeros, count)
        if scheme.bits == 4:
            return of_integers(values, scales, None if zeros is None else zeros + middle, group)
        return Weight((values ^ 128).view(torch.int8), scales, zeros, "int8", group)

    return read
