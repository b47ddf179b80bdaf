"""One answer's text as events: reasoning is split off first, tool calls are found in the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headrace.conversation.events import Event, Text
from headrace.conversation.reasoning import REASONING_FORMATS, ReasoningParser, detect_reasoning_format
from headrace.conversation.tool_formats import TOOL_PARSERS, ToolParser, detect_tool_parser
from headrace.errors import ParameterError


def special_id(tokenizer: Any, marker: str) -> int | None:
    """The id of the special token that a marker is; None where the tokenizer has it as text, in one token or several."""
    ids = tokenizer.encode(marker, add_special_tokens=False)
    return ids[0] if len(ids) == 1 and ids[0] in tokenizer.special_ids else None


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How a model writes reasoning and tool calls: names of parsers, None where it does not or where nobody looks."""

    reasoning: str | None
    tools: str | None

    @classmethod
    def choose(cls, template: str | None, reasoning: str | None = "auto", tools: str | None = "auto") -> AnswerFormat:
        """By name, or "auto": from the chat template. Raises ParameterError for a name that is not known."""
        if reasoning == "auto":
            reasoning = detect_reasoning_format(template or "")
        elif reasoning is not None and reasoning not in REASONING_FORMATS:
            raise ParameterError("reasoning_parser", reasoning, "auto, " + ", ".join(REASONING_FORMATS))
        if tools == "auto":
            tools = detect_tool_parser(template or "")
        elif tools is not None and tools not in TOOL_PARSERS:
            raise ParameterError("tool_parser", tools, "auto, " + ", ".join(TOOL_PARSERS))
        return cls(reasoning, tools)

    def needs_special_tokens(self, tokenizer: Any, reasoning: bool = True, tools: bool = True) -> bool:
        """Whether the text must be decoded with its special tokens for the markers to be seen."""
        markers = self.reasoning_markers if reasoning else ()
        markers += TOOL_PARSERS[self.tools].markers if tools and self.tools else ()
        return any(special_id(tokenizer, marker) is not None for marker in markers)

    @property
    def reasoning_markers(self) -> tuple[str, ...]:
        form = REASONING_FORMATS[self.reasoning] if self.reasoning else None
        return (form.opening, form.closing) if form is not None else ()

    def parser(
        self, prompt: str = "", *, reasoning: bool = True, tools: bool = True, constrained: bool = False
    ) -> AnswerParser:
        """A parser for one output. `prompt` (its end is enough) tells whether the output begins in reasoning.

        `constrained`: the calls obey a grammar."""
        reader = TOOL_PARSERS[self.tools]() if tools and self.tools else None
        if reader is not None:
            reader.constrained = constrained
        return AnswerParser(ReasoningParser(self.reasoning, prompt) if reasoning and self.reasoning else None, reader)


class AnswerParser:
    """State of one output. What push() and finish() return is, joined, the same for every way to cut the text."""

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolParser | None):
        self._reasoning, self.tools = reasoning, tools

    @property
    def num_calls(self) -> int:
        return self.tools.num_calls if self.tools is not None else 0

    def push(self, text: str) -> list[Event]:
        if self._reasoning is not None:
            return self._with_tools(self._reasoning.push(text))
        return self._with_tools([Text(text)] if text else [])

    def finish(self) -> list[Event]:
        events = self._with_tools(self._reasoning.finish()) if self._reasoning is not None else []
        return events + (self.tools.finish() if self.tools is not None else [])

    def _with_tools(self, events: list[Event]) -> list[Event]:
        if self.tools is None:
            return events
        found: list[Event] = []
        for event in events:
            found.extend(self.tools.push(event.text) if isinstance(event, Text) else [event])
        return found
