"""Whether AMX's tiles have the bits of the others on this very CPU: asked before a model is loaded on them.

They are chosen by what the CPU says of itself, and a wrong number would not be seen.
"""

from __future__ import annotations

import logging

import numpy as np

from headrace.native.load import Library, find_library

AMX = "avx512amx"
OTHERWISE = "avx512bf16"  # what every CPU with AMX has too
FORMATS = ("Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K", "Q4_Z")
ROWS, FEW = 27, 4  # AMX takes 16 at a time and the eleven that are left; four are multiplied without it
INPUTS, OUTPUTS = 512, 32

logger = logging.getLogger(__name__)


def checked(library: Library) -> Library:
    """The library, or where AMX gives other bits the one without it, with a warning. Raises NativeUnavailable without one."""
    if library.instruction_set != AMX:
        return library
    wrong = [name for name in FORMATS if not _same_bits(library, name)]
    if not wrong:
        return library
    logger.warning("the native CPU step goes without AMX, whose products differ from the others here: %s", ", ".join(wrong))
    return find_library(OTHERWISE)


def _same_bits(library: Library, name: str) -> bool:
    """Whether many rows give what they give a few at a time. Any bytes are weights; a scale may be no number."""
    step, random = library.extension, np.random.default_rng(0)
    part = (step.Format.__members__[name], OUTPUTS)
    raw = random.integers(0, 256, OUTPUTS * step.raw_row_bytes(part[0], INPUTS), np.uint8)
    x = random.standard_normal((ROWS, INPUTS), np.float32)

    def multiplied(rows: np.ndarray) -> np.ndarray:
        out = np.empty((len(rows), OUTPUTS), np.float32)
        step.product(str(library.path), [part], raw, step.Rounding.INT16, rows, out)
        return out

    few = np.concatenate([multiplied(x[first : first + FEW]) for first in range(0, ROWS, FEW)])
    return np.array_equal(multiplied(x), few, equal_nan=True)
