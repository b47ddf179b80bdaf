"""The entries of a quantization_config, which may come from anywhere: each is checked when it is read, and refused by name."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from headrace.errors import CheckpointError

INSTEAD = "use the unquantized checkpoint with --quantization int4, int8 or fp8, or one of FP8, AWQ, GPTQ, compressed-tensors"
# A checkpoint comes from anywhere, and its patterns are tried at the name of every matrix.
_MOST_STEPS, _NAME = 10**8, 64  # characters of such a name
_SHOWN = 100  # characters of a value that is refused
_ATOM = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)


def _most_steps(pattern: str) -> float:
    """How often a pattern may be tried at a name before it is known not to match: repeats of one another, and all choices."""
    plain = _ATOM.sub("x", pattern)
    if re.search(r"\)\s*[*+{]|\(\?\w*x", plain):
        return math.inf  # a repeated group, which may repeat in it, or a pattern with blanks and comments in it
    repeats = len(re.findall(r"(?<!\()[*+?{]", plain))
    return math.comb(_NAME + repeats, repeats) * math.prod(1 + part.count("|") for part in plain.split("("))


class Fields:
    """The entries of a quantization_config, or of an object in it, each checked when it is read."""

    def __init__(self, given: Mapping[str, Any], where: str):
        self.given, self.where = given, where

    def refuse(self, name: str, wanted: str) -> NoReturn:
        value = repr(self.given.get(name))
        value = value if len(value) <= _SHOWN else f"{value[:_SHOWN]}..."
        raise CheckpointError(f"config.json: {self.where} quantization: {name} is {value}, wanted {wanted}: {INSTEAD}")

    def one_of(self, name: str, default: Any, *allowed: Any) -> Any:
        """Numbers are not flags: 1 is not True."""
        value = self.given.get(name)
        value = default if value is None else value.lower() if isinstance(value, str) else value
        if not any(value == each and type(value) is type(each) for each in allowed):
            self.refuse(name, " or ".join(map(str, allowed)))
        return value

    def count(self, name: str) -> int:
        """A number of columns; 0: of the whole row, which is written as -1."""
        value = self.given.get(name)
        if type(value) is not int or not (value == -1 or 0 < value < 1 << 24):
            self.refuse(name, "a positive number, or -1 for the whole row")
        return max(value, 0)

    def block(self, name: str) -> tuple[int, int]:
        value = self.given.get(name)
        if not isinstance(value, list) or len(value) != 2 or any(type(n) is not int or not 0 < n < 1 << 24 for n in value):
            self.refuse(name, "[rows, columns]")
        return value[0], value[1]

    def names(self, name: str) -> list[str]:
        """A list of modules."""
        found = self.given.get(name) or []
        if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
            self.refuse(name, "a list of names")
        return self._checked(name, found)

    def keys(self, name: str) -> list[str]:
        """Modules that are the names in an object."""
        return self._checked(name, list(self.inside(name).given))

    def _checked(self, name: str, found: list[str]) -> list[str]:
        """Patterns are compiled to see that they are some."""
        for each in found:
            try:
                pattern = re.compile(each.removeprefix("re:") if each.startswith("re:") else "").pattern
            except (re.error, RecursionError, OverflowError) as error:
                raise CheckpointError(f"config.json: {name} has {each[:200]!r}, no pattern: {error}") from error
            if _most_steps(pattern) > _MOST_STEPS:
                raise CheckpointError(f"config.json: {name} has {each[:200]!r}, a pattern that takes too long: fewer repeats")
        return found

    def inside(self, name: str) -> Fields:
        value = self.given.get(name)
        if not isinstance(value, dict):
            self.refuse(name, "an object")
        return Fields(value, f"{self.where} {name}")
