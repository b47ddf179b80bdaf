"""The grammar of tool calls as a model writes them: its format's markers around JSON that obeys the tools' schemas."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from headrace.api.protocol import Tool

WHITESPACE = r"[\x20\x0A\x0D\x09]{1,20}"
JSON_FORMATS = ("hermes", "llama3_json", "mistral")
DATA = ("const", "enum", "default", "examples")  # of a schema: no schemas in there
Special = Callable[[str], str]  # a marker as Lark: a special token, or a text where the tokenizer has none


def forced_calls(form: str | None, tools: Sequence[Tool], many: bool, special: Special, *, args_tags: bool = False) -> str:
    """Lark in which the output is one call, or several if `many`; a plain JSON list for a format that is not JSON.

    `args_tags`: the template of a Mistral model writes `[ARGS]` (since its version 11).
    """
    return f"%llguidance {{}}\nstart: {_calls(form, tools, many, special, args_tags)}\n{_rules(form, tools, args_tags)}"


def free_calls(form: str, tools: Sequence[Tool], many: bool, special: Special, *, args_tags: bool = False) -> str:
    """Lark in which the output is any text, with calls where the format (one of JSON_FORMATS) has them."""
    calls = _calls(form, tools, many, special, args_tags)
    if form == "hermes":  # text up to the marker, then the rest of a call
        one = " | ".join(f"tool_{i}" for i in range(len(tools)))
        start = f'(text_and_tag "\\n" ({one}) "\\n</tool_call>"){"*" if many else "?"} TEXT\n'
        start += 'text_and_tag[lazy]: TEXT "<tool_call>"\nTEXT: /(.|\\n)*/\n'
    elif form == "mistral":  # the marker is a special token, which is no text
        start = f"TEXT ({calls})?\nTEXT: /(.|\\n)*/\n"
    else:  # only the beginning of the output may be a call
        start = f"({calls}) | TEXT\nTEXT: /([^{{\\s](.|\\n)*)?/\n"
    return "%llguidance {}\nstart: " + start + _rules(form, tools, args_tags)


def _calls(form: str | None, tools: Sequence[Tool], many: bool, special: Special, args_tags: bool) -> str:
    one = "(" + " | ".join(f"tool_{i}" for i in range(len(tools))) + ")"
    if form == "hermes":
        call = f'"<tool_call>\\n" {one} "\\n</tool_call>"'
        return f'{call} ("\\n" {call})*' if many else call
    if form == "llama3_json":
        return f'{one} ("; " {one})*' if many else one
    if form == "mistral" and args_tags:
        marker, args = special("[TOOL_CALLS]"), special("[ARGS]")
        named = " | ".join(f"{_text(t.function.name)} {args} tool_{i}" for i, t in enumerate(tools))
        return f"({marker} ({named})){'+' if many else ''}"
    listed = f'"[" {one} (", " {one})* "]"' if many else f'"[" {one} "]"'
    return f"{special('[TOOL_CALLS]')} {listed}" if form == "mistral" else listed


def _rules(form: str | None, tools: Sequence[Tool], args_tags: bool) -> str:
    """tool_i: the JSON of a call to tool i."""
    key = "arguments" if form in ("hermes", "mistral") else "parameters"
    rules = []
    for i, tool in enumerate(tools):
        arguments = tool.function.parameters or {"type": "object"}
        schema = arguments if form == "mistral" and args_tags else _call_schema(tool.function.name, key, arguments)
        schema = {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE, "lenient": False}}
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


def _text(text: str) -> str:
    return json.dumps(text)
