"""MXFP4 and NVFP4: 4-bit floats (e2m1) with small scales for groups of 32 or 16, and of NVFP4 one for all of a matrix."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from headrace.model.formats.blocks import powers_of_two
from headrace.model.formats.quantized_matrix import Allowed, Read, Role, Rows, by_row, nibbles, scale_role
from headrace.model.formats.scheme import Scheme
from headrace.model.narrow import of_e2m1
from headrace.model.weight import Weight

_INVERSE = "weight_global_scale"


def _data(shape: tuple[int, int], *suffixes: str) -> Role:
    return Role(suffixes, (Allowed(("U8",), (shape[0], -(-shape[1] // 2))),))


def mxfp4_roles(scheme: Scheme, shape: tuple[int, int]) -> dict[str, Role]:
    scales = scale_role(scheme.tile, shape, "weight_scale", encodings=("U8", "F8_E8M0"))
    return {"data": _data(shape, "weight_packed", "weight"), "scale": scales}


def mxfp4_reader(scheme: Scheme, shape: tuple[int, int]) -> Read:
    """w = e2m1 * 2^(scale - 127)."""

    def read(parts: Mapping[str, Rows], count: int) -> Weight:
        return _weight(parts, by_row(powers_of_two(parts["scale"].raw.view(count, -1)), count), scheme, shape)

    return read


def nvfp4_roles(scheme: Scheme, shape: tuple[int, int]) -> dict[str, Role]:
    return {
        "data": _data(shape, "weight_packed", "weight"),
        "scale": scale_role(scheme.tile, shape, "weight_scale", encodings=("F8_E4M3",)),
        "of_all": scale_role((0, 0), shape, _INVERSE, "weight_scale_2", encodings=("F32",)),
    }


def nvfp4_reader(scheme: Scheme, shape: tuple[int, int]) -> Read:
    """w = e2m1 * (scale * of_all), or / of_all: ModelOpt keeps the factor, compressed-tensors its inverse."""

    def read(parts: Mapping[str, Rows], count: int) -> Weight:
        scales, of_all = by_row(parts["scale"].decoded(), count), parts["of_all"].decoded()
        inverse = parts["of_all"].entry.name.endswith(_INVERSE)
        return _weight(parts, scales / of_all if inverse else scales * of_all, scheme, shape)

    return read


def _weight(parts: Mapping[str, Rows], scales: Tensor, scheme: Scheme, shape: tuple[int, int]) -> Weight:
    codes = nibbles(parts["data"].decoded())[:, : shape[1]]
    return of_e2m1(codes, scales, (scheme.tile or (1, 0))[1])
