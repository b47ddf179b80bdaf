"""Writes docs/options.md from the commands' own descriptions: `python docs/options_table.py > docs/options.md`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from headrace.cli import make_parser
from headrace.cli.parser import CommandParser
from headrace.cli.sources import variable_of

HEAD = """\
# Options

Written by `docs/options_table.py` from what `headrace COMMAND --help` is made of. The important ones are explained in
[operating.md](operating.md).

A value comes from the flag; else from the variable; else from the YAML file of `--config` (all commands that run an engine,
without `bench`), whose keys are the flags without their dashes (`max-model-len: 4096`; `_` is as good as `-`, in flags
too); else it is the default. Switches are `true` or `false`; what is repeatable is a list in the file and divided by commas
in a variable. Whatever is wrong is told by the place it came from. A key or a `HEADRACE_*` variable that no option has is
an error. What vLLM calls options is understood: [in place of vLLM](operating.md#in-place-of-vllm). Choices count in whatever
case, and sizes (tokens, bytes) may be written `32k` (of 1,000) or `32K` (of 1,024).
"""


def row(parser: CommandParser, action: argparse.Action) -> str:
    flags = ", ".join(f"`{o}`" for o in action.option_strings) or f"`{action.metavar or action.dest}`"
    words, _, default = parser._get_formatter()._expand_help(action).rpartition("default: ")  # type: ignore[attr-defined]
    words = words.removesuffix("(").removesuffix("; ").strip() + (")" if words.endswith("; ") else "")
    described = getattr(action, "described", None)
    allowed = described.allowed if described is not None and described.kind is not bool else ""
    if not allowed and action.choices:
        allowed = "one of " + ", ".join(action.choices)
    cells = [flags, f"`{name}`" if (name := variable_of(action)) else "", default.removesuffix(")"), allowed, words]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def main() -> None:
    print(HEAD, end="")
    seen: set[str] = set()
    for parser in sorted(make_parser().leaves(), key=lambda p: p.prog != "headrace serve"):
        print(f"\n## {parser.prog}\n\n{parser.description}")
        for group in parser._action_groups[1:]:
            first = parser._positionals._group_actions if group is parser._optionals else []
            rows = [row(parser, a) for a in [*first, *group._group_actions] if a.default is not argparse.SUPPRESS]
            fresh = [r for r in rows if r not in seen]
            seen.update(r for r in rows if "HEADRACE_" in r)
            title = "general" if group is parser._optionals else group.title
            if rows and not fresh:
                print(f"\n{title}: as above.")
            elif fresh:
                print(f"\n**{title}**\n\n| option | variable | default | allowed | |\n|---|---|---|---|---|")
                print("\n".join(fresh))


if __name__ == "__main__":
    main()
