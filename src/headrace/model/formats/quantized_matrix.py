"""A matrix that several tensors of a file make up, or the blocks of one: what is read of it, and by whom it is understood."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import lcm
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.errors import CheckpointError
from headrace.model.formats.blocks import decode_rows
from headrace.model.formats.scheme import Scheme
from headrace.model.formats.tensor_file import TensorEntry
from headrace.model.weight import Weight


class Rows(NamedTuple):
    """Some rows of a tensor of a file, as the bytes that they are."""

    entry: TensorEntry
    raw: Tensor  # uint8
    number: int

    def decoded(self) -> Tensor:
        return decode_rows(self.entry, self.raw, self.number)


Read = Callable[[Mapping[str, Rows], int], Weight]  # (what was read by name, so many rows of the matrix) -> these rows


class Part(NamedTuple):
    """A tensor of which each row goes with so many rows of the matrix; 0: it is read whole, whichever rows are wanted."""

    entry: TensorEntry
    rows: int = 1


@dataclass(frozen=True, slots=True)
class MatrixSource:
    """A matrix [O, I] in a file. It stands where an entry of floats would, under the name that such a tensor would have."""

    name: str
    shape: tuple[int, ...]
    parts: Mapping[str, Part]  # the numbers are "data"
    read: Read
    heads: int = 0  # `read` wants whole heads of so many rows
    scheme: Scheme | None = None  # as the config says, if it says

    @property
    def file(self) -> Path:
        return self.parts["data"].entry.file

    @property
    def unit(self) -> int:
        """Rows are read in multiples of these, or to the end."""
        data = self.parts["data"]
        if not data.rows:
            return self.shape[0]
        return lcm(self.heads or data.entry.together, *(part.rows or 1 for part in self.parts.values()))

    @property
    def scale_names(self) -> str:
        """The tensors that are to blame for a scale."""
        names = [part.entry.name for role, part in self.parts.items() if role not in ("data", "order")]
        return " or ".join(map(repr, names or [self.parts["data"].entry.name]))


class Allowed(NamedTuple):
    """What a tensor may be, and how its rows go with those of the matrix (see Part)."""

    encodings: tuple[str, ...]
    shape: tuple[int, ...]
    rows: int = 1


class Role(NamedTuple):
    """One of the tensors that make up a matrix: what may follow the module's name in its own, and what it may be."""

    suffixes: tuple[str, ...]
    allowed: tuple[Allowed, ...]
    optional: bool = False


def scale_role(tile: tuple[int, int] | None, shape: tuple[int, int], *suffixes: str, encodings: tuple[str, ...]) -> Role:
    """Scales of a matrix [O, I], each of a tile of `tile` rows and columns (see Scheme)."""
    rows, columns = shape
    of_all = (Allowed(encodings, (), 0), Allowed(encodings, (1,), 0), Allowed(encodings, (1, 1), 0))
    of_rows = (Allowed(encodings, (rows, 1)), Allowed(encodings, (rows,)))
    if tile is None:
        return Role(suffixes, of_all + of_rows)
    if not any(tile):
        return Role(suffixes, of_all)
    if tile == (1, 0):
        return Role(suffixes, of_rows)
    high, wide = -(-rows // tile[0]), -(-columns // (tile[1] or columns))
    blocks = (Allowed(encodings, (high, 1, wide, 1), tile[0]),) if tile[0] > 1 else ()  # as ModelOpt writes them
    return Role(suffixes, (Allowed(encodings, (high, wide), tile[0]), *blocks))


def by_row(scales: Tensor, count: int, of_all: bool = True) -> Tensor:
    """What was read of scales, as float32 [rows or blocks of rows, groups]. `of_all`: a single one is that of all rows."""
    scales = scales.float()
    return scales.reshape(1, 1).expand(count, 1) if of_all and scales.numel() == 1 else scales.view(len(scales), -1)


def check_zeros(stored: Rows, zeros: Tensor, middle: int = 0) -> None:
    """Raises CheckpointError if a file has zero points other than `middle` though its config says that there are none."""
    if (zeros != middle).any():
        why = "holds zero points, and by config.json there are none: another copy, or another version"
        raise CheckpointError(f"{stored.entry.file}: {stored.entry.name!r} {why}")


def nibbles(packed: Tensor) -> Tensor:
    """[..., n] of any type -> uint8 [..., 4-bit numbers], the low ones first."""
    raw = _bytes(packed)
    return torch.stack((raw & 15, raw >> 4), -1).flatten(-2)


def unpacked(packed: Tensor, bits: int) -> Tensor:
    """int32 [..., n] -> uint8 [..., 32 / bits * n]."""
    return nibbles(packed) if bits == 4 else _bytes(packed)


def _bytes(packed: Tensor) -> Tensor:
    """[..., n] of any type -> uint8 [..., bytes]. Flat in between: of a single column the stride may be anything."""
    return packed.reshape(-1).view(torch.uint8).view(*packed.shape[:-1], -1)
