"""Parts of large sums of two cards, brought to the other card by the copy engines while multiprocessors go on multiplying.

A card's product leaves its part beside the place of the other's. When it is done, a copy on a stream of its own brings it into
that place on the other card, and behind it goes the copy's number: what a stream waits for before it adds up both.

Two halves of the memory are used in turn, one for each sum. That is enough where of two sums one after the other one is taken
as a whole before the next is begun. If it is the second, a card has all of the other's second sum when it sends a part of the
third, and the last part of that was sent when all of the first had been read. If it is the first, a card has a part of the
other's second sum, which was begun when all of the first had been read.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from headrace.tensor_parallel.card_memory import CardMemory, Driver

AT_LEAST = 0  # of a stream's waits: what is there, less the number, is not negative
NUMBERS = 16  # of the parts' dtype: room for a number behind them
FAR, TURN = 1 << 30, 1 << 32  # ahead of all numbers that are waited for; where they begin again


class CopiedParts:
    """An Exchange. Not for captured steps: numbers are counted on the host."""

    def __init__(
        self, rank: int, rows: int, width: int, dtype: torch.dtype, device: torch.device,
        meet: Callable[[CardMemory], list[int]],
    ):  # fmt: skip
        """`meet` gives the addresses of such memories of both cards, as this one sees them."""
        self.rank, self.rows, self.width, self.dtype = rank, rows, width, dtype
        self._memory = CardMemory(4 * rows * width + NUMBERS, dtype, device)
        self._parts = self._memory.tensor[:-NUMBERS].view(2, -1)
        self.number = self._memory.tensor[-NUMBERS:].view(torch.int32)[:1]
        self.far = meet(self._memory)[1 - rank]
        self._behind = 4 * rows * width * dtype.itemsize  # where the number is
        self._driver, self._copies, self._sum, self.count = Driver(), torch.cuda.Stream(device), 0, 0
        self._release = torch.zeros(1, dtype=torch.int32, pin_memory=True)

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    def begin(self) -> Callable[[slice], Tensor]:
        """See Exchange."""
        self._sum = 1 - self._sum
        half, width = self._parts[self._sum], self.width
        return lambda span: half[2 * span.start * width : 2 * span.stop * width].view(2, -1, width)

    def send(self, parts: Tensor) -> int:
        """See Exchange."""
        own, stream = parts[self.rank], self._copies
        self.count = (self.count + 1) % TURN
        stream.wait_stream(torch.cuda.current_stream())
        here, handle = own.data_ptr(), ctypes.c_void_p(stream.cuda_stream)
        there, number = self.far + here - self._memory.address, ctypes.c_uint64(self.far + self._behind)
        self._driver("cuMemcpyAsync", *map(ctypes.c_uint64, (there, here, own.nbytes)), handle)
        self._driver("cuStreamWriteValue32_v2", handle, number, ctypes.c_uint32(self.count), 0)
        return self.count

    def wait(self, number: int) -> None:
        """See Exchange."""
        handle = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self._driver(
            "cuStreamWaitValue32_v2", handle, ctypes.c_uint64(self.number.data_ptr()), ctypes.c_uint32(number), AT_LEAST
        )

    def release(self) -> None:
        """Streams that wait go on, whatever is there."""
        self._release.view(torch.uint32).fill_((self.count + FAR) % TURN)
        self.number.copy_(self._release, non_blocking=True)
