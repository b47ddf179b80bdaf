"""FP8 (e4m3) and integers of 8 and 4 bits, a byte each, with scales of the whole tensor, a row, a group or a block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from headrace.errors import CheckpointError
from headrace.model.formats.blocks import powers_of_two
from headrace.model.formats.quantized_matrix import Allowed, Read, Role, Rows, by_row, check_zeros, scale_role
from headrace.model.formats.scheme import Scheme
from headrace.model.formats.tensor_file import FLOATS
from headrace.model.narrow import of_integers
from headrace.model.weight import Kind, Weight

_DATA = {"fp8": "F8_E4M3", "int8": "I8"}


def roles(scheme: Scheme, shape: tuple[int, int]) -> dict[str, Role]:
    names = ("weight_scale", "weight_scale_inv", "_weight_scale")
    scales = scale_role(scheme.tile, shape, *names, encodings=(*FLOATS, "F8_E8M0", "U8"))
    found = {"data": Role(("weight", "_weight_qdata"), (Allowed((_DATA[scheme.format],), shape),)), "scale": scales}
    if scheme.format == "int8":
        zeros = scale_role(scheme.tile, shape, "weight_zero_point", "_weight_zero_point", encodings=("I8", "I32", *FLOATS))
        found["zero"] = zeros._replace(optional=not scheme.zeros)
    return found


def _scales(stored: Rows) -> Tensor:
    """Bytes are powers of two, as MXFP8 has them."""
    return powers_of_two(stored.raw.view(stored.number, -1)) if stored.entry.encoding.name == "U8" else stored.decoded()


def reader(scheme: Scheme, shape: tuple[int, int]) -> Read:
    """w = (data - zero) * scale; the scale multiplies, whether it is called inverse or not."""
    rows, group = scheme.tile or (1, 0)

    def read(parts: Mapping[str, Rows], count: int) -> Weight:
        scales = by_row(_scales(parts["scale"]), count, rows <= 1)
        zeros = by_row(parts["zero"].decoded(), count, rows <= 1) if "zero" in parts else None
        if zeros is not None and not scheme.zeros:
            check_zeros(parts["zero"], zeros)
            zeros = None
        kind: Kind = "fp8" if scheme.format == "fp8" else "int8"
        together, data = 1 if len(scales) == count else rows, parts["data"].decoded()
        if scheme.bits == 8:
            return Weight(data, scales, zeros, kind, group, together)
        values = data + 8
        if (values >> 4).any():
            held = f"{parts['data'].entry.name!r} holds numbers that do not fit into 4 bits, as which config.json has them"
            raise CheckpointError(f"{parts['data'].entry.file}: {held}: another copy, or another version")
        packed = of_integers(values.view(torch.uint8), scales, None if zeros is None else zeros + 8, group)
        return replace(packed, scale_rows=together)

    return read
