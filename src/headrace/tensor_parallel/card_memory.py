"""Memory of a card that other processes' cards can write to, by the CUDA driver's own calls for it.

torch.distributed's symmetric memory does the same, but numbers its meetings by a counter of the process: a second engine in the
process of rank 0 would wait for ranks that count from zero.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

HANDLE_BYTES = 64
LAZY_PEER_ACCESS = 1  # of the only kind of flags that there is


class _Handle(ctypes.Structure):
    """What one process gives another, by which it finds the memory."""

    _fields_ = (("bytes", ctypes.c_byte * HANDLE_BYTES),)


class Driver:
    """libcuda's calls, in the context that torch has made for the current card. Raises RuntimeError where one fails."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def __call__(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            raise RuntimeError(f"{name}: {(text.value or b'unknown error').decode()} ({code})")


class CardMemory:
    """`count` zeros of a dtype on `device`, and what the others need to see them (`handle`). Freed with this object."""

    def __init__(self, count: int, dtype: torch.dtype, device: torch.device):
        torch.zeros(1, device=device)  # there is a context
        self.dtype, self.device, self.nbytes = dtype, device, count * dtype.itemsize
        self._driver, self._opened = Driver(), list[int]()
        address = ctypes.c_uint64()
        with torch.cuda.device(device):
            self._driver("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(self.nbytes))
            self.address = int(address.value)
            self._finish = weakref.finalize(self, _free, self._driver, self.address, self._opened, device)
            handle = _Handle()
            self._driver("cuIpcGetMemHandle", ctypes.byref(handle), address)
        self.handle = bytes(handle.bytes)
        self.tensor.zero_()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    @property
    def tensor(self) -> Tensor:
        """[count]; it keeps this object alive."""
        return torch.as_tensor(self, device=self.device).view(self.dtype)

    def addresses(self, handles: Sequence[bytes]) -> list[int]:
        """Where the memories of all ranks lie, as this card sees them, its own among them."""
        found = []
        with torch.cuda.device(self.device):
            for handle in handles:
                address = ctypes.c_uint64(self.address)
                if handle != self.handle:
                    given = _Handle.from_buffer_copy(handle)
                    self._driver("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, ctypes.c_uint(LAZY_PEER_ACCESS))
                    self._opened.append(int(address.value))
                found.append(int(address.value))
        return found


def _free(driver: Driver, address: int, opened: list[int], device: torch.device) -> None:
    with contextlib.suppress(RuntimeError), torch.cuda.device(device):  # a context that is gone has freed it
        for other in opened:
            driver("cuIpcCloseMemHandle", ctypes.c_uint64(other))
        driver("cuMemFree_v2", ctypes.c_uint64(address))
