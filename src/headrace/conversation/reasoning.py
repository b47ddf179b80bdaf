"""Splits reasoning from the answer: a block between two markers at the beginning of the output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType

from headrace.conversation.events import Event, Reasoning, Text
from headrace.text.markers import MarkerScanner


@dataclass(frozen=True)
class ReasoningFormat:
    """How a family of models marks its reasoning."""

    blocks: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]  # markers that open one, and those that then close it
    implied: bool = False  # the output begins inside the block even if neither prompt nor output open it
    answer: tuple[str, str] = ("", "")  # may stand around what follows the block

    @property
    def markers(self) -> tuple[str, ...]:
        return tuple(marker for openings, closings in self.blocks for marker in openings + closings)

    def blocks_behind(self, prompt: str) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
        """In which the output may be, by the end of the prompt: all where that has opened none."""
        return [block for block in self.blocks if prompt.rstrip().endswith(block[0])] or list(self.blocks)

    def opened_by(self, prompt: str) -> bool:
        """Whether the output begins inside the block, from the end of the prompt."""
        tail = prompt[-200:].rstrip()
        openings = tuple(marker for block in self.blocks for marker in block[0])
        closings = tuple(marker for block in self.blocks for marker in block[1])
        return tail.endswith(openings) or (self.implied and not tail.endswith(closings))


def _tags(*names: str) -> tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]:
    return tuple(((f"<{name}>",), (f"</{name}>",)) for name in names)


_THINK = ReasoningFormat(_tags("think"))
_GRANITE = (
    ("Here is my thought process:", "Here's my thought process:"),
    ("Here is my response:", "Here's my response:"),
)
REASONING_FORMATS: Mapping[str, ReasoningFormat] = MappingProxyType(
    {
        "qwen3": _THINK,
        "deepseek_r1": ReasoningFormat(_tags("think"), implied=True),
        "deepseek_v3": _THINK,
        "glm45": _THINK,
        "kimi_k2": _THINK,
        "mistral": ReasoningFormat(((("[THINK]",), ("[/THINK]",)),)),
        "granite": ReasoningFormat((_GRANITE, *_tags("think")), answer=("<response>", "</response>")),
        "gemma4": ReasoningFormat(((("<|channel>thought",), ("<channel|>",)),)),
        "openai_gptoss": ReasoningFormat(((("<|channel|>analysis<|message|>",), ("<|end|>",)),)),  # read by harmony.py
        "generic": ReasoningFormat(
            _tags("think", "thinking", "thought", "thoughts", "reasoning", "seed:think", "mm:think")
            + ((("[THINK]",), ("[/THINK]",)),),
            answer=("<answer>", "</answer>"),
        ),
    }
)


def detect_reasoning_format(template: str) -> str | None:
    """The name of the format that a chat template speaks of; None: it knows no reasoning."""
    if "[THINK]" in template:
        return "mistral"
    if "<|channel|>analysis" in template:
        return "openai_gptoss"
    if "<channel|>" in template and "<|channel>" in template:
        return "gemma4"
    if "Here is my thought process" in template or ("<|start_of_role|>" in template and "</think>" in template):
        return "granite"
    if "</think>" not in template:
        return "generic" if "</seed:think>" in template or "</mm:think>" in template else None
    if "<｜Assistant｜>" not in template:
        return "qwen3"
    return "deepseek_v3" if "thinking is defined" in template else "deepseek_r1"


class _State(Enum):
    START = auto()  # white space, perhaps the opening marker
    INSIDE = auto()
    AFTER = auto()  # white space that separates the block from the answer, perhaps a marker before that
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
        self._head = ""  # in START and AFTER: what may be white space and a marker
        self._blocks = self.format.blocks_behind(prompt)
        self._closing = MarkerScanner([marker for _, closings in self._blocks for marker in closings])
        self._wrapped: MarkerScanner | None = None  # of the answer: up to the marker behind it
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
        if self._state is _State.AFTER and text:
            text = self._after(text)
        if self._state is _State.ANSWER and text:
            self._answer(text, events)
        return events

    def _start(self, text: str) -> str:
        """What is left to parse once it is clear how the output begins."""
        head, self._head = self._head + text, ""
        found = head.lstrip()
        for openings, closings in self._blocks:
            for opening in openings:
                if found.startswith(opening):
                    self._state, self._closing = _State.INSIDE, MarkerScanner(closings)
                    return found[len(opening) :]
                if opening.startswith(found):
                    self._head = head
                    return ""
        self._state = _State.INSIDE if self._implied else _State.ANSWER
        return head

    def _after(self, text: str) -> str:
        """What is left to parse once it is clear how the answer begins."""
        opening, closing = self.format.answer
        self._head = (self._head + text).lstrip()
        if opening and self._wrapped is None and self._head.startswith(opening):
            self._wrapped, self._head = MarkerScanner([closing]), self._head[len(opening) :].lstrip()
        if not self._head or (self._wrapped is None and opening.startswith(self._head)):
            return ""
        self._state, text, self._head = _State.ANSWER, self._head, ""
        return text

    def _answer(self, text: str, events: list[Event]) -> None:
        if self._wrapped is not None:
            scan = self._wrapped.push(text)
            text = scan.text + scan.rest
            if scan.marker is not None:
                self._wrapped = None
        if text:
            events.append(Text(text))

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
        elif rest := self._head if self._state is _State.AFTER else self._wrapped.flush() if self._wrapped is not None else "":
            events.append(Text(rest))
        return events
