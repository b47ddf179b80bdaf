"""The grammar of strict tools in formats of more than JSON between markers: tags around each argument, harmony's messages."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from headrace.conversation.argument_types import referred, typed, types_of
from headrace.conversation.harmony import CHANNEL, CHANNELS, CONSTRAIN, ENDS, MESSAGE, START
from headrace.structured_output.objects import JSON_OPTIONS

Special = Callable[[str], str]  # see tool_grammar
Tools = Sequence[tuple[str, Mapping[str, Any]]]  # (name, schema of the arguments)
ANY = "/(.|\\n)*/"
ABOUT = {"title", "description", "default", "examples", "deprecated", "$comment", "$schema", "$defs", "definitions"}
_OF_OBJECT = ABOUT | {"type", "properties", "required", "additionalProperties"}


class NotStrict(ValueError):
    """A call in this format cannot be held to its schema: why."""


class TagLayout(NamedTuple):
    """`breaks`: the tags that end a value for the parser. `opens`: those that begin a call."""

    name: tuple[str, str]
    key: tuple[str, str]
    value_end: str
    end: str
    breaks: tuple[str, ...]
    opens: tuple[str, ...] = ("<tool_call>",)


TAGGED: Mapping[str, TagLayout] = MappingProxyType({
    "qwen3_coder": TagLayout(
        ("\n<function=", ">\n"), ("<parameter=", ">\n"), "\n</parameter>\n", "</function>\n</tool_call>",
        ("<parameter=", "</parameter>", "</function>", "</tool_call>"), ("<tool_call>", "<function="),
    ),
    "glm45": TagLayout(
        ("", "\n"), ("<arg_key>", "</arg_key>\n<arg_value>"), "</arg_value>\n", "</tool_call>",
        ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>"),
    ),
})  # fmt: skip


def tagged_calls(form: str, tools: Tools, many: bool, special: Special, thinking: str, *, free: bool = True) -> str:
    """Lark in which the output is any text with calls in it, one or several if `many`; arguments are in the schema's order.

    `thinking`: what may stand in the text before it. Without `free` the output is calls alone. Raises NotStrict.
    """
    try:
        tagged = _Tagged(TAGGED[form], special)
        return tagged.lark(tools, many, thinking) if free else tagged.alone(tools, many)
    except (TypeError, AttributeError, LookupError):
        raise NotStrict("the schema of a tool's arguments is none") from None


class _Tagged:
    def __init__(self, layout: TagLayout, special: Special):
        self._layout, self._special, self._rules = layout, special, dict[str, str]()
        # tokens, of which texts have none
        self._tokens = [tag for tag in (*layout.opens, *layout.breaks) if special(tag).startswith("<")]

    def lark(self, tools: Tools, many: bool, thinking: str) -> str:
        begin = f"{self._free('TEXT', self._layout.opens)} {self._special('<tool_call>')}"
        if "<tool_call>" not in self._tokens:
            self._rules["begin[lazy]"], begin = begin, "begin"
        calls = " | ".join(self._call(*tool) for tool in tools)
        return self._lark(f"start: {thinking}({begin} ({calls})){'*' if many else '?'} TEXT")

    def alone(self, tools: Tools, many: bool) -> str:
        call = f"{self._special('<tool_call>')} ({' | '.join(self._call(*tool) for tool in tools)})"
        start = f'start: {call} ("\\n"? {call})*' if many else f"start: {call}"
        return self._lark(start)

    def _lark(self, start: str) -> str:
        return "\n".join(("%llguidance {}", start, *(f"{name}: {rule}" for name, rule in self._rules.items()), ""))

    def _free(self, name: str, without: Sequence[str]) -> str:
        """Text without these tags."""
        tags = "|".join(re.escape(tag).replace("/", "\\/") for tag in without if tag not in self._tokens)
        self._rules[name] = ANY + (f" & ~/(.|\\n)*({tags})(.|\\n)*/" if tags else "")
        return name

    def _written(self, text: str) -> str:
        """As tokens and literals."""
        parts = re.split(f"({'|'.join(map(re.escape, self._tokens)) or '(?!)'})", text)
        return " ".join(self._special(part) if part in self._tokens else json.dumps(part) for part in parts if part)

    def _call(self, name: str, schema: Mapping[str, Any]) -> str:
        layout, known, others = self._layout, schema.get("properties") or {}, schema.get("additionalProperties", True)
        if rest := set(schema) - _OF_OBJECT:
            raise NotStrict(f"{name}: {', '.join(sorted(rest))} beside the properties of its arguments")
        arguments = [self._argument(key, schema) + "?" * (key not in schema.get("required", ())) for key in known]
        if not known and others not in (True, False, {}):
            raise NotStrict(f"{name}: a schema in additionalProperties")
        if not known and others is not False:
            self._rules["NAME"] = "/[^<>\\n]{1,64}/"
            arguments = [f"({self._written(layout.key[0])} NAME {self._written(layout.key[1])} {self._text()})*"]
        return " ".join((self._written(name.join(layout.name)), *arguments, self._written(layout.end)))

    def _argument(self, key: str, schema: Mapping[str, Any]) -> str:
        """What may be a string is text, as the parser takes it, all else JSON."""
        node, types, end = schema["properties"][key], types_of(schema, key), self._written(self._layout.value_end)
        for _ in range(8):
            node = referred(node["$ref"], schema) if "$ref" in node else node
        values = [node["const"]] if "const" in node else node.get("enum")
        if not re.fullmatch(r"[^<>\s](?:[^<>\n]{0,62}[^<>\s])?", key):
            raise NotStrict(f"{key[:64]!r} as the name of an argument")
        if types and "string" not in types:
            whole = {**{k: schema[k] for k in ("$defs", "definitions") if k in schema}, **node, "x-guidance": JSON_OPTIONS}
            name = f"json_{len(self._rules)}"
            self._rules[name] = f"%json {json.dumps(whole)}"
            value = f"{name} {end}"
        elif values:
            texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
            if [json.loads(typed(text, types)) for text in texts] != values or any(tag in "".join(texts) for tag in "<\n"):
                raise NotStrict(f"{key}: values that cannot be told from others")
            value = f"({' | '.join(map(json.dumps, texts))}) {end}"
        else:
            told = {word for part in (node, *node.get("anyOf", ())) for word in part} - ABOUT - {"type", "anyOf"}
            if rest := told | types - {"string", "null", "boolean"}:
                raise NotStrict(f"{key}: {', '.join(sorted(rest))} of what may be a text")
            value = self._text()
        return f"({self._written(key.join(self._layout.key))} {value})"

    def _text(self) -> str:
        """Any text, up to what ends a value."""
        whole = f"{self._free('VALUE', self._layout.breaks)} {self._written(self._layout.value_end)}"
        if self._layout.value_end.strip() in self._tokens:
            return whole
        self._rules["value[lazy]"] = whole
        return "value"


def harmony_calls(tools: Tools, special: Special) -> str:
    """Lark of messages on channels, the last of which may be a call. Raises NotStrict where a marker is no token."""
    begin, message, end, start, constrain = marks = [special(m) for m in (CHANNEL, MESSAGE, ENDS[0], START, CONSTRAIN)]
    if not all(mark.startswith("<") for mark in marks):
        raise NotStrict("its markers are no tokens of this model")
    calls, rules = [], [f"TEXT: {ANY}", f'kind: " "? ({constrain}? "json")?']
    for i, (name, schema) in enumerate(tools):
        first, later = json.dumps(f"commentary to=functions.{name}"), json.dumps(f" to=functions.{name}")
        calls.append(f'({begin} {first} | {later} {begin} "commentary") kind {message} args_{i}')
        rules.append(f"args_{i}: %json {json.dumps({**schema, 'x-guidance': JSON_OPTIONS})}")
    said = f"{begin} ({' | '.join(map(json.dumps, CHANNELS))}) {message} TEXT"
    whole = f'start: ({said} {end} {start} "assistant")* ({said} | {" | ".join(calls)})'
    return "\n".join(("%llguidance {}", whole, *rules, ""))
