"""What the package imports is what installing it brings: nothing works only because the tests need it, too."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
MODULES = {"huggingface-hub": "huggingface_hub", "pyyaml": "yaml", "pyzmq": "zmq", "prometheus-client": "prometheus_client"}
STATEMENT = re.compile(r"^ *(?:from (\w+)[.\w]* import |import (\w+)[.\w]*(?: as \w+)?$)", re.M)
BROUGHT = {"triton", "tqdm"}  # by torch, where there are cards, and by huggingface-hub
EXTRAS = {"ray": "ray", "matplotlib": "plot", "opentelemetry": "otel"}


def imported() -> dict[str, str]:
    """Modules of others, each with a file that names it."""
    found = {}
    for path in sorted((ROOT / "src").rglob("*.py")):
        found |= {name: str(path) for names in STATEMENT.findall(path.read_text()) for name in names if name}
    own = {*sys.stdlib_module_names, "headrace", "headrace_bench"}
    return {name: path for name, path in found.items() if name not in own}


def test_every_import_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [Requirement(line).name for line in project["dependencies"]]
    declared = {MODULES.get(name, name) for name in names}
    assert len(declared) > 15
    missing = {name: path for name, path in imported().items() if name not in declared | BROUGHT | set(EXTRAS)}
    assert not missing, "imported, and not among the dependencies of pyproject.toml"
    assert set(EXTRAS.values()) <= set(project["optional-dependencies"])
