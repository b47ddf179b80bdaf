"""What everybody means by an adapter; in a file of its own, for messages: whoever reads these needs no checkpoint's formats."""

from __future__ import annotations

from typing import NamedTuple


class Version(NamedTuple):
    """One content of an adapter, for ever: what requests, caches and cores mean by it."""

    digest: str
    path: str  # its directory
