"""Files that lie in the current directory, a model's perhaps, and are named as modules are: no process takes them for these."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from server_driver import SRC
from tiny_models import write_tiny

NAMES = ("json", "msgspec", "numpy", "signal", "struct", "tokenizers", "torch", "uvicorn", "zmq", "llguidance")


def headrace(tmp_path: Path) -> list[str]:
    """A command like the one that is installed: a script in another directory."""
    script = tmp_path / "headrace"
    script.write_text("import sys\nfrom headrace.__main__ import main\nif __name__ == '__main__':\n    sys.exit(main())\n")
    return [sys.executable, str(script)]


@pytest.fixture
def traps(tmp_path):
    """A model's directory with files that say in `taken` that somebody ran them."""
    model = write_tiny("llama", tmp_path / "model")
    for name in NAMES:
        (model / f"{name}.py").write_text(f"open({str(tmp_path / 'taken')!r}, 'a').write({name!r})\n")
    yield model
    assert not (tmp_path / "taken").exists(), (tmp_path / "taken").read_text()


@pytest.mark.parametrize("more", [(), ("--api-processes", "2")])
def test_a_server_runs_nothing_of_a_model_directory(tmp_path, traps, more):
    words = ["serve", ".", "--port", "0", "--device", "cpu", "--max-num-seqs", "4", "--log-level", "info", *more]
    environment = {**os.environ, "PYTHONPATH": str(SRC), "TMPDIR": str(tmp_path)}
    process = subprocess.Popen([*headrace(tmp_path), *words], cwd=traps, env=environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        said = []
        for line in process.stderr:
            said.append(line)
            if "ready after" in line:
                break
        url = re.search(r"listening on (\S+)", "".join(said))
        assert url is not None and "ready after" in said[-1], "".join(said)
        body = {"prompt": "a", "max_tokens": 8, "structured_outputs": {"regex": "[a-z]{2}"}}  # a grammar has a process of its own
        answer = httpx.post(f"{url[1]}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
    finally:
        process.terminate()
        process.communicate(timeout=60)


def test_a_simulation_of_several_fronts_does_not_either(tmp_path, traps):
    words = ["--card", "h100", "--replicas", "2", "--fronts", "2", "--request-rate", "9", "--num-prompts", "20"]
    command = [*headrace(tmp_path), "simulate", "--config", "config.json", *words]
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    done = subprocess.run(command, cwd=traps, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_every_child_is_started_by_one_function():
    paths = [p for folder in ("headrace", "headrace_bench") for p in (SRC / folder).rglob("*.py")]
    assert [p.name for p in paths if "[sys.executable" in p.read_text() or re.search(r"\bsys\.executable,", p.read_text())] == ["config.py"]
    assert Path(SRC / "headrace" / "config.py") in paths
