"""What a request wants of its tools, and the parser that its answer is read with."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.api.answer import AnswerParser
from headrace.api.context import ApiContext
from headrace.api.errors import unsupported
from headrace.api.events import CallArguments, CallBegin, Event, Text
from headrace.api.protocol import NamedTool, Tool
from headrace.api.structured import Structure
from headrace.api.tools import JsonListParser, NamedCallParser
from headrace.sampling.params import SamplingParams


class ToolPolicy:
    """`tools`, `tool_choice` and `parallel_tool_calls` of one request."""

    def __init__(self, ctx: ApiContext, tools: list[Tool] | None, choice: str | NamedTool | None, parallel: bool | None):
        self.ctx, self.parallel = ctx, parallel is not False
        self.choice = choice or ("auto" if tools else "none")
        self.tools = (tools or []) if self.choice != "none" else []  # those that the model is told of
        self.named = self.choice.function.name if isinstance(self.choice, NamedTool) else None
        self.forced = self.named is not None or self.choice == "required"
        if self.tools and not self.forced and ctx.answer_format.tools is None:
            raise unsupported("tools", "the way in which this model writes tool calls is not known (see --tool-parser)")

    def wish(self) -> Structure | None:
        """A required or named call is forced by its schema."""
        if not self.forced:
            return None
        if self.named is not None:
            tool = next(t for t in self.tools if t.function.name == self.named)
            schema: dict[str, Any] = tool.function.parameters or {"type": "object"}
        else:
            most = {} if self.parallel else {"maxItems": 1}
            schema = {"type": "array", "minItems": 1, "items": {"anyOf": [_call_schema(t) for t in self.tools]}, **most}
        return Structure("json", schema, "tool_choice")

    def finish_reason(self, reason: str, num_calls: int) -> str:
        """A call that was cut stays `length`; a named call ends with `stop`, as at OpenAI."""
        return "tool_calls" if reason == "stop" and num_calls and self.named is None else reason

    def with_special_tokens(self, params: SamplingParams) -> SamplingParams:
        """Some markers are special tokens, which the text must then contain."""
        form = self.ctx.answer_format
        if not params.skip_special_tokens or self.forced or not form.needs_special_tokens(tools=bool(self.tools)):
            return params
        return msgspec.structs.replace(params, skip_special_tokens=False)

    def reader(self, prompt_end: str, *, structured: bool = False) -> AnswerReader:
        """`structured`: the output is constrained from its first token on, so it does not begin with reasoning."""
        if self.named is not None:
            return AnswerReader(self, AnswerParser(None, NamedCallParser(self.named)))
        if self.forced:
            return AnswerReader(self, AnswerParser(None, JsonListParser()))
        form = self.ctx.answer_format
        plain = structured or form.reasoning is None
        if plain and not self.tools:
            return AnswerReader(self, None)
        return AnswerReader(self, form.parser(prompt_end, reasoning=not plain, tools=bool(self.tools)))


class AnswerReader:
    """One sample's text as events; with `parallel_tool_calls` false only the first call."""

    def __init__(self, policy: ToolPolicy, parser: AnswerParser | None):
        self.policy, self._parser = policy, parser

    @property
    def plain(self) -> bool:
        """All text is content: there is nothing to look for."""
        return self._parser is None

    @property
    def num_calls(self) -> int:
        return self._parser.num_calls if self._parser is not None else 0

    def push(self, text: str) -> list[Event]:
        if self._parser is None:
            return [Text(text)] if text else []
        return self._wanted(self._parser.push(text))

    def finish(self) -> list[Event]:
        return self._wanted(self._parser.finish()) if self._parser is not None else []

    def _wanted(self, events: list[Event]) -> list[Event]:
        if self.policy.parallel:
            return events
        return [e for e in events if not (isinstance(e, CallBegin | CallArguments) and e.index)]


def _call_schema(tool: Tool) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "name": {"const": tool.function.name},
            "parameters": tool.function.parameters or {"type": "object"},
        },
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }
