"""What each file of results says beside its figures: the machine, versions, the commit that ran, and the command."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from headrace_bench.engine import commit_of_source


def about() -> dict[str, Any]:
    """The card is this process's, if it has used one."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        machine: dict[str, Any] = {"card": torch.cuda.get_device_name()}
    else:
        machine = {"cpu": cpu_name(), "cpus": os.cpu_count()}
    versions: dict[str, Any] = {"python": platform.python_version()}
    for name in ("torch", "triton"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    found = {"load_average": os.getloadavg()[0], "versions": versions, "commit": commit_of_source(), "command": command}
    return machine | found


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def write(path: str | Path, found: dict[str, Any]) -> None:
    """`found`, and what it does not say itself of the above."""
    Path(path).write_text(json.dumps(about() | found, indent=1) + "\n")
