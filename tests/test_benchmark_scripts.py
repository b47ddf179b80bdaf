"""Scripts of docs/benchmarks.md that run on a CPU do run: each once, over something small, and writes what it found.

Two of them had been left behind by the engine's insides that they reach into.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tiny_models import write_shape

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
SMALL = {
    "vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "intermediate_size": 64, "max_position_embeddings": 4096,
}  # fmt: skip


@pytest.mark.parametrize("words", [
    "cache_index.py --sizes 200 --json OUT", "scheduler_host.py --running 4 --block-size 16 --steps 8 --cpu greedy --json OUT",
    "host_trace.py --config SHAPE --batch 1 --context 32 --steps 4 --device cpu --out OUT",
    "offline_steps.py --config SHAPE --num-prompts 2 --device cpu --out OUT",
    "speculative.py --config SHAPE --device cpu --accept 0.8 --batches 1 --input-len 32 --out OUT",
    "structured.py --config SHAPE --device cpu --pairs 1 --running 2 --tokens 6 --json OUT", "router.py --cores 2 --blocks 100 --json OUT",
], ids=lambda words: words.partition(".")[0])  # fmt: skip
def test_a_script_runs(words: str, tmp_path: Path) -> None:
    config, out = Path(write_shape(tmp_path, **SMALL)) / "config.json", tmp_path / "out.json"
    command = [{"SHAPE": str(config), "OUT": str(out)}.get(word, word) for word in words.split()]
    environment = os.environ | {"HEADRACE_CACHE": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, BENCHMARKS / command[0], *command[1:]], capture_output=True, text=True, timeout=240, env=environment, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(out.read_text())
