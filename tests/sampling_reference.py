"""The sampler once more, row by row in numpy and float64, from the definitions: what the fast ones are held to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headrace.sampling.params import GREEDY_EPS, SamplingParams
from headrace.sampling.philox import MULTIPLIER_0, MULTIPLIER_1, PURPOSE_SAMPLE, ROUNDS, WEYL_0, WEYL_1, WORD
from headrace.sampling.sampler import SampleInputs


@dataclass
class Row:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    output_index: int = 0
    sample_index: int = 0


def scaled(logits: np.ndarray, row: Row) -> np.ndarray:
    """(logit - max) / temperature as the samplers round it: float32, by multiplication with the reciprocal."""
    logits = logits.astype(np.float32)
    with np.errstate(over="ignore"):
        return (logits - logits.max()) * (np.float32(1.0) / np.float32(row.temperature))


def kept(logits: np.ndarray, row: Row, p_shift: float = 0.0) -> np.ndarray:
    """Mask [V] of what the filters keep, in the stated order, ties kept."""
    y = scaled(logits, row)
    p = np.exp(y.astype(np.float64))
    keep = np.ones(len(y), bool)
    if row.min_p > 0:
        keep &= y >= np.log(np.float32(row.min_p))
    if 0 < row.top_k < len(y):
        keep &= y >= np.sort(y)[::-1][row.top_k - 1]
    if row.top_p < 1.0:
        target = (float(np.float32(row.top_p)) + p_shift) * p[keep].sum()
        values, place = np.unique(-y[keep], return_inverse=True)  # the likeliest first, equal ones together
        mass = np.cumsum(np.bincount(place, p[keep]))
        keep &= y >= -values[min(int((mass < target).sum()), len(values) - 1)]
    return keep


def tokens(logits: np.ndarray, row: Row, slack: float = 3e-6) -> set[int]:
    """The token; or the few that rounding may choose between when u or top_p falls on an edge."""
    if row.temperature < 1e-5:
        return {int(np.argmax(logits))}
    u = float(uniform_numpy(row.seed, row.output_index, 0, row.sample_index))
    found = set()
    for p_shift in (-slack, 0.0, slack) if row.top_p < 1.0 else (0.0,):
        p = np.where(kept(logits, row, p_shift), np.exp(scaled(logits, row).astype(np.float64)), 0.0)
        cdf = np.cumsum(p) / p.sum()
        for shift in (-slack, 0.0, slack):
            inside = np.flatnonzero((cdf > u + shift) & (p > 0))
            found.add(int(inside[0]) if len(inside) else int(np.flatnonzero(p > 0)[-1]))
    return found


# parameters whose draws over a few ids are compared with what they should be
DRAWN = [
    Row(), Row(temperature=0.5), Row(temperature=2.0), Row(top_k=3), Row(top_p=0.7), Row(min_p=0.2),
    Row(temperature=0.8, top_k=8, top_p=0.9, min_p=0.05),
]  # fmt: skip


def chi_square(ids: Sequence[int], logits: np.ndarray, row: Row) -> float:
    """Of draws against their distribution; nothing outside the kept set is ever drawn."""
    counts, keep = np.bincount(ids, minlength=len(logits)), kept(logits, row)
    assert not counts[~keep].any()
    p = np.where(keep, np.exp((logits - logits.max()).astype(np.float64) / row.temperature), 0.0)
    expected = len(ids) * p / p.sum()
    return float(((counts - expected)[keep] ** 2 / expected[keep]).sum())


def uniform_numpy(seed, position, purpose: int = PURPOSE_SAMPLE, sample_index=0) -> np.ndarray:
    """`uniform` as the paper writes it: scalars or arrays of int64, broadcast together -> float32."""
    seed, position, third = (np.asarray(x, dtype=np.int64).view(np.uint64) for x in (seed, position, sample_index))
    word, shift = np.uint64(WORD), np.uint64(32)
    k0, k1 = seed & word, seed >> shift
    c0, c1, c2, c3 = position & word, position >> shift, np.uint64(purpose), third & word
    for _ in range(ROUNDS):
        # a product of two 32-bit words fits into uint64
        product0, product1 = c0 * np.uint64(MULTIPLIER_0), c2 * np.uint64(MULTIPLIER_1)
        c0, c1, c2, c3 = product1 >> shift ^ c1 ^ k0, product1 & word, product0 >> shift ^ c3 ^ k1, product0 & word
        k0, k1 = k0 + np.uint64(WEYL_0) & word, k1 + np.uint64(WEYL_1) & word
    return ((c0 >> np.uint64(9)) * np.uint64(2) + np.uint64(1)).astype(np.float32) * np.float32(2.0**-24)


def sample_inputs(
    params: Sequence[SamplingParams], seeds: Sequence[int], output_indices: Sequence[int], device: str = "cpu", **others
) -> SampleInputs:
    """Rows from resolved parameters."""

    def column(values: Sequence, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(list(values), dtype=dtype, device=device)

    return SampleInputs(
        temperature=column([p.temperature for p in params], torch.float32),
        top_k=column([p.top_k for p in params], torch.int32),
        top_p=column([p.top_p for p in params], torch.float32),
        min_p=column([p.min_p for p in params], torch.float32),
        seed=column(seeds, torch.int64),
        output_index=column(output_indices, torch.int64),
        sample_index=column([p.sample_index for p in params], torch.int32),
        all_greedy=all(p.temperature < GREEDY_EPS for p in params),
        any_top_k=any(p.top_k > 0 for p in params),
        any_top_p=any(p.top_p < 1.0 for p in params),
        any_min_p=any(p.min_p > 0.0 for p in params),
        **others,
    )
