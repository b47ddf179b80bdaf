"""What a process that will use a card can do beside `import torch`, which takes seconds: measured, 0.3 and 0.4 s.

The CUDA driver makes its context, and Triton hashes its own files (the key of its kernel cache), both without Python's lock.
For processes that are ours: a context must not be made where somebody may fork later.
"""

from __future__ import annotations

import ctypes
import threading
from functools import partial

from headrace.extras import is_installed


def prewarm(device: str, card: int = 0) -> None:
    """Begin, in threads, for one of the visible cards; what fails here is done again, and reported, where it is needed."""
    if device not in ("auto", "cuda") or not is_installed("triton"):
        return
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:  # no driver, no card
        return
    for work in (partial(_make_context, driver, card), _hash_triton):
        threading.Thread(target=work, daemon=True).start()


def _make_context(driver: ctypes.CDLL, card: int) -> None:
    if driver.cuInit(0) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), card)


def _hash_triton() -> None:
    try:
        from triton.runtime.cache import triton_key
    except ImportError:  # a Triton that keeps it elsewhere
        return
    triton_key()
