"""`headrace list`: the models in the Hub's local cache."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from headrace.cli.options import LogOptions, add_options
from headrace.errors import HeadraceError
from headrace.model.hub import in_bytes, tag_of

SPANS = ((86400 * 365, "years"), (86400 * 30, "months"), (86400, "days"), (3600, "hours"), (60, "minutes"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, LogOptions)


def run(args: argparse.Namespace) -> int:
    rows = [(name, in_bytes(size), ago(time.time() - used), form) for name, size, used, form in models()]
    if not rows:
        print("no model is in the cache; `headrace pull MODEL` brings one", file=sys.stderr)
        return 0
    rows.insert(0, ("NAME", "SIZE", "LAST USED", "FORMAT"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def models() -> list[tuple[str, int, float, str]]:
    """(name, bytes on disk, when it was last used, format) of each, the last used first. A .gguf file counts as one, in all its
    parts."""
    found = []
    for repo in repositories():
        files = files_of(repo)
        ggufs = {f.file_name: f for f in files if f.file_name.endswith(".gguf")}
        for tag in {tag_of(name): None for name in ggufs}:
            parts = [file for name, file in ggufs.items() if tag_of(name) == tag]
            used = max(file.blob_last_accessed for file in parts)
            found.append((f"{repo.repo_id}:{tag}", sum(file.size_on_disk for file in parts), used, "gguf"))
        if any(f.file_name.endswith(".safetensors") for f in files):
            size = repo.size_on_disk - sum(f.size_on_disk for f in ggufs.values())
            found.append((repo.repo_id, size, repo.last_accessed, "safetensors"))
        elif not ggufs:
            found.append((repo.repo_id, repo.size_on_disk, repo.last_accessed, "no weights"))
    return sorted(found, key=lambda row: -row[2])


def repositories() -> list[Any]:
    """Those of models, as huggingface-hub tells of them."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        return [repo for repo in scan_cache_dir().repos if repo.repo_type == "model"]
    except CacheNotFound:
        return []
    except OSError as error:
        raise HeadraceError(f"{error.filename}: cannot be read: {error.strerror}") from None


def files_of(repo: Any) -> list[Any]:
    """Of all its revisions, each blob once."""
    return list({f.blob_path: f for revision in repo.revisions for f in revision.files}.values())


def ago(seconds: float) -> str:
    for span, name in SPANS:
        if seconds >= span:
            count = int(seconds // span)
            return f"{count} {name if count > 1 else name.removesuffix('s')} ago"
    return "now"
