"""Compile the fused decode step for a card that is not there: python tests/compile_fast_decode.py 90|80. Prints the kernels."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import torch
import triton

import compile_ahead
import gpu_decode
from headrace.model import decode_tiles
from headrace.model.fast_decode import FastDecode


def main(capability: int) -> None:
    compile_ahead.install(capability)
    compiling = triton.JITFunction.run

    def run(self, *args, **kwargs):
        kernel = compiling(self, *args, **kwargs)
        print(self.fn.__name__, kernel.metadata.shared)
        return kernel

    triton.JITFunction.run = run
    config = replace(gpu_decode.MODELS["0.6b"], num_layers=1)
    meta = torch.device("meta")
    for rows, table in ((2, decode_tiles.default_table(config)), (8, gpu_decode.forced(config, "ahead"))):
        fast = FastDecode(config, gpu_decode.random_weights(config, True, meta), rows, meta, table, max_model_len=4096)
        batch = gpu_decode.Input(config, rows, 500, 8 * rows, meta).batch([500] * rows)
        fast.forward(batch, gpu_decode.Cache(config, 64, meta))


if __name__ == "__main__":
    main(int(sys.argv[1]))
