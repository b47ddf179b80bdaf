"""Files of results say on what machine, with which versions, by which commit and of what work, and scripts write all of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import about

FILES = sorted((Path(__file__).parent.parent / "benchmarks" / "results").glob("*.json"))
SAID = {
    "a machine": {"card", "cpu", "machine", "machines"}, "a commit": {"commit", "commits"},
    "versions": {"torch", "python", "versions", "engine"}, "work": {"command", "commands", "workload", "what", "script", "model", "requests"},
}  # fmt: skip


def keys_of(value: object) -> set[str]:
    if isinstance(value, dict):
        return {*value, *(key for part in value.values() for key in keys_of(part))}
    return {key for part in value for key in keys_of(part)} if isinstance(value, list) else set()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_file_of_results_says_where_it_is_from(file: Path) -> None:
    keys = keys_of(json.loads(file.read_text()))
    peer = {"a commit"} if "engine" in keys else set()  # another engine's, which has its version
    assert [what for what, names in SAID.items() if not names & keys and what not in peer] == []


def test_a_script_writes_what_a_file_has_to_say(tmp_path: Path) -> None:
    about.write(tmp_path / "x.json", {"cpus": 3, "figures": [1.5]})
    found = json.loads((tmp_path / "x.json").read_text())
    assert found["cpus"] == 3 and found["figures"] == [1.5], "what is measured is not replaced"
    assert found["cpu"] and found["versions"]["torch"] and found["command"] and "commit" in found
