"""Splits reasoning from the answer: a block between two markers at the beginning of the output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType

from headrace.conversation.events import Event, Reasoning, Text
from headrace.text.markers import Markers, MarkerScanner


@dataclass(frozen=True)
class ReasoningFormat:
    """How a family of models marks its reasoning."""

    opening: str
    closing: str
    implied: bool = False  # the output begins inside the block even if neither prompt nor output open it

    def opened_by(self, prompt: str) -> bool:
        """Whether the output begins inside the block, from the end of the prompt."""
        tail = prompt[-200:].rstrip()
        return tail.endswith(self.opening) or (self.implied and not tail.endswith(self.closing))


REASONING_FORMATS: Mapping[str, ReasoningFormat] = MappingProxyType(
    {
        "qwen3": ReasoningFormat("<think>", "</think>"),
        "deepseek_r1": ReasoningFormat("<think>", "</think>", implied=True),
        "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    }
)


def detect_reasoning_format(template: str) -> str | None:
    """The name of the format that a chat template speaks of; None: it knows no reasoning."""
    if "[THINK]" in template:
        return "mistral"
    if "</think>" not in template:
        return None
    return "deepseek_r1" if "<｜Assistant｜>" in template else "qwen3"


class _State(Enum):
    START = auto()  # white space, perhaps the opening marker
    INSIDE = auto()
    AFTER = auto()  # white space that separates the block from the answer
    ANSWER = auto()


class ReasoningParser:
    """State of one output. What push() and finish() return is, joined, the same for every way to cut the text.

    The block's edges lose their white space, and so does the beginning of the answer after a block; nothing else is
    lost. An output that ends inside the block is reasoning only. Markers later in the answer are plain text.
    """

    def __init__(self, kind: str, prompt: str = ""):
        self.format = REASONING_FORMATS[kind]
        opened = self.format.opened_by(prompt)
        self._state = _State.START
        self._implied = opened
        self._head = ""  # in START: what may be white space and the opening marker
        self._closing = MarkerScanner(Markers([self.format.closing]))
        self._begun = False  # some reasoning was given out
        self._space: list[str] = []  # white space that is dropped if the block ends after it

    @property
    def inside(self) -> bool:
        """Whether what comes next is reasoning, as far as is known."""
        return self._state is _State.INSIDE or (self._state is _State.START and self._implied)

    def push(self, text: str) -> list[Event]:
        events: list[Event] = []
        if self._state is _State.START and text:
            text = self._start(text)
        if self._state is _State.INSIDE and text:
            scan = self._closing.push(text)
            self._reason(scan.text, events)
            text = scan.rest
            if scan.marker is not None:
                self._state = _State.AFTER
        if self._state is _State.AFTER:
            text = text.lstrip()
            if text:
                self._state = _State.ANSWER
        if self._state is _State.ANSWER and text:
            events.append(Text(text))
        return events

    def _start(self, text: str) -> str:
        """What is left to parse once it is clear how the output begins."""
        head = self._head + text
        found, opening = head.lstrip(), self.format.opening
        if found.startswith(opening):
            self._state = _State.INSIDE
            return found[len(opening) :]
        if opening.startswith(found):
            self._head = head
            return ""
        self._state = _State.INSIDE if self._implied else _State.ANSWER
        return head

    def _reason(self, text: str, events: list[Event]) -> None:
        if not self._begun:
            text = text.lstrip()
        kept = text.rstrip()
        if kept:
            events.append(Reasoning("".join((*self._space, kept))))
            self._begun, self._space = True, []
        if self._begun and len(kept) < len(text):
            self._space.append(text[len(kept) :])

    def finish(self) -> list[Event]:
        events: list[Event] = []
        if self._state is _State.START and self._head:
            if self._implied:
                self._reason(self._head, events)
            else:
                events.append(Text(self._head))
        elif self._state is _State.INSIDE:
            self._reason(self._closing.flush(), events)
        return events
