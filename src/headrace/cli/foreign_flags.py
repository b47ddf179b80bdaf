"""A command line that was written for vLLM, in our words."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from typing import Any

from headrace.foreign_options import PARTS, SWITCHES, Meaning, is_known, meaning, plain, whole
from headrace.foreign_values import instead_of_value


def in_ours(words: list[str], options: Mapping[str, argparse.Action]) -> tuple[list[str], dict[str, str]]:
    """The words with vLLM's options as ours, and the options that are left out, each with why. Others stay as they are."""
    known = {flag[2:] for flag in options if flag.startswith("--")}
    found: list[str] = []
    left_out: dict[str, str] = {}
    parts: dict[str, dict[str, Any]] = {}  # --speculative-config.method
    left, given = list(words), {word.partition("=")[0].replace("_", "-") for word in words}

    def add(meant: Meaning) -> None:
        found.extend(f"--{ours}" + f"={one}" * (one != "") for ours, ones in meant.ours.items() for one in ones)
        left_out.update({("-" if len(name) < 4 else "--") + name: why for name, why in meant.left_out.items()})

    runs = "max-model-len" in known  # an engine: other commands have nothing of vLLM's
    several = not words[:1] or words[0][:1] != "-" or any(re.match(r"--model(=|$)", word) for word in words)
    while left:
        word = left.pop(0)
        if word == "--":
            return [*found, word, *left], left_out
        flag, equals, value = word.partition("=")
        flag = flag if flag.startswith("-O") else flag.replace("_", "-")
        if flag in options:
            found.append(flag + equals + value)
            if several and not equals and _is_many(options[flag]):
                values = _values(left, most=None)
                found[-1:] = [one for value in values for one in (flag, value)] or [flag]
            continue
        name = whole(plain(flag))
        begins = flag.startswith("--") and any(option.startswith(flag) for option in options)
        if begins or not runs or not word.startswith("-") or not is_known(name):
            found.append(word)
            continue
        values = [value] if equals else [] if _alone(name, left) else _values(left, None if name in _SEVERAL else 1)
        if name in PARTS and "." in flag:
            parts.setdefault(name, {})[word.partition("=")[0].partition(".")[2]] = values[0] if values else ""
            continue
        meant = meaning(name, values if name in _SEVERAL else "".join(values), known)
        if meant is None or (name == "generation-config" and any(f"--{ours}" in given for ours in meant.ours)):
            found += [word, *([] if equals else values)]
            continue
        add(meant)
    for name, fields in parts.items():
        if (meant := meaning(name, fields, known)) is None:
            found.append(f"--{name}")
        else:
            add(meant)
    return found, left_out


_SEVERAL = frozenset(("lora-modules", "middleware", "logits-processors", "cuda-graph-sizes", "cudagraph-capture-sizes",
                      "limit-mm-per-prompt"))  # fmt: skip


def _is_many(action: argparse.Action) -> bool:
    return isinstance(action, argparse._AppendAction) and getattr(action, "described", None) is not None


def _alone(name: str, left: list[str]) -> bool:
    """Whether an option stands without a value; of a switch one that older versions had is taken away."""
    if name.removeprefix("no-") not in SWITCHES:
        return False
    if left and left[0].lower() in ("true", "false"):
        del left[0]
    return True


def _values(left: list[str], most: int | None) -> list[str]:
    """Taken from the words that are left."""
    count = 0
    while count < len(left) and (most is None or count < most) and re.match(r"(?!-)|-\d", left[count]):
        count += 1
    taken, left[:count] = left[:count], []
    return taken


def meant_by(message: str) -> str:
    """What to give instead of the value that argparse's `message` says is no choice."""
    found = re.search(r"^argument --([\w-]+): invalid choice: '([^']*)'", message)
    return instead_of_value(found[1].replace("-", "_"), found[2]) if found else ""
