"""GGUF's tensor encodings: the common ones decoded with torch on any device, the rare ones by the `gguf` package.

The layouts are those of ggml's block structs; results are bit-equal to `gguf.quants.dequantize`, in float32. Decoding with
torch serves two ends: it runs on the device that the weights go to, and it is quicker than numpy on the CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.model.tensor_file import Encoding, plain_encoding


def _half(field: Tensor) -> Tensor:
    """[n, 2k] bytes of k half floats -> [n, k] float32."""
    return field.contiguous().view(torch.float16).float()


def _nibbles(qs: Tensor, out: Tensor) -> Tensor:
    """Bytes [n, ..., b] -> out [n, ..., 2b]: all low nibbles, then all high ones."""
    half = qs.shape[-1]
    out[..., :half] = qs & 15
    out[..., half:] = qs >> 4
    return out


def _fifth_bits(qh: Tensor) -> Tensor:
    """[n, 4] bytes -> [n, 32] uint8: bit i, moved to bit 4."""
    bits = torch.arange(8, dtype=torch.uint8, device=qh.device)
    return ((qh.unsqueeze(-1) >> bits) & 1).view(qh.shape[0], 32) << 4


def _q8_0(raw: Tensor) -> Tensor:
    blocks = raw.view(-1, 34)
    return blocks[:, 2:].view(torch.int8).float().mul_(_half(blocks[:, :2]))


def _q4_0(raw: Tensor) -> Tensor:
    blocks = raw.view(-1, 18)
    out = _nibbles(blocks[:, 2:], raw.new_empty((blocks.shape[0], 32), dtype=torch.float32))
    return out.sub_(8).mul_(_half(blocks[:, :2]))


def _q4_1(raw: Tensor) -> Tensor:
    blocks = raw.view(-1, 20)
    scale = _half(blocks[:, :4])
    out = _nibbles(blocks[:, 4:], raw.new_empty((blocks.shape[0], 32), dtype=torch.float32))
    return out.mul_(scale[:, :1]).add_(scale[:, 1:])


def _q5_0(raw: Tensor) -> Tensor:
    blocks = raw.view(-1, 22)
    low = _nibbles(blocks[:, 6:], raw.new_empty((blocks.shape[0], 32)))
    return (low | _fifth_bits(blocks[:, 2:6])).float().sub_(16).mul_(_half(blocks[:, :2]))


def _q5_1(raw: Tensor) -> Tensor:
    blocks = raw.view(-1, 24)
    scale = _half(blocks[:, :4])
    low = _nibbles(blocks[:, 8:], raw.new_empty((blocks.shape[0], 32)))
    return (low | _fifth_bits(blocks[:, 4:8])).float().mul_(scale[:, :1]).add_(scale[:, 1:])


def _k_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The 12 bytes of Q4_K and Q5_K -> 8 scales and 8 minima of 6 bits each, [n, 8] float32."""
    low_scale, low_min, high = packed.view(-1, 3, 4).unbind(1)
    scale = torch.cat([low_scale & 63, (high & 15) | ((low_scale >> 2) & 48)], dim=-1)
    minimum = torch.cat([low_min & 63, (high >> 4) | ((low_min >> 2) & 48)], dim=-1)
    return scale.float(), minimum.float()


def _scaled_k(blocks: Tensor, quants: Tensor) -> Tensor:
    """d * scale * q - dmin * min over groups of 32; quants [n, 8, 32] float32, changed in place."""
    super_scale = _half(blocks[:, :4])
    scale, minimum = _k_scales(blocks[:, 4:16].contiguous())
    scale.mul_(super_scale[:, :1])
    minimum.mul_(super_scale[:, 1:])
    return quants.mul_(scale.unsqueeze(-1)).sub_(minimum.unsqueeze(-1))


def _q4_k(raw: Tensor) -> Tensor:
    blocks = raw.view(-1, 144)
    quants = _nibbles(
        blocks[:, 16:].unflatten(-1, (4, 32)), raw.new_empty((blocks.shape[0], 4, 64), dtype=torch.float32)
    )
    return _scaled_k(blocks, quants.view(-1, 8, 32))


def _q5_k(raw: Tensor) -> Tensor:
    blocks = raw.view(-1, 176)
    low = _nibbles(blocks[:, 48:].unflatten(-1, (4, 32)), raw.new_empty((blocks.shape[0], 4, 64)))
    bits = torch.arange(8, dtype=torch.uint8, device=raw.device).view(1, 8, 1)
    high = ((blocks[:, 16:48].unsqueeze(1) >> bits) & 1) << 4
    return _scaled_k(blocks, (low.view(-1, 8, 32) | high).float())


def _q6_k(raw: Tensor) -> Tensor:
    blocks = raw.view(-1, 210)
    low = _nibbles(blocks[:, :128].unflatten(-1, (2, 64)), raw.new_empty((blocks.shape[0], 2, 128)))
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=raw.device).view(1, 1, 4, 1)
    high = ((blocks[:, 128:192].unflatten(-1, (2, 1, 32)) >> shifts) & 3) << 4
    quants = (low.view(-1, 2, 4, 32) | high).float().sub_(32).view(-1, 16, 16)
    scale = blocks[:, 192:208].view(torch.int8).float().mul_(_half(blocks[:, 208:]))
    return quants.mul_(scale.unsqueeze(-1))


def _by_package(gguf_type: int, block_bytes: int):
    """Decoding with the `gguf` package, on the host."""

    def decode(raw: Tensor) -> Tensor:
        from gguf import GGMLQuantizationType, quants

        rows = raw.cpu().view(-1, block_bytes).numpy()
        return torch.from_numpy(quants.dequantize(rows, GGMLQuantizationType(gguf_type))).to(raw.device)

    return decode


# ggml's type number -> encoding
ENCODINGS: dict[int, Encoding] = {
    0: plain_encoding("F32", torch.float32),
    1: plain_encoding("F16", torch.float16),
    2: Encoding("Q4_0", 32, 18, _q4_0),
    3: Encoding("Q4_1", 32, 20, _q4_1),
    6: Encoding("Q5_0", 32, 22, _q5_0),
    7: Encoding("Q5_1", 32, 24, _q5_1),
    8: Encoding("Q8_0", 32, 34, _q8_0),
    10: Encoding("Q2_K", 256, 84, _by_package(10, 84)),
    11: Encoding("Q3_K", 256, 110, _by_package(11, 110)),
    12: Encoding("Q4_K", 256, 144, _q4_k),
    13: Encoding("Q5_K", 256, 176, _q5_k),
    14: Encoding("Q6_K", 256, 210, _q6_k),
    20: Encoding("IQ4_NL", 32, 18, _by_package(20, 18)),
    23: Encoding("IQ4_XS", 256, 136, _by_package(23, 136)),
    30: plain_encoding("BF16", torch.bfloat16),
}
