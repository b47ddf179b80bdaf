"""What an option is: a field of a frozen dataclass that says its type, default, words and range, once.

Checks of its values are made of that, flags with their help (cli/options.py), variables and files of options (cli/sources.py),
and docs/options.md.
"""

from __future__ import annotations

import difflib
import os
import types
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from headrace.errors import ParameterError
from headrace.foreign_values import instead_of_value, ours_of_value

UNITS = {"SECONDS": "seconds", "MS": "milliseconds"}  # unit -> what an error calls such numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One field of a class of options. Type, choices, whether there may be none and whether several: by its annotation."""

    name: str  # the field's
    kind: type  # bool, int, float, str; object: anything
    default: Any
    choices: tuple[str, ...] = ()
    optional: bool = False  # None: none, or decided elsewhere
    many: bool = False  # a tuple
    help: str = ""  # without: not an option of the command line
    shown: str = ""  # the default, in words
    unit: str = ""  # of its values; what stands for one in help
    flag: str = ""  # without its dashes, where it is not the name
    nothing: str | None = None  # what the flag without a value means
    objects: bool = False  # a value may be a JSON object, in a file a mapping
    group: str = ""  # where help shows it: TITLE, or TITLE: DESCRIPTION
    low: float | None = None
    more_than: float | None = None  # as `low`, which is not allowed itself
    high: float | None = None

    @property
    def key(self) -> str:
        """max-model-len: the flag, and the key in a file."""
        return self.flag or self.name.replace("_", "-")

    @property
    def default_in_words(self) -> str:
        if self.shown or self.default is None or self.default == ():
            return self.shown or "none"
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        return f"{self.default:g}" if isinstance(self.default, float) else f"{self.default}"

    @property
    def allowed(self) -> str:
        """What a value may be, in words; nothing where every one of its type may."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.kind is bool:
            return "True or False"
        if self.kind not in (int, float):
            return ""
        what = "an integer" if self.kind is int else UNITS.get(self.unit, "a number")
        if self.high is not None:
            low = f"({self.more_than:g}" if self.low is None else f"[{_number(self.low)}"
            return f"{what} in {low}, {_number(self.high)}]"
        return what if self.low is None else f"{what} >= {_number(self.low)}"

    def meant(self, value: Any) -> Any:
        """Of choices the one that `value` is, in whatever case or by a name that others have for it; all else as it is."""
        if value in self.choices or not isinstance(value, str):
            return value
        found = ours_of_value(self.name, value)
        return found if found in self.choices else value

    def check(self, value: Any) -> None:
        """Raises ParameterError for what is not one of its values."""
        if value is None and self.optional:
            return
        for one in value if self.many and isinstance(value, tuple) else (value,):
            if not self._takes(one):
                raise ParameterError(self.name, value, (self.allowed or "a text") + instead_of_value(self.name, one))

    def _takes(self, value: Any) -> bool:
        if self.choices:
            return value in self.choices
        if self.kind is str:
            return isinstance(value, str | os.PathLike)
        if self.kind not in (int, float):
            return isinstance(value, self.kind)
        if isinstance(value, bool) or not isinstance(value, int if self.kind is int else int | float):
            return False
        above = (self.low is None or value >= self.low) and (self.more_than is None or value > self.more_than)
        return above and value <= (2**53 if self.high is None else self.high)


def option(default: Any, help: str = "", low: Any = None, high: Any = None, unit: str = "", **more: Any) -> Any:
    """The default of a field that has more to say: what Option holds."""
    return field(default=default, metadata={"help": help, "low": low, "high": high, "unit": unit, **more})


@cache
def options_of(cls: type) -> tuple[Option, ...]:
    """One for each field of a dataclass, in their order."""
    hints, found_options = get_type_hints(cls), []
    for found in fields(cls):
        hint, about = hints[found.name], dict(found.metadata)
        if get_origin(hint) in (Union, types.UnionType):
            about["optional"] = type(None) in get_args(hint)
            hint = next(one for one in get_args(hint) if one is not type(None))
        if get_origin(hint) is tuple:
            about["many"], hint = True, get_args(hint)[0]
        if get_origin(hint) is Literal:
            about["choices"], hint = get_args(hint), str
        kind = hint if hint in (bool, int, float, str) else object
        default = None if found.default is MISSING else found.default
        found_options.append(Option(name=found.name, kind=kind, default=default, **about))
    return tuple(found_options)


def check(instance: Any) -> None:
    """What stands for one of an option's choices becomes that. Raises ParameterError for the first value that is none."""
    cls: type = type(instance)
    for described in options_of(cls):
        value = getattr(instance, described.name)
        if (meant := described.meant(value)) is not value:
            object.__setattr__(instance, described.name, meant)
        described.check(meant)


def nearest(word: str, known: Iterable[str]) -> str:
    """What an unknown name is likely to stand for, as the end of an error's sentence."""
    found = difflib.get_close_matches(word, list(known), 1, 0.7)
    return f" (did you mean {found[0]}?)" if found else ""


def _number(value: float) -> str:
    return f"{value:g}".replace("e+0", "e") if isinstance(value, float) else f"{value}"
