"""Python's bytecode is kept, so that only a first start compiles torch's sources: longer than the rest of its import takes.

Python keeps it beside the sources. Where it may not (somebody else's directory, a read-only image, PYTHONDONTWRITEBYTECODE) and
whoever installed them did not do it (uv does not by itself), each start would. There it goes to Headrace's cache directory.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from pathlib import Path

from headrace.config import cache_dir, keep_bytecode_in
from headrace.extras import is_installed

LARGE = "torch"  # the package that tells, without which nothing takes long


def keep_bytecode() -> None:
    """For what this process and those that it starts import from now on. A place that somebody has chosen stands."""
    if sys.pycache_prefix is not None or not is_installed(LARGE):
        return
    spec = importlib.util.find_spec(LARGE)
    if spec is None or spec.origin is None or is_kept(Path(spec.origin)):
        return
    with contextlib.suppress(OSError):  # no place: each start compiles
        folder = cache_dir() / "bytecode"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            keep_bytecode_in(folder)


def is_kept(source: Path) -> bool:
    """Whether a source's bytecode is beside it, or will be as soon as it is imported."""
    kept = Path(importlib.util.cache_from_source(str(source)))
    folder = next(folder for folder in kept.parents if folder.exists())
    return kept.exists() or (not sys.dont_write_bytecode and os.access(folder, os.W_OK))
