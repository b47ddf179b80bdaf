"""Compile the fused decode step for a card that is not there: python tests/compile_fast_decode.py 90|80. Prints the kernels.

A line is: name, bytes of shared memory, bytes of stack a thread (registers that spilled; 0 where this cannot be read).
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import torch
import triton

import compile_ahead
import gpu_decode
from headrace.kernels.attention_decode import SplitTile
from headrace.model import decode_tiles
from headrace.model.fast_decode import FastDecode


def stack_bytes(cubin: bytes) -> int:
    """Of a thread of the only kernel in `cubin`."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        return 0
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    return int(re.search(r"STACK:(\d+)", usage.stdout + usage.stderr).group(1))


def main(capability: int) -> None:
    compile_ahead.install(capability)
    compiling = triton.JITFunction.run

    def run(self, *args, **kwargs):
        kernel = compiling(self, *args, **kwargs)
        print(self.fn.__name__, kernel.metadata.shared, stack_bytes(kernel.asm["cubin"]))
        return kernel

    triton.JITFunction.run = run
    config = replace(gpu_decode.MODELS["0.6b"], num_layers=1)
    meta = torch.device("meta")
    default = decode_tiles.default_table(config)
    cases = [(2, default), (8, gpu_decode.forced(config, "ahead"))]
    if capability == 90:  # the tiles of many rows are made for its shared memory
        two = replace(default[256], attention=SplitTile(), gate_up=decode_tiles.GemmTile(64, 64, 1, 8, 4))
        cases += [(100, default), (256, default), (256, {256: two})]
    for rows, table in cases:
        fast = FastDecode(config, gpu_decode.random_weights(config, True, meta), rows, meta, table, max_model_len=4096)
        batch = gpu_decode.Input(config, rows, 500, 8 * rows, meta).batch([500] * rows)
        fast.forward(batch, gpu_decode.Cache(config, 64, meta))


if __name__ == "__main__":
    main(int(sys.argv[1]))
