"""How the matrices of a checkpoint are quantized: which of them, and in what. No torch, nothing is read."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from fnmatch import translate


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a matrix [O, I] is quantized.

    `tile`: rows and columns that one scale stands for, 0: all. None: the file decides between all and one row.
    """

    format: str  # fp8, int8, packed, mxfp4, nvfp4, awq, gptq
    bits: int = 8  # 0: by the shapes in the file
    tile: tuple[int, int] | None = None
    zeros: bool = False  # asymmetric
    zero_offset: int = 0  # added to the zero points that are stored
    signed: bool = False  # awq: its 4-bit numbers, and their zero points, are from -8 to 7


class Modules:
    """What a list means: an entry is a pattern ("re:", or with *), or a name, a parent's or the end of either. Names are looked
    up, as there may be thousands on the list and ten times as many in a model."""

    def __init__(self, entries: Collection[str] = ()):
        patterns = [entry for entry in entries if entry.startswith("re:") or "*" in entry]
        self._names = frozenset(entries).difference(patterns)
        self._patterns = [re.compile(entry[3:] if entry.startswith("re:") else translate(entry)) for entry in patterns]
        self._known = {"": False}

    def have(self, module: str) -> bool:
        return self._named(module) or any(pattern.match(module) for pattern in self._patterns)

    def _named(self, module: str) -> bool:
        """By the end of its own name, or as what it is part of, which is asked for once."""
        if module not in self._known:
            parts = module.split(".")
            ends = (".".join(parts[first:]) for first in range(len(parts)))
            self._known[module] = not self._names.isdisjoint(ends) or self._named(module.rpartition(".")[0])
        return self._known[module]


def by_scheme(named: Iterable[tuple[str, Scheme]]) -> tuple[tuple[Modules, Scheme], ...]:
    """Groups of a Quantization: one of all names with the same scheme, in the order in which the schemes come first."""
    found: dict[Scheme, list[str]] = {}
    for name, scheme in named:
        found.setdefault(scheme, []).append(name)
    return tuple((Modules(names), scheme) for scheme, names in found.items())


@dataclass(frozen=True, slots=True)
class Quantization:
    """Of a checkpoint. `groups`: some of its linear layers and their scheme, each; `rest`: of those that are in none."""

    method: str
    groups: tuple[tuple[Modules, Scheme], ...] = ()
    rest: Scheme | None = None
    ignored: Modules = field(default_factory=Modules)

    @property
    def schemes(self) -> list[Scheme]:
        return [*(scheme for _, scheme in self.groups), *([self.rest] if self.rest is not None else [])]

    def scheme_of(self, *names: str) -> Scheme | None:
        """Of a linear layer: by its name, and by that in its file, where it may be another."""
        return next((scheme for modules, scheme in self.groups if any(map(modules.have, names))), self.rest)

    def ignores(self, *names: str) -> bool:
        return any(map(self.ignored.have, names))
