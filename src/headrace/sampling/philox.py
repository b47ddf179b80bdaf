"""Counted randomness: Philox4x32-10, the same bits from numpy and from the Triton kernels.

A random number is a function of (seed, output index, purpose, sample index) and of nothing else: the seed is the 64-bit
key, the rest are the four 32-bit words of the counter. There is no state to keep, to restore or to share.
Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (Random123).
"""

from __future__ import annotations

import numpy as np

PURPOSE_SAMPLE = 0  # the draw that picks a token

ROUNDS = 10
MULTIPLIER_0, MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85
WORD = 0xFFFFFFFF
LOW, HIGH = np.uint64(WORD), np.uint64(32)
MULTIPLIERS = np.array([[MULTIPLIER_0], [MULTIPLIER_1]], np.uint64)
WEYL = np.arange(ROUNDS, dtype=np.uint64)[:, None, None] * np.array([[WEYL_0], [WEYL_1]], np.uint64)


def uniform(
    seed: np.ndarray, position: np.ndarray, purpose: int = PURPOSE_SAMPLE, sample_index: np.ndarray | None = None
) -> np.ndarray:
    """One float32 in (0, 1) per row: odd multiples of 2^-24, so never 0 or 1 and exact in float32.

    seed, position: [R] int64 (any bits; position is the index of the output token); sample_index: [R], None means 0.
    """
    seed, position = seed.astype(np.int64).view(np.uint64), position.astype(np.int64).view(np.uint64)
    counter = np.zeros((4, len(seed)), np.uint64)
    counter[0], counter[1], counter[2] = position & LOW, position >> HIGH, purpose
    if sample_index is not None:
        counter[3] = sample_index
    word = philox4x32(np.stack([seed & LOW, seed >> HIGH]), counter)[0]
    return ((word >> np.uint64(9)) * np.uint64(2) + np.uint64(1)).astype(np.float32) * np.float32(2.0**-24)


def philox4x32(key: np.ndarray, counter: np.ndarray) -> np.ndarray:
    """The 4 output words [4, R] for 2 key words [2, R] and 4 counter words [4, R], all unsigned 32-bit values in uint64."""
    keys = key + WEYL & LOW  # of all rounds
    even, odd = counter[0::2], counter[1::2]
    for round_key in keys:
        product = even * MULTIPLIERS  # of two 32-bit words: it fits
        even, odd = (product >> HIGH)[::-1] ^ odd ^ round_key, (product & LOW)[::-1]
    return np.stack([even[0], odd[0], even[1], odd[1]])
