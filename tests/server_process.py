"""A real `headrace serve` process for tests: started on a free port, watched, its children found, ended without remains."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

SRC = Path(__file__).parents[1] / "src"
HERE = Path(__file__).parent


class ServerProcess:
    """`options` are the command line's; `builder` is module:function of an engine for this test, importable from tests/.

    `before` is Python that the server's process runs first.
    """

    def __init__(self, model: str | Path, *options: str, builder: str | None = None, tmp: Path | None = None, before: str = ""):
        code = "import sys; from headrace.cli import main; sys.exit(main(sys.argv[1:]))"
        if builder is not None:
            code = (
                "import argparse, sys; from headrace.cli import serve; p = argparse.ArgumentParser(); serve.add_arguments(p); "
                f"sys.exit(serve.run(p.parse_args(sys.argv[2:]), builder={builder!r}))"
            )
        code = before + code
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{SRC}:{HERE}"}
        if tmp is not None:
            environment["TMPDIR"] = str(tmp)
        self.errors = open((tmp or Path("/tmp")) / f"server-{time.monotonic_ns()}.log", "w+b")  # noqa: SIM115
        small = ["--device", "cpu", "--dtype", "float32", "--max-num-seqs", "16", "--debug-checks"]
        command = [sys.executable, "-c", code, "serve", str(model), "--port", "0", *small, *options]
        self.process = subprocess.Popen(
            command, env=environment, stderr=self.errors, stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            self.url = self._printed(r"listening on ([^\s\"]+)")
        except BaseException:
            self.kill()
            raise
        self.http = httpx.Client(base_url=self.url, timeout=60)

    def log(self) -> str:
        return Path(self.errors.name).read_text()

    def _printed(self, pattern: str) -> str:
        found = until(lambda: re.search(pattern, self.log()) or self.process.poll() is not None, 60)
        assert not isinstance(found, bool), self.log()
        return found.group(1)

    def wait_ready(self, seconds: float = 90) -> ServerProcess:
        until(lambda: self.process.poll() is not None or self.is_ready(), seconds)
        assert self.process.poll() is None, self.log()
        return self

    def is_ready(self) -> bool:
        try:
            return self.http.get("/ready").status_code == 200
        except httpx.HTTPError:
            return False

    def children(self) -> list[int]:
        """Process ids of cores: the running one and, after it, the one on standby."""
        return sorted(processes_of(self.process.pid))

    def core(self) -> int:
        """The process that runs the engine; 0: none does at the moment."""
        return next(iter(self.children()), 0)

    def metrics(self) -> dict[str, float]:
        """name{labels without the model's} -> value."""
        return parse_metrics(self.http.get("/metrics").text)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()

    def interrupt(self) -> None:
        """Ctrl-C at a terminal: all processes of the group get a SIGINT."""
        os.killpg(self.process.pid, signal.SIGINT)

    def terminate(self, seconds: float = 30) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *error: Any) -> None:
        self.http.close()
        children = self.children()
        self.kill()
        until(lambda: not any(map(alive, children)), 5)
        self.errors.close()


def processes_of(parent: int) -> Iterator[int]:
    """Children that live."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, ppid = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if int(ppid) == parent and state != "Z":
                    yield int(entry.name)


def zombies_of(parent: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, ppid = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if int(ppid) == parent and state == "Z":
                    found.append(int(entry.name))
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition: Callable[[], Any], seconds: float, every: float = 0.02) -> Any:
    """The condition's first true value."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(every)
    return value


def parse_metrics(text: str) -> dict[str, float]:
    found = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[re.sub(r'engine="0",?|model_name="[^"]*",?', "", name).replace("{}", "").replace(",}", "}")] = float(value)
    return found
