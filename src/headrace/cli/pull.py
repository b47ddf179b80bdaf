"""`headrace pull MODEL`: from the Hugging Face Hub into the local cache. First it says what that weighs and what is free."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from headrace.cli.options import LogOptions, add_options
from headrace.cli.parser import text
from headrace.config import EngineConfig, hub_offline
from headrace.errors import ParameterError
from headrace.model import hub

NAMES = "a Hub id; ORG/REPO:Q4_K_M names one .gguf file of a repository"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", type=text, metavar="MODEL", help=NAMES + " (default: none)")
    add_options(parser, EngineConfig, "revision")
    add_options(parser, LogOptions)


def run(args: argparse.Namespace) -> int:
    name, path = pull(args.name, args.revision)
    print(path)
    print(f"`headrace run {name}` talks to it", file=sys.stderr)
    return 0


def pull(name: str, revision: str | None) -> tuple[str, Path]:
    """Its name, with the tag of its file if it has one, and where it lies now. Raises HeadraceError."""
    if os.path.exists(os.path.expanduser(name)):
        raise ParameterError("MODEL", name, "a model of the Hub: this one is a local file or directory")
    if hub_offline():
        raise ParameterError("MODEL", name, "nothing while HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set")
    found = hub.find(name, revision)
    print(f"{name}: {found.words}", file=sys.stderr)
    folder = hub.download(found, revision)
    return found.name, folder / found.files[0].filename if ":" in found.name else folder
