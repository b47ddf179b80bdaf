"""Turns this process into a compiler: Triton launches on meta tensors compile for a named target and fill Triton's cache."""

from __future__ import annotations

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver

from headrace.kernels import attention_decode_fused, embed_residual, gemv, launch, skinny_gemm
from headrace.model import fast_decode


class StandIn(DriverBase):
    """Just enough of a CUDA driver for a compilation."""

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


def install(capability: int) -> None:
    """From now on every launch in this process only compiles, for sm_<capability>."""
    driver.set_active(StandIn(capability))
    launch.capability = lambda device: divmod(capability, 10)
    for module in (attention_decode_fused, embed_residual, fast_decode, gemv, skinny_gemm):
        module.runs_triton = lambda tensor: True
    original = triton.JITFunction.run

    def run(self, *args, grid, warmup, **kwargs):
        return original(self, *args, grid=grid, warmup=True, **kwargs)

    triton.JITFunction.run = run
