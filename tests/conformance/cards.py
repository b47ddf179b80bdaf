"""All kernels of models compile for the cards that people own, without one, and fit into their shared memory: pytest cards.py.

A quarter of an hour of two cores, and so no part of `make test`, which compiles a few of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHAPES = Path(__file__).parents[2] / "benchmarks" / "shapes"
CARDS = {"a100": 80, "a10": 86, "l4": 89, "h100": 90, "rtx5090": 120}
# Gemma-2-2B's: heads of 256, windows, soft caps, no fused decode step
GEMMA = {
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "vocab_size": 256000, "hidden_size": 2304,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 9216,
    "query_pre_attn_scalar": 256, "sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "hidden_activation": "gelu_pytorch_tanh", "torch_dtype": "bfloat16",
}  # fmt: skip
CASES = {
    "floats": ("qwen3-8b", []), "int4": ("qwen3-8b", ["--quantization", "int4"]), "int8": ("qwen3-0.6b", ["--quantization", "int8"]),
    "fp8": ("qwen3-8b", ["--quantization", "fp8"]), "heads of 256": (None, []),
    "an FP8 cache": ("qwen3-0.6b", ["--kv-cache-dtype", "fp8"]),
}  # fmt: skip


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("case", CASES)
def test_all_kernels_fit(card: str, case: str, tmp_path: Path) -> None:
    shape, options = CASES[case]
    config = json.dumps(GEMMA) if shape is None else (SHAPES / f"{shape}.json").read_text()
    (tmp_path / "config.json").write_text(config)
    places = {"TRITON_CACHE_DIR": str(tmp_path / "triton"), "HEADRACE_CACHE": str(tmp_path / "headrace")}
    few = ["--load-format", "dummy", "--max-num-seqs", "64", "--max-model-len", "4096"]
    command = [sys.executable, "-m", "headrace.cli", "compile", str(tmp_path), "--card", card, *few, *options]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | places, timeout=1700)
    if case == "an FP8 cache" and CARDS[card] < 89:
        assert done.returncode == 1 and "kv_cache_dtype" in done.stderr.replace("-", "_") and "8.9" in done.stderr
        return
    assert done.returncode == 0, done.stderr[-3000:]
    again = subprocess.run(command, capture_output=True, text=True, env=os.environ | places, timeout=300)
    assert again.stdout.startswith("all of it is in ")
