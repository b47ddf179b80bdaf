"""What all Triton kernels share: the import that may fail, programmatic dependent launch, what a card can do.

Kernel files import `jit`, `tl` and the two grid-dependency instructions from here, so that they load without Triton (the
torch references then serve the CPU). Under TRITON_INTERPRET=1 the kernels run on CPU tensors, which is how they are tested.

Programmatic dependent launch (PDL, sm_90 and newer): a kernel may start while its predecessor in the stream still runs.
Rules that every kernel here keeps:
- each program executes `gdc_wait()` before it touches anything that an earlier kernel of the same step wrote, and before it
  exits, also when it has nothing to do: a kernel that has ended thus implies that all before it have ended (a product with
  adapters begins at a flag of the kernel before, which has itself waited, and waits at its end: lora_product.py);
- before the wait it reads only weights and what the step's first kernels wrote (lengths, tables, positions);
- `gdc_launch_dependents()` comes after the wait: at once in short kernels, at the end of long ones, where successors that
  wait on the multiprocessors would only be in the way (measured: 2-6 % of a decode step). Before the wait it comes in products
  that load weights there, and in what lies between two of these.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

try:
    import triton.language as tl
    from triton import __version__ as _TRITON
    from triton import jit
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # no Triton, so no GPU of ours either
    tl = gdc_wait = gdc_launch_dependents = TensorDescriptor = None
    _TRITON = ""

    def jit(fn: Callable | None = None, **options: Any) -> Any:
        """Stands for triton.jit: the function cannot be launched."""
        return fn or (lambda f: f)


__all__ = [
    "Launcher",
    "TensorDescriptor",
    "capability",
    "gdc_launch_dependents",
    "gdc_wait",
    "hold",
    "is_roomy",
    "jit",
    "next_power_of_2",
    "num_multiprocessors",
    "on_gpu",
    "pdl",
    "takes_gluon",
    "tl",
    "touch",
]

logger = logging.getLogger(__name__)
WRITTEN_FOR = "3.6."  # Triton, which Gluon changes with. There a compiled kernel takes all arguments in order, constants too
_KNOWN = _TRITON.startswith(WRITTEN_FOR)  # elsewhere every launch goes Triton's way


@jit
def touch(pointers):
    """Ask for the cache lines (128 bytes) at `pointers` to come into the L2 cache; waits for nothing."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )  # fmt: skip


@jit
def hold():
    """Loads before this line are asked for before those behind it: left alone, the assembler moves them to where their results
    are needed. That is not always worse (benchmarks/results/h200-experts.json)."""
    tl.inline_asm_elementwise("bar.warp.sync 0xffffffff; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device; (0, 0) for anything else (the interpreter)."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def is_roomy(device: torch.device) -> bool:
    """Whether a program may have more than 99 KB of shared memory: on data centre cards (an A100 163 KB, an H100 227 KB)."""
    major, minor = capability(device)
    return major in (9, 10) or (major == 8 and minor in (0, 7)) or not major


@functools.cache
def takes_gluon() -> bool:
    """Whether Triton is of the kind that kernels in Gluon, which is young, were written for, and compiles them."""
    if not _TRITON.startswith(WRITTEN_FOR):
        others = f"Headrace's fastest kernels are written for Triton {WRITTEN_FOR}x, which torch 2.11 brings: others run here"
        logger.warning("Triton is %s: %s, and many steps take longer", _TRITON, others)
        return False
    from triton import knobs

    return not knobs.runtime.interpret


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """SMs of a CUDA device; 132, an H100's, for anything else."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def on_gpu(tensor: Tensor) -> bool:
    """Whether a kernel's Triton version serves this tensor."""
    return tensor.is_cuda


def pdl(tensor: Tensor) -> dict[str, bool]:
    """Launch options of a kernel with a PDL parameter, for the card that `tensor` lies on."""
    if capability(tensor.device) >= (9, 0):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


class Launcher:
    """Launches a kernel again by its compiled form, without Triton's look at every argument (half of a launch's cost): where
    the host is what a step waits for, in small prefill steps, a layer's launches are most of it.

    The kernel's parameters are tensors, numbers, numbers that it is not specialized for, and constants ending with PDL. What
    decides about the compiled form is the key: the numbers themselves, the constants, the tensors' types and device. Tensors
    that are not aligned to 16 bytes go Triton's way.
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
