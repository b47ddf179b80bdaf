"""What a process that will use a card can do beside `import torch`, which takes seconds: measured, 0.3 and 0.4 s.

The CUDA driver makes its context. Triton finds out what it asks once: the hash of its own files (the key of its kernel cache),
and by starting programs where the driver lies and which assembler this is. Both mostly without Python's lock.
For processes that are ours: a context must not be made where somebody may fork later.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from functools import partial

from headrace.extras import is_installed
from headrace.machine import cuda_driver

CAPABILITY = (75, 76)  # the driver's attributes: major and minor


def prewarm(device: str, card: int = 0) -> None:
    """Begin, in threads, for one of the visible cards; what fails here is done again, and reported, where it is needed."""
    if device not in ("auto", "cuda") or not is_installed("triton"):
        return
    if (driver := cuda_driver()) is None:
        return
    for work in (_make_context, _ask_triton):
        threading.Thread(target=_quietly, args=(partial(work, driver, card),), daemon=True).start()


def _quietly(work: partial[None]) -> None:
    with contextlib.suppress(Exception):
        work()


def _make_context(driver: ctypes.CDLL, card: int) -> None:
    if driver.cuInit(0) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), card)


def _ask_triton(driver: ctypes.CDLL, card: int) -> None:
    """A Triton that keeps these elsewhere is asked nothing."""
    from triton.backends.nvidia.compiler import get_ptxas_version
    from triton.backends.nvidia.driver import library_dirs
    from triton.runtime.build import platform_key
    from triton.runtime.cache import triton_key

    triton_key()
    platform_key()
    capability, number = 0, ctypes.c_int()
    if driver.cuInit(0) == 0:
        for attribute in CAPABILITY:
            driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, card)
            capability = 10 * capability + number.value
        get_ptxas_version(capability)
    library_dirs()
