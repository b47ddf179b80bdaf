"""The Triton kernels compile for Hopper and for Ampere, on a machine without a card, and do not spill where it matters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
pytest.importorskip("triton")


@pytest.mark.parametrize("capability", [90, 80])
def test_kernels_compile(capability: int) -> None:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, str(TESTS / "compile_kernels.py"), str(capability), "8B"], env=env, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-3000:]
    kernels = [json.loads(line) for line in run.stdout.splitlines()]
    assert {k["kernel"] for k in kernels} >= {
        "_split_attention", "_varlen_attention", "_gather_kv", "_qkv_rope_write", "_rms_norm", "_act_mul", "_embed",
    }  # fmt: skip
    for k in kernels:
        assert k["shared"] <= (227 if capability >= 90 else 99) * 1024, k
        if capability >= 90:
            assert k["spills"] == 0, k
