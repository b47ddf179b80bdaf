"""JSON schemas as Lark, in which the keys that an object may leave out can come at any place.

The backend's own translation takes the declared keys in the order of the schema only. A model that writes a later one first
has then lost the optional ones before it, and in an open object it writes what is nearest: `nickname_1`. Here an object is
a rule with a set of bits, one for each key that has been written. Required keys keep the order of the schema (that answers
are reasoned before they are given is often written so); optional ones stand before, between or behind them, each once;
undeclared ones come when all that are required are there.

    object   : "{" object_m::0
    object_m : "a" ":" value object_n::set_bit(0)  %if bit_clear(0)   |  ...       a member
    object_n : "}"                                 %if the required bits are set
             | "," object_m                        %if there is a member left

Whatever is no such object stays a schema, which the backend compiles. Compiling takes two to three times as long: 1.4 ms
instead of 0.5 for two keys, 2.7 instead of 1.2 for forty.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# JSON allows any amount of white space between tokens; a model that likes it would never come to an end
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,20}"
JSON_OPTIONS: JsonCompileOptions = {"whitespace_pattern": WHITESPACE, "lenient": False}  # of the backend
MAX_KEYS = 60  # a rule has 64 bits
ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly", "$defs", "definitions",
     "$schema"}
)  # fmt: skip
_OBJECT = frozenset({"type", "properties", "required", "additionalProperties"})
_ARRAY = frozenset({"type", "items", "minItems", "maxItems"})
_FIXED = ('"$id"', '"id"', '"$anchor"', '"$dynamicRef"', '"$dynamicAnchor"', '"x-guidance"')  # references may mean other places
_HEAD = rf"""%llguidance {{"ignore_once": true}}
%ignore /{WHITESPACE}/
KEY: /"([^"\\\x00-\x1F\x7F]|\\[nrbtf"\\]|\\u(00[01][0-9a-fA-F]|007[fF]))*"/
"""


class _UnsuitableError(Exception):
    """This schema cannot be written so."""


def lark_of_schema(schema: Any) -> str | None:
    """A grammar; None where the backend's translation loses nothing, or where this one is not able to.

    What is wrong with a schema is found when it is compiled.
    """
    if not isinstance(schema, dict) or any(word in json.dumps(schema) for word in _FIXED):
        return None
    try:
        rules = _Rules(schema)
        if not rules.has_optional(schema):
            return None
        rules.define("start", schema)
    except (_UnsuitableError, RecursionError):
        return None
    return _HEAD + "".join(rules.lines)


class _Rules:
    """The rules of one document."""

    def __init__(self, root: dict[str, Any]):
        self.root = root
        self.lines: list[str] = []
        self._names: dict[str, str] = {}  # schema as text -> rule
        self._optional: dict[str, bool] = {}  # reference -> has_optional

    def define(self, name: str, schema: Any) -> None:
        """The rule `name` for a schema."""
        bare = _bare(schema)
        if not self.has_optional(schema):
            self.lines.append(f"{name}: %json {json.dumps(self._alone(schema))}\n")
        elif "$ref" in bare:
            self.lines.append(f"{name}: {self._rule(bare)}\n")
        elif _is_object(bare):
            self._object(name, bare)
        elif _is_array(bare):
            self._array(name, bare)
        else:
            options = bare.get("anyOf") or bare["allOf"]
            self.lines.append(f"{name}: {' | '.join(map(self._rule, options))}\n")

    def _rule(self, schema: Any) -> str:
        """The name of the rule for a schema: one for all that say the same."""
        bare = _bare(schema)
        key = json.dumps(bare)
        if key not in self._names:
            name = self._names[key] = f"r{len(self._names)}"
            self.define(name, self._resolved(bare["$ref"]) if _is_reference(bare) else bare)
        return self._names[key]

    def _object(self, name: str, schema: dict[str, Any]) -> None:
        properties, extra = schema["properties"], schema.get("additionalProperties", True)
        required = schema.get("required", ())
        first = [k for k in properties if k in required] + [k for k in dict.fromkeys(required) if k not in properties]
        keys = first + [k for k in properties if k not in required]
        done = f" %if is_ones([0:{len(first)}])" if first else ""
        members = []
        for i, key in enumerate(keys):
            turn = f"and(is_ones([0:{i}]), bit_clear({i}))" if 0 < i < len(first) else f"bit_clear({i})"
            members.append(f'{_spelled(key)} ":" {self._rule(properties.get(key, extra))} {name}_n::set_bit({i}) %if {turn}')
        left = f" %if bit_count_lt([0:{len(keys)}], {len(keys)})"
        if extra is not False:
            other, left = f"{name.upper()}_OTHER", ""
            self.lines.append(f"{other}: KEY & ~({' | '.join(map(_spelled, keys))})\n")
            members.append(f'{other} ":" {self._rule(extra)} {name}_n::_{done}')
        self.lines += [
            f'{name}: "{{" {name}_m::0x0' + ("\n" if first else ' | "{" "}"\n'),
            f"{name}_m::_: " + "\n  | ".join(members) + "\n",
            f'{name}_n::_: "}}"{done}\n  | "," {name}_m::_{left}\n',
        ]

    def _array(self, name: str, schema: dict[str, Any]) -> None:
        item, low, high = self._rule(schema["items"]), schema.get("minItems", 0), schema.get("maxItems")
        more = f"{{{max(0, low - 1)},{'' if high is None else high - 1}}}"
        self.lines.append(f'{name}: "[" {item} ("," {item}){more} "]"' + ("\n" if low else ' | "[" "]"\n'))

    def _alone(self, schema: Any) -> dict[str, Any]:
        """A document of its own, with what it refers to."""
        if not isinstance(schema, dict):
            return {"x-guidance": JSON_OPTIONS} if schema is True else {"not": {}}
        places: dict[str, str] = {}
        moved = self._with_local_references({k: v for k, v in schema.items() if k not in ANNOTATIONS}, places)
        known: dict[str, Any] = {}
        while len(known) < len(places):
            reference = list(places)[len(known)]
            known[places[reference]] = self._with_local_references(self._resolved(reference), places)
        return {**moved, **({"$defs": known} if known else {}), **self._dialect, "x-guidance": JSON_OPTIONS}

    @property
    def _dialect(self) -> dict[str, Any]:
        return {"$schema": self.root["$schema"]} if "$schema" in self.root else {}

    def _with_local_references(self, node: Any, places: dict[str, str]) -> Any:
        if isinstance(node, list):
            return [self._with_local_references(n, places) for n in node]
        if not isinstance(node, dict):
            return node
        moved = {}
        for key, value in node.items():
            if key == "$ref" and isinstance(value, str):
                moved[key] = "#/$defs/" + places.setdefault(value, f"d{len(places)}")
            elif key not in ("$defs", "definitions"):
                moved[key] = value if key in ("const", "enum") else self._with_local_references(value, places)
        return moved

    def _resolved(self, reference: Any) -> Any:
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")) or "%" in reference:
            raise _UnsuitableError
        node: Any = self.root
        for step in reference.split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(node, list) and step.isdecimal() and int(step) < len(node):
                node = node[int(step)]
            elif isinstance(node, dict) and step in node:
                node = node[step]
            else:
                raise _UnsuitableError
        return node

    def has_optional(self, schema: Any) -> bool:
        """Whether it is, or holds where define() gets at it, an object with keys that may be left out."""
        if not isinstance(schema, dict):
            return False
        bare = _bare(schema)
        if _is_reference(bare):
            reference = str(bare["$ref"])
            if reference not in self._optional:
                self._optional[reference] = False  # while it is being looked at
                self._optional[reference] = self.has_optional(self._resolved(bare["$ref"]))
            return self._optional[reference]
        if _is_object(bare):
            if not bare["properties"].keys() <= set(bare.get("required", ())):
                return True
            return any(map(self.has_optional, [*bare["properties"].values(), bare.get("additionalProperties")]))
        if bare.keys() in ({"anyOf"}, {"allOf"}):
            options = next(iter(bare.values()))
            one_of_them = isinstance(options, list) and ("anyOf" in bare or len(options) == 1)
            return one_of_them and any(map(self.has_optional, options))
        return _is_array(bare) and self.has_optional(bare["items"])


def _bare(schema: Any) -> Any:
    return {k: v for k, v in schema.items() if k not in ANNOTATIONS} if isinstance(schema, dict) else schema


def _is_reference(bare: Any) -> bool:
    return isinstance(bare, dict) and bare.keys() == {"$ref"}


def _is_object(bare: dict[str, Any]) -> bool:
    """One that is described by its keys alone, and can be satisfied as far as they say."""
    properties, required, extra = bare.get("properties"), bare.get("required", []), bare.get("additionalProperties", True)
    if bare.get("type") != "object" or not bare.keys() <= _OBJECT or not isinstance(properties, dict) or not properties:
        return False
    if not isinstance(required, list) or not all(isinstance(k, str) for k in required) or not isinstance(extra, dict | bool):
        return False
    names = {*properties, *required}
    known = properties.keys() if extra is False else names
    return len(names) <= MAX_KEYS and names <= known and all(isinstance(v, dict) or v is True for v in properties.values())


def _is_array(bare: dict[str, Any]) -> bool:
    low, high = bare.get("minItems", 0), bare.get("maxItems", bare.get("minItems", 0) or 1)
    sizes = type(low) is int and type(high) is int and 0 <= low <= high and high > 0
    return bare.get("type") == "array" and bare.keys() <= _ARRAY and "items" in bare and sizes


def _spelled(key: str) -> str:
    """A key as Lark's text of JSON's text."""
    return json.dumps(json.dumps(key, ensure_ascii=False))
