"""The sampler once more, row by row in numpy and float64, from the definitions: what the fast ones are held to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headrace.sampling.philox import uniform_numpy


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
