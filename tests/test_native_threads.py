"""How many threads a native step runs with beside others who want the cores: tried, not guessed; on a made-up machine."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import headrace.native

SOURCES = Path(headrace.native.__file__).parent.parent / "csrc" / "cpu"
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("threads") / "thread_choice"
    source = Path(__file__).with_name("native") / "thread_choice.cpp"
    subprocess.run([str(COMPILER), "-std=c++20", "-I", SOURCES, source, "-o", program], check=True)
    return program


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody knows a thread's core")
def test_threads_that_share_a_core_leave_it_to_each_other(tmp_path):
    """A thread that spins there until it sleeps takes 50 us from the one that it waits for."""
    program, source = tmp_path / "crowded_threads", Path(__file__).with_name("native") / "crowded_threads.cpp"
    subprocess.run([str(COMPILER), "-std=c++20", "-pthread", "-I", SOURCES, source, SOURCES / "pool.cpp", "-o", program], check=True)
    assert float(subprocess.run([program], check=True, capture_output=True, text=True).stdout) < 30


def steps(machine: Path, scene: str) -> str:
    return subprocess.run([machine, scene], check=True, capture_output=True, text=True).stdout.strip()


def test_all_threads_run_where_nobody_else_does_but_for_a_moment(machine):
    assert steps(machine, "quiet").count("1") < 60


def test_a_stranger_gets_a_core_at_once_and_little_is_lost_in_trying_again(machine):
    threads = steps(machine, "stranger")
    assert threads[:200].count("1") > 170
    assert threads.count("2") < 60


def test_who_takes_a_core_for_a_moment_in_every_step_costs_no_thread(machine):
    threads = steps(machine, "server")
    assert 0 < threads.count("1") < 100  # it is tried, too


def test_all_threads_are_back_when_the_stranger_has_left(machine):
    threads = steps(machine, "leaves")
    assert threads[100:300].count("1") > 180
    assert threads[-1000:] == "2" * 1000


def test_more_rows_have_all_threads_at_once_where_one_row_had_fewer(machine):
    threads = steps(machine, "streams")
    assert threads[100:1000].count("1") > 800
    assert threads[1030:1130].count("2") > 60
