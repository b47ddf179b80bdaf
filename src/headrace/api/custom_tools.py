"""Custom tools, whose input is any text, as the functions that templates and parsers know: of one string, `input`; and back."""

from __future__ import annotations

import json
import re
from typing import Any

from headrace.api.errors import invalid
from headrace.conversation.tool_grammar import FunctionDef
from headrace.conversation.tool_syntax import without_half_pairs

_INPUT = re.compile(r'\s*\{\s*"input"\s*:\s*"((?:[^"\\]|\\.)*)', re.DOTALL)


def function_of(name: str, description: Any, form: Any, at: str, part: str | None = None) -> FunctionDef:
    """The function that stands for a tool. `form`: its `format`; `part`: where a grammar stands in it, if not in itself.

    Raises ApiError naming the field below `at`.
    """
    about, grammar, place = description or "", form or {"type": "text"}, f"{at}.format"
    if grammar.get("type") == "grammar":
        if part is not None:
            grammar, place = grammar.get(part), f"{place}.{part}"
            if not isinstance(grammar, dict):
                raise invalid(place, "an object with syntax and definition is needed.", "missing_required_parameter")
        for field in ("syntax", "definition"):
            if not isinstance(grammar.get(field), str):
                raise invalid(f"{place}.{field}", "a text is needed.", "missing_required_parameter")
        about += f"\n\n`input` must obey this grammar ({grammar['syntax']}):\n{grammar['definition']}"
    elif grammar.get("type") != "text":
        raise invalid(f"{place}.type", "allowed are text, grammar.")
    parameters = {
        "type": "object", "properties": {"input": {"type": "string", "description": "the whole input, as it is"}},
        "required": ["input"], "additionalProperties": False,
    }  # fmt: skip
    return FunctionDef(name=name, description=about.strip() or None, parameters=parameters)


def arguments_of(text: str) -> str:
    """Of a call to the function, with this input."""
    return json.dumps({"input": text}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """The text that the arguments hold: what there is of it, if they were cut off; all of them, if the model wrote another
    object than it was told to."""
    try:
        value = json.loads(arguments or "{}", strict=False)
    except (ValueError, RecursionError):
        return without_half_pairs(_cut_off(arguments))
    if isinstance(value, dict) and isinstance(value.get("input"), str):
        return without_half_pairs(value["input"])
    return arguments


def _cut_off(arguments: str) -> str:
    head = _INPUT.match(arguments)
    text = head[1] if head is not None else ""
    for end in range(len(text), max(len(text) - 6, -1), -1):  # an escape may be cut, too
        try:
            return str(json.loads(f'"{text[:end]}"', strict=False))
        except ValueError:
            continue
    return ""
