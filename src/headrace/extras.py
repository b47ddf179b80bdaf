"""Packages that only some uses need: which extra brings them, and what to say where one is missing."""

from __future__ import annotations

import importlib.util

from headrace.errors import HeadraceError

EXTRAS = {  # module -> the extra of pyproject.toml that brings it
    "matplotlib": "plot", "ray": "ray", "opentelemetry": "otel", "opentelemetry.exporter.otlp.proto.http": "otel",
}  # fmt: skip


class MissingPackageError(HeadraceError):
    """A package that was left out when Headrace was installed; the message has the command that adds it."""


def is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def install_command(module: str) -> str:
    """Where Headrace is installed, this adds only what is missing."""
    return f"pip install 'headrace[{EXTRAS[module]}]'" if module in EXTRAS else f"pip install {module}"


def without_grammars() -> str:
    """Why an engine takes no grammars."""
    return "there is no tokenizer" if is_installed("llguidance") else _advice("llguidance")


def require(extra: str) -> None:
    """Raises MissingPackageError if a package of the extra is not installed."""
    for module, brought_by in EXTRAS.items():
        if brought_by == extra and not is_installed(module):
            raise MissingPackageError(_advice(module))


def missing_package(error: ImportError) -> str | None:
    """What to do about a failed import; None where it is not for the want of a package."""
    module = (error.name or "").partition(".")[0]
    if module in EXTRAS:
        return _advice(module)
    if module in ("", "headrace") or is_installed(module):
        return None
    return f"the package {module} is not installed: install Headrace anew, with all that it depends on (pip install)"


def _advice(module: str) -> str:
    return f"this needs the package {module}, which is not installed: {install_command(module)}"
