"""Zeroed memory for what is as large as a cache and mostly unused."""

from __future__ import annotations

import contextlib
import math
import mmap

import numpy as np
import torch
from torch import Tensor

from headrace.errors import CapacityError

_HUGE_PAGE = 2 << 20


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A zeroed tensor (an uninitialised NaN would survive a masked-out product as 0 * NaN). Raises CapacityError.

    On the CPU its pages are not touched before they are used, so a large cache costs a laptop nothing at start; they are
    huge ones where the system has them, and begin at a cache line.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    try:
        pages = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as e:
        raise CapacityError(f"a cache's part of {size / 2**20:.0f} MiB: {e.strerror}; set a smaller kv_cache_bytes") from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    raw = np.frombuffer(pages, dtype=np.uint8)
    first = -raw.ctypes.data % _HUGE_PAGE
    return torch.from_numpy(raw[first : first + size]).view(dtype).view(shape)
