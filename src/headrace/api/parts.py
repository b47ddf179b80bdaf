"""The text of a chat answer as its parts: plain text, reasoning, tool calls; and what a request wants of its tools."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.api.context import ApiContext
from headrace.api.protocol import NamedTool, Tool
from headrace.api.structured import Structure, constrain
from headrace.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    index: int
    text: str


Part = Text | Reasoning | CallBegin | CallArguments


class ToolPolicy:
    """What `tools`, `tool_choice` and `parallel_tool_calls` ask for."""

    def __init__(self, tools: list[Tool] | None, choice: str | NamedTool, parallel: bool):
        self.choice, self.parallel = choice, parallel
        self.shown = tools if tools and choice != "none" else None  # what the model is told of
        self.named = choice.function.name if isinstance(choice, NamedTool) else None

    @classmethod
    def of(
        cls, ctx: ApiContext, tools: list[Tool] | None, choice: str | NamedTool | None, parallel: bool | None
    ) -> ToolPolicy:
        return cls(tools, choice or ("auto" if tools else "none"), parallel is not False)

    def constrained(self, ctx: ApiContext, params: SamplingParams) -> SamplingParams:
        """A required or named call is forced by its schema; refused while that is not available."""
        if self.named is not None and self.shown:
            tool = next(t for t in self.shown if t.function.name == self.named)
            return constrain(ctx, params, Structure("json", tool.function.parameters or {"type": "object"}, "tool_choice"))
        if self.choice == "required" and self.shown:
            return constrain(ctx, params, Structure("json", _any_call(self.shown), "tool_choice"))
        return params

    def finish_reason(self, reason: str, num_calls: int) -> str:
        """A call that was cut stays `length`; a named call ends with `stop`, as at OpenAI."""
        return "tool_calls" if reason == "stop" and num_calls and self.named is None else reason


def _any_call(tools: list[Tool]) -> dict:
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": t.function.name}, "parameters": t.function.parameters or {"type": "object"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for t in tools
    ]
    return {"type": "array", "minItems": 1, "items": {"anyOf": calls}}


class PartStream:
    """Cuts one sample's text into parts; joined, the parts do not depend on how the text was cut into pieces."""

    def __init__(self, ctx: ApiContext, policy: ToolPolicy):
        self.policy = policy
        self.plain = True
        self.needs_special_tokens = False
        self.num_calls = 0
        self.reasoning_tokens = 0

    def push(self, text: str) -> list[Part]:
        return [Text(text)] if text else []

    def finish(self) -> list[Part]:
        return []
