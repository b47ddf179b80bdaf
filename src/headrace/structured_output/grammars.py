"""Wishes as llguidance's grammars: JSON schemas, regular expressions, choices, Lark and GBNF, structural tags."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from headrace.sampling.structured_outputs import StructuredOutputsParams
from headrace.structured_output.objects import JSON_OPTIONS, lark_of_schema

if TYPE_CHECKING:
    from headrace.structured_output.vocabulary import GrammarVocabulary

# what Lark's text is made of, as far as one must know not to find a name or a schema within a string
_PARTS = re.compile(
    r'''"(?:\\.|[^"\\])*" | /(?![/*])(?:\\.|[^/\\\n])+/ | //.* | \#.*
    | (?P<json>%json\s*(?=\{)) | (?P<token><[^\s<>"\[\]]+>)''', re.VERBOSE
)  # fmt: skip


def grammars_of(spec: StructuredOutputsParams, vocabulary: GrammarVocabulary) -> list[str]:
    """The grammar as llguidance takes it; of two the second is for the case that the first does not compile.

    Raises ValueError, and what its converters raise, on a spec that is none.
    """
    value = getattr(spec, spec.kind)
    if spec.kind == "json":
        return _schema(value)
    if spec.kind == "json_object":
        return _schema({"type": "object"})
    if spec.kind == "regex":
        return [LLMatcher.grammar_from_regex(value)]
    if spec.kind == "choice":  # one lexeme: as alternatives of a rule, many choices would be as many items of the parser
        return [LLMatcher.grammar_from_regex("|".join(map(_literal, value)))]
    lark = any_to_lark(value) if spec.kind == "grammar" else _tags(value, vocabulary.special)
    return list(dict.fromkeys(_grammar(lark, vocabulary.added, schemas) for schemas in (True, False)))


def _literal(text: str) -> str:
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def _schema(schema: Any) -> list[str]:
    if schema is False:
        raise ValueError("the schema false allows nothing")
    plain = LLMatcher.grammar_from_json_schema({} if schema is True else _checked(schema), overrides=JSON_OPTIONS)
    lark = lark_of_schema(schema)
    return [plain] if lark is None else [LLMatcher.grammar_from_lark(lark), plain]


def _checked(schema: dict[str, Any]) -> dict[str, Any]:
    if "x-guidance" in schema:
        raise ValueError("x-guidance is not taken: it changes how JSON is written")
    return schema


def _grammar(lark: str, added: Mapping[str, int], schemas: bool) -> str:
    """Lark in which `<name>` may be any added token; with `schemas`, those of our own options become grammars beside it."""
    beside: list[str] = []
    pieces, end = [], 0
    for part in _PARTS.finditer(lark):
        if part.start() < end:
            continue
        if (token := part["token"]) in added:
            pieces.append(lark[end : part.start()] + f"<[{added[token]}]>")
            end = part.end()
        elif part["json"]:
            try:
                schema, stop = json.JSONDecoder().raw_decode(lark, part.end())
            except ValueError:  # the compiler says what is wrong
                continue
            own = schema.pop("x-guidance", None) == JSON_OPTIONS
            document = lark_of_schema(schema) if schemas and own else None
            if document is not None:
                pieces.append(lark[end : part.start()] + f"@json_{len(beside)}")
                beside.append(document)
            else:
                pieces.append(lark[end:stop])
            end = stop
    text = "".join(pieces) + lark[end:]
    if not beside:
        return LLMatcher.grammar_from_lark(text)
    named = [{"name": f"json_{i}", "lark_grammar": document} for i, document in enumerate(beside)]
    return json.dumps({"grammars": [{"name": "main", "lark_grammar": text}, *named]})


def _tags(value: Any, special: Mapping[str, int]) -> str:
    """Any text, in which what follows a trigger is one of the tags. `special`: the tokens that are no text."""
    if not isinstance(value, dict) or not isinstance(value.get("structures"), list) or not value["structures"]:
        raise ValueError('{"structures": [{begin, schema, end}], "triggers": [...]} is needed')
    triggers = value.get("triggers")
    if not isinstance(triggers, list) or not all(isinstance(t, str) and t for t in triggers):
        raise ValueError("triggers: a list of texts is needed")
    rules = []
    for i, structure in enumerate(value["structures"]):
        if not isinstance(structure, dict) or not all(isinstance(structure.get(k), str) for k in ("begin", "end")):
            raise ValueError("structures: each needs the texts begin and end")
        begin, schema = structure["begin"], structure.get("schema", {})
        trigger = next((t for t in triggers if begin.startswith(t)), None)
        if trigger is None:
            raise ValueError(f"no trigger begins {begin!r}")
        if not isinstance(schema, dict):
            raise ValueError("structures: schema is an object")
        body = f"%json {json.dumps(_checked(schema) | {'x-guidance': JSON_OPTIONS})}"
        rest = f"{_marked(begin[len(trigger):], special)} {body} {_marked(structure['end'], special)}"
        first = _marked(trigger, special)
        if first.startswith("<"):  # a special token: no text holds it
            rules.append(f"tag_{i}: TEXT {first} {rest}\n")
        elif first != json.dumps(trigger):
            raise ValueError(f"the trigger {trigger!r} has a special token within: one may only begin a trigger")
        else:
            rules.append(f"trigger_{i}[lazy]: TEXT {first}\ntag_{i}: trigger_{i} {rest}\n")
    options = " | ".join(f"tag_{i}" for i in range(len(rules)))
    return f"%llguidance {{}}\nstart: ({options})* last\nlast: TEXT\nTEXT: /(.|\\n)*/\n" + "".join(rules)


def _marked(text: str, special: Mapping[str, int]) -> str:
    """Lark for a text, and for the special tokens that are written out in it."""
    names = "|".join(map(re.escape, sorted(special, key=len, reverse=True)))
    parts = re.split(f"({names})", text) if names else [text]
    return " ".join(f"<[{special[part]}]>" if part in special else json.dumps(part) for part in parts if part)
