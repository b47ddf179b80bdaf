"""Decodes the tensors of files: plain types, the common GGUF blocks with torch on any device, rare ones by `gguf`.

The layouts are those of ggml's block structs; results are bit-equal to `gguf.quants.dequantize`, in float32. Decoding
with torch serves two ends: it runs on the device that the weights go to, and on the CPU it is ten times as fast.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from headrace.model.formats.gguf import DECODED
from headrace.model.formats.tensor_file import TensorEntry, head_order
from headrace.model.weight import e2m1_values

Decoder = Callable[[Tensor], Tensor]


def decode_rows(entry: TensorEntry, raw: Tensor, num_rows: int) -> Tensor:
    """`num_rows` rows of a tensor from their bytes `raw`, uint8 [num_rows * row_bytes] on any device; whole heads where
    the entry has a head_dim, all where it is transposed. Returns [num_rows, *shape[1:]] in the file's type, or in float32 if
    that is quantized."""
    out = _DECODERS[entry.encoding.name](raw)
    if entry.stride:
        out = out.view(num_rows, -1)[:, entry.skip : entry.skip + entry.shape[1]]
    elif entry.transposed:
        out = out.view(*reversed(entry.shape)).t()
    else:
        out = out.view(num_rows, *entry.shape[1:])
    if entry.head_dim:
        heads = out.unflatten(0, (num_rows // entry.head_dim, entry.head_dim))
        out = heads[:, head_order(entry.head_dim, entry.rotary)].reshape(num_rows, *entry.shape[1:])
    return out.float() + entry.shift if entry.shift else out


def _plain(dtype: torch.dtype) -> Decoder:
    return lambda raw: raw.view(dtype)


def powers_of_two(raw: Tensor) -> Tensor:
    """uint8 -> 2^(raw - 127) in float32; the last, which stands for nothing, is infinite."""
    return torch.where(raw == 0, 1 << 22, raw.int() << 23).int().view(torch.float32)


def half(field: Tensor) -> Tensor:
    """[n, 2k] bytes of k half floats -> [n, k] float32."""
    return field.contiguous().view(torch.float16).float()


def _nibbles(qs: Tensor, out: Tensor) -> Tensor:
    """Bytes [n, ..., b] -> out [n, ..., 2b]: all low nibbles, then all high ones."""
    count = qs.shape[-1]
    out[..., :count] = qs & 15
    out[..., count:] = qs >> 4
    return out


def fifth_bits(qh: Tensor) -> Tensor:
    """[n, 4] bytes -> [n, 32] uint8: bit i, moved to bit 4."""
    bits = torch.arange(8, dtype=torch.uint8, device=qh.device)
    return ((qh.unsqueeze(-1) >> bits) & 1).view(qh.shape[0], 32) << 4


def _q8_0(raw: Tensor) -> Tensor:
    blocks = raw.view(-1, 34)
    return blocks[:, 2:].view(torch.int8).float().mul_(half(blocks[:, :2]))


def _q4_0(raw: Tensor) -> Tensor:
    blocks = raw.view(-1, 18)
    out = _nibbles(blocks[:, 2:], raw.new_empty((blocks.shape[0], 32), dtype=torch.float32))
    return out.sub_(8).mul_(half(blocks[:, :2]))


def _q4_1(raw: Tensor) -> Tensor:
    blocks = raw.view(-1, 20)
    scale = half(blocks[:, :4])
    out = _nibbles(blocks[:, 4:], raw.new_empty((blocks.shape[0], 32), dtype=torch.float32))
    return out.mul_(scale[:, :1]).add_(scale[:, 1:])


def _q5_0(raw: Tensor) -> Tensor:
    blocks = raw.view(-1, 22)
    low = _nibbles(blocks[:, 6:], raw.new_empty((blocks.shape[0], 32)))
    return (low | fifth_bits(blocks[:, 2:6])).float().sub_(16).mul_(half(blocks[:, :2]))


def _q5_1(raw: Tensor) -> Tensor:
    blocks = raw.view(-1, 24)
    scale = half(blocks[:, :4])
    low = _nibbles(blocks[:, 8:], raw.new_empty((blocks.shape[0], 32)))
    return (low | fifth_bits(blocks[:, 4:8])).float().mul_(scale[:, :1]).add_(scale[:, 1:])


def k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Of blocks of Q4_K or Q5_K, the scales and minima of their groups of 32, [n, 8] float32: two numbers for the block, and 12
    bytes of 8 scales and 8 minima of 6 bits each."""
    of_all = half(blocks[:, :4])
    low_scale, low_min, high = blocks[:, 4:16].reshape(-1, 3, 4).unbind(1)
    scale = torch.cat([low_scale & 63, (high & 15) | ((low_scale >> 2) & 48)], dim=-1)
    minimum = torch.cat([low_min & 63, (high >> 4) | ((low_min >> 2) & 48)], dim=-1)
    return scale.float().mul_(of_all[:, :1]), minimum.float().mul_(of_all[:, 1:])


