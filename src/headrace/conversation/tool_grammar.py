"""The grammar of tool calls as a model writes them: its format's markers around JSON that obeys the tools' schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from headrace.conversation.call_layouts import LAYOUTS, NUMBER, CallLayout
from headrace.conversation.tagged_grammar import TAGGED, harmony_calls, tagged_calls
from headrace.conversation.tool_formats import TOOL_PARSERS
from headrace.structured_output.objects import JSON_OPTIONS

LLAMA4 = ("llama4_json", "llama4_pythonic")  # which read the calls of llama3_json, too
JSON_FORMATS = ("hermes", "llama3_json", *LLAMA4, "mistral", *LAYOUTS)
FREE_FORMATS = (*JSON_FORMATS, *TAGGED)  # of free_calls()
DATA = ("const", "enum", "default", "examples")  # of a schema: no schemas in there
Special = Callable[[str], str]  # a marker as Lark: a special token, or a text where the tokenizer has none


class FunctionDef(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A function as OpenAI's API describes it."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def schema(self) -> dict[str, Any]:
        """Of the arguments: a function that is described without any takes none."""
        if self.parameters is None:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return {**self.parameters, "type": "object"}


class Tool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    function: FunctionDef
    type: Literal["function"] = "function"


def forced_calls(form: str | None, tools: Sequence[Tool], many: bool, special: Special, *, args_tags: bool = False) -> str:
    """Lark in which the output is one call, or several if `many`; a plain JSON list for a format that is not JSON.

    `args_tags`: the template of a Mistral model writes `[ARGS]` (since its version 11).
    """
    if form is not None and form in LAYOUTS:
        return _laid_out(LAYOUTS[form], TOOL_PARSERS[form].markers, tools, many, special)
    form = "llama3_json" if form in LLAMA4 else form
    return f"%llguidance {{}}\nstart: {_calls(form, tools, many, special, args_tags)}\n{_rules(form, tools, args_tags)}"


def free_calls(
    form: str, tools: Sequence[Tool], many: bool, special: Special, *, args_tags: bool = False, reasoning: Sequence[str] = ()
) -> str:
    """Lark in which the output is any text, with calls where the format (one of FREE_FORMATS) has them.

    `reasoning`: markers that may stand in the text, special tokens or not. Raises NotStrict (tagged_grammar).
    """
    if form == "openai" or form in TAGGED:
        plain = [(tool.function.name, tool.function.schema) for tool in tools]
        if form == "openai":
            return harmony_calls(plain, special)
        return tagged_calls(form, plain, many, special, _thinking(reasoning, special))
    if form in LAYOUTS:
        return _laid_out(LAYOUTS[form], TOOL_PARSERS[form].markers, tools, many, special, free=True, thinking=reasoning)
    form = "llama3_json" if form in LLAMA4 else form
    opening = special({"hermes": "<tool_call>", "llama3_json": "<|python_tag|>", "mistral": "[TOOL_CALLS]"}[form])
    text = _thinking(reasoning, special)
    calls = _calls(form, tools, many, special, args_tags)
    rules = "TEXT: /(.|\\n)*/\n"
    if form == "hermes":
        if opening.startswith("<"):
            begin = f"TEXT {opening}"
        else:  # text up to the marker, which is the end of that text
            begin, rules = "text_and_tag", rules + f"text_and_tag[lazy]: TEXT {opening}\n"
        start = f"{text}({begin} {_hermes(tools, special)}){'*' if many else '?'} TEXT"
    elif form == "mistral" and opening.startswith("<"):
        start = f"{text}TEXT ({calls})?"
    elif form == "mistral":
        start = f"{text}(text_and_tag {_mistral(tools, many, special, args_tags)}){'*' if many else '?'} TEXT"
        rules += f"text_and_tag[lazy]: TEXT {opening}\n"
    else:  # without the marker only the beginning of the output may be a call
        marked = f" ({opening} {calls})?" if opening.startswith("<") else ""
        start = f"{text}(({calls}) | FIRST{marked})"
        rules = 'FIRST: /([^{\\s](.|\\n)*)?/\n' + (rules if text else "")
    return f"%llguidance {{}}\nstart: {start}\n{rules}{_rules(form, tools, args_tags)}"


def calls_or_answer(
    form: str, tools: Sequence[Tool], many: bool, special: Special, answer: dict[str, Any], *, args_tags: bool = False
) -> str:
    """Lark in which the output is calls in a format (one of FREE_FORMATS) or JSON of `answer`. Raises NotStrict."""
    if form in TAGGED:
        plain = [(tool.function.name, tool.function.schema) for tool in tools]
        calls = tagged_calls(form, plain, many, special, "", free=False)
    else:
        calls = forced_calls(form, tools, many, special, args_tags=args_tags)
    head, _, rules = calls.partition("start: ")
    return f"{head}start: calls | answer\n{answer_rule(answer)}calls: {rules}"


def answer_rule(schema: Mapping[str, Any]) -> str:
    """The rule of Lark that says what an answer in a format is."""
    return f"answer: %json {json.dumps({**schema, 'x-guidance': JSON_OPTIONS})}\n"


def _thinking(reasoning: Sequence[str], special: Special) -> str:
    """Text with markers in it that are special tokens, which are no text."""
    marks = [mark for mark in map(special, reasoning) if mark.startswith("<")]
    return f"(TEXT ({' | '.join(marks)}))* " if marks else ""


def _laid_out(
    layout: CallLayout, markers: Sequence[str], tools: Sequence[Tool], many: bool, special: Special, *,
    free: bool = False, thinking: Sequence[str] = (),
) -> str:  # fmt: skip
    """Lark of calls in a layout; `free`: where there are any, beside text."""

    def text(written: str) -> str:
        parts = re.split(f"({'|'.join(map(re.escape, [*markers, NUMBER]))})", written)
        return " ".join("/[0-9]{1,3}/" if p == NUMBER else special(p) if p in markers else json.dumps(p) for p in parts if p)

    before, between, after = map(text, (layout.before_name, layout.before_arguments, layout.after))
    calls = [f"{before} {json.dumps(tool.function.name)} {between} args_{i} {after}" for i, tool in enumerate(tools)]
    section = f"call ({text(layout.between)} call)*" if many and layout.between is not None else "call"
    begin, rules = text(layout.begin), []
    if free and begin.startswith("<"):
        begin, rules = f"TEXT {begin}", ["TEXT: /(.|\\n)*/"]
    elif free:  # text up to the section, whose beginning is the end of that text
        begin, rules = "text_and_tag", ["TEXT: /(.|\\n)*/", f"text_and_tag[lazy]: TEXT {begin}"]
    section = f"{begin} {section} {text(layout.end)}"
    start = f"{_thinking(thinking, special)}({section}){'*' if many else '?'} TEXT" if free else section
    rules += [f"call: {' | '.join(calls)}"]
    for i, tool in enumerate(tools):
        schema = {**tool.function.schema, "x-guidance": JSON_OPTIONS}
        rules.append(f"args_{i}: %json {json.dumps(schema)}")
    return "\n".join(("%llguidance {}", f"start: {start}", *rules, ""))


def _hermes(tools: Sequence[Tool], special: Special) -> str:
    """What follows the opening marker."""
    one = " | ".join(f"tool_{i}" for i in range(len(tools)))
    closing = special("</tool_call>")
    return f'"\\n" ({one}) ' + (f'"\\n" {closing}' if closing.startswith("<") else '"\\n</tool_call>"')


def _calls(form: str | None, tools: Sequence[Tool], many: bool, special: Special, args_tags: bool) -> str:
    one = "(" + " | ".join(f"tool_{i}" for i in range(len(tools))) + ")"
    if form == "hermes":
        call = f"{special('<tool_call>')} {_hermes(tools, special)}"
        return f'{call} ("\\n" {call})*' if many else call
    if form == "llama3_json":
        return f'{one} ("; " {one})*' if many else one
    if form == "mistral":
        call = f"{special('[TOOL_CALLS]')} {_mistral(tools, many, special, args_tags)}"
        return f"({call})+" if many and args_tags else call
    return _listed(tools, many)


def _mistral(tools: Sequence[Tool], many: bool, special: Special, args_tags: bool) -> str:
    """What follows the marker."""
    if not args_tags:
        return _listed(tools, many)
    args = special("[ARGS]")
    return "(" + " | ".join(f"{json.dumps(t.function.name)} {args} tool_{i}" for i, t in enumerate(tools)) + ")"


def _listed(tools: Sequence[Tool], many: bool) -> str:
    one = "(" + " | ".join(f"tool_{i}" for i in range(len(tools))) + ")"
    return f'"[" {one} (", " {one})* "]"' if many else f'"[" {one} "]"'


def _rules(form: str | None, tools: Sequence[Tool], args_tags: bool) -> str:
    """tool_i: the JSON of a call to tool i."""
    key = "arguments" if form in ("hermes", "mistral") else "parameters"
    rules = []
    for i, tool in enumerate(tools):
        arguments = tool.function.schema
        schema = arguments if form == "mistral" and args_tags else _call_schema(tool.function.name, key, arguments)
        schema = {**schema, "x-guidance": JSON_OPTIONS}
        rules.append(f"tool_{i}: %json {json.dumps(schema)}\n")
    return "".join(rules)


def _call_schema(name: str, key: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Of {"name": ..., key: {...}}."""
    return {
        "type": "object",
        "properties": {"name": {"const": name}, key: _moved(arguments, f"#/properties/{key}")},
        "required": ["name", key],
        "additionalProperties": False,
    }


def _moved(node: Any, place: str) -> Any:
    """A schema that comes to stand at `place`: its references to itself follow."""
    if isinstance(node, list):
        return [_moved(n, place) for n in node]
    if not isinstance(node, dict):
        return node
    moved = {}
    for key, value in node.items():
        if key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            moved[key] = place + value[1:]
        else:
            moved[key] = value if key in DATA else _moved(value, place)
    return moved
