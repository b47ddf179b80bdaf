"""Copies of the tree in which tests run, in processes forked from one that has imported the libraries."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

PARTS = ("scheduler", "cache", "engine", "sampling", "text", "conversation", "api")  # of src/headrace
TRACED = [f"*/src/headrace/{part}/*" for part in PARTS]
LIBRARIES = "numpy torch tokenizers jinja2 msgspec hypothesis pytest httpx starlette uvicorn prometheus_client llguidance transformers jsonschema"


def copy_tree(checkout: Path, to: Path) -> Path:
    """The files of the checkout that git knows or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=checkout, capture_output=True, check=True, text=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (checkout / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(checkout / name, to / name)
    # by content: a mutant of the same second and size is not taken for the original
    subprocess.run([sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash", to / "src"], check=True)
    (to / "src/sitecustomize.py").write_text("import coverage\n\ncoverage.process_startup()\n")  # idle unless tests are traced
    (to / "coverage.rc").write_text(
        "[run]\nparallel = true\ncontext = ${PYTEST_CURRENT_TEST-}\ninclude =\n"
        + "".join(f"  {p}\n" for p in TRACED)
    )
    return to


def forked(tree: Path, work: Callable[[], int], log: Path) -> int:
    """The process id of a child that does `work` in `tree`, as the leader of a group of its own."""
    if (child := os.fork()) != 0:
        return child
    code = 70
    try:
        os.setsid()
        os.chdir(tree)
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.environ["PYTHONPATH"] = str(tree / "src")
        sys.path[:0] = [str(tree / "src"), str(tree / "tests")]
        sys.dont_write_bytecode = True
        code = work()
    finally:
        os._exit(code)


class Pool:
    """Trees, each with at most one child at work in it."""

    def __init__(self, trees: list[Path]):
        self.free, self.busy = list(trees), {}

    def start(
        self, work: Callable[[], int], seconds: float, done: Callable[[Path, int | None], None], prepare=lambda tree: None
    ) -> None:
        """Run `work` in a free tree, waiting for one; `done(tree, exit code or None for too long)` is called when it has ended."""
        while not self.free:
            self.wait()
        tree = self.free.pop()
        prepare(tree)
        self.busy[forked(tree, work, tree.with_suffix(".log"))] = (tree, time.monotonic() + seconds, done)

    def wait(self) -> None:
        """Until one child has ended."""
        while True:
            for child, (tree, until, done) in list(self.busy.items()):
                ended, status = os.waitpid(child, os.WNOHANG)
                late = not ended and time.monotonic() > until
                if ended or late:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(child, signal.SIGKILL)  # also what a test has started and left
                    if late:
                        os.waitpid(child, 0)
                    del self.busy[child]
                    self.free.append(tree)
                    return done(tree, None if late else os.waitstatus_to_exitcode(status))
            time.sleep(0.02)

    def finish(self) -> None:
        while self.busy:
            self.wait()


def pytest_main(*args: str, plugins: list | None = None) -> int:
    import pytest
    from hypothesis import Phase, settings

    # the first example that fails is enough, and none is carried from one mutant to the next
    settings.register_profile("mutation", deadline=None, phases=[Phase.explicit, Phase.generate], database=None)
    always = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--hypothesis-profile", "mutation"]
    return int(pytest.main([*always, *args], plugins=plugins))


def import_libraries() -> None:
    os.environ["TRITON_INTERPRET"] = "1"  # as in tests/conftest.py
    for library in LIBRARIES.split():
        with contextlib.suppress(ImportError):
            __import__(library)
