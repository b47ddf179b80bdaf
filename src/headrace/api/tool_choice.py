"""What a request wants of its tools, and the parser that its answer is read with."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import msgspec

from headrace.api.context import ApiContext
from headrace.api.errors import allowed_only, bad_request, invalid, unsupported
from headrace.api.structured import Structure
from headrace.conversation.answer import AnswerParser, special_id
from headrace.conversation.events import CallArguments, CallBegin, Event, Text
from headrace.conversation.reasoned_grammar import answer_alone, behind_reasoning
from headrace.conversation.reasoning import REASONING_FORMATS, ReasoningParser
from headrace.conversation.tagged_grammar import NotStrict
from headrace.conversation.tool_formats import JsonListParser, NamedCallParser
from headrace.conversation.tool_grammar import FREE_FORMATS, JSON_FORMATS, Tool, calls_or_answer, forced_calls, free_calls
from headrace.sampling.params import SamplingParams

MAX_TOOLS = 256
FUNCTION_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


class Named(NamedTuple):
    """The function of this name must be called."""

    name: str


class Allowed(NamedTuple):
    """Of the functions only these may be called, and one must be if that is required."""

    mode: Literal["auto", "required"]
    names: frozenset[str]


Choice = str | Named | Allowed | None  # a word: none, auto, required


def check_name(name: str, field: str) -> None:
    """Of a tool. Raises ApiError naming the field."""
    if not FUNCTION_NAME.fullmatch(name):
        raise invalid(field, "1 to 64 letters, digits, underscores, dots or dashes.")


def check_tools(tools: list[Tool] | None, choice: Choice) -> None:
    if tools is not None and len(tools) > MAX_TOOLS:
        raise invalid("tools", f"{len(tools)} tools; at most {MAX_TOOLS}.")
    for i, tool in enumerate(tools or ()):
        check_name(tool.function.name, f"tools[{i}].function.name")
        kind = (tool.function.parameters or {}).get("type") or "object"  # what is called gets arguments by their names
        if kind != "object" and not (isinstance(kind, list) and "object" in kind):
            raise invalid(f"tools[{i}].function.parameters.type", f"got {str(kind)[:100]!r}, allowed: object")
    if not tools and choice not in (None, "none"):
        raise allowed_only("tool_choice", "together with tools that are functions; others are not run here")
    chosen = choice.names if isinstance(choice, Allowed) else {choice.name} if isinstance(choice, Named) else set()
    if missing := sorted(chosen - {t.function.name for t in tools or ()}):
        raise invalid("tool_choice", f"there is no tool named {missing[0][:100]!r}.")


class ToolPolicy:
    """`tools`, `tool_choice` and `parallel_tool_calls` of one request."""

    def __init__(self, ctx: ApiContext, tools: list[Tool] | None, choice: Choice, parallel: bool | None):
        self.ctx, self.parallel = ctx, parallel is not False
        allowed = choice if isinstance(choice, Allowed) else None
        mode = choice or ("auto" if tools else "none") if allowed is None else allowed.mode
        told = [t for t in tools or () if allowed is None or t.function.name in allowed.names]
        self.tools = told if mode != "none" else []  # those that the model is told of
        self.named = mode.name if isinstance(mode, Named) else None
        self.forced = self.named is not None or mode == "required"
        strict, form = any(t.function.strict for t in self.tools), ctx.answer_format.tools
        # a model may remember a tool that is not allowed any more: a grammar keeps it from calling that, where there can be one
        bound = allowed is not None and bool(self.tools) and form in FREE_FORMATS and ctx.engine.supports_structured
        self.only_bound = bound and not self.forced and not strict
        self.strict = (strict and not self.forced) or self.only_bound
        self.or_answer = False  # the output is calls or an answer in the request's format, both by one grammar
        self.reasons = False  # before what a grammar holds the model may reason
        if self.tools and not self.forced and form is None:
            raise unsupported("tools", "the way in which this model writes tool calls is not known (see --tool-parser)")

    def spec(self) -> Structure | None:
        """What the output is constrained to: a required or named call by its schema, strict tools by theirs."""
        form, many = self.ctx.answer_format.tools, self.parallel and self.named is None
        args_tags = self.ctx.template_mentions("[ARGS]")
        if self.forced:
            tools = [t for t in self.tools if self.named in (None, t.function.name)]
            if self.named is not None and form not in JSON_FORMATS:
                return Structure("json", tools[0].function.schema, "tool_choice")
            return Structure("grammar", forced_calls(form, tools, many, self._special, args_tags=args_tags), "tool_choice")
        if not self.strict:
            return None
        if form not in FREE_FORMATS:
            raise unsupported("tools", f"strict tools are not supported in the format of this model's calls ({form})")
        reasoning = self.ctx.answer_format.reasoning_markers
        try:
            lark = free_calls(str(form), self._held(), many, self._special, args_tags=args_tags, reasoning=reasoning)
        except NotStrict as why:
            if self.only_bound:
                self.strict = False
                return None
            raise unsupported("tools", f"strict in the format of this model's calls ({form}): {why}") from None
        return Structure("grammar", lark, "tools")

    def joined(self, other: Structure | None) -> Structure | None:
        """The constraint of a request that asks for another one too.

        A format of the answer leaves the model its calls, as at OpenAI: beside forced ones there is no answer, otherwise the
        output is calls or the answer. Where no grammar can say so it is the answer. `structured_outputs` are of all that is
        written: raises ApiError where they cannot be had.
        """
        if other is None:
            return self.spec()
        whole, form = other.field == "structured_outputs", self.ctx.answer_format.tools
        if self.forced and not whole:
            return self.spec()
        able = form in FREE_FORMATS and self.ctx.engine.supports_structured
        if self.tools and not whole and able and (schema := _of_answer(other)) is not None:
            args_tags = self.ctx.template_mentions("[ARGS]")
            try:
                lark = calls_or_answer(str(form), self._held(), self.parallel, self._special, schema, args_tags=args_tags)
                self.strict = self.or_answer = True
                return Structure("grammar", lark, "tools", other.field)
            except NotStrict:
                pass
        if not whole or self.only_bound:
            self.strict = False  # there is no call at all
        own = self.spec()
        if own is not None:
            raise bad_request(f"{other.field} cannot be had together with {own.field}.", other.field, "invalid_value")
        return other

    def behind_reasoning(self, spec: Structure | None, prompt_end: str, kwargs: Mapping[str, Any]) -> Structure | None:
        """A constraint of joined() for a format of the answer, where the model may reason before that: not if the switches of
        its template, `kwargs`, are off and have an effect. gpt-oss has none, and its answer is in a message in any case. Forced
        and strict calls wait for the end of a thought that the prompt has begun."""
        kind = self.ctx.answer_format.reasoning
        if spec is None or kind is None or spec.field == "structured_outputs":
            return spec
        begun = REASONING_FORMATS[kind].opened_by(prompt_end)
        off = kind != "openai_gptoss" and False in (kwargs.get("enable_thinking"), kwargs.get("thinking"))
        strict = self.strict and not self.or_answer
        if (not begun and (off or self.forced or strict)) or (strict and kind == "openai_gptoss"):
            return spec
        calls, schema = spec.kind == "grammar" and (self.or_answer or self.forced or strict), _of_answer(spec)
        plain = spec.value if calls else None if schema is None else answer_alone(schema)
        if plain is None or (lark := behind_reasoning(plain, kind, prompt_end, self._special)) == plain:
            return spec
        self.reasons = True
        return Structure("grammar", lark, spec.field, spec.answer if calls else spec.field)

    def _held(self) -> list[Tool]:
        """The tools as a grammar holds calls to them."""
        return [t if t.function.strict else _of_any_arguments(t) for t in self.tools]

    def _special(self, marker: str) -> str:
        """A marker in a grammar: as the special token that it is, or as a text (in which an added token is text too)."""
        token = special_id(self.ctx.engine.tokenizer, marker)
        return json.dumps(marker) if token is None else f"<[{token}]>"

    def finish_reason(self, reason: str, num_calls: int) -> str:
        """A call that was cut stays `length`; a named call ends with `stop`, as at OpenAI."""
        return "tool_calls" if reason == "stop" and num_calls and self.named is None else reason

    def with_special_tokens(self, params: SamplingParams) -> SamplingParams:
        """Some markers are special tokens, which the text must then contain."""
        form = self.ctx.answer_format
        tools = bool(self.tools) and (not self.forced or form.tools in JSON_FORMATS)
        thoughts = self.reasons or not self.forced
        if not params.skip_special_tokens or not form.needs_special_tokens(self.ctx.engine.tokenizer, thoughts, tools):
            return params
        return msgspec.structs.replace(params, skip_special_tokens=False, spaces_between_special_tokens=False)

    def reader(self, prompt_end: str, *, structured: bool = False) -> AnswerReader:
        """`structured`: the output is constrained from its first token on, so it does not begin with reasoning (but for
        strict tools where any text may stand beside them, and where `behind_reasoning` lets it)."""
        form = self.ctx.answer_format
        if self.forced and form.tools in JSON_FORMATS:
            return AnswerReader(self, form.parser(prompt_end, reasoning=self.reasons, constrained=True, thought_ends=True))
        if self.forced:
            thoughts = ReasoningParser(form.reasoning, prompt_end) if self.reasons and form.reasoning else None
            return AnswerReader(self, AnswerParser(thoughts, NamedCallParser(self.named) if self.named else JsonListParser()))
        plain = (structured and not self.reasons and (self.or_answer or not self.strict)) or form.reasoning is None
        if plain and not self.tools:
            return AnswerReader(self, None)
        schemas = {tool.function.name: tool.function.parameters or {} for tool in self.tools}
        parser = form.parser(
            prompt_end, reasoning=not plain, tools=bool(self.tools), constrained=self.strict, or_answer=self.or_answer,
            thought_ends=self.reasons, schemas=schemas,
        )  # fmt: skip
        return AnswerReader(self, parser)


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
        if self._parser is None:
            return []
        events = self._wanted(self._parser.finish())
        named = self.policy.named if not self.policy.reasons else None
        if named is not None and not self.num_calls and self._parser.tools is not None:
            events.append(CallBegin(0, self._parser.tools.new_id(), named))  # cut off before its arguments
        return events

    def _wanted(self, events: list[Event]) -> list[Event]:
        if self.policy.forced:  # text is there only where a call was cut off before it began
            events = [e for e in events if not isinstance(e, Text)]
        if self.policy.parallel:
            return events
        return [e for e in events if not (isinstance(e, CallBegin | CallArguments) and e.index)]


def _of_answer(wish: Structure) -> dict[str, Any] | None:
    """The schema of an answer that is asked for as JSON."""
    if wish.kind == "json_object":
        return {"type": "object"}
    schema = {} if wish.value is True else wish.value
    return schema if wish.kind == "json" and isinstance(schema, dict) and "x-guidance" not in schema else None


def _of_any_arguments(tool: Tool) -> Tool:
    function = msgspec.structs.replace(tool.function, parameters={"type": "object"})
    return msgspec.structs.replace(tool, function=function)