def _scaled_k(blocks: Tensor, quants: Tensor) -> Tensor:
    """scale * q - minimum over groups of 32; quants [n, 8, 32] float32, changed in place."""
    scale, minimum = k_scales(blocks)
    return quants.mul_(scale.unsqueeze(-1)).sub_(minimum.unsqueeze(-1))


def _q4_k(raw: Tensor) -> Tensor:
    blocks = raw.view(-1, 144)
    quants = _nibbles(blocks[:, 16:].unflatten(-1, (4, 32)), raw.new_empty((blocks.shape[0], 4, 64), dtype=torch.float32))
    return _scaled_k(blocks, quants.view(-1, 8, 32))


def q5_k_numbers(blocks: Tensor) -> Tensor:
    """[n, 176] bytes -> [n, 8, 32] uint8."""
    low = _nibbles(blocks[:, 48:].unflatten(-1, (4, 32)), blocks.new_empty((blocks.shape[0], 4, 64)))
    bits = torch.arange(8, dtype=torch.uint8, device=blocks.device).view(1, 8, 1)
    high = ((blocks[:, 16:48].unsqueeze(1) >> bits) & 1) << 4
    return low.view(-1, 8, 32) | high


def _q5_k(raw: Tensor) -> Tensor:
    blocks = raw.view(-1, 176)
    return _scaled_k(blocks, q5_k_numbers(blocks).float())


def q6_k_numbers(blocks: Tensor) -> Tensor:
    """[n, 210] bytes -> [n, 16, 16] uint8, 32 above what they stand for."""
    low = _nibbles(blocks[:, :128].unflatten(-1, (2, 64)), blocks.new_empty((blocks.shape[0], 2, 128)))
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device).view(1, 1, 4, 1)
    high = ((blocks[:, 128:192].unflatten(-1, (2, 1, 32)) >> shifts) & 3) << 4
    return (low.view(-1, 2, 4, 32) | high).view(-1, 16, 16)


def q6_k_scales(blocks: Tensor) -> Tensor:
    """[n, 210] bytes -> [n, 16] float32."""
    return blocks[:, 192:208].contiguous().view(torch.int8).float().mul_(half(blocks[:, 208:]))


def _q6_k(raw: Tensor) -> Tensor:
    blocks = raw.view(-1, 210)
    return q6_k_numbers(blocks).float().sub_(32).mul_(q6_k_scales(blocks).unsqueeze(-1))


def mxfp4_codes(blocks: Tensor) -> Tensor:
    """[n, 17] bytes -> [n, 32] uint8, codes of e2m1."""
    return _nibbles(blocks[:, 1:], blocks.new_empty((blocks.shape[0], 32)))


def _mxfp4(raw: Tensor) -> Tensor:
    """Of twice the numbers and half the scale, as ggml does: zeros have no sign, and no scale is infinite."""
    blocks = raw.view(-1, 17)
    exponent = blocks[:, :1].int()
    half = torch.where(exponent < 2, (1 << 21) << exponent, (exponent - 1) << 23).int().view(torch.float32)
    return e2m1_values(mxfp4_codes(blocks)).mul_(2).add_(0.0).mul_(half)


def _by_package(name: str) -> Decoder:
    """Decoding with the `gguf` package, on the host."""

    def decode(raw: Tensor) -> Tensor:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

        kind = GGMLQuantizationType[name]
        rows = raw.cpu().view(-1, GGML_QUANT_SIZES[kind][1]).numpy()
        return torch.from_numpy(quants.dequantize(rows, kind)).to(raw.device)

    return decode


_DECODERS: dict[str, Decoder] = {
    "F64": _plain(torch.float64),
    "F32": _plain(torch.float32),
    "F16": _plain(torch.float16),
    "BF16": _plain(torch.bfloat16),
    "I64": _plain(torch.int64),
    "I32": _plain(torch.int32),
    "U8": _plain(torch.uint8),
    "I8": _plain(torch.int8),
    "BOOL": _plain(torch.bool),
    "F8_E4M3": _plain(torch.float8_e4m3fn),
    "F8_E8M0": powers_of_two,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
    **{name: _by_package(name) for name in ("IQ4_NL", *DECODED)},
}
