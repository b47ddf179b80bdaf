"""What the interpreter accepts the compiler must too: the fused decode step compiles for Ampere and Hopper without a card."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.parametrize("capability", [80, 90])
def test_compiles(capability: int) -> None:
    script = Path(__file__).parent / "compile_fast_decode.py"
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, script, str(capability)], env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = [line.split() for line in done.stdout.splitlines()]
    names = {"_embed_residual_kernel", "_gemv_kernel", "_skinny_kernel", "_decode_attention_kernel"}
    names |= {"_qkv_rope_write", "_split_attention"} if capability == 90 else set()
    assert {name for name, _, _ in kernels} == names
    assert max(int(shared) for _, shared, _ in kernels) <= 227 * 1024  # of an SM
    assert not [kernel for kernel in kernels if int(kernel[2]) > 16], "registers are spilled"
