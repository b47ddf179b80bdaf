"""Wishes as llguidance's grammars: JSON schemas, regular expressions, choices, Lark and GBNF, structural tags."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, StructTag
from llguidance.gbnf_to_lark import any_to_lark

from headrace.structured_output.params import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# JSON allows any amount of white space between tokens; a model that likes it would never come to an end
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,20}"
JSON_OPTIONS: JsonCompileOptions = {"whitespace_pattern": WHITESPACE, "lenient": False}


def grammar_of(wish: StructuredOutputsParams) -> str:
    """The grammar as llguidance takes it. Raises ValueError, and what its converters raise, on a wish that is none."""
    value = getattr(wish, wish.kind)
    if wish.kind == "json":
        return _schema(value)
    if wish.kind == "json_object":
        return _schema({"type": "object"})
    if wish.kind == "regex":
        return LLMatcher.grammar_from_regex(value)
    if wish.kind == "choice":  # one lexeme: as alternatives of a rule, many choices would be as many items of the parser
        return LLMatcher.grammar_from_regex("|".join(map(_literal, value)))
    if wish.kind == "grammar":
        return LLMatcher.grammar_from_lark(any_to_lark(value))
    return _tags(value)


def _literal(text: str) -> str:
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def _schema(schema: Any) -> str:
    if schema is False:
        raise ValueError("the schema false allows nothing")
    return LLMatcher.grammar_from_json_schema({} if schema is True else _checked(schema), overrides=JSON_OPTIONS)


def _checked(schema: dict[str, Any]) -> dict[str, Any]:
    if "x-guidance" in schema:
        raise ValueError("x-guidance is not taken: it changes how JSON is written")
    return schema


def _tags(value: Any) -> str:
    if not isinstance(value, dict) or not isinstance(value.get("structures"), list) or not value["structures"]:
        raise ValueError('{"structures": [{begin, schema, end}], "triggers": [...]} is needed')
    triggers = value.get("triggers")
    if not isinstance(triggers, list) or not all(isinstance(t, str) and t for t in triggers):
        raise ValueError("triggers: a list of texts is needed")
    tags = []
    for structure in value["structures"]:
        if not isinstance(structure, dict) or not all(isinstance(structure.get(k), str) for k in ("begin", "end")):
            raise ValueError("structures: each needs the texts begin and end")
        begin, schema = structure["begin"], structure.get("schema", {})
        trigger = next((t for t in triggers if begin.startswith(t)), None)
        if trigger is None:
            raise ValueError(f"no trigger begins {begin!r}")
        if not isinstance(schema, dict):
            raise ValueError("structures: schema is an object")
        schema = _checked(schema) | {"x-guidance": JSON_OPTIONS}
        tags.append(StructTag(trigger=trigger, begin=begin, grammar=schema, end=structure["end"]))
    return StructTag.to_grammar(tags, assume_special=False)
