"""API keys from options, files and the environment. Whatever was meant to give a key gives one, or the command ends."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from headrace.config import KEY_FORM, api_key_from_environment, is_api_key
from headrace.errors import ParameterError
from headrace.files import read_text

ENVIRONMENT, FOREIGN = "HEADRACE_API_KEY", "VLLM_API_KEY"  # what vLLM's server reads where no key is given otherwise


def server_keys(args: argparse.Namespace) -> tuple[str, ...]:
    """The keys that a server takes; () only where none of the sources is named. Errors never show a key."""
    keys = [_checked("--api-key", key) for key in args.api_key or ()]
    if args.api_key_file is not None:
        keys += _keys_of_file("--api-key-file", args.api_key_file)
    if (found := api_key_from_environment()) is not None:
        keys.append(_checked(ENVIRONMENT, found))
    if not keys and (found := api_key_from_environment(FOREIGN)) is not None:
        keys.append(_checked(FOREIGN, found))
    return tuple(keys)


def admin_keys(args: argparse.Namespace) -> tuple[str, ...]:
    """The operator's keys."""
    keys = [_checked("--admin-key", key) for key in args.admin_key or ()]
    if args.admin_key_file is not None:
        keys += _keys_of_file("--admin-key-file", args.admin_key_file)
    return tuple(keys)


def check_admin(args: argparse.Namespace, keys: Sequence[str], takes_adapters: bool) -> None:
    """Raises ParameterError for keys of an operator who would have nothing to do."""
    if not keys:
        return
    option = args.sources["admin_key" if args.admin_key else "admin_key_file"]
    if args.api_processes > 1:
        raise ParameterError(option, "a key", "none with several --api-processes, where no adapter comes or goes")
    if not takes_adapters:
        raise ParameterError(option, "a key", "none without --lora-dir or --lora: it opens nothing else")


def client_key(args: argparse.Namespace) -> str | None:
    """The key that a client sends, if any; an empty one is none."""
    if args.api_key is not None:
        return _checked("--api-key", args.api_key)
    found = (api_key_from_environment() or "").strip()
    return _checked(ENVIRONMENT, found) if found else None


def _keys_of_file(option: str, path: str) -> list[str]:
    """A key a line; blank lines and those that begin with # are not keys."""
    keys = []
    for number, line in enumerate(read_text(option, path).split("\n"), 1):
        key = line.strip()
        if key and not key.startswith("#"):
            keys.append(_checked(f"{option} {path}, line {number}", key))
    if not keys:
        raise ParameterError(option, path, "a file with at least one key, a line each")
    return keys


def _checked(source: str, key: str) -> str:
    if not is_api_key(key):
        raise ParameterError(source, "a key of another form" if key.strip() else "no key", KEY_FORM)
    return key
