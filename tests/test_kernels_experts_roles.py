"""What the experts' warps with roles rest upon, without a card: the very instructions that widen, and the order of columns."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("triton.experimental.gluon")

import ptx_interpreter
from headrace.kernels import experts_roles
from headrace.kernels.experts_sort import placed
from headrace.model.weight import E2M1


def bits(scale: float) -> int:
    return int(np.float32(scale).view(np.uint32)) >> 16


def value(half: np.ndarray) -> np.ndarray:
    return (half.astype(np.uint32) << np.uint32(16)).view(np.float32)


@pytest.mark.parametrize("scale", [2.0**-7, 2.0**33, 2.0**-90, 1.0, 0.0])
def test_bytes_become_weights(scale: float) -> None:
    """All bytes at all four places, exactly: 2^-32 of the numbers that their halves stand for, of each half with its scale."""
    table = np.array([*E2M1, *(-number for number in E2M1)], np.float32)
    byte = np.arange(256, dtype=np.uint32)
    places = [byte, byte * 7 % 256, byte * 31 % 256, 255 - byte]
    word = sum((place << np.uint32(8 * i)).astype(np.uint32) for i, place in enumerate(places)).astype(np.uint32)
    other = scale / 4 if scale < 1 else scale
    four = np.full(256, bits(scale) | bits(other) << 16, np.uint32)
    (low,) = ptx_interpreter.run(experts_roles._FIRST.value, [four], 1)
    (high,) = ptx_interpreter.run(experts_roles._SECOND.value, [four], 1)
    found = ptx_interpreter.run(experts_roles._WIDEN.value, [word, *[low] * 4, *[high] * 4], 4)
    for i, (pair, shift, own) in enumerate((((0, 2), 0, scale), ((1, 3), 0, scale), ((0, 2), 4, other), ((1, 3), 4, other))):
        for half, place in enumerate(pair):
            got = value(found[i] >> np.uint32(16 * half) & np.uint32(0xFFFF))
            assert np.array_equal(got, table[places[place] >> shift & 15] * np.float32(own * 2.0**-32))


def test_columns_lie_as_a_thread_reads_them() -> None:
    """A thread has eight bytes side by side, in the order in which they are widened; as the left operand of 16 columns it has
    2 q, 2 q + 1 and those eight further."""
    widened = (0, 2, 1, 3, 4, 6, 5, 7)
    for q in range(4):
        for k16 in range(2):
            for register, column in enumerate((2 * q, 2 * q + 1, 2 * q + 8, 2 * q + 9)):
                assert placed.fn(16 * k16 + column) == 8 * q + widened[4 * k16 + register]
    assert sorted(placed.fn(k) for k in range(64, 128)) == list(range(64, 128))
