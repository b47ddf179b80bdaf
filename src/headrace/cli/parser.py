"""How a command line is read: options are made when their command runs, help shows defaults, mistakes get a suggestion."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from headrace.cli.foreign_flags import in_ours, meant_by
from headrace.cli.sources import settle, unsettled
from headrace.config import foreign_variables
from headrace.errors import ParameterError
from headrace.foreign_options import instead_of, left_out_in_words
from headrace.foreign_values import synonyms_in_words
from headrace.options import nearest


class HelpFormatter(argparse.HelpFormatter):
    """Every option's default is shown; a help text that says it in words keeps its words."""

    def __init__(self, prog: str, **options: Any):
        super().__init__(prog, max_help_position=34, **options)

    def _get_help_string(self, action: argparse.Action) -> str:
        text, described = action.help or "", getattr(action, "described", None)
        if described is not None:
            if others := synonyms_in_words(described.name):
                text += f"; also {others}"
            return f"{text} ({'repeatable; ' if described.many else ''}default: {described.default_in_words})"
        ends = isinstance(action, argparse._HelpAction | argparse._VersionAction)
        if not action.option_strings or action.required or "default:" in text or ends:
            return text
        return f"{text} (default: {_shown(action.default)})"


def _shown(value: Any) -> str:
    if value is None or value == [] or value is argparse.SUPPRESS:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return " ".join(map(str, value)) if isinstance(value, list) else f"{value}"


class CommandParser(argparse.ArgumentParser):
    """A command, whose options `fill` adds when it is the one that runs."""

    def __init__(self, *args: Any, fill: Callable[[argparse.ArgumentParser], None] | None = None, **options: Any):
        super().__init__(*args, **{"formatter_class": HelpFormatter, **options})
        self._fill = fill

    def fill(self) -> None:
        """Add the options, once."""
        fill, self._fill = self._fill, None
        if fill is not None:
            fill(self)

    def leaves(self) -> list[CommandParser]:
        """The commands below, each with its options; this one, if there is none."""
        self.fill()
        if self._subparsers is None:
            return [self]
        below = next(a for a in self._actions if isinstance(a, argparse._SubParsersAction))
        return [leaf for child in below.choices.values() for leaf in child.leaves()]

    def parse_known_args(self, args=None, namespace=None):
        self.fill()
        if self._subparsers is not None:
            return super().parse_known_args(args, namespace)
        words, left_out = in_ours(list(args or ()), self._option_string_actions)
        found, unknown = super().parse_known_args(words, unsettled(self))
        if unknown:  # here, not in the parser above: this one knows its command's options
            self.error(f"unknown: {' '.join(unknown)}{self._suggestion(unknown)}")
        left_out |= settle(self, found)
        runs = "--max-model-len" in self._option_string_actions
        found.remarks = left_out_in_words(left_out, foreign_variables() if runs else ())
        return found, unknown

    def error(self, message: str) -> NoReturn:
        said = f"{self.prog}: error: {message}{meant_by(message)}\n{self.prog} --help lists what there is\n"
        self.exit(2, self.format_usage() + said)

    def option_of(self, field: str, sources: Mapping[str, str]) -> str | None:
        """What set `field`: a variable or a file's key, else the option that sets it or adds to it."""
        dests = (field, field.removesuffix("s"))
        if (source := next(filter(None, map(sources.get, dests)), None)) is not None:
            return source
        options = (o for action in self._actions if action.dest in dests for o in action.option_strings)
        return next((o for o in options if o.startswith("--") and not o.startswith("--no-")), None)

    def _suggestion(self, unknown: list[str]) -> str:
        known = [o for o in self._option_string_actions if o.startswith("--")]
        names = {o[2:] for o in known}
        if advice := next(filter(None, (instead_of(word, names) for word in unknown if word.startswith("-"))), ""):
            return advice
        return next(filter(None, (nearest(word.partition("=")[0], known) for word in unknown if word.startswith("-"))), "")


def text(value: str) -> str:
    """The type of options whose value may not be empty: `--x "$UNSET"` must not pass for an option that was left out."""
    if not value.strip():
        raise argparse.ArgumentTypeError("an empty text is no value")
    return value


def json_object(option: str, value: str) -> dict[str, Any]:
    try:
        found = json.loads(value)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ParameterError(option, value, "a JSON object")
    return found
