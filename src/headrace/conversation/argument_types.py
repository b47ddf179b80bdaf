"""Arguments that a model writes without saying of what type they are: the tool's schema tells."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from typing import Any

from headrace.conversation.tool_syntax import as_written, json_text, parse_json

MAX_REFERENCES = 32
KINDS = {dict: "object", list: "array", tuple: "array", str: "string", bool: "boolean", int: "number", type(None): "null"}


def types_of(schema: Mapping[str, Any] | None, name: str) -> frozenset[str]:
    """The types that the argument `name` may have, numbers of any kind as "number"; empty: any."""
    properties = (schema or {}).get("properties")
    if isinstance(properties, Mapping) and name in properties:
        found = properties[name]
    else:
        found = (schema or {}).get("additionalProperties")
        if not isinstance(found, Mapping) or not found:
            return frozenset({"string"})
    return frozenset(_types(found, schema or {}, [MAX_REFERENCES]))


def _types(node: Any, root: Mapping[str, Any], left: list[int]) -> Iterator[str]:
    left[0] -= 1
    if not isinstance(node, Mapping) or left[0] < 0:
        return
    kinds = node.get("type")
    if kinds is not None:
        listed = kinds if isinstance(kinds, list) else [kinds]
        yield from ("number" if kind == "integer" else kind for kind in listed if isinstance(kind, str))
    elif isinstance(node.get("enum"), list):
        yield from (KINDS.get(type(value), "number") for value in node["enum"])
    elif "const" in node:
        yield KINDS.get(type(node["const"]), "number")
    elif isinstance(node.get("$ref"), str):
        yield from _types(referred(node["$ref"], root), root, left)
    else:
        for key in ("anyOf", "oneOf", "allOf"):
            for one in node[key] if isinstance(node.get(key), list) else ():
                yield from _types(one, root, left)


def referred(reference: str, root: Mapping[str, Any]) -> Any:
    found: Any = root
    for step in reference.removeprefix("#").strip("/").split("/"):
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def typed(text: str, types: frozenset[str]) -> str:
    """The argument as JSON: as it is written where that is JSON, or a literal of Python's, of one of the types; else a string.

    Where no string is asked for, any JSON value is taken: the client sees what the model wrote.
    """
    if types == {"string"}:
        return json_text(text)
    for read in (_json, _python):
        found = read(text)
        if found is not None and ("string" not in types or found[1] in types - {"string"}):
            return found[0]
    return json_text(text)


def _json(text: str) -> tuple[str, str] | None:
    """(JSON, its type)."""
    try:
        value = parse_json(text.strip())
    except (ValueError, RecursionError):
        return None
    return as_written(text.strip()), KINDS[type(value)]


def _python(text: str) -> tuple[str, str] | None:
    try:
        value = ast.literal_eval(text.strip())
        return json_text(value), KINDS.get(type(value), "number")
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


def string_piece(text: str) -> str:
    """A piece of a string as it stands between JSON's quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
