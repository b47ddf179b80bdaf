"""Launch the elementwise kernels for a card that is not there, by Triton's way and then by the compiled form.

Both must hand over the same arguments. Prints a kernel's name and how often Triton's way was taken for three launches.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from headrace.compile_ahead.no_device import NoDevice
from headrace.kernels import launch
from headrace.kernels.activation import act_mul_triton
from headrace.kernels.norm import add_rms_norm_triton, rms_norm_triton
from headrace.kernels.qkv import qkv_rope_write_triton
from headrace.kernels.tables import enter_triton

seen: list[tuple] = []
slow: list[str] = []


class Recorder:
    """Stands for what puts a compiled kernel on a stream."""

    def __init__(self, src, metadata):
        self.name = metadata.name

    def __call__(self, x, y, z, stream, function, metadata, launch_metadata, enter, leave, *args):
        shown = [(tuple(a.shape), a.dtype) if isinstance(a, torch.Tensor) else (type(a), a) for a in args]
        seen.append((self.name, (x, y, z), stream, function, metadata, shown))


class Card(NoDevice):
    launcher_cls = Recorder
    utils = SimpleNamespace(
        load_binary=lambda *args: (1, 1, 32, 0, 1024), get_device_properties=lambda device: {"max_shared_mem": 232448},
        unload_module=lambda module: None,
    )  # fmt: skip


def main() -> None:
    driver.set_active(Card(90))
    launch.capability = lambda device: (9, 0)  # type: ignore[assignment]
    launch.on_gpu = lambda tensor: True  # type: ignore[assignment]
    run = JITFunction.run
    JITFunction.run = lambda self, *args, **options: slow.append(self.fn.__name__) or run(self, *args, **options)  # type: ignore
    bf16 = torch.bfloat16
    x, weight, gate_up = torch.zeros(6, 64, dtype=bf16), torch.zeros(64, dtype=bf16), torch.zeros(6, 256, dtype=bf16)
    odd = torch.zeros(6 * 64 + 1, dtype=bf16)[1:].view(6, 64)  # not aligned
    cache, table, places = torch.zeros(4, 16, 2, 32, dtype=bf16), torch.zeros(40, 16), torch.arange(6)
    kv = SimpleNamespace(k=[cache], v=[cache], scales=[(None, None)])

    packet, tables = torch.zeros(64, dtype=torch.int32), [torch.zeros(4, n, dtype=torch.int32) for n in (17, 8, 6, 10)]

    def qkv(norm: torch.Tensor | None) -> None:
        qkv_rope_write_triton(
            gate_up, places.int(), table, table, kv, 0, places, num_heads=4, num_kv_heads=2, head_dim=32,
            q_norm=norm, k_norm=norm, eps=1e-6, norm_offset=0.0, keep=True,
        )  # fmt: skip

    for call in (
        lambda: rms_norm_triton(x, weight, 1e-6), lambda: add_rms_norm_triton(x, x, weight, 1e-6),
        lambda: act_mul_triton(gate_up, "silu"), lambda: qkv(None), lambda: qkv(weight[:32]),
        lambda: rms_norm_triton(odd, weight, 1e-6), lambda: enter_triton(packet, 2, 1500, tables),
    ):  # fmt: skip
        seen.clear()
        slow.clear()
        for _ in range(3):
            call()
        assert len(seen) == 3 and seen[0] == seen[1] == seen[2], seen
        print(seen[0][0], len(slow))


if __name__ == "__main__":
    main()
