"""`headrace completion bash | zsh | fish`: what the shell must know to complete commands, options and their values."""

from __future__ import annotations

import argparse

from headrace.cli.options import LogOptions, add_options

SHELLS = ("bash", "zsh", "fish")
PATHS = ("FILE", "PATH", "MODEL")  # what stands for a value in help, where a file or a directory may be meant


def add_arguments(parser: argparse.ArgumentParser) -> None:
    words = "whose: bash: ~/.local/share/bash-completion/completions/headrace, zsh: _headrace in a directory of $fpath, fish: "
    words += "~/.config/fish/completions/headrace.fish (default: none)"
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=words)
    add_options(parser, LogOptions)


def run(args: argparse.Namespace) -> int:
    print(script(args.shell))
    return 0


def script(shell: str) -> str:
    import shtab

    from headrace.cli import make_parser

    parser = make_parser()
    for command in parser.leaves():
        for action in command._actions:
            if action.metavar in PATHS:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    return shtab.complete(parser, shell=shell)
