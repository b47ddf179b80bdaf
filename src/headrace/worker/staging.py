"""Host arrays to the device without waiting: two pinned buffers in turn, one per launched step."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class Staging:
    """Copies small numpy arrays to the device. On the CPU a tensor simply shares the array's memory.

    On a GPU an asynchronous copy reads its pinned source later than this call returns. A buffer is therefore written again
    only two steps on: `next_step` is called once per step, and the step before the previous one has been settled by then.
    """

    def __init__(self, device: torch.device, capacity: int = 1 << 22):
        self.device = device
        self._pinned = [torch.empty(0), torch.empty(0)]
        if device.type == "cuda":
            self._pinned = [torch.empty(capacity, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._capacity, self._turn, self._used = capacity, 0, 0

    def next_step(self) -> None:
        self._turn ^= 1
        self._used = 0

    def pin(self, array: np.ndarray) -> Tensor:
        """A pinned copy of `array` that stays as it is until two steps on."""
        source = torch.from_numpy(np.ascontiguousarray(array))
        size = source.numel() * source.element_size()
        begin = -(-self._used // 16) * 16
        if begin + size > self._capacity:  # rare and large: a buffer of its own, which the copy's stream keeps alive
            return source.pin_memory()
        self._used = begin + size
        pinned = self._pinned[self._turn][begin : self._used].view(source.dtype).view(source.shape)
        pinned.copy_(source)
        return pinned

    def upload(self, array: np.ndarray) -> Tensor:
        """`array` as a tensor on the device, same shape and dtype."""
        if self.device.type == "cpu":
            return torch.from_numpy(array)
        if self.device.type != "cuda":
            return torch.from_numpy(array).to(self.device)
        return self.pin(array).to(self.device, non_blocking=True)

    def upload_into(self, target: Tensor, array: np.ndarray) -> None:
        """Copy `array` over `target`, a device tensor of the same shape."""
        if self.device.type == "cuda":
            target.copy_(self.pin(array), non_blocking=True)
        else:
            target.copy_(torch.from_numpy(array))
