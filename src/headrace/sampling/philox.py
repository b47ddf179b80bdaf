"""Counted randomness: Philox4x32-10, the same bits from torch and from the Triton kernels.

A random number is a function of (seed, output index, purpose, sample index) and of nothing else: the seed is the 64-bit
key, the rest are the four 32-bit words of the counter. There is no state to keep, to restore or to share.
Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (Random123).
"""

from __future__ import annotations

import torch
from torch import Tensor

PURPOSE_SAMPLE = 0  # the draw that picks a token

ROUNDS = 10
MULTIPLIER_0, MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85
WORD = 0xFFFFFFFF

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def uniform(seed: Tensor, position: Tensor, purpose: int = PURPOSE_SAMPLE, sample_index: Tensor | None = None) -> Tensor:
    """One float32 in (0, 1) per row: odd multiples of 2^-24, so never 0 or 1 and exact in float32.

    seed, position: [R] int64 (any bits; position is the index of the output token); sample_index: [R], None means 0.
    """
    third = torch.zeros_like(position) if sample_index is None else sample_index.long()
    purposes = torch.full_like(position, purpose)
    key = seed & WORD, seed >> 32 & WORD
    word = philox4x32(key, (position & WORD, position >> 32 & WORD, purposes, third & WORD))[0]
    return ((word >> 9) * 2 + 1).float() * 2.0**-24


def philox4x32(key: tuple[Tensor, Tensor], counter: Words) -> Words:
    """The 4 output words for 2 key words and 4 counter words, all int64 tensors that hold unsigned 32-bit values."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(ROUNDS):
        high0, low0 = _multiply(c0, MULTIPLIER_0)
        high1, low1 = _multiply(c2, MULTIPLIER_1)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + WEYL_0 & WORD, k1 + WEYL_1 & WORD
    return c0, c1, c2, c3


def _multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a * b. In halves of 16 bits, because the product needs 64 bits and int64 has a sign."""
    low = (a & 0xFFFF) * b
    high = (a >> 16) * b + (low >> 16)
    return high >> 16, (high & 0xFFFF) << 16 | low & 0xFFFF
