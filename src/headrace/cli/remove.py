"""`headrace rm MODEL`: out of the Hub's local cache."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

from headrace.cli.cached import files_of, models, repositories
from headrace.cli.options import LogOptions, add_options
from headrace.cli.parser import text
from headrace.errors import HeadraceError
from headrace.model.hub import in_bytes, split_name, tag_of
from headrace.options import nearest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    words = "a name as `headrace list` shows it; without its :TAG all of the repository (default: none)"
    parser.add_argument("names", nargs="+", type=text, metavar="MODEL", help=words)
    add_options(parser, LogOptions)


def run(args: argparse.Namespace) -> int:
    chosen = [(name, *find(name)) for name in args.names]  # all of them are there before one is removed
    for name, repo, files in chosen:
        print(f"{name}: {in_bytes(remove(repo, files))} freed")
    return 0


def find(name: str) -> tuple[Any, list[Any]]:
    """Its repository, and those of its files that are meant. Raises HeadraceError."""
    wanted, tag = split_name(name)
    for repo in repositories():
        if repo.repo_id == wanted:
            files = files_of(repo)
            if tag is not None:
                files = [f for f in files if f.file_name.endswith(".gguf") and tag_of(f.file_name).lower() == tag.lower()]
            if files:
                return repo, files
    known = {known for found, *_ in models() for known in (found, split_name(found)[0])}
    raise HeadraceError(f"{name} is not in the cache{nearest(name, known)}; `headrace list` shows what is")


def remove(repo: Any, files: list[Any]) -> int:
    """The bytes that are free then. With its last weights a repository goes as a whole."""
    gone = {f.blob_path for f in files}
    weights = [f for f in files_of(repo) if f.file_name.endswith((".gguf", ".safetensors")) and f.blob_path not in gone]
    if not weights:
        shutil.rmtree(repo.repo_path)  # huggingface-hub would look for its commits, and take a copy's that has the same
        return repo.size_on_disk
    for revision in repo.revisions:
        for f in revision.files:
            if f.blob_path in gone:
                Path(f.file_path).unlink(missing_ok=True)
    for blob in gone:
        Path(blob).unlink(missing_ok=True)
    return sum(f.size_on_disk for f in files)
