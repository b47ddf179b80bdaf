"""Where Python keeps the bytecode of what a command imports: as it does by itself, or with Headrace's other files."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.bytecode import is_kept

CODE = """
import sys
from headrace.bytecode import keep_bytecode
keep_bytecode()
import torch, subprocess
print(subprocess.run([sys.executable, "-c", "import torch; print(torch.__cached__)"], capture_output=True, text=True).stdout)
"""


def cached_by(tmp_path: Path, **environment: str) -> str:
    """Where a child of a process that keeps bytecode has that of a small package called torch."""
    package = tmp_path / "packages" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("SIZE = 1\n")
    path = os.pathsep.join([str(package.parent), *sys.path])
    unset = ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")
    env = {k: v for k, v in os.environ.items() if k not in unset} | {
        "PYTHONPATH": path,
        "HEADRACE_CACHE": str(tmp_path / "cache"),
    }
    ran = subprocess.run([sys.executable, "-c", CODE], env=env | environment, capture_output=True, text=True, check=True)
    return ran.stdout.strip()


@pytest.mark.parametrize(
    "environment, kept",
    [
        ({}, "packages/torch/__pycache__"),
        ({"PYTHONDONTWRITEBYTECODE": "1"}, "cache/bytecode"),
        ({"PYTHONPYCACHEPREFIX": "chosen"}, "chosen"),
    ],
)
def test_bytecode_is_kept(tmp_path, environment, kept):
    chosen = {k: str(tmp_path / v) if k == "PYTHONPYCACHEPREFIX" else v for k, v in environment.items()}
    file = Path(cached_by(tmp_path, **chosen))
    assert file.is_relative_to(tmp_path / kept)
    assert file.exists()


def test_without_a_place_nothing_changes(tmp_path):
    (tmp_path / "cache").write_text("no directory")
    file = Path(cached_by(tmp_path, PYTHONDONTWRITEBYTECODE="1"))
    assert file.is_relative_to(tmp_path / "packages")
    assert not file.exists()


def test_what_an_installer_has_kept_is_used(tmp_path, monkeypatch):
    source = tmp_path / "module.py"
    source.write_text("")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert not is_kept(source)
    kept = Path(importlib.util.cache_from_source(str(source)))
    kept.parent.mkdir()
    kept.touch()
    assert is_kept(source)


def test_nothing_is_kept_beside_sources_of_others(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    source = tmp_path / "module.py"
    source.write_text("")
    assert is_kept(source)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # whoever is root may write anywhere
    assert not is_kept(source)
