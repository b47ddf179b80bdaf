"""AWQ, GPTQ, Quark's of 4 bits: integers of matrices that lie as [in, out], scales and zero points of each group of inputs."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from headrace.errors import CheckpointError
from headrace.model.formats.quantized_matrix import Allowed, Read, Role, Rows, check_zeros, nibbles, unpacked
from headrace.model.formats.scheme import Scheme
from headrace.model.narrow import of_integers
from headrace.model.weight import Weight

_HALVES = ("F16", "BF16", "F32")
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # which of a word's numbers, from the lowest, is the next column's


def awq_roles(scheme: Scheme, shape: tuple[int, int]) -> dict[str, Role]:
    rows, columns = shape
    groups = _groups(scheme, columns)
    return {
        "data": Role(("qweight", "weight"), (Allowed(("I32",), (columns, -(-rows // 8)), 0),)),
        "scale": Role(("scales", "weight_scale"), (Allowed(_HALVES, (groups, rows), 0),)),
        "zero": Role(("qzeros", "weight_zero_point"), (Allowed(("I32",), (groups, -(-rows // 8)), 0),)),
    }


def awq_reader(scheme: Scheme, shape: tuple[int, int]) -> Read:
    """w = (data - zero) * scale, packed along the outputs. Quark has the same under other names, of signed numbers, too."""
    order, sign = list(_AWQ_ORDER), 8 if scheme.signed else 0

    def read(parts: Mapping[str, Rows], count: int) -> Weight:
        values, zeros = (nibbles(parts[role].decoded().unsqueeze(-1))[..., order].flatten(1).t() for role in ("data", "zero"))
        values, zeros, scales = values[:count] ^ sign, zeros[:count] ^ sign, parts["scale"].decoded().t().float()
        if not scheme.zeros:
            check_zeros(parts["zero"], zeros, sign)
        return of_integers(values, scales, zeros.float() if scheme.zeros else None, (scheme.tile or (1, 0))[1])

    return read


def gptq_roles(scheme: Scheme, shape: tuple[int, int]) -> dict[str, Role]:
    rows, columns = shape
    each, groups = 32 // scheme.bits, _groups(scheme, columns)
    return {
        "data": Role(("qweight",), (Allowed(("I32",), (-(-columns // each), rows), 0),)),
        "scale": Role(("scales",), (Allowed(_HALVES, (groups, rows), 0),)),
        "zero": Role(("qzeros",), (Allowed(("I32",), (groups, -(-rows // each)), 0),)),
        "order": Role(("g_idx",), (Allowed(("I32",), (columns,), 0),), optional=True),
    }


def gptq_reader(scheme: Scheme, shape: tuple[int, int]) -> Read:
    """w = (data - zero) * scale, packed along the inputs, zero points along the outputs and in v1 one too small."""
    columns, group = shape[1], (scheme.tile or (1, 0))[1]

    def read(parts: Mapping[str, Rows], count: int) -> Weight:
        values = unpacked(parts["data"].decoded().unsqueeze(-1), scheme.bits)  # [I / each, O, each]
        values = values.transpose(0, 1).flatten(1)[:, :columns]
        zeros = unpacked(parts["zero"].decoded(), scheme.bits).t()[:count].float() + scheme.zero_offset
        scales = parts["scale"].decoded().t().float()
        if scheme.bits == 4:
            return of_integers(values, scales, zeros, group)
        return Weight((values ^ 128).view(torch.int8), scales, zeros - 128, "int8", group)

    return read


def _groups(scheme: Scheme, columns: int) -> int:
    group = (scheme.tile or (1, 0))[1]
    return -(-columns // group) if group else 1


def check_order(order: Rows, group: int) -> None:
    """Raises CheckpointError if the columns of a matrix do not lie in their groups one behind the other."""
    found = order.decoded()
    columns = torch.arange(len(found), dtype=found.dtype, device=found.device)
    if not torch.equal(found, columns // group if group else torch.zeros_like(columns)):
        raise CheckpointError(
            f"{order.entry.file}: {order.entry.name!r} shuffles the columns among the groups (act-order, desc_act), "
            f"which is not supported: use a version made without it, or the unquantized checkpoint with --quantization int4"
        )
