"""What the text of an answer turns out to be, piece by piece: plain text, reasoning, tool calls."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    index: int  # 0, 1, ... in the order in which the calls were written
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    index: int
    text: str  # JSON text, or the next piece of it


Event = Text | Reasoning | CallBegin | CallArguments
