"""Turns this process into a compiler: Triton launches on meta tensors compile for a card that is not there.

What is compiled lies in Triton's cache. One target per process (Triton remembers it), TRITON_INTERPRET unset.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver

from headrace.fast_decode import epilogues
from headrace.kernels import launch


class NoDevice(DriverBase):
    """The part of a CUDA driver that compilation asks for."""

    def __init__(self, capability: int):
        self.target = GPUTarget("cuda", capability, 32)

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return "void*"

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_benchmarker(self):
        return None


def install(capability: int, compiled: Callable[[str, Any], None] = lambda name, kernel: None) -> None:
    """From now on every launch in this process only compiles, for sm_<capability>; `compiled` is told each kernel's name."""
    driver.set_active(NoDevice(capability))
    replace_everywhere(launch.capability, lambda device: divmod(capability, 10))
    replace_everywhere(epilogues.runs_triton, lambda tensor: True)
    run_kernel = triton.JITFunction.run

    def run(self, *args, grid, warmup, **kwargs):
        kernel = run_kernel(self, *args, grid=grid, warmup=True, **kwargs)
        compiled(self.fn.__name__, kernel)
        return kernel

    triton.JITFunction.run = run


def replace_everywhere(asked: Callable, answer: Callable) -> None:
    """Let `answer` stand for a function of Headrace's in all modules that have imported it by its name."""
    for name, module in list(sys.modules.items()):
        if name.startswith("headrace.") and getattr(module, asked.__name__, None) is asked:
            setattr(module, asked.__name__, answer)


def usage(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of stack: spilled registers) a thread of a compiled kernel; (0, 0) where they cannot be read."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not os.access(tool, os.X_OK):
        return 0, 0
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        out = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", out.stdout + out.stderr)
    assert found is not None, out
    return int(found[1]), int(found[2])
