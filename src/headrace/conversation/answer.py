"""One answer's text as events: reasoning is split off, tool calls are found.

Calls are looked for in what is no reasoning, and at the end of a thought behind which nothing is said (thought_calls).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.conversation.events import Event, Text
from headrace.conversation.harmony import HarmonyParser
from headrace.conversation.reasoning import REASONING_FORMATS, ReasoningParser, detect_reasoning_format
from headrace.conversation.thought_calls import ThoughtCalls
from headrace.conversation.tool_formats import TOOL_PARSERS, ToolParser, detect_tool_parser
from headrace.errors import ParameterError
from headrace.foreign_values import ours_of_value


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
        reasoning = reasoning and ours_of_value("reasoning_parser", reasoning)
        tools = tools and ours_of_value("tool_parser", tools)
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
        return REASONING_FORMATS[self.reasoning].markers if self.reasoning else ()

    def parser(
        self, prompt: str = "", *, reasoning: bool = True, tools: bool = True, constrained: bool = False,
        or_answer: bool = False, thought_ends: bool = False, schemas: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> AnswerParser:  # fmt: skip
        """A parser for one output. `prompt` (its end is enough) tells whether the output begins in reasoning.

        `constrained`: the calls obey a grammar, `or_answer`: or an answer does, `thought_ends`: and a thought has ended before
        them. `schemas`: what the tools' arguments are."""
        thoughts = ReasoningParser(self.reasoning, prompt) if reasoning and self.reasoning else None
        reader = TOOL_PARSERS[self.tools]() if tools and self.tools else None
        if isinstance(reader, HarmonyParser) or (thoughts is not None and self.reasoning == "openai_gptoss"):
            reader, thoughts = HarmonyParser(prompt=prompt, calls=reader is not None, reasons=thoughts is not None), None
        if reader is not None:
            reader.constrained, reader.or_answer, reader.schemas = constrained, or_answer, schemas or {}
        return AnswerParser(thoughts, reader, thought_ends=thought_ends)


class AnswerParser:
    """State of one output. What push() and finish() return is, joined, the same for every way to cut the text."""

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolParser | None, *, thought_ends: bool = False):
        self._reasoning, self.tools = reasoning, tools
        self._in_thoughts = ThoughtCalls(tools) if reasoning is not None and tools is not None and not thought_ends else None

    @property
    def num_calls(self) -> int:
        readers = (self.tools, self._in_thoughts)
        return sum(reader.num_calls for reader in readers if reader is not None)

    def push(self, text: str) -> list[Event]:
        if self._reasoning is not None:
            return self._read(self._reasoning.push(text))
        return self._read([Text(text)] if text else [])

    def finish(self) -> list[Event]:
        events = self._read(self._reasoning.finish()) if self._reasoning is not None else []
        if self._in_thoughts is not None:
            events += self._in_thoughts.finish()
        return events + (self.tools.finish() if self.tools is not None else [])

    def _read(self, events: list[Event]) -> list[Event]:
        """The same, with the calls of what is no reasoning."""
        if self._in_thoughts is not None:
            events = self._in_thoughts.read(events)
        if self.tools is None:
            return events
        found: list[Event] = []
        for event in events:
            found.extend(self.tools.push(event.text) if isinstance(event, Text) else [event])
        return found
