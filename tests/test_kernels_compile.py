"""The kernels compile for a Hopper card, with programmatic dependent launch, on a machine that has none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
SCRIPT = Path(__file__).with_name("kernel_compilation.py")
EXPECTED = {"sampling": {"_reduce": 3, "_pick": 3, "_filter": 2, "_filter_all": 1}}  # variants of each kernel


@pytest.mark.parametrize("name", EXPECTED)
def test_kernels_compile(name, tmp_path):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, str(SCRIPT), name, "90"], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    compiled = [line.split()[1].rstrip(":") for line in done.stdout.splitlines() if line.startswith("sm_90")]
    assert {kernel: compiled.count(kernel) for kernel in EXPECTED[name]} == EXPECTED[name]


def test_launching_again_hands_over_the_same(tmp_path):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    script = SCRIPT.with_name("launcher_arguments.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == [
        "_rms_norm", "1", "_rms_norm", "1", "_act_mul", "1", "_qkv_rope_write", "1", "_qkv_rope_write", "1",
        "_rms_norm", "3",  # not aligned: Triton's way each time
    ]  # fmt: skip
