"""Other people's clients and checkers against a real server: the quick part of `make conformance`, installed beside the tests."""

from __future__ import annotations

import sys
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest

from conformance.judges import JUDGES, Judge, run_judge, server

QUICK = {"--max-examples": "3", "--max-time": "6", "--timeout": "100"}  # options that get other values here


def quick(name: str) -> Judge:
    judge = next(judge for judge in JUDGES if judge.name == name)
    command = [QUICK.get(option, value) for option, value in zip(("", *judge.command), judge.command, strict=False)]
    return replace(judge, command=tuple(command))


@pytest.mark.timeout(600)
def test_judges(tmp_path):
    """`make conformance` has all of them, and the strict ones."""
    here = {"bin": str(Path(sys.executable).parent), "site": sysconfig.get_path("purelib")}
    with server("tiny", tmp_path) as running:
        for name in ("schemathesis", "openai (Python)", "litellm"):
            work = tmp_path / name
            work.mkdir()
            verdict = run_judge(quick(name), running | here, work, log := tmp_path / f"{name}.log")
            assert not verdict.why and verdict.passed, f"{verdict}\n{log.read_text()[-4000:]}"
