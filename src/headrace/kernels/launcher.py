"""Launching a Triton kernel again: by its compiled form, without Triton's look at every argument (half of a launch's cost).

Where the host is what a step waits for, in small prefill steps, a layer's launches are most of it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from headrace.kernels.launch import on_gpu, pdl

try:
    from triton import __version__ as _TRITON
except ImportError:
    _TRITON = ""

# Here a compiled kernel is known to take all arguments in order, constants too. Elsewhere every launch goes Triton's way.
_KNOWN = _TRITON.startswith("3.6.")


class Launcher:
    """A kernel whose parameters are tensors, numbers, numbers that it is not specialized for, and constants ending with PDL.

    What decides about the compiled form is the key: the numbers themselves, the constants, the tensors' types and device.
    Tensors that are not aligned to 16 bytes go Triton's way.
    """

    def __init__(self, kernel: Any):
        self.kernel = kernel
        self._compiled: dict[tuple, Any] = {}

    def __call__(
        self, grid: int, tensors: tuple[Tensor, ...], numbers: tuple, free: tuple = (), *, num_warps: int, **constants: Any
    ) -> None:
        """Launch `grid` programs on the current stream of the tensors' device; `constants` in the kernel's order."""
        options = pdl(tensors[0])
        addresses = 0
        for tensor in tensors:
            addresses |= tensor.data_ptr()
        key = (num_warps, numbers, *constants.values(), *[t.dtype for t in tensors], tensors[0].device)
        compiled = self._compiled.get(key)
        if compiled is not None and not addresses & 15:
            compiled[grid, 1, 1](*tensors, *numbers, *free, *constants.values(), options["PDL"])
            return
        compiled = self.kernel[(grid,)](*tensors, *numbers, *free, num_warps=num_warps, **constants, **options)
        if _KNOWN and on_gpu(tensors[0]) and not addresses & 15:
            assert [*constants, "PDL"] == self.kernel.arg_names[-len(constants) - 1 :], "not in the kernel's order"
            self._compiled[key] = compiled
