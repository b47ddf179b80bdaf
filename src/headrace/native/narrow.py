"""Narrow weights of safetensors as rows of native formats: the same numbers, with scales for each 32 inputs."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.errors import CheckpointError
from headrace.model.formats.quantized_matrix import MatrixSource
from headrace.model.formats.tensor_file import TensorEntry
from headrace.model.narrow import in_bytes
from headrace.model.narrow_loader import Source
from headrace.model.weight import Weight, dequantized, unpack_int4
from headrace.native.precision import GROUP, OTHER, encoding_of_scheme

# Of GPTQ by its bits: a byte of zero points in the middle, and what version 1 stores less
_MIDDLE = {4: (0x88, 0x11), 8: (0x80, 0x01)}
_NAN = 0x7F  # of e4m3, below the sign


def encoding_of(source: Source) -> str:
    """By the name of the format that holds the same, if there is one. GPTQ's zero points are read: most are the middle."""
    if isinstance(source, TensorEntry):
        return source.encoding.name
    assert source.scheme is not None
    encoding, scheme = encoding_of_scheme(source.scheme), source.scheme
    if scheme.format != "gptq" or encoding == OTHER:
        return encoding
    middle, less = _MIDDLE[scheme.bits]
    if _all_bytes(source, middle - less * scheme.zero_offset):
        return "Q4_0" if scheme.bits == 4 else "Q8_0"
    return "Q4_Z" if scheme.bits == 4 else OTHER


def _all_bytes(source: MatrixSource, value: int) -> bool:
    entry = source.parts["zero"].entry
    with entry.file.open("rb") as file:
        file.seek(entry.offset)
        return file.read(entry.num_bytes) == bytes([value]) * entry.num_bytes


class Rounded:
    """Which tensors did not fit into float16 exactly; for the log."""

    def __init__(self) -> None:
        self.scales: set[str] = set()
        self.weights: set[str] = set()

    def __str__(self) -> str:
        both = {"the scales": self.scales, "the weights": self.weights}
        return " and ".join(f"{what} of {len(names)} matrices" for what, names in both.items() if names)


def blocks_of(weight: Weight, format_: str, name: str, rounded: Rounded) -> np.ndarray:
    """A narrow weight [N, K] as rows of F8, Q8_0, Q4_0 or Q4_Z: uint8 [N, bytes]."""
    assert weight.scales is not None
    scales = _by_block(weight.scales, weight)
    if format_ == "F8":
        numbers = _padded(weight.data.view(torch.uint8))
        scales = torch.where(((numbers & _NAN) == _NAN).any(2), torch.nan, scales)  # a block with one is broken
        return _joined(scales, numbers)
    zeros = None if weight.zeros is None else _by_block(weight.zeros, weight)
    if format_ == "Q8_0":
        weight = in_bytes(weight)
        assert weight.scales is not None
        return _joined(_halves(_by_block(weight.scales, weight), name, rounded), _padded(weight.data))
    if weight.kind == "int4":
        numbers = _padded(unpack_int4(weight.data))
    else:  # in bytes, because of its shape
        numbers = _padded((weight.data if zeros is not None else weight.data + 8).to(torch.uint8))
    nibbles = numbers[:, :, :16] | numbers[:, :, 16:] << 4
    halves = [_halves(scales, name, rounded)]
    if format_ == "Q4_Z":
        halves.append(_halves(torch.full_like(scales, -8) if zeros is None else -zeros, name, rounded))
    return _joined(torch.stack(halves, 2), nibbles)


def halves_of(weight: Weight, name: str, rounded: Rounded) -> Tensor:
    """What has no format of its own, in float16 [N, K]."""
    values = dequantized(weight, torch.float32)
    halves = values.half()
    if not torch.equal(halves.float(), values):
        rounded.weights.add(name)
    return _finite(halves, name)


def _halves(scales: Tensor, name: str, rounded: Rounded) -> Tensor:
    halves = scales.half()
    if not torch.equal(halves.float(), scales):
        rounded.scales.add(name)
    return _finite(halves, name)


def _finite(halves: Tensor, name: str) -> Tensor:
    if not torch.isfinite(halves).all():
        raise CheckpointError(f"{name!r} has numbers beyond those of float16: --quantization none runs it in float32")
    return halves


def _by_block(scales: Tensor, weight: Weight) -> Tensor:
    """float32 [N, blocks]."""
    rows, columns = weight.shape
    count, scales = -(-columns // GROUP), scales.float()
    if weight.scale_rows > 1:
        scales = scales.repeat_interleave(weight.scale_rows, 0)[:rows]
    return scales.repeat_interleave(weight.group // GROUP, 1)[:, :count] if weight.group else scales.expand(rows, count)


def _padded(numbers: Tensor) -> Tensor:
    """[N, K] -> [N, blocks, 32]."""
    return F.pad(numbers, (0, -numbers.shape[1] % GROUP)).unflatten(1, (-1, GROUP))


def _joined(header: Tensor, numbers: Tensor) -> np.ndarray:
    """What stands before the numbers of each block [N, blocks] or [N, blocks, several], and these [N, blocks, n], as bytes."""
    header = header.unsqueeze(2) if header.ndim == 2 else header
    return torch.cat([header.contiguous().view(torch.uint8), numbers.contiguous().view(torch.uint8)], 2).flatten(1).numpy()
