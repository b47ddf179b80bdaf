"""Compile Triton kernels for a card that is not there: `python kernel_compilation.py sampling 90`.

A stand-in driver names the target and `warmup` compiles without a launch. What needs no card is thus found without one: what
the interpreter accepts but the compiler refuses. One target per process (Triton remembers it), TRITON_INTERPRET unset.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver


class StandIn(DriverBase):
    """Just enough of a CUDA driver for warmup."""

    def __init__(self, target: GPUTarget):
        self.target = target

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return "x"

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


def compile_all(capability: int, launch: Callable[[], None]) -> list[str]:
    """Run `launch` (meta tensors) with every kernel launch turned into a compilation: a line per compiled kernel."""
    driver.set_active(StandIn(GPUTarget("cuda", capability, 32)))
    lines = []

    def run(self, *args, grid, warmup, **kwargs):
        compiled = original(self, *args, grid=grid, warmup=True, **kwargs)
        lines.append(f"sm_{capability} {self.__name__}: {len(compiled.asm['cubin'])} bytes, shared {compiled.metadata.shared}")
        return compiled

    original = triton.JITFunction.run
    triton.JITFunction.run = run
    try:
        launch()
    finally:
        triton.JITFunction.run = original
    return lines


def sampling() -> None:
    """Every variant of the sampling kernels, for Qwen3's vocabulary."""
    from headrace.kernels.sample import sample_rows

    logits = torch.empty(4, 151936, dtype=torch.bfloat16, device="meta")
    floats = torch.empty(4, dtype=torch.float32, device="meta")
    ints = torch.empty(4, dtype=torch.int32, device="meta")
    longs = torch.empty(4, dtype=torch.int64, device="meta")
    for all_greedy, any_filter in ((True, False), (False, False), (False, True)):
        sample_rows(
            logits, floats, ints, floats, floats, longs, longs, ints,
            purpose=0, greedy_eps=1e-5, all_greedy=all_greedy, any_filter=any_filter,
        )  # fmt: skip


if __name__ == "__main__":
    name, capability = sys.argv[1], int(sys.argv[2])
    if capability >= 90:
        from headrace.kernels import sample

        sample.pdl = lambda tensor: {"PDL": True, "launch_pdl": True}
    print(*compile_all(capability, {"sampling": sampling}[name]), sep="\n")
