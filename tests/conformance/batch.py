"""A batch file with every kind of line, answered by `headrace run-batch` with the embedded model; what it says is what the served model says.

    python batch.py URL MODEL FOLDER
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from real_tokenizers import post

HI = [{"role": "user", "content": "What is the capital of France?"}]
BODIES = {
    "/v1/chat/completions": {"messages": HI, "temperature": 0, "max_tokens": 16},
    "/v1/completions": {"prompt": "The sea", "temperature": 1, "seed": 3, "max_tokens": 16},
    "/v1/responses": {"input": "Hello", "temperature": 0, "max_output_tokens": 16}, "/v1/embeddings": {"input": ["a", "b"]},
    "/v1/rerank": {"query": "a", "documents": ["b", "a"]}, "/v1/score": {"text_1": "a", "text_2": ["a", "b"]},
}  # fmt: skip
VARY = ("id", "created", "created_at", "completed_at", "store")


def fixed(value: object) -> object:
    """Without what no two answers share; numbers as far as batches round alike."""
    if isinstance(value, dict):
        return {k: fixed(v) for k, v in value.items() if k not in (*VARY, "usage")}
    if isinstance(value, list):
        return [fixed(v) for v in value]
    return round(value, 3) if isinstance(value, float) else value


def main(url: str, model: str, folder: Path) -> int:
    lines = [{"custom_id": path, "method": "POST", "url": path, "body": {"model": model, **body}} for path, body in BODIES.items()]
    lines += [{**lines[0], "custom_id": "bad", "body": {"model": model, "messages": []}}, {**lines[0], "custom_id": "where", "url": "/v1/nothing"}]
    given, answers = folder / "in.jsonl", folder / "out.jsonl"
    given.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [sys.executable, "-m", "headrace.cli", "run-batch", "-i", given, "-o", answers, "--dtype", "float32", "--max-model-len", "1024"]
    code = subprocess.run([str(part) for part in command], check=False).returncode
    found = {line["custom_id"]: line for line in map(json.loads, answers.read_text().splitlines())}
    assert code == 1, "two lines are errors"
    assert found.keys() == {line["custom_id"] for line in lines}
    assert found["bad"]["response"]["status_code"] == 400 and found["where"]["response"] is None
    for path, body in BODIES.items():
        mine, served = found[path]["response"]["body"], post(url, path, {**body, "model": model})
        assert found[path]["response"]["status_code"] == 200, mine
        assert fixed(mine) == fixed(served), (path, fixed(mine), fixed(served))
    print(f"{len(found)} passed")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
