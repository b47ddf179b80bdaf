"""Turns this process into a compiler: launches on tensors without data compile for a card that is not there, or are noted.

What is compiled lies in Triton's cache, under the key that a machine with the card looks for: it is made of the kernel's
source, its arguments' types, its constants and the card's compute capability. So do the small C modules that hand a kernel's
arguments over, which Triton builds one for each signature. One target a process (Triton remembers it), TRITON_INTERPRET unset.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.backends.nvidia import driver as nvidia
from triton.runtime import build, driver

from headrace.config import c_compiler
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


class Launch(NamedTuple):
    """A form of a kernel that a launch needs: what Triton's compilation is asked for."""

    kernel: Any  # JITFunction
    arguments: tuple[Any, ...]

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__


class _Noted:
    """Stands for a compiled kernel where none is made."""


def install(
    capability: int, compiled: Callable[[str, Any], None] = lambda name, kernel: None, *, multiprocessors: int = 132
) -> None:
    """From now on every launch in this process only compiles, for sm_<capability>; `compiled` is told each kernel's name."""
    driver.set_active(NoDevice(capability))
    replace_everywhere(launch.capability, lambda device: divmod(capability, 10))
    replace_everywhere(launch.num_multiprocessors, lambda device: multiprocessors)
    replace_everywhere(launch.on_gpu, lambda tensor: True)
    replace_everywhere(epilogues.runs_triton, lambda tensor: True)
    launch._KNOWN = False  # what is only compiled cannot be launched again
    run_kernel = triton.JITFunction.run

    def run(self, *args, grid, warmup, **kwargs):
        kernel = run_kernel(self, *args, grid=grid, warmup=True, **kwargs)
        compiled(self.fn.__name__, kernel)
        return kernel

    triton.JITFunction.run = run


def note_launches() -> tuple[list[Launch], Callable[..., Any]]:
    """After `install`: from now on nothing is compiled, and the forms that would be are added to the list, each once. Also
    what compiles them."""
    noted: list[Launch] = []
    original = triton.JITFunction._do_compile

    def note(self, key, signature, device, constants, options, attributes, warmup):
        noted.append(Launch(self, (key, signature, device, constants, options, attributes, warmup)))
        self.device_caches[device][0][key] = _Noted()
        return self.device_caches[device][0][key]

    triton.JITFunction._do_compile = note
    return noted, original


def compile_noted(found: Launch, original: Callable[..., Any]) -> Any:
    """The compiled kernel, from Triton's cache if it is there, by Triton's `original` compilation; and what hands its
    arguments over is built, where each kernel has its own (until Triton 3.6)."""
    kernel = original(found.kernel, *found.arguments)
    if hasattr(nvidia, "make_launcher"):
        nvidia.CudaLauncher(kernel.src, kernel.metadata)
    return kernel


def places_of(kernel: Any) -> list[str]:
    """The files of Triton's cache by which it finds this kernel, loads it and launches it."""
    files = [Path(kernel.metadata_group[name]) for name in kernel.metadata_group if name.endswith((".json", ".cubin"))]
    files += [file.with_name(f"__grp__{file.name}") for file in files if file.suffix == ".json"]
    return [f"{file.parent.name}/{file.name}" for file in files]


class _NotLoaded:
    """Stands for a C module that is built and not loaded."""

    def __getattr__(self, name: str) -> None:
        return None


def build_without_loading(directory: Path) -> None:
    """From now on Triton's C modules are built and cached, and not loaded, which takes a driver. The `directory` gets a library
    to link with in its place. Without a C compiler there are none: then a machine that runs kernels needs one."""
    compiler = c_compiler()
    build._load_module_from_path = lambda name, path: _NotLoaded()
    if compiler is None:
        nvidia.CudaLauncher = lambda source, metadata: None
        return
    stub = directory / "libcuda.so.1"
    # with the functions' names: linkers that drop what gives nothing (Ubuntu's) would have no driver loaded with the module
    texts = [Path(nvidia.dirname, name).read_text() for name in ("driver.c", "driver.py")]
    asked = {name for text in texts for name in re.findall(r"\bcu[A-Z]\w+", text)}
    source = "".join(f"void {name}(void) {{}}\n" for name in sorted(asked))
    build_stub = [compiler, "-shared", f"-Wl,-soname,{stub.name}", "-x", "c", "-", "-o", str(stub)]
    subprocess.run(build_stub, input=source, text=True, check=True)
    nvidia.library_dirs = lambda: [nvidia.libdevice_dir, str(directory)]
    nvidia.CudaUtils()


def replace_everywhere(asked: Callable, answer: Callable) -> None:
    """Let `answer` stand for a function of Headrace's in all modules that have imported it by its name."""
    for name, module in list(sys.modules.items()):
        if name.startswith("headrace.") and getattr(module, asked.__name__, None) is asked:
            setattr(module, asked.__name__, answer)
