"""Host arrays to the device and results back without waiting: pinned buffers in turn."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

CAPACITY = 1 << 22  # bytes of a buffer


class Staging:
    """Copies small numpy arrays to the device. On the CPU a tensor simply shares the array's memory.

    On a GPU an asynchronous copy reads or writes its pinned side later than this call returns. A buffer is therefore used
    again only two steps on: `next_step` is called once per step, and the step before the previous one has been settled by
    then, its results read.
    """

    def __init__(self, device: torch.device):
        self.device, self._turn, self._used = device, 0, 0
        pinned = device.type == "cuda"
        self._pinned = [torch.empty(CAPACITY * pinned, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]

    def next_step(self) -> None:
        self._turn, self._used = self._turn ^ 1, 0

    def pin(self, array: np.ndarray) -> Tensor:
        """A pinned copy of `array` that stays as it is until two steps on."""
        pinned = self._room(torch.from_numpy(array))
        pinned.numpy()[...] = array  # torch would wake its threads for a large one, and they spin on for a while
        return pinned

    def _room(self, like: Tensor) -> Tensor:
        size = like.numel() * like.element_size()
        begin = -(-self._used // 16) * 16
        if begin + size > CAPACITY:  # rare and large: a buffer of its own, which the copy's stream keeps alive
            return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
        self._used = begin + size
        return self._pinned[self._turn][begin : self._used].view(like.dtype).view(like.shape)

    def download(self, tensor: Tensor) -> Tensor:
        """`tensor` on the host, to be read when the step is done and before the step after the next."""
        if not tensor.is_cuda:
            return tensor.cpu()  # itself, if the device wrote it there
        return self._room(tensor).copy_(tensor, non_blocking=True)

    def upload(self, array: np.ndarray) -> Tensor:
        """`array` as a tensor on the device, same shape and dtype."""
        if self.device.type == "cpu":
            return torch.from_numpy(array)
        return self.pin(array).to(self.device, non_blocking=True)

    def upload_all(self, *arrays: np.ndarray) -> list[Tensor]:
        """As `upload` of each, in one copy. Each begins at 16 bytes: kernels are compiled anew for what begins elsewhere."""
        if self.device.type == "cpu":
            return [torch.from_numpy(array) for array in arrays]
        begins = np.cumsum([0, *(-(-a.nbytes // 16) * 16 for a in arrays)]).tolist()
        packet = np.empty(begins[-1], np.uint8)
        for array, begin in zip(arrays, begins, strict=False):
            packet[begin : begin + array.nbytes] = array.reshape(-1).view(np.uint8)
        sent = self.upload(packet)
        return [
            sent[begin : begin + a.nbytes].view(torch.from_numpy(a[:0]).dtype).view(a.shape)
            for a, begin in zip(arrays, begins, strict=False)
        ]
